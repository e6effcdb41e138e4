// The parts of the CPU grouped GEMM that no plan reaches everywhere: small waves, every layout that
// is staged, every line loop.
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>

#include "cpu/gemm/refusals.h"
#include "cpu/gemm/run_tiles.h"
#include "cpu/gemm/stage.h"
#include "cpu/gemm/tile_product.h"
#include "cpu/grouped_gemm.h"
#include "tests/cpu/products_case.h"

using namespace cadre;
using namespace cadre::cpu::gemm;
using test::Counts;
using test::long_counts;
using test::problem;

namespace {

TEST(Waves, OfAnySizeGiveTheSameBits) { test::expect_waves_of_any_size_agree(portable_products); }

/// Runs tiles of 100 rows and 40 columns, of 1496 rows and 70 columns, on three threads. `start`
/// takes a thread's scratch, 100 bytes.
template <class Start>
void run_small_tiles(std::vector<char>& memory, Start&& start) {
  const GroupedGemmProblem p = problem("fprop N=70 K=1 format=f32", long_counts());
  const std::vector<int32_t> offsets = long_counts().offsets();
  const TileWalk walk(p, offsets.data(), {100, 40, 1, 1});
  const Means means{Multiplicand::kF32, 3};
  const auto place = [](Arena& arena) { return arena.take<char>(100); };
  memory.resize(size_t(scratch_bytes(means, place)));
  run_tiles(walk, means, {memory.data(), int64_t(memory.size())}, place, start);
}

TEST(RunTiles, DoesEveryTileOnceInItsThreadsScratch) {
  std::vector<char> memory;
  std::vector<int> done(1700 * 70, 0);
  run_small_tiles(memory, [&](char* scratch) {
    const char own = char(1 + omp_get_thread_num());
    EXPECT_EQ(scratch, memory.data() + (own - 1) * 256);
    std::fill_n(scratch, 100, own);
    return [&done, scratch, own](const DrawnTile& now, const DrawnTile*) {
      EXPECT_EQ(std::count(scratch, scratch + 100, own), 100);
      const OutTile& t = now.tile;
      for (int64_t row = t.row; row < t.row + t.rows; ++row)
        for (int64_t col = t.col; col < t.col + t.cols; ++col) ++done[size_t(row * 70 + col)];
    };
  });
  EXPECT_EQ(memory.size(), 3 * 256u);
  EXPECT_EQ(std::count(done.begin(), done.end(), 1), long_counts().used() * 70);
  EXPECT_EQ(std::count(done.begin(), done.end(), 0), (1700 - long_counts().used()) * 70);
}

TEST(RunTiles, ThrowsWhatAThreadThrows) {
  std::vector<char> memory;
  const auto nothing = [](const DrawnTile&, const DrawnTile*) {};
  const auto fails = [&](char*) -> decltype(nothing) { throw InvalidArgument("no start"); };
  EXPECT_THROW(run_small_tiles(memory, fails), InvalidArgument);
  const auto fails_later = [&](char*) {
    return [](const DrawnTile& now, const DrawnTile*) {
      if (now.tile.expert == 3) throw Unsupported("no such tile");
    };
  };
  EXPECT_THROW(run_small_tiles(memory, fails_later), Unsupported);
}

TEST(Tiles, SayWhyTheyRefuse) {
  const auto why = [](std::string_view words) {
    return cpu::refuses_grouped_gemm_tiles(
        parse_grouped_gemm_problem(text("grouped_gemm R=1 N=1 K=1 ", words)), this_cpu());
  };
  const bool avx512 = processor().free_tiles;
  EXPECT_EQ(why("wgrad format=f32"), "takes fprop and dgrad");
  EXPECT_EQ(why("fprop format=f32"), avx512 ? "" : "needs AVX-512");
  Processor without = processor();
  without.free_tiles = false;
  EXPECT_STREQ(refuses_tile_product(Multiplicand::kF32, without), "needs AVX-512");
  EXPECT_STREQ(refuses_tile_product(Multiplicand::kBf16, {true, true, true}),
               "this processor has matrix tiles, which oneDNN uses");
  EXPECT_EQ(refuses_tile_product(Multiplicand::kF32, {true, true, true}), nullptr);
  EXPECT_EQ(refuses_tile_product(Multiplicand::kBf16, {true, true, false}), nullptr);
}

TEST(Bf16Products, TakeOnlyFormatsThatAreBf16) {
  for (const char* words :
       {"x=f32 w=bf16", "x=bf16 w=f16", "format=mxfp8", "x=bf16 w=mxfp4", "format=fp8_block"}) {
    const GroupedGemmProblem p =
        parse_grouped_gemm_problem(text("grouped_gemm fprop R=1 N=1 K=1 ", words));
    EXPECT_NE(refuses_bf16(p).find("takes operands whose decoded"), std::string::npos) << words;
  }
  const GroupedGemmProblem p = parse_grouped_gemm_problem("grouped_gemm fprop R=1 N=1 K=1");
  EXPECT_EQ(refuses_bf16(p),
            processor().bf16
                ? ""
                : "bf16 products are missing, unsafe or slower than fp32 on this processor");
}

// What may be done to a line, against the formats' own arithmetic, at every code of 8 and 16 bits.
template <class Element>
void expect_decoded() {
  using Code = typename Element::Code;
  constexpr int kCodes = sizeof(Code) == 1 ? 256 : 65536;
  std::vector<Code> codes;
  for (int i = 0; i < kCodes; ++i) codes.push_back(Code(i));
  std::vector<float> got(codes.size());
  decode_line(Element::kDType)(codes.data(), 0, kCodes, got.data());
  for (int i = 0; i < kCodes; ++i)
    EXPECT_EQ(formats::bits_of(got[size_t(i)]), formats::bits_of(Element::decode(Code(i))))
        << name(Element::kDType) << " code " << i;
}

TEST(Lines, DecodeEveryCode) {
  expect_decoded<formats::Bf16>();
  expect_decoded<formats::Fp16>();
  expect_decoded<formats::E4m3>();
  expect_decoded<formats::E5m2>();
  expect_decoded<formats::E8m0>();
}

TEST(Lines, DecodeHalfBytesFromAnywhere) {
  const std::vector<uint8_t> bytes = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
  for (int first = 0; first < 16; ++first)
    for (int count = 0; first + count <= 16; ++count) {
      std::vector<float> got(size_t(count) + 1, -99.0f);
      decode_line(DType::kE2m1)(bytes.data(), first, count, got.data());
      for (int i = 0; i < count; ++i)
        EXPECT_EQ(got[size_t(i)], formats::E2m1::decode(uint8_t(first + i)));
      EXPECT_EQ(got.back(), -99.0f);
    }
}

TEST(Lines, EncodeAsTheFormatsDo) {
  std::mt19937 random(1);
  std::vector<float> x(5000);
  for (float& v : x) v = formats::float_of(uint32_t(random()));
  std::vector<uint16_t> got(x.size());
  encode_line(DType::kBf16)(x.data(), int64_t(x.size()), got.data());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(got[i], formats::Bf16::encode(x[i]));
  encode_line(DType::kF16)(x.data(), int64_t(x.size()), got.data());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(got[i], formats::Fp16::encode(x[i]));
}

TEST(Lines, OtherTypesAreRefused) {
  EXPECT_THROW(decode_line(DType::kI32), InvalidArgument);
  EXPECT_THROW(encode_line(DType::kE4m3), InvalidArgument);
}

// A matrix of numbers that tell where they stand, staged from either order into either layout.
TEST(Stage, PutsEveryElementWhereProductsLookForIt) {
  constexpr int64_t kOuter = 75, kDepth = 70;
  for (const bool along_depth : {true, false}) {
    const int64_t lines = along_depth ? kOuter : kDepth, length = along_depth ? kDepth : kOuter;
    std::vector<float> stored(size_t(lines * length));
    const auto number = [](int64_t o, int64_t d) { return float(1 + o + 128 * (d % 2)); };
    for (int64_t o = 0; o < kOuter; ++o)
      for (int64_t d = 0; d < kDepth; ++d)
        stored[size_t(along_depth ? o * length + d : d * length + o)] = number(o, d);
    Operand operand;
    operand.codes = view(stored.data(), DType::kF32, {lines, length});
    const QuantizedShape shape{.rows = lines, .cols = length, .format = format(FormatKind::kF32)};
    const OperandLines from(operand, shape);
    const Along run = along_depth ? Along::kDepth : Along::kOuter;
    const Part part{0, 0, 0, lines, 0, length};
    for (const Multiplicand type : {Multiplicand::kF32, Multiplicand::kBf16}) {
      const int64_t depth = 96, outer_a = 80, outer_b = 128;
      std::vector<float> a(size_t(outer_a * depth), NAN), b(size_t(outer_b * depth), NAN);
      stage_a(from, run, part, {a.data(), type, outer_a, depth});
      stage_b(from, run, part, {b.data(), type, outer_b, depth});
      const auto at = [&](const std::vector<float>& staged, int64_t i) {
        if (type == Multiplicand::kF32) return staged[size_t(i)];
        return formats::Bf16::decode(reinterpret_cast<const uint16_t*>(staged.data())[i]);
      };
      for (int64_t o = 0; o < outer_b; ++o)
        for (int64_t d = 0; d < depth; ++d) {
          const float want = o < kOuter && d < kDepth ? number(o, d) : 0;
          const int64_t column = o / 64 * 64 * depth, lane = o % 64;
          const int64_t in_b =
              type == Multiplicand::kF32 ? d * 64 + lane : d / 2 * 128 + lane * 2 + d % 2;
          ASSERT_EQ(at(b, column + in_b), want) << o << ", " << d;
          if (o < outer_a) {
            ASSERT_EQ(at(a, o * depth + d), want) << o << ", " << d;
          }
        }
    }
  }
}

}  // namespace
