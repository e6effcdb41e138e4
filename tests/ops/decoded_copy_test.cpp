// Decoded copies on a machine: the numbers of the codes that would have been written, bit for bit,
// made by quantising at once or from the codes.
#include <gtest/gtest.h>

#include "tests/judge/errors.h"
#include "tests/judge/machine_copy.h"
#include "tests/judge/on_machine.h"
#include "tests/ops/quantize_pairs.h"

using namespace cadre;
using test::Counts;
using test::FormatPair;
using test::Holds;
using test::QuantizeCase;
using test::QuantizedCopy;
using test::ValuesKind;

namespace {

/// Which copies are decoded, of those that are quantised.
struct Which {
  bool along_k = true, along_rows = true;
};

/// A case whose quantised copies are decoded, with its outputs.
struct DecodedCase {
  QuantizeCase c;
  QuantizeCase::Out out;
  test::OwnedWorkspace workspace{0};

  DecodedCase(const QuantizeCase& codes, const Device& device, Which which = {}) : c(codes) {
    QuantizeProblem& p = c.problem;
    p.along_k_decoded = which.along_k && p.along_k && !is_plain(*p.along_k);
    p.along_rows_decoded = which.along_rows && p.along_rows && !is_plain(*p.along_rows);
    p.along_k_scales_major = p.along_rows_scales_major = Major::kRow;
    p.along_rows_codes_major = Major::kRow;
    out = c.outputs();
    workspace = test::OwnedWorkspace(plan(p, device).workspace_bytes);
  }

  template <class Visit>
  void for_pieces(Visit&& visit) const {
    visit(test::list_piece("offsets", c.offsets));
    visit(test::piece("source", c.source, Holds::kInput));
    visit(test::list_piece("rng", c.rng));
    for (const QuantizedCopy* copy : {&out.along_k, &out.along_rows}) visit_copy(visit, *copy);
    visit(test::piece("workspace", workspace));
  }
  template <class Visit>
  static void visit_copy(Visit&& visit, const QuantizedCopy& copy) {
    for (const auto& [name, t] : {std::pair("codes", &copy.codes),
                                  {"scales", &copy.scales},
                                  {"expert scales", &copy.expert_scale},
                                  {"block offsets", &copy.block_offsets}})
      visit(test::piece(name, *t, Holds::kOutput));
  }
};

/// The numbers of a copy of codes, as a decoded copy has them.
struct FromCodes {
  QuantizedCopy codes, numbers;
  const std::vector<int32_t>& offsets;

  FromCodes(const QuantizedCopy& of, const QuantizedShape& decoded, int64_t gap,
            const std::vector<int32_t>& rows)
      : codes(of), numbers(decoded, gap), offsets(rows) {
    // The scales of experts are not decoding's business.
    numbers.expert_scale = of.expert_scale;
  }
  DequantizePlan plan_for(const Device& device) const {
    const DType out = decoded_format(codes.shape.format).element;
    return plan(DequantizeProblem{codes.shape, out, true}, device);
  }
  DequantizeArgs args() const {
    const QuantizedView to = numbers.view();
    DequantizeArgs a{.source = codes.view(), .offsets = {}, .out = to.codes};
    a.block_offsets = to.block_offsets;
    if (codes.shape.kind == RowsKind::kRagged) a.offsets = {offsets.data(), codes.shape.experts};
    return a;
  }
  template <class Visit>
  void for_pieces(Visit&& visit) const {
    visit(test::list_piece("offsets", offsets));
    DecodedCase::visit_copy(visit, codes);
    DecodedCase::visit_copy(visit, numbers);
  }
};

struct DecodedCopies : test::OnMachine {
  /// Three ways: quantising here, codes on the CPU that are decoded there, and codes decoded here.
  void check(const QuantizeCase& codes_case, Which which = {}) {
    DecodedCase got(codes_case, machine->device(), which);
    const std::string what = to_string(got.c.problem);
    {
      test::MachineCopy copy(*machine, got);
      copy.upload();
      const QuantizeArgs args = copy.moved(got.c.args(got.out));
      machine->run([&](Stream stream) {
        cadre::run(plan(got.c.problem, machine->device()), args, copy.moved(got.workspace), stream);
      });
      copy.fetch();
      EXPECT_EQ(copy.damage(), "") << what;
    }
    const QuantizeCase::Out codes = codes_case.run("cpu");
    if (codes_case.problem.along_k) check(codes.along_k, got.out.along_k, got.c, what);
    if (codes_case.problem.along_rows) check(codes.along_rows, got.out.along_rows, got.c, what);
  }

