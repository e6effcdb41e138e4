# The door's own oneDNN, if it is a shared library; a static one is inside the door, which exports nothing.
if(NOT CADRE_ONEDNN_SHARED)
  return()
endif()

# torch has another oneDNN inside, and a few inline functions of the two bear the same names
# (std::call_once of a lambda). The order of linking decides whose are taken by both only where torch
# is not in the global scope (TORCH_USE_RTLD_GLOBAL=1), so the door brings a copy of oneDNN that asks
# itself first. It has oneDNN's own name: the door's RPATH finds it beside the door.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(onednn ${package}/$<TARGET_SONAME_FILE_NAME:DNNL::dnnl>)
set(copied ${CMAKE_CURRENT_BINARY_DIR}/onednn.stamp)
set(copies ${PROJECT_SOURCE_DIR}/cmake/own_symbols_first.py)
add_custom_command(OUTPUT ${copied}
  COMMAND Python3::Interpreter ${copies} $<TARGET_FILE:DNNL::dnnl> ${onednn}
  COMMAND ${CMAKE_COMMAND} -E touch ${copied}
  DEPENDS ${copies} $<TARGET_FILE:DNNL::dnnl> VERBATIM)
add_custom_target(cadre_torch_onednn DEPENDS ${copied})
add_dependencies(cadre_torch cadre_torch_onednn)

# Machines that run a wheel need not have oneDNN, nor the OpenCL loader that Debian's oneDNN names; both
# are found beside the library. An RPATH, for a RUNPATH would not serve what oneDNN needs.
target_link_options(cadre_torch PRIVATE LINKER:--disable-new-dtags)
install(FILES ${onednn} ${wheel})
if(TARGET OpenCL::OpenCL)
  file(REAL_PATH ${OpenCL_LIBRARY} opencl)
  install(FILES ${opencl} RENAME libOpenCL.so.1 ${wheel})
endif()
# Their licences ask for their notices, which Debian keeps here.
foreach(name libdnnl2 ocl-icd-libopencl1)
  install(FILES /usr/share/doc/${name}/copyright RENAME ${name}.copyright OPTIONAL ${wheel})
endforeach()
