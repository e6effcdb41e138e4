#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

#include "cadre/offsets.h"
#include "cadre/routing.h"
#include "tests/judge/tensor.h"
#include "tests/judge/workspace.h"

namespace cadre::test {

/// Everything that offsets write, with canaries around, and the probabilities that they read: any
/// bits, of no two choices alike.
struct OffsetsOut {
  Tensor offsets, row_of, slot_of, prob, row_prob, status;

  explicit OffsetsOut(const OffsetsProblem& p)
      : offsets(DType::kI32, {p.experts + 1}),
        row_of(DType::kI32, {p.tokens, std::max(p.top_k, 1)}),
        slot_of(DType::kI32, {p.rows}),
        prob(DType::kF32, {p.tokens, std::max(p.top_k, 1)}),
        row_prob(DType::kF32, {p.rows}),
        status(DType::kI32, {1}) {
    for (int64_t slot = 0; slot < p.tokens * p.top_k; ++slot)
      prob.data<uint32_t>()[slot] = uint32_t(slot) * 2654435761u;
  }

  /// `words` says where a tensor is. Only routing has a map.
  template <class Words>
  OffsetsArgs args(const OffsetsProblem& p, const void* source, Words&& words) const {
    OffsetsArgs given{.source = source, .offsets = words(offsets), .status = words(status)};
    if (p.source != OffsetsSource::kRouting) return given;
    given.map = {words(row_of), words(slot_of)};
    given.prob = reinterpret_cast<const float*>(words(prob));
    given.row_prob = reinterpret_cast<float*>(words(row_prob));
    return given;
  }
  /// Whether row_prob has the bits of these probabilities by slot_of, and in the tail its own.
  bool has_row_prob_of(const Tensor& of) const {
    const int64_t rows = offset_list().back();
    for (int64_t row = 0; row < rows; ++row)
      if (row_prob.data<uint32_t>()[row] != of.data<uint32_t>()[slot_of.data<int32_t>()[row]])
        return false;
    return std::all_of(row_prob.data<uint32_t>() + rows,
                       row_prob.data<uint32_t>() + row_prob.columns(),
                       [](uint32_t bits) { return bits == ~0u; });
  }
  std::vector<int32_t> offset_list() const {
    const auto* first = offsets.data<int32_t>();
    return {first, first + offsets.columns()};
  }
  /// Whether those of a routing are the same, which writes no status.
  bool maps_like(const OffsetsOut& other) const {
    return offsets.bytes() == other.offsets.bytes() && row_of.bytes() == other.row_of.bytes() &&
           slot_of.bytes() == other.slot_of.bytes();
  }
  std::string damage() const {
    return offsets.damage() + row_of.damage() + slot_of.damage() + row_prob.damage() +
           status.damage();
  }
  bool operator==(const OffsetsOut& other) const {
    return maps_like(other) && row_prob.bytes() == other.row_prob.bytes() &&
           status.bytes() == other.status.bytes();
  }
};

template <class Index>
OffsetsOut offsets_on_cpu(const OffsetsProblem& p, const std::vector<Index>& source,
                          std::string_view only) {
  OffsetsOut out(p);
  const OffsetsPlan made = plan(p, this_cpu(), only);
  EXPECT_EQ(made.name, only);
  const OwnedWorkspace workspace(made.workspace_bytes);
  const auto words = [](const Tensor& t) { return t.data<int32_t>(); };
  run(made, out.args(p, source.data(), words), workspace.get(), {});
  EXPECT_EQ(out.damage(), "") << to_string(p);
  return out;
}

/// What a routing with map=yes asks of offsets.
inline OffsetsProblem map_of(const RoutingProblem& p) {
  return {.source = OffsetsSource::kRouting,
          .rows = p.tokens * p.top_k,
          .experts = p.experts,
          .tokens = p.tokens,
          .top_k = p.top_k};
}

/// Experts of T * top_k choices: some negative, some too large, half of the experts without any.
template <class Index>
std::vector<Index> random_routing(std::mt19937& random, const OffsetsProblem& p) {
  std::vector<Index> experts;
  for (int64_t slot = 0; slot < p.tokens * p.top_k; ++slot) {
    const int64_t kind = int64_t(random() % 20);
    const int64_t any = int64_t(random() % uint64_t(p.experts)) / 2 * 2;
    experts.push_back(Index(kind == 0 ? -1 : kind == 1 ? p.experts : any));
  }
  return experts;
}

}  // namespace cadre::test
