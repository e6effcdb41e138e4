#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "cadre/layers.h"
#include "cadre/operations.h"

namespace cadre::cli {

/// The operation or the layer that a problem is one of; both are null for exchanges of ranks.
struct Subject {
  const OperationInfo* operation = nullptr;
  const LayerInfo* layer = nullptr;
  bool is_of_ranks() const { return operation == nullptr && layer == nullptr; }
};

/// What `cadre info` says of problems of ranks.
struct RanksInfo {
  std::string_view name, summary, example;
};
constexpr RanksInfo kExpertParallel{
    "expert_parallel", "tokens to the ranks of their experts, and rows back",
    "expert_parallel T=512 top_k=2 H=256 E=4 ranks=2 R=2048 dtype=bf16"};

/// What the first word of `problem` names.
/// Errors    UsageError listing the operations, layers, and exchanges of ranks.
Subject subject_of(std::string_view problem);

/// Words of the command line as one problem: `cadre explain "permute ..."` and `cadre explain
/// permute ...` mean the same.
std::string joined(const std::vector<std::string>& words);

}  // namespace cadre::cli