  void check(const QuantizedCopy& codes, const QuantizedCopy& got, const QuantizeCase& c,
             const std::string& what) {
    EXPECT_EQ(got.damage(), "") << what;
    if (!got.shape.decoded) {
      EXPECT_TRUE(got == codes) << what;
      return;
    }
    FromCodes want(codes, got.shape, c.gap, c.offsets), here = want;
    const test::OwnedWorkspace none(0);
    run(want.plan_for(this_cpu()), want.args(), none.get(), {});
    ASSERT_TRUE(got == want.numbers) << what << " differs from its codes";
    test::MachineCopy copy(*machine, here);
    copy.upload();
    const DequantizeArgs args = copy.moved(here.args());
    machine->run([&](Stream stream) {
      cadre::run(here.plan_for(machine->device()), args, none.get(), stream);
    });
    copy.fetch();
    ASSERT_TRUE(here.numbers == want.numbers) << what << " decoded here";
  }
};

/// Every format with every option, on routed rows and on weights.
std::vector<FormatPair> all_pairs(bool ragged) {
  std::vector<FormatPair> pairs = test::format_pairs();
  if (ragged)
    for (const FormatPair& pair : test::ragged_pairs()) pairs.push_back(pair);
  return pairs;
}

constexpr DType kTypes[] = {DType::kBf16, DType::kF32, DType::kF16};

// NaN payloads of f32 are no part of a format, so those numbers have none.
ValuesKind kind_of(const FormatPair& pair, unsigned seed) {
  const bool f32 = pair.along_k.find("fp32") != std::string::npos ||
                   pair.along_rows.find("fp32") != std::string::npos ||
                   pair.along_k.starts_with("f") || pair.along_rows.starts_with("f32");
  const auto kind = ValuesKind(seed % test::kValuesKinds);
  return f32 && kind >= ValuesKind::kNan ? ValuesKind::kNormal : kind;
}

TEST_F(DecodedCopies, OfRoutedRowsAreTheNumbersOfTheirCodes) {
  unsigned seed = 0;
  std::mt19937 random(1);
  for (const FormatPair& pair : all_pairs(true)) {
    for (const Counts& counts : {Counts{75, {0, 17, 0, 40, 1, 0}}, Counts{300, {5, 0, 150, 129}}}) {
      if (seed % 2 && counts.rows > 100 && machine->draws(8) < 8) continue;
      QuantizeCase c =
          QuantizeCase::rows(counts, seed % 3 ? 72 : 133, kTypes[seed % 3], seed % 2 ? 8 : 5);
      c.gap = seed % 2 ? 8 : 6;
      test::fill_values(c, kind_of(pair, ++seed), random);
      check(c.formats(pair.along_k, pair.along_rows));
      check(c.formats(pair.along_k, ""));
      check(c.formats("", pair.along_rows));
    }
  }
}

TEST_F(DecodedCopies, OfWeightsAreTheNumbersOfTheirCodes) {
  unsigned seed = 0;
  std::mt19937 random(2);
  for (const FormatPair& pair : all_pairs(false)) {
    QuantizeCase c = QuantizeCase::weights({2, seed % 2 ? 70 : 131, seed % 3 ? 40 : 135},
                                           kTypes[seed % 3], false, seed % 2 ? 8 : 5);
    c.gap = seed % 2 ? 8 : 6;
    test::fill_values(c, kind_of(pair, ++seed), random);
    check(c.formats(pair.along_k, pair.along_rows));
  }
}

// One copy in codes and one in numbers, from one read of the source where a kernel has both.
TEST_F(DecodedCopies, MayLieBesideCodes) {
  std::mt19937 random(4);
  unsigned seed = 0;
  for (const char* words : {"mxfp8", "mxfp8:e5m2+floor", "mxfp4", "fp8_block", "nvfp4"})
    for (const Which which : {Which{true, false}, Which{false, true}}) {
      QuantizeCase rows =
          QuantizeCase::rows({300, {5, 0, 150, 129}}, seed % 2 ? 136 : 40, DType::kBf16, 8);
      QuantizeCase weights = QuantizeCase::weights({2, 70, 136}, DType::kBf16, false, 8);
      for (QuantizeCase* c : {&rows, &weights}) {
        c->gap = seed % 5 == 4 ? 6 : 8;
        test::fill_values(*c, ValuesKind(++seed % test::kValuesKinds), random);
        check(c->formats(words, words), which);
      }
    }
}

// Blocks of transformed rows lie without gaps, whatever the offsets say.
TEST_F(DecodedCopies, OfTransformedRowsHaveOffsetsOfTheirOwn) {
  std::mt19937 random(3);
  QuantizeCase c = QuantizeCase::rows({90, {20, 0, 33, 16}}, 40, DType::kBf16);
  test::fill_values(c, ValuesKind::kNormal, random);
  c.formats("", "nvfp4:rht");
  for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{0, 20, 20, 53, 69},
                                              {-7, 50, 12, 900, 60},
                                              {90, 80, 70, 60, 50},
                                              {-9, -8, -7, -6, -5}}) {
    c.offsets = offsets;
    check(c);
  }
  c.offsets = {0, 20, 20, 53, 69};
  DecodedCase got(c, this_cpu());
  const test::OwnedWorkspace none(0);
  run(plan(got.c.problem, this_cpu()), got.c.args(got.out), none.get(), {});
  const auto* offsets = got.out.along_rows.block_offsets.data<int32_t>();
  EXPECT_EQ((std::vector<int32_t>{offsets, offsets + 5}),
            (std::vector<int32_t>{0, 32, 32, 80, 96}));
}

