// Operations on tensors of more than 2^31 elements: rows in front of that place, at it and behind.
// The tensors hold one block of random rows over and over; its length divides no power of two, so
// that an index which wraps finds another row. On the CPU the same with few elements, which shows
// that the test is right.
#include <algorithm>

#include "cadre/activation.h"
#include "cadre/bias_grad.h"
#include "cadre/error.h"
#include "cadre/grouped_gemm.h"
#include "cadre/permute.h"
#include "tests/judge/close.h"
#include "tests/judge/on_machine.h"
#include "tests/judge/tensor.h"

using namespace cadre;
using test::Tensor;

namespace {

/// Memory of the machine.
class Taken {
 public:
  Taken(test::Machine& machine, int64_t bytes) : machine_(machine), data(machine.take(bytes)) {}
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  ~Taken() { machine_.give_back(data); }

 private:
  test::Machine& machine_;

 public:
  void* data;
};

/// [R, C] whose rows are those of a block of random ones, again and again.
class Periodic {
 public:
  static constexpr int64_t kRows = 1021;

  Periodic(test::Machine& machine, DType dtype, int64_t rows, int64_t columns, unsigned seed)
      : block(dtype, {kRows, columns}),
        machine_(machine),
        rows_(rows),
        row_bytes_(bytes_for(dtype, columns)),
        memory_(machine, rows * row_bytes_) {
    std::mt19937 random(seed);
    if (seed != kPoison) block.fill(random, -1, 1);
    const int64_t block_bytes = std::min(rows, kRows) * row_bytes_;
    machine.upload(memory_.data, block.view().data, block_bytes);
    for (int64_t done = block_bytes; done < rows * row_bytes_;) {
      const int64_t next = std::min(done, rows * row_bytes_ - done);
      machine.copy(address(0) + done, memory_.data, next);
      done += next;
    }
  }
  /// The same without numbers.
  Periodic(test::Machine& machine, DType dtype, int64_t rows, int64_t columns)
      : Periodic(machine, dtype, rows, columns, kPoison) {}

  TensorView view() const {
    return cadre::view(memory_.data, block.view().dtype, {rows_, block.columns()});
  }
  double at(int64_t r, int64_t c) const { return block.at(r % kRows, c); }
  /// A row as it is on the machine.
  Tensor fetched(int64_t r) const {
    Tensor one(block.view().dtype, {1, block.columns()});
    machine_.download(one.view().data, address(r), row_bytes_);
    return one;
  }
  /// Row `r` as it was.
  Tensor given(int64_t r) const {
    Tensor one(block.view().dtype, {1, block.columns()});
    for (int64_t c = 0; c < block.columns(); ++c) one.set({0, c}, at(r, c));
    return one;
  }

  Tensor block;

 private:
  static constexpr unsigned kPoison = 0;
  char* address(int64_t r) const { return static_cast<char*>(memory_.data) + r * row_bytes_; }

  test::Machine& machine_;
  int64_t rows_, row_bytes_;
  Taken memory_;
};

/// A list in the memory of the machine.
template <class Element>
class List {
 public:
  List(test::Machine& machine, const std::vector<Element>& host)
      : memory_(machine, int64_t(host.size() * sizeof(Element))) {
    machine.upload(memory_.data, host.data(), int64_t(host.size() * sizeof(Element)));
  }
  Element* data() const { return static_cast<Element*>(memory_.data); }

 private:
  Taken memory_;
};

struct Large : test::OnMachine {
  static constexpr DType kType = DType::kBf16;
  static constexpr int kExperts = 3;
  int64_t limit = 0, columns = 0;  ///< elements; of the wide tensors

  void SetUp() override {
    OnMachine::SetUp();
    if (machine == nullptr) return;
    const bool cpu = machine->device().kind == DeviceKind::kCpu;
    limit = cpu ? 1 << 18 : int64_t(1) << 31;
    columns = cpu ? 128 : 4096;
    const int64_t needed = cpu ? 0 : 5 * limit * 2;
    if (machine->free_bytes() < needed)
      GTEST_SKIP() << "needs " << needed << " bytes of free memory, has " << machine->free_bytes();
  }

  /// The row at which the limit lies, how many have owners, and how many there are.
  int64_t edge() const { return limit / columns; }
  int64_t used() const { return edge() + 407; }
  int64_t rows() const { return used() + 5; }
  /// The last expert's rows are all behind the limit.
  std::vector<int32_t> offsets() const { return {0, 70, int32_t(edge() + 300), int32_t(used())}; }
  int expert_of(int64_t r) const { return r < 70 ? 0 : r < edge() + 300 ? 1 : 2; }
  /// Rows to look at: both ends, a half of the limit, and both sides of it and of an expert.
  std::vector<int64_t> samples() const {
    return {0,      1,          69,           70,           edge() / 2, edge() / 2 + 1, edge() - 1,
            edge(), edge() + 1, edge() + 299, edge() + 300, used() - 2, used() - 1};
  }

