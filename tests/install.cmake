# The installed tree, from a consumer's side. Included by the tests' list file: tests/consumer is a
# project of its own.
if(CADRE_INSTALL)
  foreach(way headers find_package pkg_config shared fetch_content no_onednn which_onednn which_nccl)
    add_test(NAME consumer_${way} COMMAND Python3::Interpreter
      ${CMAKE_CURRENT_SOURCE_DIR}/consumer/consumer_test.py
      ${way} ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR} ${PROJECT_BINARY_DIR}-consumer-${way})
  endforeach()
  set_tests_properties(consumer_headers consumer_pkg_config consumer_shared consumer_fetch_content consumer_no_onednn
    PROPERTIES LABELS slow)
endif()
