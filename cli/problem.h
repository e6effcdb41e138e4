#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "cadre/layers.h"
#include "cadre/operations.h"

namespace cadre::cli {

/// The operation or the layer that a problem is one of; the other is null.
struct Subject {
  const OperationInfo* operation = nullptr;
  const LayerInfo* layer = nullptr;
};

/// What the first word of `problem` names.
/// Errors    UsageError listing the operations and layers.
Subject subject_of(std::string_view problem);

/// Words of the command line as one problem: `cadre explain "permute ..."` and `cadre explain
/// permute ...` mean the same.
std::string joined(const std::vector<std::string>& words);

}  // namespace cadre::cli
