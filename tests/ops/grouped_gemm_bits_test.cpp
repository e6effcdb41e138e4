// What is promised about bits: they depend neither on the run, nor on the threads or units that it
// may use, nor, for rows of y and dx, on anything but the row and its expert's weight, nor, for dw,
// on anything but the expert's rows.
#include <cstring>
#include <future>
#include <map>

#include "backend/walk.h"
#include "tests/judge/machine_copy.h"
#include "tests/judge/on_machine.h"
#include "tests/ops/grouped_gemm_case.h"

using namespace cadre;
using test::Counts;
using test::GemmCase;
using test::Holds;
using test::list_piece;
using test::piece;
using test::Tensor;

namespace {

GroupedGemmProblem problem(std::string_view words, const Counts& counts) {
  GroupedGemmProblem p = parse_grouped_gemm_problem(words);
  p.rows = counts.rows;
  p.experts = counts.experts();
  return p;
}

using GroupedGemmBits = test::OnMachine;

TEST_F(GroupedGemmBits, DoNotDependOnTheRunOrTheThreads) {
  if (machine->device().kind != DeviceKind::kCpu) GTEST_SKIP() << "threads are the CPU's";
  const Counts counts{.rows = 470, .of = {0, 70, 3, 300, 1, 64, 31}};
  for (const char* words :
       {"fprop N=300 K=130 format=f32", "fprop N=300 K=130 format=bf16",
        "dgrad N=300 K=330 format=f32", "dgrad N=300 K=330 format=mxfp8",
        "wgrad N=300 K=130 format=f32 out=f32", "wgrad N=140 K=1100 format=bf16 out=bf16",
        "fprop N=300 K=130 format=f32 rhs_major=column out_major=column"}) {
    GemmCase c(problem(text("grouped_gemm ", words), counts), counts, 1);
    for (std::string_view name : test::implementations(c.p)) {
      const auto once = c.run(name, 1);
      for (int threads : {1, 2, 3, 7})
        EXPECT_EQ(c.run(name, threads).out.bytes(), once.out.bytes())
            << name << ", " << words << " on " << threads << " threads";
    }
  }
}

/// The implementations that take a problem on a device.
std::vector<std::string_view> names_on(const Device& device, const GroupedGemmProblem& p) {
  std::vector<std::string_view> names;
  for (const auto& entry : backend::entries_on<GroupedGemmProblem>(device))
    if (entry.refuses(p, device).empty()) names.push_back(entry.name);
  return names;
}

/// The tensors of one run, and where they are on the machine.
struct GemmRun {
  explicit GemmRun(const GroupedGemmProblem& problem) : p(problem) {}

  GroupedGemmProblem p;
  Tensor lhs, rhs, out;
  std::vector<int32_t> offsets;
  std::vector<const void*> weights;  ///< discrete ones
  std::vector<void*> gradients;      ///< discrete ones
  bool own_thread = false;           ///< launched by a thread that has launched nothing before

  template <class Visit>
  void for_pieces(Visit&& visit) const {
    visit(piece("lhs", lhs, Holds::kInput));
    visit(piece("rhs", rhs, Holds::kInput));
    visit(piece("out", out, Holds::kOutput));
    visit(list_piece("offsets", offsets));
    visit(list_piece("weights", weights, Holds::kPointers));
    visit(list_piece("gradients", gradients, Holds::kPointers));
  }

  GroupedGemmArgs args() const {
    GroupedGemmArgs args;
    args.lhs.codes = lhs.view();
    args.rhs.codes = rhs.view();
    args.offsets = {offsets.data(), p.experts};
    args.out = out.view();
    if (p.discrete_rhs) {
      args.rhs.discrete = weights.data();
      args.rhs.codes = view(nullptr, p.rhs.element, {p.experts, p.n, p.k});
    }
    if (p.discrete_out) args.discrete_out = gradients.data(), args.out.data = nullptr;
    return args;
  }

  void on(test::Machine& machine, std::string_view implementation, int units) {
    Device device = machine.device();
    if (units > 0) device.units = units;
    const GroupedGemmPlan made = plan(p, device, implementation);
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    test::MachineCopy copy(machine, *this), scratch(machine, Scratch{workspace});
    copy.upload();
    scratch.upload();
    const GroupedGemmArgs moved = copy.moved(args());
    machine.run([&](Stream stream) {
      const auto launch = [&] { run(made, moved, scratch.moved(workspace), stream); };
      own_thread ? std::async(std::launch::async, launch).get() : launch();
    });
    copy.fetch();
    EXPECT_EQ(copy.damage() + lhs.damage() + rhs.damage() + out.damage(), "") << to_string(p);
  }

