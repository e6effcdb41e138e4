// Arguments of every operation and layer with words that are wrong: lengths and strides near 2^31
// and 2^63, other types and ranks, addresses that are null, or given where none is wanted. A run
// refuses them and has touched nothing, or it writes the bits that it writes without them.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "bench/compare.h"
#include "bench/layer_case.h"
#include "bench/visit.h"
#include "cadre/layers.h"
#include "tests/bench/problems.h"
#include "tests/judge/errors.h"

using namespace cadre;

namespace {

using Bytes = std::vector<std::byte>;

constexpr int kTries = 60;  ///< of each problem
constexpr int64_t kSpareBytes = 1 << 16;

constexpr const char* kMore[] = {
    "activation forward silu R=64 F=24 E=4",
    "dequantize weights N=24 K=40 E=4 format=mxfp8 axis=along_rows codes_major=column",
    "grouped_gemm fprop R=64 N=24 K=40 E=4 format=f32 out=f32",
    "grouped_gemm wgrad R=64 N=24 K=40 E=4 format=nvfp4",
    "grouped_gemm fprop R=64 N=24 K=40 E=4 gather=lhs T=33 top_k=2 act=swiglu z=yes",
    "grouped_gemm wgrad R=64 N=24 K=40 E=4 gather=rhs T=33 top_k=2",
    "offsets counts R=64 E=4 index=i64",
    "permute combine T=32 top_k=2 R=64 H=24 E=4 addend=yes",
    "permute permute T=32 top_k=2 R=64 H=24 E=4",
    "quantize weights N=24 K=40 E=4 along_k=fp8_block:2d along_rows=mxfp8 role=w",
    "routing forward sigmoid T=32 E=8 top_k=2 expert_bias=yes",
    "routing forward softmax T=32 E=4 top_k=2 map=yes row_prob=yes",
};

constexpr const char* kLayers[] = {
    "grouped_linear R=64 N=24 K=40 E=4 recipe=bf16 bias=yes bias_scale=yes",
    "grouped_linear R=64 N=24 K=40 E=4 recipe=f32 dtype=f32 weight=f32 weight_major=column",
    "grouped_linear R=64 N=32 K=64 E=4 recipe=mxfp8 discrete_weight=yes discrete_dw=yes",
    "grouped_linear R=64 N=32 K=64 E=4 recipe=nvfp4 cache_weights=yes deferred=yes",
    "grouped_mlp R=64 H=24 F=32 E=4 recipe=bf16 prob=yes bias1=yes",
    "grouped_mlp R=64 H=24 F=32 E=4 recipe=bf16 prob=yes gather=yes T=33 top_k=2",
    "grouped_mlp R=64 H=64 F=32 E=4 recipe=fp8_block deferred=yes",
    "sequential fuse=no | grouped_linear R=64 N=32 K=16 E=4 | activation forward silu R=64 F=32 "
    "E=4 "
    "| grouped_linear R=64 N=16 K=32 E=4 bias=yes",
    "sequential | grouped_linear R=64 N=32 K=16 E=4 | activation forward swiglu R=64 F=16 E=4 | "
    "grouped_linear R=64 N=16 K=16 E=4",
};

std::string replaced(std::string words, const std::string& from, const std::string& to) {
  for (size_t at = words.find(from); at != words.npos; at = words.find(from, at + to.size()))
    words.replace(at, from.size(), to);
  return words;
}

/// The problem, with one row of one expert, and without rows: dimensions whose strides say nothing.
std::vector<std::string> sizes_of(const std::string& problem) {
  const std::string one = replaced(replaced(problem, " R=64", " R=1"), " E=4", " E=1");
  return {problem, replaced(replaced(one, " T=32", " T=1"), " top_k=2", " top_k=1"),
          replaced(replaced(problem, " R=64", " R=0"), " T=32", " T=0")};
}

/// One word of the arguments, by its place, as it was and as it is.
struct Spoilt {
  int place;
  int64_t was, is;
};
using Spoils = std::vector<Spoilt>;

std::string to_string(const Spoils& spoils) {
  std::string words;
  for (const Spoilt& s : spoils) words += text(" word ", s.place, " is ", s.is, ", was ", s.was);
  return words;
}

class Spoiler {
 public:
  explicit Spoiler(unsigned seed) : random_(seed) {}

  int64_t below(int64_t end) { return int64_t(random_() % uint64_t(end)); }

