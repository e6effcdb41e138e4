# The installed tree, from a consumer's side. Included by the tests' list file: tests/consumer is a
# project of its own. A sanitized library asks more of its consumers, so those builds have no tests.
if(CADRE_INSTALL AND NOT CADRE_SANITIZE)
  foreach(way headers find_package pkg_config shared fetch_content)
    add_test(NAME consumer_${way} COMMAND Python3::Interpreter
      ${CMAKE_CURRENT_SOURCE_DIR}/consumer/consumer_test.py
      ${way} ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR} ${PROJECT_BINARY_DIR}/consumer/${way})
    set_tests_properties(consumer_${way} PROPERTIES TIMEOUT 1200)
  endforeach()
  set_tests_properties(consumer_headers consumer_pkg_config consumer_shared consumer_fetch_content
    PROPERTIES LABELS slow)
endif()