  template <class Plan, class Args>
  void run(const Plan& made, const Args& args) {
    const Taken scratch(*machine, std::max<int64_t>(made.workspace_bytes, 1));
    const Workspace workspace{scratch.data, made.workspace_bytes};
    machine->run([&](Stream stream) { cadre::run(made, args, workspace, stream); });
  }

  /// y = x w^T with so many columns of x and of y.
  void fprop(int64_t n, int64_t k) {
    GroupedGemmProblem p{.pass = Pass::kFprop, .rows = rows(), .n = n, .k = k};
    p.experts = kExperts;
    const Periodic x(*machine, kType, rows(), k, 1), y(*machine, kType, rows(), n);
    const Periodic w(*machine, kType, kExperts * n, k, 2);
    const List device_offsets(*machine, offsets());
    GroupedGemmArgs args;
    args.lhs.codes = x.view();
    args.rhs.codes = view(w.view().data, kType, {kExperts, n, k});
    args.offsets = {device_offsets.data(), kExperts};
    args.out = y.view();
    run(plan(p, machine->device()), args);
    for (int64_t r : samples()) {
      const Tensor got = y.fetched(r);
      for (int64_t j = 0; j < n; j += 1 + n / 200) {
        double want = 0, magnitude = 0;
        for (int64_t i = 0; i < k; ++i) {
          const double term = x.at(r, i) * w.at(expert_of(r) * n + j, i);
          want += term, magnitude += std::abs(term);
        }
        EXPECT_NEAR(got.at(0, j), want,
                    test::gamma(k + 10, magnitude) + 2 * test::rounding(kType, want))
            << "row " << r << " column " << j;
      }
    }
    EXPECT_TRUE(y.fetched(used()).untouched(0, 1));
    EXPECT_TRUE(y.fetched(rows() - 1).untouched(0, 1));
  }
};

TEST_F(Large, XOfAGroupedGemm) { fprop(16, columns); }

TEST_F(Large, YOfAGroupedGemm) { fprop(columns, 16); }

TEST_F(Large, XOfAWeightGradient) {
  constexpr int64_t kN = 8;
  GroupedGemmProblem p{.pass = Pass::kWgrad, .rows = rows(), .n = kN, .k = columns};
  p.experts = kExperts;
  p.out = DType::kF32;
  const Periodic dy(*machine, kType, rows(), kN, 3), x(*machine, kType, rows(), columns, 4);
  const Periodic dw(*machine, DType::kF32, kExperts * kN, columns);
  const List device_offsets(*machine, offsets());
  GroupedGemmArgs args;
  args.lhs.codes = dy.view();
  args.rhs.codes = x.view();
  args.offsets = {device_offsets.data(), kExperts};
  args.out = view(dw.view().data, DType::kF32, {kExperts, kN, columns});
  run(plan(p, machine->device()), args);
  for (int e : {0, 2})
    for (int64_t n = 0; n < kN; ++n) {
      const Tensor got = dw.fetched(e * kN + n);
      for (int64_t k = 0; k < columns; k += 1 + columns / 200) {
        double want = 0, magnitude = 0;
        const int64_t first = offsets()[size_t(e)], last = offsets()[size_t(e) + 1];
        for (int64_t r = first; r < last; ++r) {
          const double term = dy.at(r, n) * x.at(r, k);
          want += term, magnitude += std::abs(term);
        }
        EXPECT_NEAR(got.at(0, k), want, test::gamma(last - first + 10, magnitude))
            << "expert " << e << " at " << n << ", " << k;
      }
    }
}

TEST_F(Large, BothSidesOfPermute) {
  const int64_t tokens = used();
  std::vector<int32_t> other(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) other[size_t(t)] = int32_t(tokens - 1 - t);
  const List map(*machine, other), device_offsets(*machine, offsets());
  for (PermutePass pass : {PermutePass::kPermute, PermutePass::kCombine}) {
    PermuteProblem p{.pass = pass, .tokens = tokens, .top_k = 1, .rows = rows(), .hidden = columns};
    p.experts = kExperts;
    const bool forth = pass == PermutePass::kPermute;
    const Periodic from(*machine, kType, forth ? tokens : rows(), columns, 5);
    const Periodic to(*machine, kType, forth ? rows() : tokens, columns);
    PermuteArgs args{.tokens = forth ? from.view() : to.view(),
                     .rows = forth ? to.view() : from.view(),
                     .y = {},
                     .map = {.row_of = map.data(), .slot_of = map.data()},
                     .offsets = {device_offsets.data(), kExperts}};
    run(plan(p, machine->device()), args);
    for (int64_t r : samples())
      EXPECT_EQ(to.fetched(r).bytes() == from.given(tokens - 1 - r).bytes(), true) << "row " << r;
  }
}

/// The same by the CPU for one row.
struct OneRow {
  Tensor z, dh, h, dz;

