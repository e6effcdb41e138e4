// fprop and dgrad of fp8_block, fp8_tensor and fp8_row on Hopper's 8-bit tensor cores, to the bit:
// what the model of their adder says, promoted every 128 codes; the exact product where that adder
// loses nothing; rows that do not depend on the batch.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <random>

#include "bench/case.h"
#include "bench/compare.h"
#include "bench/mirror.h"
#include "cadre/error.h"
#include "formats/bf16.h"
#include "formats/small_float.h"
#include "tests/judge/adder_of_codes.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;

constexpr std::string_view kName = "sm90_fp8_rows";
constexpr int64_t kBlock = 128;

class Fp8Rows : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
    if (cuda_devices()[0].sm != 90) GTEST_SKIP() << "no GPU of Hopper here";
  }
};

GroupedGemmCase make(std::string_view words, std::vector<int64_t> counts) {
  const GroupedGemmProblem p = parse_grouped_gemm_problem(text("grouped_gemm ", words));
  bench::Draw draw;
  draw.counts = std::move(counts);
  return bench::make_case(p, draw);
}

void run_on_gpu(GroupedGemmCase& c) {
  const Device device = cuda_devices()[0];
  const GroupedGemmPlan chosen = plan(c.problem, device, kName);
  const auto accelerator = bench::open_accelerator(device);
  const Workspace workspace = c.buffers->workspace(chosen.workspace_bytes);
  const bench::Mirror mirror(*c.buffers, *accelerator);
  run(chosen, mirror.moved(c.args), mirror.moved(workspace), accelerator->stream());
  mirror.fetch();
}

uint8_t& code(const TensorView& v, int64_t i, int64_t j, int64_t expert = 0) {
  const int64_t first = v.rank == 3 ? expert * v.stride[0] : 0;
  return static_cast<uint8_t*>(
      v.data)[first + i * v.stride[size_t(v.rank - 2)] + j * v.stride[size_t(v.rank - 1)]];
}
float& scale(const TensorView& v, int64_t i, int64_t j, int64_t expert = 0) {
  const int64_t first = v.rank == 3 ? expert * v.stride[0] : 0;
  return static_cast<float*>(
      v.data)[first + i * v.stride[size_t(v.rank - 2)] + j * v.stride[size_t(v.rank - 1)]];
}

float& scale_of_expert(const Operand& operand, int64_t expert) {
  return const_cast<float*>(operand.expert_scale)[expert];
}
bool has_scales(const GroupedGemmCase& c) { return c.args.lhs.expert_scale == nullptr; }

/// Packed operands as [rows, contraction].
struct Operands {
  const GroupedGemmCase& c;
  bool fprop = c.problem.pass == Pass::kFprop;
  int64_t depth = fprop ? c.problem.k : c.problem.n, cols = fprop ? c.problem.n : c.problem.k;

  float x(int64_t r, int64_t d) const {
    const uint8_t stored = code(c.args.lhs.codes, r, d);
    return c.problem.lhs.element == DType::kE4m3 ? formats::E4m3::decode(stored)
                                                 : formats::E5m2::decode(stored);
  }
  float w(int e, int64_t col, int64_t d) const {
    return formats::E4m3::decode(fprop ? code(c.args.rhs.codes, col, d, e)
                                       : code(c.args.rhs.codes, d, col, e));
  }
  float factor(int64_t r, int e, int64_t col, int64_t block) const {
    if (c.problem.lhs.kind != FormatKind::kFp8Block) return 1;
    const int64_t across = col / kBlock;
    return scale(c.args.lhs.scales, r, block) * (fprop
                                                     ? scale(c.args.rhs.scales, across, block, e)
                                                     : scale(c.args.rhs.scales, block, across, e));
  }
  /// Of the whole sum.
  float factor_of(int64_t r, int e, int64_t col) const {
    if (c.problem.lhs.kind == FormatKind::kFp8Block) return 1;
    if (c.problem.lhs.kind == FormatKind::kFp8Row)
      return scale(c.args.lhs.scales, r, 0) *
             (fprop ? scale(c.args.rhs.scales, col, 0, e) : scale(c.args.rhs.scales, 0, col, e));
    return scale_of_expert(c.args.lhs, e) * scale_of_expert(c.args.rhs, e);
  }
  /// What the kernel makes of it: four additions of 32 products a block.
  float model(int64_t r, int e, int64_t col) const {
    float total = 0;
    for (int64_t first = 0; first < depth; first += kBlock) {
      float sum = 0;
      for (int64_t step = first; step < first + kBlock; step += test::kCodesOfAnAdd) {
        float a[test::kCodesOfAnAdd] = {}, b[test::kCodesOfAnAdd] = {};
        for (int64_t d = step; d < std::min<int64_t>(depth, step + test::kCodesOfAnAdd); ++d)
          a[d - step] = x(r, d), b[d - step] = w(e, col, d);
        sum = test::add_products_of_codes(a, b, sum);
      }
      total = std::fma(sum, factor(r, e, col, first / kBlock), total);
    }
    return total * factor_of(r, e, col);
  }
};

