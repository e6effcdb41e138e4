# Whether there is a torch, and which: CADRE_TORCH_FOUND, CADRE_TORCH_FOLDER, CADRE_TORCH_VERSION.
# Looks again whenever CMake runs; nothing found is remembered. torch's headers and libraries are all
# that is used: it is not imported.
#
# Sanitized builds have no door: python does not start with their runtime. They have what
# tests/torch/linear_memory_test.cpp takes of it; tests/ops and tests/layers run the rest.
set(CADRE_TORCH_DIR "" CACHE PATH "torch's folder; empty: that of CADRE_TORCH_PYTHON")
set(CADRE_TORCH_PYTHON "" CACHE FILEPATH
  "Python that has torch; empty: the project's .venv, else the python3 on the path")
set(CADRE_TORCH_FOUND OFF)

if(NOT CADRE_TORCH)
  return()
endif()

set(CADRE_TORCH_FOLDER "${CADRE_TORCH_DIR}")
if(CADRE_TORCH_PYTHON)
  set(pythons ${CADRE_TORCH_PYTHON})
else()
  set(pythons ${PROJECT_SOURCE_DIR}/.venv/bin/python3 python3)
endif()
# Not from the source's folder, where `torch` is another one.
foreach(python ${pythons})
  if(NOT CADRE_TORCH_FOLDER)
    execute_process(
      COMMAND ${python} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0], end='')"
      WORKING_DIRECTORY ${PROJECT_BINARY_DIR} OUTPUT_VARIABLE CADRE_TORCH_FOLDER ERROR_QUIET)
  endif()
endforeach()

if(EXISTS "${CADRE_TORCH_FOLDER}/version.py")
  file(STRINGS ${CADRE_TORCH_FOLDER}/version.py line REGEX "^__version__")
  string(REGEX MATCH "[0-9][^'\"]*" CADRE_TORCH_VERSION "${line}")
  set(CADRE_TORCH_FOUND ON)
  message(STATUS "cadre: the PyTorch door takes torch ${CADRE_TORCH_VERSION}")
elseif(CADRE_TORCH STREQUAL AUTO)
  message(STATUS "cadre: no torch here, so the PyTorch door is not built")
else()
  message(FATAL_ERROR "CADRE_TORCH is ${CADRE_TORCH}, and ${pythons} has no torch; install it, or "
    "name another Python with CADRE_TORCH_PYTHON or torch's folder with CADRE_TORCH_DIR")
endif()

# cadre_use_torch(TARGET): torch's headers and libraries.
function(cadre_use_torch target)
  set(torch ${CADRE_TORCH_FOLDER})
  target_include_directories(${target} SYSTEM PRIVATE ${torch}/include ${torch}/include/torch/csrc/api/include)
  # torch's headers need extensions of the language; its macros declare what is not used.
  target_compile_options(${target} PRIVATE -Wno-conversion -Wno-shadow)
  target_link_libraries(${target} PRIVATE cadre::cadre ${CADRE_ONEDNN_LIBRARY} ${torch}/lib/libtorch_cpu.so ${torch}/lib/libc10.so)
endfunction()
