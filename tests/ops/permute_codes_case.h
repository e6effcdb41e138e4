#pragma once
#include <random>
#include <string_view>
#include <vector>

#include "cadre/permute.h"
#include "tests/judge/tensor.h"
#include "tests/ops/permute_case.h"

namespace cadre::test {

/// permute of tokens that are codes and scales, of one rank or of several. Both are any bits; what
/// is written is poison.
struct PermuteCodesCase {
  PermuteProblem p;
  RoutedRows routed;
  Tensor tokens, token_scales, rows, row_scales, prob, row_prob;
  bool has_row_of = true;

  PermuteCodesCase(std::string_view words, unsigned seed)
      : p(parse_permute_problem(words)), routed(of_all_tokens(p), seed) {
    const QuantizedShape shape{.rows = p.rows, .cols = p.hidden, .format = *p.format};
    const TensorView scales = quantized_view(shape, nullptr).scales;
    const int64_t all = p.ranks * apart(), gap = 2 * (seed % 2);
    tokens = Tensor(p.format->element, {all, p.hidden}, {.row_gap = 8 * gap});
    token_scales = Tensor(scales.dtype, {all, scales[1]}, {.row_gap = gap});
    rows = Tensor(p.format->element, {p.rows, p.hidden}, {.row_gap = gap});
    row_scales = p.scales_major == Major::kRow
                     ? Tensor(scales.dtype, {p.rows, scales[1]}, {.row_gap = gap})
                     : Tensor(scales.dtype, {scales[1], p.rows}, {.row_gap = 3});
    prob = Tensor(DType::kF32, {p.ranks * p.tokens, p.top_k});
    row_prob = Tensor(DType::kF32, {p.rows});
    std::mt19937 random(seed);
    prob.fill(random, 0, 1);
    for (Tensor* t : {&tokens, &token_scales}) fill_bits(*t, random);
  }
  int64_t used() const { return routed.offsets.back(); }

  /// `view` and `list` say where tensors and lists are.
  template <class View, class List>
  PermuteArgs args(View&& view, List&& list) {
    PermuteArgs given{.tokens = of_ranks(view(tokens)),
                      .rows = view(rows),
                      .map = {list(routed.row_of), list(routed.slot_of)},
                      .token_scales = of_ranks(view(token_scales)),
                      .row_scales = view(row_scales),
                      .offsets = {list(routed.offsets), p.experts}};
    if (p.scales_major == Major::kColumn) given.row_scales = transposed(given.row_scales);
    if (!has_row_of) given.map.row_of = nullptr;
    if (!p.prob) return given;
    given.prob = static_cast<float*>(view(prob).data);
    given.row_prob = static_cast<float*>(view(row_prob).data);
    return given;
  }
  PermuteArgs args() {
    return args([](const Tensor& t) { return t.view(); },
                [](std::vector<int32_t>& list) { return list.data(); });
  }
  std::vector<char> outputs() const {
    std::vector<char> all;
    for (const Tensor* t : {&rows, &row_scales, &row_prob})
      all.insert(all.end(), t->bytes().begin(), t->bytes().end());
    return all;
  }

 private:
  /// Rows from one rank's first to the next one's.
  int64_t apart() const { return p.ranks == 1 ? p.tokens : p.tokens + 3; }
  static PermuteProblem of_all_tokens(PermuteProblem p) {
    p.tokens *= p.ranks;
    return p;
  }
  TensorView of_ranks(const TensorView& v) const {
    if (p.ranks == 1) return v;
    const int64_t step = v.stride[0];
    return view(v.data, v.dtype, {p.ranks, p.tokens, v[1]}, {apart() * step, step, 1});
  }
  static void fill_bits(const Tensor& t, std::mt19937& random) {
    const TensorView v = t.view();
    const int64_t bytes = bits(v.dtype) / 8;
    for (int64_t r = 0; r < v[0]; ++r)
      for (int64_t b = 0; b < v[1] * bytes; ++b)
        static_cast<char*>(v.data)[r * v.stride[0] * bytes + b] = char(random());
  }
};

/// Of every format, with rows of many lengths.
inline constexpr std::string_view kPermuteOfCodes[] = {
    "permute permute T=13 top_k=3 R=43 H=64 E=5 format=mxfp8 prob=yes",
    "permute permute T=13 top_k=3 R=30 H=2112 E=5 format=mxfp8:e5m2 tail=zero",
    "permute permute T=13 top_k=9 R=130 H=7168 E=5 format=fp8_block scales_major=column prob=yes",
    "permute permute T=9 top_k=2 R=30 H=386 E=3 format=fp8_block:e5m2 scales_major=column "
    "tail=zero",
    "permute permute T=9 top_k=2 R=18 H=18 E=3 format=fp8_block",
    "permute permute T=13 top_k=1 R=13 H=2 E=1 format=fp8_row prob=yes tail=zero",
    "permute permute T=7 top_k=3 R=70 H=4096 E=5 ranks=3 format=mxfp8 prob=yes tail=zero",
    "permute permute T=7 top_k=3 R=50 H=1056 E=5 ranks=3 format=fp8_block scales_major=column",
    "permute permute T=1 top_k=3 R=7 H=128 E=5 ranks=2 format=fp8_row:e5m2",
    "permute permute T=3 top_k=2 R=8 H=8256 E=2 format=mxfp8",
    "permute permute T=0 top_k=3 R=7 H=128 E=5 format=mxfp8 tail=zero",
    "permute permute T=5 top_k=3 R=0 H=128 E=5 format=mxfp8"};

}  // namespace cadre::test
