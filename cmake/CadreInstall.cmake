# What `cmake --install` writes: the library, its headers, and the files by which find_package(cadre
# CONFIG) and pkg-config find it. The installed tree can be moved.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(cadre_config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cadre)
install(TARGETS cadre EXPORT cadre_targets)
install(DIRECTORY include/cadre DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT cadre_targets NAMESPACE cadre:: DESTINATION ${cadre_config_dir})

configure_package_config_file(cmake/cadreConfig.cmake.in ${PROJECT_BINARY_DIR}/cadreConfig.cmake
  INSTALL_DESTINATION ${cadre_config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cadreConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cadreConfig.cmake ${PROJECT_BINARY_DIR}/cadreConfigVersion.cmake
  DESTINATION ${cadre_config_dir})

if(CADRE_NCCL)
  install(FILES cmake/FindNccl.cmake DESTINATION ${cadre_config_dir})
endif()

# A static library names what it needs in Libs, so that plain `pkg-config --libs` links.
file(RELATIVE_PATH cadre_pc_up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
set(cadre_pc_needs "${OpenMP_CXX_FLAGS}")
if(CADRE_ONEDNN)
  string(PREPEND cadre_pc_needs "-ldnnl ")
endif()
if(CADRE_NCCL)
  cmake_path(GET NCCL_LIBRARY PARENT_PATH cadre_pc_nccl)
  string(APPEND cadre_pc_needs " -L${cadre_pc_nccl} -lnccl")
endif()
if(CADRE_CUDA)
  string(APPEND cadre_pc_needs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread")
endif()
if(BUILD_SHARED_LIBS)
  set(cadre_pc_libs "")
  set(cadre_pc_private "${cadre_pc_needs}")
else()
  set(cadre_pc_libs " ${cadre_pc_needs}")
  set(cadre_pc_private "")
endif()
configure_file(cmake/cadre.pc.in ${PROJECT_BINARY_DIR}/cadre.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cadre.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
