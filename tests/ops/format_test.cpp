#include "cadre/format.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "cadre/error.h"
#include "tests/judge/errors.h"

using namespace cadre;

namespace {

// Every legal combination of the options of one kind.
std::vector<Format> variants(const FormatInfo& row) {
  std::vector<Format> all = {format(row.kind)};
  const auto doubled = [&](bool takes, auto change) {
    if (!takes) return;
    for (size_t i = 0, count = all.size(); i < count; ++i) {
      Format f = all[i];
      change(f);
      all.push_back(f);
    }
  };
  doubled(row.takes_e5m2, [](Format& f) { f.element = DType::kE5m2; });
  doubled(row.takes_square, [](Format& f) { f.square = true; });
  doubled(row.takes_power_of_two, [](Format& f) { f.power_of_two = !f.power_of_two; });
  doubled(row.takes_floor, [](Format& f) { f.floor_scale = true; });
  doubled(row.takes_hadamard, [](Format& f) { f.hadamard = true; });
  doubled(row.takes_stochastic, [](Format& f) { f.stochastic = true; });
  return all;
}

std::string parse_error(std::string_view words) {
  try {
    parse_format(words);
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "no error";
}

std::string legal_error(const Format& f) {
  try {
    require_legal(f);
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace

TEST(Format, ListIsInTheOrderOfTheKinds) {
  for (size_t i = 0; i < format_list().size(); ++i) {
    EXPECT_EQ(size_t(format_list()[i].kind), i);
    EXPECT_EQ(&info(FormatKind(i)), &format_list()[i]);
    EXPECT_FALSE(format_list()[i].summary.empty());
  }
}

TEST(Format, EveryCombinationOfOptionsPrintsAndParsesBack) {
  std::set<std::string> seen;
  size_t count = 0;
  for (const FormatInfo& row : format_list()) {
    for (const Format& f : variants(row)) {
      EXPECT_EQ(parse_format(to_string(f)), f) << to_string(f);
      EXPECT_EQ(legal_error(f), "no error") << to_string(f);
      seen.insert(to_string(f));
      ++count;
    }
  }
  EXPECT_EQ(seen.size(), count) << "two formats print alike";
}

TEST(Format, TextIsThatOfTheHeader) {
  EXPECT_EQ(to_string(format(FormatKind::kBf16)), "bf16");
  EXPECT_EQ(to_string(format(FormatKind::kMxfp8)), "mxfp8");
  EXPECT_EQ(to_string(parse_format("nvfp4:sr+rht")), "nvfp4:rht+sr");
  EXPECT_EQ(to_string(parse_format("fp8_block:2d")), "fp8_block:2d");
  EXPECT_EQ(to_string(parse_format("fp8_tensor:e5m2")), "fp8_tensor:e5m2");
  EXPECT_EQ(to_string(parse_format("fp8_block:fp32+2d")), "fp8_block:2d+fp32");
}

TEST(Format, DefaultsAreThoseOfTheNumericsPage) {
  EXPECT_TRUE(format(FormatKind::kFp8Block).power_of_two);
  EXPECT_FALSE(format(FormatKind::kFp8Tensor).power_of_two);
  EXPECT_EQ(parse_format("fp8_block:pow2"), format(FormatKind::kFp8Block));
  EXPECT_EQ(to_string(parse_format("fp8_tensor:pow2")), "fp8_tensor:pow2");
  EXPECT_EQ(info(FormatKind::kFp8Block).block, 128);
  EXPECT_EQ(info(FormatKind::kMxfp8).block, 32);
  EXPECT_EQ(info(FormatKind::kNvfp4).block, 16);
  EXPECT_EQ(info(FormatKind::kMxfp4).block, 32);
  EXPECT_EQ(info(FormatKind::kNvfp4).scale, DType::kE4m3);
  EXPECT_EQ(parse_format("fp16"), format(FormatKind::kF16));
  EXPECT_EQ(parse_format("fp32"), format(FormatKind::kF32));
}

TEST(Format, PlainFormatsAreThoseThatStoreValues) {
  for (const FormatInfo& row : format_list())
    EXPECT_EQ(is_plain(format(row.kind)), row.kind <= FormatKind::kF16) << row.name;
}

TEST(Format, UnknownNameListsTheKnown) {
  const std::string known = "must be one of " + test::names(format_list());
  EXPECT_EQ(
      known.find("must be one of f32, bf16, f16, fp8_tensor, fp8_row, fp8_block, mxfp8, nvfp4"),
      0u);
  EXPECT_EQ(parse_error("fp7"), "format: name is 'fp7', " + known);
  EXPECT_EQ(parse_error(""), "format: name is '', " + known);
}

TEST(Format, UnknownOptionListsThoseThatTheFormatTakes) {
  EXPECT_EQ(parse_error("mxfp8:rht"),
            "format: option of mxfp8 is 'rht', must be one of e5m2, 2d, floor");
  EXPECT_EQ(parse_error("mxfp8:"), "format: option of mxfp8 is '', must be one of e5m2, 2d, floor");
  EXPECT_EQ(parse_error("nvfp4:rht+"), "format: option of nvfp4 is '', must be one of 2d, rht, sr");
  EXPECT_EQ(parse_error("bf16:sr"), "format: option of bf16 is 'sr'; bf16 takes no options");
}

TEST(Format, AnOptionIsSettledOnce) {
  EXPECT_EQ(parse_error("nvfp4:sr+sr"), "format: 'nvfp4:sr+sr' settles sr twice; give it once");
  EXPECT_EQ(parse_error("fp8_block:pow2+fp32"),
            "format: 'fp8_block:pow2+fp32' settles fp32 twice; give it once");
}

TEST(Format, HandMadeNonsenseIsRefused) {
  Format f = format(FormatKind::kMxfp8);
  f.element = DType::kF32;
  EXPECT_EQ(legal_error(f), "format: element of mxfp8 is f32, must be e4m3 or e5m2");
  f = format(FormatKind::kNvfp4);
  f.element = DType::kE5m2;
  EXPECT_EQ(legal_error(f), "format: element of nvfp4 is e5m2, must be e2m1");
  f = format(FormatKind::kMxfp8);
  f.hadamard = true;
  EXPECT_EQ(legal_error(f), "format: option of mxfp8 is 'rht', must be one of e5m2, 2d, floor");
  f = format(FormatKind::kBf16);
  f.power_of_two = true;
  EXPECT_EQ(legal_error(f), "format: option of bf16 is 'pow2'; bf16 takes no options");
  f = {.kind = FormatKind(200)};
  EXPECT_EQ(legal_error(f), text("format: kind is 200, must be 0 to ", format_list().size() - 1));
}
