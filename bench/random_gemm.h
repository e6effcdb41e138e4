#pragma once
#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/counts.h"
#include "bench/draw.h"
#include "cadre/grouped_gemm.h"

namespace cadre::bench {

/// A random problem of grouped_gemm with adversarial counts, small enough for the reference.
struct RandomGemm {
  GroupedGemmProblem problem;
  Draw draw;
  std::vector<std::string> kinds;  ///< what is special in it, such as "discrete"
};

class RandomGemms {
 public:
  explicit RandomGemms(unsigned seed) : random_(seed) {}

  RandomGemm next() {
    RandomGemm g;
    GroupedGemmProblem& p = g.problem;
    p.pass = Pass(below(3));
    sizes(p);
    formats(p);
    p.alpha = one_in(3);
    p.unit_budget = one_in(8) ? int(1 + below(40)) : 0;
    if (one_in(8)) p.align = 2 << below(3);
    majors(p);
    p.pass == Pass::kWgrad ? contraction(p) : rows(p);
    activation(p);
    counts(g);
    if (one_in(6)) gather(p);
    if (can_scatter(p) && one_in(4)) scatter(p);
    g.draw.seed = random_();
    name_kinds(g);
    return g;
  }

 private:
  int64_t below(int64_t end) { return int64_t(random_() % uint64_t(end)); }
  bool one_in(int64_t n) { return below(n) == 0; }

