#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cadre/quantize.h"
#include "ops/amax_eps.h"
#include "tests/judge/workspace.h"
#include "tests/ops/activation_case.h"

namespace cadre::test {

/// An activation whose result is quantised along K, with the memory of its codes and scales.
struct ActivationCodesCase : ActivationCase {
  static constexpr uint8_t kPoison = 0xa5;
  static constexpr size_t kGuard = 256;
  std::vector<uint8_t> copy;  ///< poison at first, and a guard behind

  ActivationCodesCase(const ActivationProblem& problem, int64_t used, unsigned seed,
                      int64_t row_gap)
      : ActivationCase(problem, used, seed, row_gap),
        copy(size_t(quantized_bytes(copy_shape(problem))) + kGuard, kPoison) {
    for (int e = 1; e < p.experts; ++e) offsets[size_t(e)] = int32_t(used / (e + 1) % (used + 1));
    std::sort(offsets.begin(), offsets.end());
    vary();
  }

  template <class View, class List>
  ActivationArgs args(View&& view, List&& list) {
    ActivationArgs given = ActivationCase::args(view, list);
    if (!p.plain) (p.backward ? given.dz : given.h) = {};
    given.along_k = quantized_view(copy_shape(p), list(copy));
    return given;
  }

  /// What a plan for the CPU makes of it.
  void run_on_cpu(std::string_view only = {}) {
    const ActivationPlan made = plan(p, this_cpu(), only);
    const OwnedWorkspace workspace(made.workspace_bytes);
    const auto view = [](const Tensor& t) { return t.view(); };
    run(made, args(view, [](auto& all) { return all.data(); }), workspace.get(), {});
  }

  /// The activation, and then quantise, of its result as it is stored.
  void run_one_by_one() {
    ActivationCase plain = static_cast<const ActivationCase&>(*this);
    plain.p.along_k.reset();
    plain.p.along_k_scales_major = Major::kRow;
    plain.p.amax_eps = 0;
    plain.p.plain = false;
    plain.on_cpu("cpu");
    QuantizeProblem q{.rows = p.rows, .cols = copy_shape(p).cols, .experts = p.experts};
    q.source = p.backward ? p.z : p.h;
    q.along_k = p.along_k;
    q.along_k_scales_major = p.along_k_scales_major;
    q.amax_eps = p.amax_eps;
    const Tensor& result = !p.backward ? plain.h : plain.dz_is_z ? plain.z : plain.dz;
    QuantizeArgs codes{.source = result.view(), .offsets = {offsets.data(), p.experts}};
    codes.along_k = quantized_view(copy_shape(p), copy.data());
    const QuantizePlan made = plan(q, this_cpu(), "cpu_reference");
    const OwnedWorkspace workspace(made.workspace_bytes);
    run(made, codes, workspace.get(), {});
    plain.p = p;
    if (!p.plain) (p.backward ? plain.dz : plain.h) = p.backward ? dz : h;
    static_cast<ActivationCase&>(*this) = plain;
  }

  /// Names of what differs; `of_dprob` where its sums have the same order.
  std::string difference(const ActivationCodesCase& want, bool of_dprob) const {
    std::string names;
    const auto compare = [&](const char* name, bool same) {
      if (!same) names += std::string(name) + " ";
    };
    compare("codes", copy == want.copy);
    compare("h", h.bytes() == want.h.bytes());
    compare("dz", dz.bytes() == want.dz.bytes());
    compare("z", z.bytes() == want.z.bytes());
    compare("dh", dh.bytes() == want.dh.bytes());
    if (of_dprob) compare("dprob", dprob.bytes() == want.dprob.bytes());
    return names;
  }

 private:
  /// Blocks of all sizes, one of zeros, one with an infinity and one with a NaN.
  void vary() {
    for (int64_t r = 0; r < used(); ++r)
      for (int64_t c = 0; c < z.columns(); ++c) {
        const int64_t block = (r * 7 + c / 32) % 11;
        const double factor = block == 5 ? 0 : std::ldexp(1.0, int(block) - 5);
        z.set({r, c}, z.at(r, c) * factor);
      }
    if (used() > 1) z.set({1, z.columns() / 2}, INFINITY);
    if (used() > 2) z.set({2, z.columns() - 1}, NAN);
    if (p.backward && used() > 3) dh.set({3, p.features / 2}, NAN);
    if (p.backward && used() > 4) dh.set({4, 0}, -INFINITY);
  }
};

/// Formats that an activation writes.
inline constexpr const char* kActivationFormats[] = {"fp8_block", "mxfp8:e5m2+floor",
                                                     "fp8_block:e5m2+fp32", "mxfp4", "mxfp8"};

/// Problems of an activation in all layouts, formats and forms, some of each.
template <class Visit>
void for_activation_codes(const ActivationInfo& of, Visit&& visit) {
  unsigned seed = 1;
  for (const GluLayout layout :
       {GluLayout::kConcat, GluLayout::kInterleave1, GluLayout::kInterleave32})
    for (const int64_t features : {8, 32, 72, 96, 256, 384})
      for (const bool backward : {false, true})
        for (const char* format : kActivationFormats) {
          if (layout == GluLayout::kInterleave32 && features % 32 != 0) continue;
          if (layout != GluLayout::kConcat && !of.gated) continue;
          ActivationProblem p{.backward = backward, .kind = of.kind, .layout = layout};
          p.rows = 13;
          p.features = features;
          p.experts = 3;
          p.prob = seed % 3 != 0;
          p.tail = seed / 2 % 2 == 0 ? Tail::kZero : Tail::kKeep;
          p.along_k = parse_format(format);
          p.along_k_scales_major = seed % 2 == 0 ? Major::kColumn : Major::kRow;
          p.amax_eps = seed % 5 == 0 && ops::hears_amax_eps(p.along_k) ? 0.23f : 0;
          p.plain = seed % 4 != 0;
          if (p.kind == ActivationKind::kClampedSwiGlu) p.constants = {4.5f, 1.25f, 0.5f};
          visit(p, seed++);
        }
}

}  // namespace cadre::test
