# Objects come from ccache where it is installed, unless another launcher was chosen. Paths below the
# source are hashed as relative ones, so that a clone, the mutants' copy and the wheel, each built two
# folders deep, share objects; precompiled headers want the sloppiness.
find_program(CADRE_CCACHE ccache)
set(CADRE_LAUNCHER "" CACHE STRING "A command before that of each C++ compiler and its cache")
mark_as_advanced(CADRE_CCACHE CADRE_LAUNCHER)
if(CADRE_CCACHE)
  foreach(language CXX CUDA)
    if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
        CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros ${CADRE_CCACHE})
    endif()
  endforeach()
endif()
set(CMAKE_CXX_COMPILER_LAUNCHER ${CADRE_LAUNCHER} ${CMAKE_CXX_COMPILER_LAUNCHER})