  int64_t width() {
    if (one_in(12)) return 1 + below(300);       // no multiple of anything
    if (one_in(8)) return 64 * (1 + below(12));  // whole tiles
    return 8 * (1 + below(40));
  }
  void sizes(GroupedGemmProblem& p) {
    constexpr int kExperts[] = {1, 2, 3, 5, 8, 17, 40, 64, 130, 384};
    constexpr int64_t kMostWeights = 2'000'000;
    p.n = width();
    p.k = width();
    p.experts = kExperts[below(std::size(kExperts))];
    while (p.experts > 1 && p.experts * p.n * p.k > kMostWeights) p.experts = (p.experts + 1) / 2;
  }
  void formats(GroupedGemmProblem& p) {
    constexpr FormatKind kKinds[] = {FormatKind::kF32, FormatKind::kF16, FormatKind::kBf16};
    const int64_t pick = below(16);
    p.lhs = p.rhs = format(kKinds[std::min<int64_t>(pick, 2)]);
    if (one_in(16)) p.rhs = format(kKinds[below(3)]);
    p.out = one_in(p.pass == Pass::kWgrad ? 2 : 8) ? DType::kF32
            : one_in(16)                           ? DType::kF16
                                                   : p.lhs.element;
  }
  void majors(GroupedGemmProblem& p) {
    for (Major* major : {&p.lhs_major, &p.rhs_major, &p.out_major})
      if (one_in(12)) *major = Major::kColumn;
  }
  void rows(GroupedGemmProblem& p) {
    p.discrete_rhs = one_in(4);
    p.tail = one_in(3) ? Tail::kZero : Tail::kKeep;
    p.beta = one_in(8);
    if (p.pass != Pass::kFprop || !one_in(6)) return;
    p.bias = true;
    p.bias_scale = one_in(3);
    p.discrete_bias = one_in(3);
    p.bias_dtype = one_in(2) ? DType::kF32 : DType::kBf16;
  }
  void activation(GroupedGemmProblem& p) {
    constexpr GluLayout kLayouts[] = {GluLayout::kConcat, GluLayout::kInterleave1,
                                      GluLayout::kInterleave32};
    if (p.pass != Pass::kFprop || !one_in(3)) return;
    GemmActivation& a = p.activation.emplace();
    const auto kinds = activation_list();
    a.kind = kinds[size_t(below(int64_t(kinds.size())))].kind;
    a.prob = one_in(2);
    a.keep_z = one_in(2);
    p.out_major = Major::kRow;
    if (!one_in(4)) p.alpha = p.beta = p.bias_scale = false, p.out = p.lhs.element;
    if (!info(a.kind).gated) return;
    a.layout = kLayouts[below(3)];
    const int64_t unit = a.layout == GluLayout::kInterleave32 ? 64 : 2;
    p.n = (p.n + unit - 1) / unit * unit;
  }
  void contraction(GroupedGemmProblem& p) {
    p.discrete_out = one_in(4);
    if (one_in(2)) p.accumulate = Accumulate(1 + below(3));
  }
  void counts(RandomGemm& g) {
    constexpr int64_t kMostProducts = 20'000'000;
    GroupedGemmProblem& p = g.problem;
    const int64_t most = std::clamp<int64_t>(kMostProducts / (p.n * p.k), 8, 1500);
    const Counts c = random_counts(random_, CountsKind(below(kCountsKinds)), p.experts,
                                   1 + below(std::max<int64_t>(1, most / p.experts)));
    g.draw.counts = c.of;
    p.rows = c.used() == 0 && one_in(2) ? below(300) : c.rows;
  }
  void gather(GroupedGemmProblem& p) {
    const bool lhs = p.pass != Pass::kWgrad || one_in(2);
    p.gather = lhs ? Gather::kLhs : Gather::kRhs;
    (lhs ? p.lhs_major : p.rhs_major) = Major::kRow;
    p.top_k = int(1 + below(8));
    p.tokens = one_in(3) ? 1 + below(300) : p.rows / p.top_k + 1;
  }
  static bool can_scatter(const GroupedGemmProblem& p) {
    return p.pass != Pass::kWgrad && p.gather == Gather::kNo && !p.activation && !p.beta &&
           p.tail == Tail::kKeep && p.out_major == Major::kRow;
  }
  void scatter(GroupedGemmProblem& p) {
    p.scatter = true;
    p.ranks = one_in(2) ? 1 : int(2 + below(3));
    p.top_k = int(1 + below(4));
    p.tokens = one_in(3) ? below(60) : p.rows / (int64_t(p.top_k) * p.ranks) + 1;
  }
  static void name_kinds(RandomGemm& g) {
    const GroupedGemmProblem& p = g.problem;
    const auto add = [&](bool is, const char* kind) {
      if (is) g.kinds.emplace_back(kind);
    };
    const auto& of = g.draw.counts;
    const int64_t used = std::accumulate(of.begin(), of.end(), int64_t(0));
    add(p.pass == Pass::kFprop, "fprop");
    add(p.pass == Pass::kDgrad, "dgrad");
    add(p.pass == Pass::kWgrad, "wgrad");
    add(p.discrete_rhs || p.discrete_out, "discrete");
    add(p.alpha, "alpha");
    add(p.beta, "beta");
    add(p.bias, "bias");
    add(p.activation.has_value(), "activation");
    add(p.gather != Gather::kNo, "gather");
    add(p.scatter, "scatter");
    add(p.accumulate != Accumulate::kNo, "accumulate");
    add(p.out == DType::kF32, "f32 out");
    add(p.tail == Tail::kZero, "tail zero");
    add(p.unit_budget != 0, "budget");
    add(p.n % 8 != 0 || p.k % 8 != 0, "ragged width");
    add(p.align < 16, "misaligned");
    add(p.lhs_major == Major::kColumn || p.rhs_major == Major::kColumn ||
            p.out_major == Major::kColumn,
        "column major");
    add(p.lhs.kind == FormatKind::kF32, "f32 operand");
    add(p.lhs != p.rhs, "two types");
    add(p.rows == 0, "R = 0");
    add(p.rows > 0 && used == 0, "all tail");
    add(used > 0 && used < p.rows, "sum below R");
    add(used > 0 && p.experts > 1 && std::count(of.begin(), of.end(), used) == 1, "all in one");
    add(used > 0 && std::count(of.begin(), of.end(), 0) > 0, "empty experts");
  }

  std::mt19937 random_;
};

/// How many problems of each kind were seen.
using Tally = std::map<std::string, int>;
inline void count(Tally& tally, const RandomGemm& g) {
  for (const std::string& kind : g.kinds) ++tally[kind];
}

}  // namespace cadre::bench