// A number is a code times its block's scale, and lacks the expert's: by hand.
// A block of a GPU sums 256 of them at once.
TEST_F(DecodedCopies, OfTransformedRowsMayBeOfManyExperts) {
  std::mt19937 random(5);
  Counts counts{.rows = 5, .of = {}};
  for (int e = 0; e < 600; ++e) counts.of.push_back(e % 3 == 0 ? int64_t(random() % 40) : 0);
  for (const int64_t rows : counts.of) counts.rows += rows;
  QuantizeCase c = QuantizeCase::rows(counts, 16, DType::kBf16);
  test::fill_values(c, ValuesKind::kNormal, random);
  c.formats("", "nvfp4:rht");
  check(c);
  c.offsets[255] = 900, c.offsets[256] = -3, c.offsets[300] = 7;
  check(c);
}

TEST(DecodedCopy, LacksTheScaleOfTheExpert) {
  QuantizeCase c = QuantizeCase::rows({1, {1}}, 3, DType::kF32, 0);
  for (int64_t k = 0; k < 3; ++k) c.source.set({0, k}, double(k + 1));
  c.formats("fp8_tensor", "");
  c.problem.along_k_decoded = true;
  const QuantizeCase::Out out = c.run();
  const double want[] = {144, 288, 448};  // 448 / 3 times 1, 2 and 3, rounded to e4m3
  for (int64_t k = 0; k < 3; ++k) EXPECT_EQ(out.along_k.codes.at(0, k), want[k]);
  EXPECT_EQ(out.along_k.expert_scale.at(0), 1 / float(448.0f / 3.0f));
}