  /// Changes one word of the arguments.
  template <class Args>
  Spoilt spoil(Args& args, bench::Buffers& buffers) {
    static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) % sizeof(int64_t) == 0);
    auto* bytes = reinterpret_cast<std::byte*>(&args);
    for (;;) {
      std::byte* at = bytes + below(sizeof(Args) / sizeof(int64_t)) * int64_t(sizeof(int64_t));
      if (is_closed(args, at - bytes)) continue;
      int64_t word = 0;
      std::memcpy(&word, at, sizeof(word));
      const bool is_address = word < 0 || word >= kAddresses;
      if (is_address && !is_in(buffers, word)) continue;
      const int64_t other = is_address ? 0 : other_than(word, buffers);
      std::memcpy(at, &other, sizeof(word));
      return {int((at - bytes) / int64_t(sizeof(word))), word, other};
    }
  }

  /// Whether an address became null.
  static bool is_less(const Spoils& spoils) {
    return std::any_of(spoils.begin(), spoils.end(),
                       [](const Spoilt& s) { return s.was >= kAddresses && s.is == 0; });
  }

  Workspace spoil(Workspace workspace) {
    if (below(8) != 0) return workspace;
    const Workspace others[] = {{nullptr, workspace.bytes},
                                {workspace.data, INT64_MIN},
                                {workspace.data, workspace.bytes - 1},
                                {workspace.data, INT64_MAX}};
    return others[below(std::size(others))];
  }

 private:
  static constexpr int64_t kAddresses = int64_t{1} << 40;  ///< no size of a case is so large

  /// A bool has two values; lists and queues are the caller's objects, not tensors.
  template <class Args>
  static bool is_closed(const Args& args, int64_t at) {
    const auto* start = reinterpret_cast<const std::byte*>(&args);
    const auto covers = [&](const auto& member) {
      const int64_t first = reinterpret_cast<const std::byte*>(&member) - start;
      return at + int64_t(sizeof(int64_t)) > first && at < first + int64_t(sizeof(member));
    };
    bool closed = false;
    if constexpr (requires { args.refresh_weights; })
      closed = covers(args.refresh_weights) || covers(args.queue);
    if constexpr (requires { args.op_arguments; })
      closed = closed || covers(args.parameters) || covers(args.extra_inputs) ||
               covers(args.extra_gradients) || covers(args.op_arguments);
    return closed;
  }

  static bool is_in(const bench::Buffers& buffers, int64_t word) {
    const auto* place = reinterpret_cast<const std::byte*>(word);
    for (const auto& piece : buffers.pieces())
      if (place >= piece.start && place < piece.start + piece.bytes) return true;
    return false;
  }

  int64_t other_than(int64_t word, bench::Buffers& buffers) {
    if (word == 0) return reinterpret_cast<int64_t>(spare(buffers));
    const int64_t rank = word >> 32, dtype = word & 0xffffffff;
    if (rank >= 1 && rank <= TensorView::kMaxRank && dtype <= int64_t(DType::kU8))
      return below(7) << 32 | below(12);
    constexpr int64_t kOne = 1;
    const int64_t part = INT64_MAX / std::max<int64_t>(word, 2);  // just what fits, and one more
    const int64_t others[] = {
        0,          1,    -1,       -word,         INT32_MIN, kOne << 45, kOne << 61,
        kOne << 62, part, part + 1, INT64_MAX - 1, INT64_MAX, INT64_MIN,  INT64_MIN + 1};
    return others[below(std::size(others))];
  }

  /// Room for an argument that nobody asked for.
  static void* spare(bench::Buffers& buffers) {
    void* room = buffers.take(kSpareBytes);
    std::memset(room, 0, size_t(kSpareBytes));
    return room;
  }

  std::mt19937 random_;
};

struct Tally {
  int ran = 0, refused = 0;
};

/// False if `work` refused.
template <class Work>
bool runs(Work&& work) {
  try {
    work();
    return true;
  } catch (const InvalidArgument& refusal) {
    EXPECT_NE(std::string(refusal.what()), "");
    return false;
  }
}

/// Of an operation's outputs or of a layer's.
template <class Outputs>
std::vector<Bytes> snapshots(const Outputs& outputs) {
  std::vector<Bytes> all;
  for (const bench::Output& out : outputs) all.push_back(snapshot(out));
  return all;
}

/// Not where something optional became null: then less is computed.
template <class Outputs>
void expect_outputs(const Outputs& outputs, const std::vector<Bytes>& want,
                    const std::string& words) {
  for (size_t o = 0; o < outputs.size(); ++o)
    EXPECT_TRUE(snapshot(outputs[o]) == want[o]) << outputs[o].name << " of " << words;
}