  OneRow(const ActivationProblem& of, const Tensor& z_row, const Tensor& dh_row)
      : z(z_row), dh(dh_row), h(of.h, {1, of.features}), dz(of.z, {1, 2 * of.features}) {
    ActivationProblem p = of;
    p.rows = p.experts = 1;
    const int32_t offsets[] = {0, 1};
    ActivationArgs args{.z = z.view(), .offsets = {offsets, 1}, .h = h.view()};
    if (p.backward) args.dh = dh.view(), args.dz = dz.view();
    cadre::run(plan(p, this_cpu(), "cpu"), args, {}, {});
  }
};

TEST_F(Large, ZAndDzOfAnActivation) {
  for (bool backward : {false, true}) {
    ActivationProblem p{.backward = backward, .kind = ActivationKind::kSwiGlu, .rows = rows()};
    p.features = columns / 2;
    p.experts = kExperts;
    const Periodic z(*machine, kType, rows(), columns, 6), h(*machine, kType, rows(), columns / 2);
    const Periodic dh(*machine, kType, backward ? rows() : 1, columns / 2, 7);
    const Periodic dz(*machine, kType, backward ? rows() : 1, columns);
    const List device_offsets(*machine, offsets());
    ActivationArgs args{.z = z.view(), .offsets = {device_offsets.data(), kExperts}, .h = h.view()};
    if (backward) args.dh = dh.view(), args.dz = dz.view();
    run(plan(p, machine->device()), args);
    for (int64_t r : samples()) {
      const OneRow want(p, z.given(r), dh.given(r));
      EXPECT_EQ(h.fetched(r).bytes() == want.h.bytes(), true) << "h of row " << r;
      EXPECT_EQ(!backward || dz.fetched(r).bytes() == want.dz.bytes(), true) << "dz of row " << r;
    }
    EXPECT_TRUE(h.fetched(used()).untouched(0, 1));
  }
}

TEST_F(Large, DyOfBiasGrad) {
  BiasGradProblem p{.rows = rows(), .n = columns, .experts = kExperts};
  p.dbias = p.bias = DType::kF32;
  p.bias_scale = true;
  const Periodic dy(*machine, kType, rows(), columns, 8);
  const Periodic bias(*machine, DType::kF32, kExperts, columns, 9);
  const Periodic dbias(*machine, DType::kF32, kExperts, columns);
  const Periodic scale(*machine, DType::kF32, rows(), 1, 10),
      dscale(*machine, DType::kF32, rows(), 1);
  const List device_offsets(*machine, offsets());
  run(plan(p, machine->device()),
      BiasGradArgs{.dy = dy.view(),
                   .offsets = {device_offsets.data(), kExperts},
                   .dbias = dbias.view(),
                   .bias_scale = static_cast<const float*>(scale.view().data),
                   .bias = bias.view(),
                   .dbias_scale = static_cast<float*>(dscale.view().data)});
  for (int64_t r : samples()) {
    double want = 0, magnitude = 0;
    for (int64_t n = 0; n < columns; ++n) {
      const double term = dy.at(r, n) * bias.at(expert_of(r), n);
      want += term, magnitude += std::abs(term);
    }
    EXPECT_NEAR(dscale.fetched(r).at(0), want, test::gamma(columns + 10, magnitude)) << r;
  }
  for (int e : {0, 2}) {
    const Tensor got = dbias.fetched(e);
    const int64_t first = offsets()[size_t(e)], last = offsets()[size_t(e) + 1];
    for (int64_t n = 0; n < columns; ++n) {
      double want = 0, magnitude = 0;
      for (int64_t r = first; r < last; ++r) {
        const double term = dy.at(r, n) * scale.at(r, 0);
        want += term, magnitude += std::abs(term);
      }
      EXPECT_NEAR(got.at(0, n), want, test::gamma(last - first + 10, magnitude)) << e << ", " << n;
    }
  }
}

}  // namespace
