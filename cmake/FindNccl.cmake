# Which NCCL: CADRE_NCCL_LIBRARY, a target. Installed beside a static library, it finds NCCL for those
# who link that.
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${NCCL_ROOT} ${CUDAToolkit_LIBRARY_DIR}
  PATH_SUFFIXES lib lib64)
if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
  message(FATAL_ERROR "cadre: NCCL is missing; install libnccl-dev, name its folder with NCCL_ROOT, or build "
    "without it: -DCADRE_NCCL=OFF")
endif()

set(nccl_version "")
file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "NCCL_${part} +([0-9]+)" found "${lines}")
  list(APPEND nccl_version ${CMAKE_MATCH_1})
endforeach()
list(JOIN nccl_version "." nccl_version)
# Since then ncclGetLastError says more than a code.
if(nccl_version VERSION_LESS 2.13)
  message(FATAL_ERROR "cadre: NCCL is ${nccl_version}, must be 2.13 or later; name another with NCCL_ROOT")
endif()

set(CADRE_NCCL_LIBRARY cadre_nccl::nccl)
if(NOT TARGET cadre_nccl::nccl)
  add_library(cadre_nccl::nccl UNKNOWN IMPORTED)
  set_target_properties(cadre_nccl::nccl PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
message(STATUS "cadre: moves rows by NCCL ${nccl_version}, ${NCCL_LIBRARY}")