template <class Problem>
void run_hostile(const Problem& problem, Spoiler& spoiler, Tally& tally) {
  const auto chosen = plan(problem, this_cpu());
  const auto workspace_of = [&](auto& c) { return c.buffers->workspace(chosen.workspace_bytes); };
  auto base = bench::make_case(problem, {});
  run(chosen, base.args, workspace_of(base), {});
  const std::vector<Bytes> want = snapshots(base.outputs);
  for (int i = 0; i < kTries; ++i) {
    auto c = bench::make_case(problem, {});
    const Workspace workspace = spoiler.spoil(workspace_of(c));
    Spoils spoils{spoiler.spoil(c.args, *c.buffers)};
    if (spoiler.below(4) == 0) spoils.push_back(spoiler.spoil(c.args, *c.buffers));
    const std::vector<Bytes> before = snapshots(c.outputs);
    const bool ran = runs([&] { run(chosen, c.args, workspace, {}); });
    ++(ran ? tally.ran : tally.refused);
    const std::string words = to_string(problem) + to_string(spoils);
    if (!ran || !spoiler.is_less(spoils)) expect_outputs(c.outputs, ran ? want : before, words);
    EXPECT_TRUE(c.buffers->canaries_live()) << words;
  }
}

template <class Case>
bool run_layer(Case& c, Workspace workspace) {
  const bool deferred = to_string(c.plan.problem).find("deferred=yes") != std::string::npos;
  return runs([&] { forward(c.plan, c.args, workspace, {}); }) &&
         runs([&] { backward(c.plan, c.args, workspace, {}); }) &&
         (!deferred || runs([&] { wgrad(c.plan, c.args, workspace, {}); }));
}

template <class Problem>
void run_layer_hostile(const Problem& problem, Spoiler& spoiler, Tally& tally) {
  auto base = bench::make_layer_case(problem, this_cpu(), {});
  EXPECT_TRUE(run_layer(base, base.workspace)) << to_string(problem);
  const std::vector<Bytes> want = snapshots(base.outputs);
  for (int i = 0; i < kTries; ++i) {
    auto c = bench::make_layer_case(problem, this_cpu(), {});
    const Workspace workspace = spoiler.spoil(c.workspace);
    Spoils spoils{spoiler.spoil(c.args, *c.buffers)};
    if constexpr (requires { c.lists; })
      spoils.push_back(spoiler.spoil(c.lists.parameters.front(), *c.buffers));
    const bool ran = run_layer(c, workspace);
    ++(ran ? tally.ran : tally.refused);
    const std::string words = to_string(problem) + to_string(spoils);
    if (ran && !spoiler.is_less(spoils)) expect_outputs(c.outputs, want, words);
    EXPECT_TRUE(c.buffers->canaries_live()) << words;
  }
}

void expect_both(const Tally& tally) {
  EXPECT_GT(tally.ran, kTries);
  EXPECT_GT(tally.refused, kTries);
}

}  // namespace

TEST(HostileArguments, OfOperationsAreRefusedOrChangeNothing) {
  Spoiler spoiler(31);
  Tally tally;
  const auto all = [&](const char* problem) {
    for (const std::string& words : sizes_of(problem))
      bench::visit_problem(words, [&](const auto& p) { run_hostile(p, spoiler, tally); });
  };
  for (const char* problem : test::kProblems) all(problem);
  for (const char* problem : kMore) all(problem);
  expect_both(tally);
}

// Of one operation, and of two that are planned with it.
TEST(HostileArguments, ThatAreAPlanThatWasMovedFrom) {
  for (const char* words : {"grouped_gemm fprop R=64 N=24 K=40 E=4 format=f32 out=f32 act=relu",
                            "grouped_gemm fprop R=64 N=24 K=40 E=4 gather=lhs T=33 top_k=2",
                            "grouped_gemm fprop R=64 N=24 K=40 E=4 scatter=yes T=32 top_k=2",
                            "activation forward relu R=64 F=64 E=4 along_k=mxfp8"})
    bench::visit_problem(words, [&](const auto& p) {
      auto c = bench::make_case(p, {});
      auto made = plan(p, this_cpu());
      const Workspace workspace = c.buffers->workspace(made.workspace_bytes);
      const auto other = std::move(made);
      EXPECT_EQ(test::invalid([&] { run(made, c.args, workspace, {}); }),
                "run: the plan is empty; make it with plan()")
          << words;
      run(other, c.args, workspace, {});
    });
}

TEST(HostileArguments, OfLayersAreRefusedOrChangeNothing) {
  Spoiler spoiler(63);
  Tally tally;
  for (const char* problem : kLayers)
    for (const std::string& words : sizes_of(problem))
      bench::visit_layer(words, [&](const auto& p) { run_layer_hostile(p, spoiler, tally); });
  expect_both(tally);
}
