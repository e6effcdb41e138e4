#pragma once
#include <gtest/gtest.h>

#include "tests/judge/machine.h"

namespace cadre::test {

/// A test on the machine that it is linked with, skipped where that is not here.
struct OnMachine : testing::Test {
  std::unique_ptr<Machine> machine = open_machine();

  void SetUp() override {
    if (machine == nullptr) GTEST_SKIP() << why_no_machine();
  }
};

}  // namespace cadre::test
