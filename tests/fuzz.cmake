# Fuzz targets of whatever reads what a user wrote. They need clang, are built by a test of their own,
# so that no other build waits for them, and run half a minute each, always the same inputs;
# CONTRIBUTING.md says how to look for new ones. Included by the tests' list file: tests/fuzz is a project of its own.
find_program(CADRE_CLANG NAMES clang++-14 clang++)
if(NOT CADRE_CLANG OR NOT CADRE_CLI)
  message(STATUS "cadre: no clang here, so what reads problems and files is not fuzzed")
  return()
endif()

set(fuzz ${PROJECT_BINARY_DIR}-fuzz)
get_target_property(sources cadre SOURCES)
list(FILTER sources INCLUDE REGEX "/src/(ops|layers)/")
foreach(file src/parallel/expert_parallel bench/draw bench/text_file cli/problem apps/train/checkpoint apps/train/parameter
        apps/train/safetensors apps/train/settings)
  list(APPEND sources ${PROJECT_SOURCE_DIR}/${file}.cpp)
endforeach()
set(libraries $<TARGET_FILE:cadre_bench> $<TARGET_FILE:cadre_train> $<TARGET_FILE:cadre>)
foreach(onednn ${CADRE_ONEDNN_LIBRARY})
  list(APPEND libraries $<TARGET_FILE:${onednn}>)
endforeach()
list(APPEND libraries ${OpenMP_CXX_LIBRARIES})
if(CADRE_CUDA)
  list(APPEND libraries $<TARGET_FILE:CUDA::cudart_static> dl rt pthread)
endif()
file(GENERATE OUTPUT ${fuzz}/settings.cmake CONTENT
"set(SOURCES ${sources} CACHE STRING \"\")
set(LIBRARIES ${libraries} CACHE STRING \"\")
set(CMAKE_CXX_COMPILER ${CADRE_CLANG} CACHE STRING \"\")
set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER} CACHE STRING \"\")
")
add_test(NAME fuzz_build COMMAND ${CMAKE_CTEST_COMMAND}
  --build-and-test ${CMAKE_CURRENT_SOURCE_DIR}/fuzz ${fuzz} --build-generator Ninja
  --build-noclean --build-options -C ${fuzz}/settings.cmake)
set_tests_properties(fuzz_build PROPERTIES LABELS slow FIXTURES_SETUP fuzz)

# Each with the inputs that half a minute lasts for. Those that libFuzzer finds worth keeping go to
# the first folder, which is emptied, or the next run would begin with others.
foreach(target_runs problem:600000 explain:250000 offsets:700000 safetensors:450000
        checkpoint:100000)
  string(REPLACE ":" ";" target_runs ${target_runs})
  list(POP_FRONT target_runs target runs)
  file(MAKE_DIRECTORY ${fuzz}/found/${target})
  add_test(NAME fuzz_${target} WORKING_DIRECTORY ${fuzz} COMMAND sh -c
    "rm -rf kept/${target} && mkdir -p kept/${target} && exec ./${target}_fuzz -seed=1 -runs=${runs} \
      -timeout=100 -malloc_limit_mb=256 -dict=seeds/${target}.dict kept/${target} seeds/${target}")
  set_tests_properties(fuzz_${target} PROPERTIES LABELS slow FIXTURES_REQUIRED fuzz)
endforeach()