 private:
  struct Scratch {
    const test::OwnedWorkspace& workspace;
    template <class Visit>
    void for_pieces(Visit&& visit) const {
      visit(piece("workspace", workspace));
    }
  };
};

char* row(const Tensor& tensor, int64_t i) {
  const TensorView v = tensor.view();
  return static_cast<char*>(v.data) + bytes_for(v.dtype, i * v[v.rank - 1]);
}

/// Results by what they may depend on, to compare them with those that were seen first.
class Seen {
 public:
  void expect_same(std::array<int, 2> what, const char* bytes, int64_t count,
                   const GroupedGemmProblem& p) {
    const std::string now(bytes, size_t(count));
    const auto [seen, first] = seen_.try_emplace(what, now);
    compared_ += !first;
    EXPECT_EQ(seen->second == now, true) << what[0] << ", " << what[1] << " of " << to_string(p);
  }
  int compared() const { return compared_; }

 private:
  std::map<std::array<int, 2>, std::string> seen_;
  int compared_ = 0;
};

/// A batch as rows of a pool, under experts of a pool.
struct Batch {
  std::vector<int> experts;            ///< numbers in the pool
  std::vector<std::vector<int>> rows;  ///< of each expert, numbers in the pool
  int64_t tail = 0;
  int units = 0, unit_budget = 0;
  bool own_thread = false;

  int64_t used() const {
    int64_t count = 0;
    for (const auto& own : rows) count += int64_t(own.size());
    return count;
  }
  std::vector<int32_t> offsets() const {
    std::vector<int32_t> all = {0};
    for (const auto& own : rows) all.push_back(all.back() + int32_t(own.size()));
    return all;
  }
};

/// Experts in any order, some without rows; few rows or many, and any tail, threads and budget.
Batch random_batch(std::mt19937& random, int pool_rows, int pool_experts, int most) {
  Batch batch;
  for (int e = 0; e < pool_experts; ++e) batch.experts.push_back(e);
  std::shuffle(batch.experts.begin(), batch.experts.end(), random);
  batch.experts.resize(1 + random() % size_t(pool_experts));
  for (size_t e = 0; e < batch.experts.size(); ++e) {
    std::vector<int>& rows = batch.rows.emplace_back();
    const auto count = random() % 4 == 0 ? 0 : int(random() % size_t(most));
    for (int i = 0; i < count; ++i) rows.push_back(int(random() % size_t(pool_rows)));
  }
  batch.tail = random() % 2 ? 0 : int64_t(random() % 50);
  batch.units = random() % 2 ? 0 : 2 + int(random() % 6);
  batch.unit_budget = random() % 2 ? 0 : 2 + int(random() % 5);
  return batch;
}

/// Plain operands, random but the same for the same number in the pool. Each tail is NaN.
class Pool {
 public:
  static constexpr int kRows = 40, kExperts = 3;

  explicit Pool(const GroupedGemmProblem& p)
      : p_(p),
        depth_(p.pass == Pass::kFprop ? p.k : p.n),
        cols_(p.pass == Pass::kFprop ? p.n : p.k),
        x_(p.lhs.element, {kRows, depth_}),
        w_(p.rhs.element, {kExperts, p.n, p.k}) {
    std::mt19937 random(7);
    x_.fill(random, -1, 1);
    w_.fill(random, -1, 1);
  }

  /// The bits of every row of a batch, by row and expert, compared with those seen before.
  void expect_same(const Batch& batch, test::Machine& machine, std::string_view implementation) {
    GemmRun run(p_);
    run.p.rows = batch.used() + batch.tail;
    run.p.experts = int(batch.rows.size());
    run.p.unit_budget = batch.unit_budget;
    run.own_thread = batch.own_thread;
    run.p.discrete_rhs = true;
    run.lhs = Tensor(p_.lhs.element, {run.p.rows, depth_});
    run.out = Tensor(p_.out, {run.p.rows, cols_});
    run.rhs = w_;
    run.offsets = batch.offsets();
    for (int e : batch.experts) run.weights.push_back(row(run.rhs, e * p_.n));
    for (size_t e = 0; e < batch.rows.size(); ++e)
      for (size_t i = 0; i < batch.rows[e].size(); ++i)
        std::memcpy(row(run.lhs, run.offsets[e] + int64_t(i)), row(x_, batch.rows[e][i]),
                    size_t(bytes_for(p_.lhs.element, depth_)));
    run.on(machine, implementation, batch.units);
    EXPECT_TRUE(run.out.untouched(batch.used(), run.p.rows));
    for (size_t e = 0; e < batch.rows.size(); ++e)
      for (size_t i = 0; i < batch.rows[e].size(); ++i)
        seen_.expect_same({batch.rows[e][i], batch.experts[e]},
                          row(run.out, run.offsets[e] + int64_t(i)), bytes_for(p_.out, cols_),
                          run.p);
  }
  int compared() const { return seen_.compared(); }

