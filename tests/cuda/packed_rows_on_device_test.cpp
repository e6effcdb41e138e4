// fprop of bf16 rows and packed weights, which Hopper's kernel decodes on their way into the tensor
// cores: the bits of the kernel of bf16, of weights that were decoded before; every code and scale.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "bench/case.h"
#include "bench/mirror.h"
#include "cadre/error.h"
#include "formats/bf16.h"
#include "formats/list.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;

constexpr std::string_view kName = "sm90_packed_rows";

class PackedRows : public testing::Test {
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

/// Runs on the GPU what is in the memory of the case.
void run_on_gpu(GroupedGemmCase& c, const GroupedGemmProblem& p, const GroupedGemmArgs& args,
                std::string_view name) {
  const Device device = cuda_devices()[0];
  const GroupedGemmPlan chosen = plan(p, device, name);
  const auto accelerator = bench::open_accelerator(device);
  const Workspace workspace = c.buffers->workspace(chosen.workspace_bytes);
  const bench::Mirror mirror(*c.buffers, *accelerator);
  run(chosen, mirror.moved(args), mirror.moved(workspace), accelerator->stream());
  mirror.fetch();
}

/// The address of a code or a scale of packed weights.
uint8_t* place(const TensorView& v, int64_t e, int64_t n, int64_t k) {
  const int64_t at = e * v.stride[0] + n * v.stride[1] + k * v.stride[2];
  return static_cast<uint8_t*>(v.data) + at * bits(v.dtype) / 8;
}

/// The numbers of the codes times their block scales, as quantise writes them.
TensorView decoded_weights(GroupedGemmCase& c) {
  TensorView codes = c.args.rhs.codes, scales = c.args.rhs.scales;
  if (c.problem.discrete_rhs) {  // experts lie in a row
    codes.data = const_cast<void*>(c.args.rhs.discrete[0]);
    scales.data = const_cast<void*>(c.args.rhs.discrete_scales[0]);
  }
  const TensorView w =
      c.buffers->tensor(DType::kBf16, {codes.shape[0], codes.shape[1], codes.shape[2]});
  const Format& format = c.problem.rhs;
  const int64_t block = info(format.kind).block, down = format.square ? block : 1;
  formats::visit(format, [&]<class Row, class Element>() {
    for (int64_t e = 0; e < w.shape[0]; ++e)
      for (int64_t n = 0; n < w.shape[1]; ++n)
        for (int64_t k = 0; k < w.shape[2]; ++k) {
          const int byte = *place(codes, e, n, k);
          const int code = bits(codes.dtype) == 8 ? byte : byte >> (k % 2 * 4) & 0xf;
          typename Row::Scale::Code scale;
          std::memcpy(&scale, place(scales, e, n / down, k / block), sizeof(scale));
          const float number =
              Element::decode(typename Element::Code(code)) * float(Row::Scale::decode(scale));
          auto* to = reinterpret_cast<uint16_t*>(place(w, e, n, k));
          *to = formats::Bf16::encode(number);
        }
  });
  return w;
}

/// What decoded weights and the kernel of bf16 make of the case, with the scales of experts in
/// alpha; and what the packed ones make.
struct Outputs {
  std::vector<uint8_t> want, got;
};
Outputs outputs_of(GroupedGemmCase& c) {
  const TensorView& out = c.args.out;
  const int64_t bytes = bytes_for(out.dtype, out.shape[0] * out.stride[0]);
  GroupedGemmProblem plain = c.problem;
  GroupedGemmArgs args = c.args;
  plain.rhs = format(FormatKind::kBf16);
  plain.discrete_rhs = false;
  args.rhs = {.codes = decoded_weights(c)};
  args.out.data = c.buffers->take(bytes);
  std::memcpy(args.out.data, out.data, size_t(bytes));
  if (c.args.rhs.expert_scale != nullptr) {
    auto* alpha = c.buffers->array<float>(c.problem.experts);
    for (int e = 0; e < c.problem.experts; ++e)
      alpha[e] = (c.args.alpha == nullptr ? 1.0f : c.args.alpha[e]) * c.args.rhs.expert_scale[e];
    args.alpha = alpha;
    plain.alpha = true;
  }
  run_on_gpu(c, plain, args, "sm90_ragged_rows");
  run_on_gpu(c, c.problem, c.args, kName);
  const auto content = [&](const void* data) {
    const auto* first = static_cast<const uint8_t*>(data);
    return std::vector<uint8_t>(first, first + bytes);
  };
  return {content(args.out.data), content(out.data)};
}

// More stages than a round of scales has, last ones that are half full, rows and experts at every
// edge, tiles of all widths, with x as it is and split, dealt out or counted; of four consumers all
// or some; scales that can be read as words, and others.
TEST_F(PackedRows, HaveTheBitsOfDecodedWeights) {
  const struct {
    const char* words;
    std::vector<int64_t> counts;
  } cases[] = {
      {"fprop R=60 N=136 K=416 E=3 x=bf16 w=mxfp4", {33, 0, 22}},
      {"fprop R=60 N=264 K=992 E=3 x=bf16 w=nvfp4 alpha=yes beta=yes out=f32", {0, 41, 19}},
      {"fprop R=60 N=136 K=400 E=3 x=bf16 w=mxfp8 bias=yes bias_scale=yes tail=zero", {33, 0, 22}},
      {"fprop R=60 N=264 K=992 E=3 x=bf16 w=mxfp4 unit_budget=2", {7, 20, 33}},
      {"fprop R=60 N=776 K=1088 E=3 x=bf16 w=mxfp4 beta=yes", {33, 0, 22}},
      {"fprop R=60 N=1544 K=1088 E=3 x=bf16 w=nvfp4:2d unit_budget=4", {21, 0, 39}},
      {"fprop R=60 N=1544 K=1104 E=3 x=bf16 w=mxfp8 unit_budget=4", {21, 0, 39}},
      {"fprop R=60 N=520 K=1088 E=3 x=bf16 w=nvfp4 bias=yes", {1, 40, 19}},
      {"fprop R=40 N=136 K=544 E=3 x=bf16 w=mxfp4 discrete_rhs=yes", {17, 0, 22}},
      {"fprop R=120 N=328 K=544 E=3 x=bf16 w=mxfp4", {70, 0, 48}},
      {"fprop R=120 N=136 K=1088 E=3 x=bf16 w=nvfp4", {70, 0, 48}},
      {"fprop R=120 N=648 K=1024 E=3 x=bf16 w=mxfp8", {70, 0, 48}},
      {"fprop R=450 N=264 K=96 E=3 x=bf16 w=nvfp4:2d", {201, 7, 203}},
      {"fprop R=150 N=4096 K=96 E=2 x=bf16 w=mxfp4", {100, 49}},
      {"fprop R=190 N=4096 K=80 E=2 x=bf16 w=mxfp8", {41, 148}},
      {"fprop R=280 N=264 K=544 E=4 x=bf16 w=mxfp4 bias=yes", {96, 5, 97, 70}},
      {"fprop R=280 N=520 K=400 E=4 x=bf16 w=mxfp8 unit_budget=2", {97, 49, 96, 33}},
      {"fprop R=250 N=264 K=416 E=4 x=bf16 w=nvfp4 alpha=yes", {97, 3, 80, 70}},
      {"fprop R=450 N=72 K=352 E=3 x=bf16 w=mxfp4 alpha=yes out=f32", {201, 7, 240}},
      {"fprop R=450 N=136 K=144 E=3 x=bf16 w=mxfp8:2d unit_budget=2", {0, 450, 0}},
  };
  for (const auto& one : cases) {
    GroupedGemmCase c = make(one.words, one.counts);
    const Outputs outputs = outputs_of(c);
    EXPECT_EQ(outputs.want == outputs.got, true) << one.words;
  }
}

/// Neighbouring columns of x, of all sizes, cancel each other but for some small ones, with weights
/// that are the same.
void draw_differences(GroupedGemmCase& c) {
  std::mt19937 random(8);
  const TensorView &x = c.args.lhs.codes, &codes = c.args.rhs.codes;
  const auto number = [&](uint32_t exponent) {
    return uint16_t((random() & 0x807f) | exponent << 7);
  };
  for (int64_t r = 0; r < x.shape[0]; ++r)
    for (int64_t k = 0; k < x.shape[1]; k += 2) {
      auto* pair = static_cast<uint16_t*>(x.data) + r * x.stride[0] + k;
      pair[0] = number(uint32_t(112 + random() % 30));
      pair[1] = k % 6 == 0 ? number(112) : uint16_t(pair[0] ^ 0x8000u);
      if (k % 6 == 0) pair[0] = number(112);
    }
  for (int64_t e = 0; e < codes.shape[0]; ++e)
    for (int64_t n = 0; n < codes.shape[1]; ++n)
      for (int64_t k = 0; k < codes.shape[2]; k += 2) {
        uint8_t* pair = place(codes, e, n, k);
        if (bits(codes.dtype) == 8)
          pair[1] = pair[0];
        else
          *pair = uint8_t(*pair % 16 * 17);
      }
}

// What is left of large products shows in which order they were added.
TEST_F(PackedRows, HaveTheBitsOfDecodedWeightsWhereProductsCancel) {
  for (const char* words :
       {"fprop R=60 N=136 K=416 E=3 x=bf16 w=mxfp4", "fprop R=60 N=136 K=416 E=3 x=bf16 w=mxfp8"}) {
    GroupedGemmCase c = make(words, {33, 0, 22});
    draw_differences(c);
    const Outputs outputs = outputs_of(c);
    EXPECT_EQ(outputs.want == outputs.got, true) << words;
  }
}

/// Every code, NaNs in a few rows; every scale, one for all blocks of a row.
void draw_everything(GroupedGemmCase& c) {
  std::mt19937 random(7);
  const TensorView &codes = c.args.rhs.codes, &scales = c.args.rhs.scales;
  const bool nibbles = bits(codes.dtype) == 4;
  for (int64_t e = 0; e < codes.shape[0]; ++e)
    for (int64_t n = 0; n < codes.shape[1]; ++n) {
      for (int64_t k = 0; k < codes.shape[2]; k += nibbles ? 2 : 1) {
        auto code = uint8_t(random());
        if (!nibbles && code % 128 == 127 && (n % 16 != 3 || k % 100 != 0)) code = 1;
        *place(codes, e, n, k) = code;
      }
      for (int64_t b = 0; b < scales.shape[2]; ++b)
        *place(scales, e, n, b) = uint8_t(e * codes.shape[1] + n);
    }
}

TEST_F(PackedRows, DecodeEveryCodeWithEveryScale) {
  for (const char* words :
       {"fprop R=40 N=264 K=416 E=1 x=bf16 w=mxfp4 out=f32",
        "fprop R=40 N=264 K=416 E=1 x=bf16 w=mxfp8 out=f32",
        "fprop R=40 N=264 K=416 E=1 x=bf16 w=nvfp4 out=f32",
        "fprop R=40 N=264 K=416 E=1 x=bf16 w=mxfp4", "fprop R=40 N=264 K=416 E=1 x=bf16 w=mxfp8",
        "fprop R=40 N=264 K=416 E=1 x=bf16 w=nvfp4", "fprop R=40 N=264 K=416 E=2 x=bf16 w=nvfp4"}) {
    const int experts = parse_grouped_gemm_problem(text("grouped_gemm ", words)).experts;
    GroupedGemmCase c =
        make(words, experts == 1 ? std::vector<int64_t>{40} : std::vector<int64_t>{40, 0});
    draw_everything(c);
    const Outputs outputs = outputs_of(c);
    EXPECT_EQ(outputs.want == outputs.got, true) << words;
    constexpr int64_t kAll = int64_t(40) * 264;
    int64_t finite = 0;
    for (int64_t i = 0; i < kAll; ++i) {
      const float y =
          c.problem.out == DType::kF32
              ? reinterpret_cast<const float*>(outputs.got.data())[i]
              : formats::Bf16::decode(reinterpret_cast<const uint16_t*>(outputs.got.data())[i]);
      finite += std::isfinite(y) && y != 0;
    }
    EXPECT_GT(finite, kAll * 9 / 10) << words;
    EXPECT_LT(finite, kAll) << words;
  }
}

// Scales that times the unit are no numbers, beside others of the same rows: decoded in two steps.
TEST_F(PackedRows, DecodeLargeScalesBesideSmallOnes) {
  GroupedGemmCase c = make("fprop R=40 N=136 K=1056 E=1 x=bf16 w=mxfp4 out=f32", {40});
  std::mt19937 random(9);
  const TensorView& scales = c.args.rhs.scales;
  for (int64_t n = 0; n < 136; ++n)
    for (int64_t b = 0; b < scales.shape[2]; ++b)
      *place(scales, 0, n, b) = uint8_t(120 + random() % (n < 64 || b > 20 ? 8 : 16));
  const Outputs outputs = outputs_of(c);
  EXPECT_EQ(outputs.want == outputs.got, true);
}

// Until they have been timed.
TEST_F(PackedRows, RunWhereTheyAreNamed) {
  const auto p = parse_grouped_gemm_problem("grouped_gemm fprop R=20 N=40 K=64 E=1 format=mxfp4");
  EXPECT_EQ(plan(p, cuda_devices()[0], kName).name, kName);
  EXPECT_THROW(plan(p, cuda_devices()[0]), Unsupported);
}

}  // namespace
}  // namespace cadre