TEST_F(Fp8Rows, HaveTheBitsOfTheModel) {
  for (const char* words :
       {"fprop R=60 N=136 K=400 E=3 format=fp8_block lhs_scales_major=column out=f32",
        "fprop R=60 N=264 K=272 E=3 x=fp8_block:fp32 w=fp8_block:2d+fp32 lhs_scales_major=column "
        "out=f32",
        "dgrad R=60 N=144 K=136 E=3 dy=fp8_block:e5m2 w=fp8_block:2d rhs_major=column "
        "lhs_scales_major=column rhs_scales_major=column out=f32",
        "fprop R=60 N=136 K=400 E=3 format=fp8_tensor out=f32",
        "dgrad R=60 N=144 K=264 E=3 format=fp8_tensor rhs_major=column out=f32 unit_budget=2",
        "fprop R=60 N=264 K=400 E=3 x=fp8_row w=fp8_row out=f32 unit_budget=2",
        "dgrad R=60 N=144 K=136 E=3 dy=fp8_row:e5m2+pow2 w=fp8_row rhs_major=column "
        "rhs_scales_major=column lhs_scales_major=column out=f32"}) {
    GroupedGemmCase c = make(words, {33, 0, 22});
    run_on_gpu(c);
    const Operands operands{c};
    int64_t wrong = 0;
    for (int e = 0; e < 3; ++e)
      for (int64_t r = c.offsets[size_t(e)]; r < c.offsets[size_t(e) + 1]; ++r)
        for (int64_t col = 0; col < operands.cols; ++col)
          wrong += scale(c.args.out, r, col) != operands.model(r, e, col);
    EXPECT_EQ(wrong, 0) << words;
  }
}

/// Integers of at most 2 as codes, whose sums of a block no adder cuts off, and scales of a few
/// powers of two, so that fp32 holds all totals. Both batches are of e4m3.
void draw_integers(GroupedGemmCase& c) {
  std::mt19937 random(5);
  const auto integer = [&] { return formats::E4m3::encode(float(int(random() % 5) - 2)); };
  const auto power = [&] { return formats::pow2(int(random() % 5) - 2); };
  const TensorView &x = c.args.lhs.codes, &w = c.args.rhs.codes;
  const TensorView &x_scales = c.args.lhs.scales, &w_scales = c.args.rhs.scales;
  for (int64_t e = 0; e < w[0] && !has_scales(c); ++e)
    scale_of_expert(c.args.lhs, e) = power(), scale_of_expert(c.args.rhs, e) = power();
  for (int64_t r = 0; r < c.offsets.back(); ++r) {
    for (int64_t d = 0; d < x[1]; ++d) code(x, r, d) = integer();
    for (int64_t b = 0; has_scales(c) && b < x_scales[1]; ++b) scale(x_scales, r, b) = power();
  }
  for (int64_t e = 0; e < w[0]; ++e) {
    for (int64_t i = 0; i < w[1] * w[2]; ++i) code(w, i / w[2], i % w[2], e) = integer();
    for (int64_t i = 0; has_scales(c) && i < w_scales[1] * w_scales[2]; ++i)
      scale(w_scales, i / w_scales[2], i % w_scales[2], e) = power();
  }
}

