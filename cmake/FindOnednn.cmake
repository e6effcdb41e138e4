# Which oneDNN: CADRE_ONEDNN_LIBRARY, a target, empty with CADRE_ONEDNN=OFF; and CADRE_ONEDNN_SHARED. The
# library, its benchmarks and the door link it privately: nobody gets it from them.
set(CADRE_ONEDNN_LIBRARY "")
set(CADRE_ONEDNN_SHARED OFF)
if(NOT CADRE_ONEDNN)
  return()
endif()

set(without "or build without it: -DCADRE_ONEDNN=OFF, which costs speed on the CPU alone")
find_package(dnnl CONFIG)
if(NOT dnnl_FOUND)
  message(FATAL_ERROR "cadre: oneDNN is missing; on Debian apt-get install libdnnl-dev ocl-icd-opencl-dev, "
    "elsewhere name its folder with dnnl_DIR, ${without}")
endif()
if(dnnl_VERSION VERSION_LESS 2.6 OR dnnl_VERSION VERSION_GREATER_EQUAL 4)
  message(FATAL_ERROR "cadre: oneDNN is ${dnnl_VERSION}, must be 2.6 or later and before 4; name another "
    "with dnnl_DIR, ${without}")
endif()
# Products are made for one thread each, which oneDNN takes from OpenMP.
if(DNNL_CPU_RUNTIME AND NOT DNNL_CPU_RUNTIME MATCHES "^(OMP|SEQ)$")
  message(FATAL_ERROR "cadre: the threads of oneDNN are ${DNNL_CPU_RUNTIME}'s, must be OMP's or none (SEQ); "
    "name another with dnnl_DIR, ${without}")
endif()
set(CADRE_ONEDNN_LIBRARY DNNL::dnnl)
get_target_property(type DNNL::dnnl TYPE)
if(NOT type STREQUAL STATIC_LIBRARY)
  set(CADRE_ONEDNN_SHARED ON)
endif()
message(STATUS "cadre: multiplies by oneDNN ${dnnl_VERSION} on the CPU")
