#pragma once
#include <gtest/gtest.h>

#include <exception>
#include <string_view>

#include "bench/check.h"

namespace cadre::test {

/// Checks an implementation on random data, each time in another order of threads and copies.
inline void agrees_in_any_order(std::string_view problem, std::string_view implementation,
                                bench::Draw draw, unsigned orders) {
  for (draw.seed = 0; draw.seed < orders; ++draw.seed) try {
      EXPECT_EQ(bench::check(problem, draw, implementation, cuda_devices().at(0)).fault, "");
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
}

}  // namespace cadre::test
