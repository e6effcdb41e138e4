#include "cadre/error.h"

#include <gtest/gtest.h>

namespace cadre {
namespace {

int printed = 0;
struct Counted {};
std::string to_string(const Counted&) {
  ++printed;
  return "counted";
}

TEST(Error, TextPrintsWhatHasNoOperator) {
  EXPECT_EQ(text("a ", 1, ' ', Counted{}), "a 1 counted");
}

TEST(Error, RequireFormatsNothingWhileItHolds) {
  printed = 0;
  require(true, "must be ", Counted{});
  EXPECT_EQ(printed, 0);
  try {
    require(false, "must be ", Counted{});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "must be counted");
  }
  EXPECT_EQ(printed, 1);
}

}  // namespace
}  // namespace cadre