TEST_F(Fp8Rows, AreExactWhereTheAdderIs) {
  const struct {
    const char* words;
    std::vector<int64_t> counts;
  } cases[] = {
      {"fprop R=450 N=264 K=272 E=3 format=fp8_block lhs_scales_major=column out=f32",
       {201, 7, 203}},
      {"fprop R=450 N=136 K=144 E=3 format=fp8_block lhs_scales_major=column", {201, 7, 203}},
      {"dgrad R=450 N=144 K=520 E=3 dy=fp8_block:fp32 w=fp8_block:2d+fp32 rhs_major=column "
       "lhs_scales_major=column unit_budget=2",
       {201, 7, 203}},
      // More blocks than a warp has lanes, twice, and tiles behind them.
      {"fprop R=30 N=40 K=8464 E=2 format=fp8_block lhs_scales_major=column out=f32 unit_budget=2",
       {9, 17}},
      // Tiles above each other and a row of them side by side, of an odd number.
      {"fprop R=900 N=392 K=272 E=3 format=fp8_block lhs_scales_major=column", {300, 570, 20}},
      {"fprop R=900 N=392 K=272 E=4 format=fp8_tensor", {300, 0, 570, 20}},
      {"dgrad R=450 N=144 K=136 E=3 dy=fp8_tensor w=fp8_tensor rhs_major=column out=f32",
       {201, 7, 203}},
      {"fprop R=30 N=8 K=16 E=1 format=fp8_tensor", {29}},
      {"fprop R=900 N=392 K=272 E=4 x=fp8_row w=fp8_row", {300, 0, 570, 20}},
      {"dgrad R=450 N=144 K=136 E=3 dy=fp8_row w=fp8_row rhs_major=column out=f32", {201, 7, 203}},
      {"fprop R=30 N=8 K=16 E=1 x=fp8_row w=fp8_row", {29}},
  };
  for (const auto& one : cases) {
    GroupedGemmCase got = make(one.words, one.counts), want = make(one.words, one.counts);
    draw_integers(got), draw_integers(want);
    run_on_gpu(got);
    run(plan(want.problem, this_cpu(), "cpu_reference"), want.args, {}, {});
    EXPECT_EQ(bench::snapshot(got.outputs[0]) == bench::snapshot(want.outputs[0]), true)
        << one.words;
  }
}

// The same rows behind ever more others, of another expert or of their own: other consumers, blocks
// and pairs of tiles have them then.
void expect_no_bit_of_the_batch(const char* words) {
  constexpr int64_t kRows = 37;
  const GroupedGemmCase alone = make(words, {0, kRows});
  std::vector<uint16_t> first;
  for (const auto& [others, own] : {std::pair<int64_t, int64_t>{0, 0},
                                    {1, 0},
                                    {6, 0},
                                    {190, 0},
                                    {0, 37},
                                    {3, 101},
                                    {0, 165},
                                    {5, 293}}) {
    GroupedGemmCase c = make(words, {others, own + kRows});
    const int64_t before = others + own;
    const Operand &x = c.args.lhs, &same = alone.args.lhs;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t d = 0; d < 400; ++d) code(x.codes, before + r, d) = code(same.codes, r, d);
      for (int64_t b = 0; has_scales(c) && b < x.scales[1]; ++b)
        scale(x.scales, before + r, b) = scale(same.scales, r, b);
    }
    if (!has_scales(c)) scale_of_expert(x, 1) = scale_of_expert(same, 1);
    run_on_gpu(c);
    const auto* y = static_cast<const uint16_t*>(c.args.out.data) + before * c.args.out.stride[0];
    std::vector<uint16_t> rows(y, y + kRows * 200);
    if (first.empty()) first = rows;
    EXPECT_EQ(rows, first) << words << ", behind " << others << " and " << own;
  }
}

TEST_F(Fp8Rows, DoNotDependOnTheBatch) {
  expect_no_bit_of_the_batch(
      "fprop R=400 N=200 K=400 E=2 format=fp8_block lhs_scales_major=column");
  expect_no_bit_of_the_batch("fprop R=400 N=200 K=400 E=2 format=fp8_tensor");
  expect_no_bit_of_the_batch("fprop R=400 N=200 K=400 E=2 x=fp8_row w=fp8_row");
}

