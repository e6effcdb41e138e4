// What a run does before an implementation takes over neither allocates nor formats: a step of a
// model makes hundreds of runs, and waits for the host of each. Nor does an implementation copy its
// plan.
#include <gtest/gtest.h>

#include "backend/entry.h"
#include "cadre/activation.h"
#include "cadre/dequantize.h"
#include "cadre/grouped_gemm.h"
#include "cadre/permute.h"
#include "cadre/quantize.h"
#include "tests/count_allocations.h"

namespace cadre {
namespace {

using Entry = backend::Entry<GroupedGemmProblem>;

int runs = 0;
void count_run(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream) { ++runs; }
constexpr Entry kEntry{"counts", backend::takes_all<GroupedGemmProblem>,
                       backend::no_workspace<GroupedGemmProblem>, count_run};

alignas(256) static char memory[256];

// Addresses that nobody reads.
GroupedGemmArgs args_of(const GroupedGemmProblem& p) {
  const bool fprop = p.pass == Pass::kFprop, wgrad = p.pass == Pass::kWgrad;
  GroupedGemmArgs args;
  args.lhs.codes = view(memory, DType::kBf16, {p.rows, fprop ? p.k : p.n});
  args.rhs.codes = wgrad ? view(memory, DType::kBf16, {p.rows, p.k})
                         : view(memory, DType::kBf16, {p.experts, p.n, p.k});
  args.out = wgrad ? view(memory, DType::kBf16, {p.experts, p.n, p.k})
                   : view(memory, DType::kBf16, {p.rows, fprop ? p.n : p.k});
  args.offsets = {reinterpret_cast<const int32_t*>(memory), p.experts};
  return args;
}

TEST(Run, AllocatesNothingBeforeTheImplementation) {
  for (const char* pass : {"fprop", "dgrad", "wgrad"}) {
    const auto p = parse_grouped_gemm_problem(std::string("grouped_gemm ") + pass +
                                              " R=48 N=24 K=40 E=7 format=bf16");
    const GroupedGemmPlan plan{.problem = p,
                               .device = this_cpu(),
                               .name = "counts",
                               .workspace_bytes = 256,
                               .refusals = {},
                               .entry = &kEntry};
    const GroupedGemmArgs args = args_of(p);
    const int before = allocations;
    run(plan, args, {memory, 256}, {});
    EXPECT_EQ(allocations - before, 0) << pass;
  }
  EXPECT_EQ(runs, 3);
}

// Copies whose parts have long names, of formats that have all parts; no row is there to be read.
TEST(Run, OfCodesAllocatesNothingBeforeTheImplementation) {
  alignas(256) static char along_k[1 << 12], along_rows[1 << 12];
  const Offsets offsets{reinterpret_cast<const int32_t*>(memory), 3};
  const auto check = [](const auto& plan, const auto& args) {
    std::vector<char> scratch(size_t(plan.workspace_bytes) + 256);
    const auto begin = (reinterpret_cast<uintptr_t>(scratch.data()) + 255) / 256 * 256;
    const Workspace workspace{reinterpret_cast<void*>(begin), plan.workspace_bytes};
    run(plan, args, workspace, {});  // what threads keep
    const int before = allocations;
    run(plan, args, workspace, {});
    EXPECT_EQ(allocations - before, 0) << to_string(plan.problem);
  };
  const auto quantize =
      parse_quantize_problem("quantize rows R=0 C=64 E=3 along_k=nvfp4 along_rows=nvfp4 role=x");
  check(plan(quantize, this_cpu()),
        QuantizeArgs{
            .source = view(memory, DType::kBf16, {0, 64}),
            .offsets = offsets,
            .along_k = quantized_view(copy_shape(quantize, Axis::kAlongK), along_k),
            .along_rows = quantized_view(copy_shape(quantize, Axis::kAlongRows), along_rows)});
  EXPECT_LE(quantized_bytes(copy_shape(quantize, Axis::kAlongK)), int64_t(sizeof along_k));
  EXPECT_LE(quantized_bytes(copy_shape(quantize, Axis::kAlongRows)), int64_t(sizeof along_rows));
  const auto dequantize =
      parse_dequantize_problem("dequantize rows R=0 C=64 E=3 format=nvfp4 out=f32");
  check(plan(dequantize, this_cpu()),
        DequantizeArgs{.source = quantized_view(dequantize.source, along_k),
                       .offsets = offsets,
                       .out = view(memory, DType::kF32, {0, 64})});
}

template <class Work>
int allocations_of(Work&& work) {
  work();  // what is kept from run to run
  const int before = allocations;
  work();
  return allocations - before;
}

// A product and an activation, one after the other: what both take by themselves, and no more. In
// f32, where implementations refuse and planning allocates their reasons.
TEST(Run, ComposedPlansNothing) {
  auto p = parse_grouped_gemm_problem(
      "grouped_gemm fprop R=48 N=64 K=32 E=7 format=f32 out=f32 act=swiglu");
  const GroupedGemmPlan composed = plan(p, this_cpu(), "composed");
  GroupedGemmArgs args;
  args.lhs.codes = view(memory, DType::kF32, {48, 32});
  args.rhs.codes = view(memory, DType::kF32, {7, 64, 32});
  args.offsets = {reinterpret_cast<const int32_t*>(memory), 7};  // zeros: no row is read
  GroupedGemmArgs product_args = args;
  args.out = view(memory, DType::kF32, {48, 32});
  product_args.out = view(memory, DType::kF32, {48, 64});
  p.activation.reset();
  const GroupedGemmPlan product = plan(p, this_cpu());
  const ActivationPlan act = plan(
      parse_activation_problem("activation forward swiglu R=48 F=32 E=7 z=f32 h=f32"), this_cpu());
  const ActivationArgs act_args{.z = product_args.out, .offsets = args.offsets, .h = args.out};
  std::vector<char> scratch(size_t(composed.workspace_bytes) + 256);
  const auto begin = (reinterpret_cast<uintptr_t>(scratch.data()) + 255) / 256 * 256;
  const Workspace workspace{reinterpret_cast<void*>(begin), composed.workspace_bytes};
  const int want = allocations_of([&] {
    run(product, product_args, workspace, {});
    run(act, act_args, workspace, {});
  });
  EXPECT_EQ(allocations_of([&] { run(composed, args, workspace, {}); }), want);
}

// The same of rows that are gathered: what permute and the product take.
TEST(Run, ComposedOfGatheredRowsPlansNothing) {
  auto p = parse_grouped_gemm_problem(
      "grouped_gemm fprop R=48 N=64 K=32 E=7 format=f32 out=f32 gather=lhs T=24 top_k=2");
  const GroupedGemmPlan composed = plan(p, this_cpu(), "composed");
  const auto* words = reinterpret_cast<const int32_t*>(memory);  // zeros: no row is read
  GroupedGemmArgs args;
  args.lhs.codes = view(memory, DType::kF32, {24, 32});
  args.rhs.codes = view(memory, DType::kF32, {7, 64, 32});
  args.offsets = {words, 7};
  args.out = view(memory, DType::kF32, {48, 64});
  GroupedGemmArgs product_args = args;
  product_args.lhs.codes = view(memory, DType::kF32, {48, 32});
  args.slot_of = words;
  const GroupedGemmPlan product =
      plan(parse_grouped_gemm_problem("grouped_gemm fprop R=48 N=64 K=32 E=7 format=f32 out=f32"),
           this_cpu());
  const PermutePlan copy = plan(
      parse_permute_problem("permute permute T=24 top_k=2 R=48 H=32 E=7 dtype=f32"), this_cpu());
  const PermuteArgs copy_args{.tokens = args.lhs.codes,
                              .rows = product_args.lhs.codes,
                              .map = {.slot_of = const_cast<int32_t*>(words)},
                              .offsets = args.offsets};
  std::vector<char> scratch(size_t(composed.workspace_bytes) + 256);
  const auto begin = (reinterpret_cast<uintptr_t>(scratch.data()) + 255) / 256 * 256;
  const Workspace workspace{reinterpret_cast<void*>(begin), composed.workspace_bytes};
  const int want = allocations_of([&] {
    run(copy, copy_args, {}, {});
    run(product, product_args, workspace, {});
  });
  EXPECT_EQ(allocations_of([&] { run(composed, args, workspace, {}); }), want);
}

// Launches may take memory that is not ours, as the emulator's do, but the same for any plan. No
// element is there to be read.
TEST(Run, OnAGpuCopiesNoPlan) {
  const std::vector<Device> gpus = cuda_devices();
  if (gpus.empty()) GTEST_SKIP() << "no GPU here";
  for (const char* formats :
       {"along_k=bf16 along_rows=f16", "along_k=bf16 along_rows=mxfp8", "along_k=mxfp8"}) {
    const auto p =
        parse_quantize_problem(std::string("quantize weights N=0 K=40 E=3 role=w ") + formats);
    QuantizePlan made = plan(p, gpus.front());
    QuantizeArgs args{.source = view(memory, DType::kBf16, {3, 0, 40})};
    if (p.along_k) args.along_k = quantized_view(copy_shape(p, Axis::kAlongK), memory);
    if (p.along_rows) args.along_rows = quantized_view(copy_shape(p, Axis::kAlongRows), memory);
    const auto allocations_of_a_run = [&] {
      const int before = allocations;
      run(made, args, {}, {});
      return allocations - before;
    };
    allocations_of_a_run();  // what is kept from launch to launch
    made.refusals.clear();
    const int want = allocations_of_a_run();
    made.refusals = {{"one", std::string(100, 'x')}, {"two", std::string(100, 'y')}};
    EXPECT_EQ(allocations_of_a_run(), want) << formats;
  }
}

}  // namespace
}  // namespace cadre
