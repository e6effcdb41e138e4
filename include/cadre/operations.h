#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/device.h"
#include "cadre/plan.h"

namespace cadre {

/// What planning a problem came to, without the problem's type.
struct Explanation {
  std::string problem;            ///< as it prints back
  std::string plan;               ///< the implementation's name; empty if none takes the problem
  int64_t workspace_bytes = 0;    ///< what `run` needs
  bool exact = true;              ///< same bits on every run, whatever else is in the batch
  std::vector<Refusal> refusals;  ///< those that come before `plan`; all of them if none takes it
};

/// One operation, printed by `cadre info`.
struct OperationInfo {
  std::string_view name;     ///< "grouped_gemm", the first word of its problems
  std::string_view summary;  ///< one line
  std::string_view example;  ///< a problem that every build takes on the CPU
  /// The implementations on a device's backend, in the order in which planning asks them.
  std::vector<std::string_view> (*implementations)(const Device&);
  /// Parses the problem and plans it.
  Explanation (*explain)(std::string_view problem, const Device&);
};

/// All operations.
std::span<const OperationInfo> operation_list();

}  // namespace cadre