#ifdef CADRE_EMULATED
/// A tensor's numbers again, behind which a page lies that nobody may read.
class Guarded {
 public:
  explicit Guarded(TensorView& v) {
    size_t count = 1;
    for (int d = 0; d < v.rank; ++d)
      count += size_t(v.shape[size_t(d)] - 1) * size_t(v.stride[size_t(d)]);
    const size_t bytes = (count + 3) / 4 * 4 * sizeof(float);  // rows of scales have room for that
    readable_ = (bytes + kPage - 1) / kPage * kPage;
    memory_ = static_cast<char*>(mmap(nullptr, readable_ + kPage, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memcpy(memory_ + readable_ - bytes, v.data, bytes);
    mprotect(memory_ + readable_, kPage, PROT_NONE);
    v.data = memory_ + readable_ - bytes;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(memory_, readable_ + kPage); }

 private:
  static constexpr size_t kPage = 4096;
  size_t readable_ = 0;
  char* memory_ = nullptr;
};

// The emulator reads memory of the host, so it stops where a kernel reads too much.
TEST_F(Fp8Rows, ReadNoScalesBehindTheLast) {
  for (const char* words : {"fprop R=29 N=40 K=272 E=2 format=fp8_block lhs_scales_major=column",
                            "fprop R=29 N=512 K=272 E=2 format=fp8_block lhs_scales_major=column",
                            "dgrad R=29 N=272 K=512 E=2 format=fp8_block rhs_major=column "
                            "lhs_scales_major=column",
                            "fprop R=29 N=40 K=272 E=2 x=fp8_row w=fp8_row",
                            "dgrad R=29 N=272 K=200 E=2 dy=fp8_row w=fp8_row rhs_major=column"}) {
    GroupedGemmCase c = make(words, {20, 9});
    const Guarded x(c.args.lhs.scales), w(c.args.rhs.scales);
    const GroupedGemmPlan chosen = plan(c.problem, cuda_devices()[0]);
    EXPECT_EQ(chosen.name, kName);
    run(chosen, c.args, c.buffers->workspace(chosen.workspace_bytes), {});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
}
#endif

// A large product beside small ones: sums lose what fp32 would keep, and no more than their bound.
void expect_a_loss_of_thirteen_bits(const char* words) {
  GroupedGemmCase c = make(words, {16});
  const TensorView& x = c.args.lhs.codes;
  for (int64_t r = 0; r < 16; ++r)
    for (int64_t d = 0; d < 256; ++d)
      code(x, r, d) = formats::E4m3::encode(d % 128 == 0 ? 448.0f : 0.0625f);
  for (int64_t i = 0; i < 64 * 256; ++i)
    code(c.args.rhs.codes, i / 256, i % 256) = formats::E4m3::encode(1.0f + float(i % 3) / 8);
  run_on_gpu(c);
  const Operands operands{c};
  double worst = 0;
  for (int64_t r = 0; r < 16; ++r)
    for (int64_t col = 0; col < 64; ++col) {
      double want = 0;  // all terms are positive
      for (int64_t d = 0; d < 256; ++d)
        want += double(operands.x(r, d)) * operands.w(0, col, d) *
                operands.factor(r, 0, col, d / kBlock) * operands.factor_of(r, 0, col);
      worst = std::max(worst, std::abs(scale(c.args.out, r, col) / want - 1));
    }
  EXPECT_GT(worst, 1e-4) << words;
  EXPECT_LT(worst, bench::gamma(bench::roundings_of_adder(13))) << words;
}

TEST_F(Fp8Rows, LoseNoMoreThanThirteenBitsSay) {
  expect_a_loss_of_thirteen_bits(
      "fprop R=16 N=64 K=256 E=1 format=fp8_block lhs_scales_major=column out=f32");
  expect_a_loss_of_thirteen_bits("fprop R=16 N=64 K=256 E=1 format=fp8_tensor out=f32");
  expect_a_loss_of_thirteen_bits("fprop R=16 N=64 K=256 E=1 x=fp8_row w=fp8_row out=f32");
}

}  // namespace
}  // namespace cadre
