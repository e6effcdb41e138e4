// What a run does before an implementation takes over neither allocates nor formats: a step of a
// model makes hundreds of runs, and waits for the host of each.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "backend/entry.h"
#include "cadre/grouped_gemm.h"

static std::atomic<int> allocations{0};

[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

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

}  // namespace
}  // namespace cadre
