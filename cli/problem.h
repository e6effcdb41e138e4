#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "cadre/operations.h"

namespace cadre::cli {

/// The operation whose name is the first word of `problem`.
/// Errors    UsageError listing the operations.
const OperationInfo& operation_of(std::string_view problem);

/// Words of the command line as one problem: `cadre explain "permute ..."` and `cadre explain
/// permute ...` mean the same.
std::string joined(const std::vector<std::string>& words);

}  // namespace cadre::cli