TEST(DecodedCopy, IsInTheTypeThatHoldsItsNumbers) {
  const auto type_of = [](std::string_view format) {
    return to_string(decoded_format(parse_format(format)));
  };
  for (const char* format : {"fp8_tensor", "fp8_tensor:e5m2+pow2", "fp8_block", "mxfp8:2d",
                             "nvfp4:rht+sr", "mxfp4", "bf16"})
    EXPECT_EQ(type_of(format), "bf16") << format;
  EXPECT_EQ(type_of("fp8_block:fp32"), "f32");
  EXPECT_EQ(type_of("f16"), "f16");
}

TEST(DecodedCopy, IsRefusedWhereItMeansNothing) {
  const auto error = [](const std::string& words) {
    const std::string said = test::invalid([&] {
      words.starts_with("de") ? (void)plan(parse_dequantize_problem(words), this_cpu())
                              : (void)plan(parse_quantize_problem(words), this_cpu());
    });
    return said.substr(0, said.find(" ["));
  };
  EXPECT_EQ(error("quantize rows R=7 C=5 E=1 along_k=bf16 along_k_decoded=yes"),
            "quantize: along_k_decoded is yes, must be no for bf16; it has no codes");
  EXPECT_EQ(error("quantize rows R=7 C=5 E=1 along_k=mxfp8 along_rows_decoded=yes"),
            "quantize: along_rows_decoded is yes, must be no; no copy along rows is wanted");
  EXPECT_EQ(error("quantize rows R=7 C=5 E=1 along_rows=mxfp8 along_k_decoded=yes"),
            "quantize: along_k_decoded is yes, must be no; no copy along K is wanted");
  EXPECT_EQ(error("quantize weights N=7 K=5 E=1 along_rows=mxfp8 along_rows_decoded=yes "
                  "along_rows_codes_major=column"),
            "quantize: along_rows_decoded is yes, must be no where codes or scales are "
            "column-major; a decoded copy has neither");
  EXPECT_EQ(error("dequantize rows R=7 C=5 E=1 format=f32 decoded=yes"),
            "dequantize: decoded is yes, must be no for f32; it has no codes");
  EXPECT_NE(test::unsupported([&] {
              plan(parse_quantize_problem("quantize rows R=7 C=5 E=1 along_k=mxfp8 "
                                          "along_k_decoded=yes"),
                   this_cpu(), "cpu");
            }).find("cpu: writes codes; products take them here"),
            std::string::npos);
}

TEST(DecodedCopy, SaysWhichOfItsPartsAreMissing) {
  QuantizeCase c = QuantizeCase::rows({9, {9}}, 8, DType::kBf16).formats("nvfp4", "nvfp4:rht");
  c.problem.along_k_decoded = c.problem.along_rows_decoded = true;
  QuantizeCase::Out out = c.outputs();
  const auto said = [&](auto&& change) {
    QuantizeArgs args = c.args(out);
    change(args);
    const std::string error =
        test::invalid([&] { run(plan(c.problem, this_cpu()), args, {}, {}); });
    return error.substr(0, error.find(" ["));
  };
  int32_t word[2] = {};
  uint8_t scale = 0;
  EXPECT_EQ(said([](QuantizeArgs& a) { a.along_rows.block_offsets = nullptr; }),
            "quantize: along_rows.block_offsets is null, must point to 2 elements");
  EXPECT_EQ(said([&](QuantizeArgs& a) { a.along_k.block_offsets = word; }),
            "quantize: along_k.block_offsets is given, must be null; only decoded copies of "
            "transformed blocks have offsets of their own");
  EXPECT_EQ(said([&](QuantizeArgs& a) {
              a.along_k.scales = view(&scale, DType::kE4m3, {1, 1});
            }),
            "quantize: along_k.scales is given, must be null; a decoded copy has no block scales");
}

}  // namespace