 private:
  GroupedGemmProblem p_;
  int64_t depth_, cols_;
  Tensor x_, w_;
  Seen seen_;
};

// The same forty rows alone, in front, behind, and among others, in tiles of every fill.
TEST_F(GroupedGemmBits, OfARowDoNotDependOnTheOthers) {
  int compared = 0;
  for (const char* words :
       {"fprop N=90 K=300 format=f32", "fprop N=90 K=300 format=bf16",
        "dgrad N=530 K=90 format=f32", "dgrad N=300 K=300 format=bf16",
        "fprop N=64 K=17 format=f32 out=f32", "dgrad N=800 K=90 format=f32 out=f32",
        "fprop N=70 K=1300 format=bf16 out=f32", "fprop N=136 K=72 format=bf16",
        "dgrad N=72 K=264 format=f16 out=f32", "fprop N=8 K=200 format=f16"}) {
    const GroupedGemmProblem p = parse_grouped_gemm_problem(text("grouped_gemm ", words));
    for (std::string_view name : names_on(machine->device(), p)) {
      Pool pool(p);
      std::mt19937 random(3);
      const int draws = std::max(16, machine->draws(160) / (name == "cpu_reference" ? 4 : 1));
      for (int draw = 0; draw < draws; ++draw) {
        const int most = draw < draws / 2 ? 9 : draw % 8 == 0 ? 600 : 150;
        Batch batch = random_batch(random, Pool::kRows, Pool::kExperts, most);
        batch.own_thread = draw % 4 == 1;
        pool.expect_same(batch, *machine, name);
      }
      compared += pool.compared();
    }
  }
  EXPECT_GT(compared, 300);
}

/// Experts with their rows, which any batch may have anywhere, and more than once.
class GradientPool {
 public:
  static constexpr int kExperts = 4;

  explicit GradientPool(const GroupedGemmProblem& p) : p_(p) {
    std::mt19937 random(8);
    for (int64_t count : {0, 1, 70, 300}) {
      dy_.emplace_back(p.lhs.element, std::initializer_list<int64_t>{count, p.n});
      x_.emplace_back(p.rhs.element, std::initializer_list<int64_t>{count, p.k});
      dy_.back().fill(random, -1, 1);
      x_.back().fill(random, -1, 1);
    }
  }

  /// The bits of dw of every expert of a batch, compared with those seen before.
  void expect_same(const std::vector<int>& experts, bool discrete, test::Machine& machine,
                   std::string_view implementation) {
    GemmRun run(p_);
    run.p.experts = int(experts.size());
    run.p.discrete_out = discrete;
    run.offsets = {0};
    for (int e : experts)
      run.offsets.push_back(run.offsets.back() + int32_t(dy_[size_t(e)].rows()));
    run.p.rows = run.offsets.back() + int64_t(experts.size()) % 3 * 17;
    run.p.unit_budget = int(experts.size()) % 2 * 4;
    run.own_thread = experts.size() % 2 == 0;
    run.lhs = Tensor(p_.lhs.element, {run.p.rows, p_.n});
    run.rhs = Tensor(p_.rhs.element, {run.p.rows, p_.k});
    run.out = Tensor(p_.out, {run.p.experts, p_.n, p_.k});
    for (size_t i = 0; i < experts.size(); ++i) {
      put(dy_[size_t(experts[i])], run.lhs, run.offsets[i]);
      put(x_[size_t(experts[i])], run.rhs, run.offsets[i]);
      if (discrete) run.gradients.push_back(row(run.out, place(run, i) * p_.n));
    }
    run.on(machine, implementation, 0);
    for (size_t i = 0; i < experts.size(); ++i)
      seen_.expect_same({experts[i], 0}, row(run.out, place(run, i) * p_.n),
                        bytes_for(p_.out, p_.n * p_.k), run.p);
  }
  int compared() const { return seen_.compared(); }

 private:
  /// Discrete gradients lie in reverse, so that taking the tensor for them would be seen.
  static int64_t place(const GemmRun& run, size_t i) {
    return run.p.discrete_out ? run.p.experts - 1 - int64_t(i) : int64_t(i);
  }
  static void put(const Tensor& from, const Tensor& to, int64_t first) {
    for (int64_t i = 0; i < from.rows(); ++i)
      std::memcpy(row(to, first + i), row(from, i),
                  size_t(bytes_for(from.view().dtype, from.columns())));
  }

  GroupedGemmProblem p_;
  std::vector<Tensor> dy_, x_;
  Seen seen_;
};

// dw of an expert depends on its own rows only, wherever they stand in the batch, and not on where
// it is written.
TEST_F(GroupedGemmBits, OfAWeightGradientDoNotDependOnOtherExperts) {
  int compared = 0;
  for (const char* words :
       {"wgrad N=70 K=90 format=f32 out=f32", "wgrad N=72 K=136 format=bf16 out=f32",
        "wgrad N=136 K=264 format=f16", "wgrad N=8 K=40 format=bf16"}) {
    const GroupedGemmProblem p = parse_grouped_gemm_problem(text("grouped_gemm ", words));
    for (std::string_view name : names_on(machine->device(), p)) {
      GradientPool pool(p);
      std::mt19937 random(4);
      for (int draw = 0; draw < std::max(16, machine->draws(160)); ++draw) {
        std::vector<int> experts;
        for (size_t i = 0; i <= random() % 7; ++i)
          experts.push_back(int(random() % GradientPool::kExperts));
        pool.expect_same(experts, draw % 2, *machine, name);
      }
      compared += pool.compared();
    }
  }
  EXPECT_GT(compared, 10);
}

}  // namespace
