#pragma once
#include <cstring>
#include <string>
#include <string_view>

#include "tests/parallel/rank_case.h"

// What a rank has against what one rank has that has all tokens and experts.
namespace cadre::test {

/// Where rows of `part` differ from those of `whole` from `first` on; empty if nowhere.
inline std::string difference(const Tensor& part, const Tensor& whole, int64_t first, int64_t count,
                              std::string_view what) {
  const bool is_list = part.view().rank == 1;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < (is_list ? 1 : part.columns()); ++c) {
      const double got = is_list ? part.at(i) : part.at(i, c);
      const double want = is_list ? whole.at(first + i) : whole.at(first + i, c);
      if (got != want) return text(what, " [", i, ", ", c, "] is ", got, ", must be ", want, "\n");
    }
  return {};
}

/// Whether all bytes of the rows of a view are that one, from `first` on.
inline bool all_bytes_are(uint8_t byte, const TensorView& v, int64_t first) {
  const int64_t bytes = bits(v.dtype) / 8;
  for (int64_t i = 0; i < (v[0] - first) * v[1] * bytes; ++i) {
    const int64_t element = i / bytes, row = first + element / v[1], column = element % v[1];
    const int64_t at = (row * v.stride[0] + column * v.stride[1]) * bytes + i % bytes;
    if (static_cast<const uint8_t*>(v.data)[at] != byte) return false;
  }
  return true;
}

/// The same of codes and scales, as they are stored.
inline std::string difference_of_codes(const RankCase& r, const RankCase& all, int64_t first) {
  const auto differs = [&](const TensorView& part, const TensorView& whole) {
    const int64_t bytes = bits(part.dtype) / 8;
    const auto at = [&](const TensorView& v, int64_t row, int64_t c) {
      return static_cast<const char*>(v.data) + (row * v.stride[0] + c * v.stride[1]) * bytes;
    };
    for (int64_t row = 0; row < r.used(); ++row)
      for (int64_t c = 0; c < part[1]; ++c)
        if (std::memcmp(at(part, row, c), at(whole, first + row, c), size_t(bytes)) != 0)
          return text(" differ in [", row, ", ", c, "]\n");
    return std::string();
  };
  const QuantizedView got = r.codes_of_rows(), want = all.codes_of_rows();
  const std::string codes = differs(got.codes, want.codes),
                    scales = differs(got.scales, want.scales);
  std::string found =
      (codes.empty() ? "" : "codes" + codes) + (scales.empty() ? "" : "scales" + scales);
  if (!r.row_codes.untouched(r.used(), r.p.rows)) found += "the tail of codes was written";
  if (!all_bytes_are(0xff, got.scales, r.used())) found += "the tail of scales was written";
  return found;
}

/// Of rows of one rank that has all: the sums of tokens as ranks make them, each of its own rows.
inline Tensor sums_of_ranks(const ExpertParallelProblem& p, const RankCase& all,
                            const Tensor& rows) {
  Tensor sums(p.dtype, {all.tokens(), p.hidden}), rounded(p.dtype, {1, 1});
  for (int64_t t = 0; t < all.tokens(); ++t)
    for (int64_t h = 0; h < p.hidden; ++h) {
      float total = 0;
      for (int q = 0; q < p.ranks; ++q) {
        float sum = 0;
        for (int64_t i = t * p.top_k; i < (t + 1) * p.top_k; ++i)
          if (all.row_of[size_t(i)] >= 0 && all.experts[size_t(i)] / p.experts == q)
            sum += float(rows.at(all.row_of[size_t(i)], h));
        rounded.set({0, 0}, sum);
        total += float(rounded.at(0, 0));
      }
      sums.set({t, h}, total);
    }
  return sums;
}

/// Where sums that ranks have made differ from those of one; empty if nowhere.
inline std::string difference_of_sums(const ExpertParallelProblem& p, int rank, const RankCase& r,
                                      const RankCase& all) {
  const int64_t token = rank * p.tokens;
  if (p.sum == RowSum::kChoice)
    return difference(r.out, all.out, token, r.tokens(), "out") +
           difference(r.dx, all.dx, token, r.tokens(), "dx");
  return difference(r.out, sums_of_ranks(p, all, all.y), token, r.tokens(), "out by ranks") +
         difference(r.dx, sums_of_ranks(p, all, all.drows), token, r.tokens(), "dx by ranks");
}

/// Where what a rank has differs from what one rank has that has all.
inline std::string difference(const ExpertParallelProblem& p, int rank, const RankCase& r,
                              const RankCase& all) {
  std::string found = r.damage();
  const int64_t row = all.offsets[size_t(rank * p.experts)], token = rank * p.tokens;
  for (int e = 0; e <= p.experts; ++e)
    if (r.offsets[size_t(e)] != all.offsets[size_t(rank * p.experts + e)] - row)
      return found + text("offset ", e, " is ", r.offsets[size_t(e)]);
  found += difference(r.rows, all.rows, row, r.used(), "rows");
  found += difference(r.dy, all.dy, row, r.used(), "dy");
  found += difference_of_sums(p, rank, r, all);
  if (p.prob) found += difference(r.row_prob, all.row_prob, row, r.used(), "row_prob");
  if (p.prob) found += difference(r.dprob, all.dprob, token, r.tokens(), "dprob");
  if (r.verdict[0] != 0) found += "the verdict is not 0";
  if (p.x) found += difference_of_codes(r, all, row);
  if (!r.rows.untouched(r.used(), p.rows)) found += "the tail was written";
  return found;
}

/// Where the places of a rank's choices are not the rows that they would have on it alone, or, of
/// those that were dropped, none; empty if nowhere.
inline std::string difference_of_places(const ExpertParallelProblem& p, const RankCase& r) {
  int32_t place = 0;
  for (int e = 0; e < p.ranks * p.experts; ++e)
    for (size_t i = 0; i < r.experts.size(); ++i) {
      if (r.experts[i] != e) continue;
      const bool is_dropped = r.row_of[i] == -1 && p.overflow == Overflow::kDrop;
      if (!is_dropped && r.row_of[i] != place)
        return text("the place of choice ", i, " is ", r.row_of[i], ", must be ", place);
      ++place;
    }
  return {};
}

}  // namespace cadre::test
