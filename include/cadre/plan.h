#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/device.h"

#pragma GCC visibility push(default)
namespace cadre {

/// What is printed of an operation, and its first word. Every problem has it as `kOperation`, and
/// the arguments of its run as `Args`.
struct OperationText {
  std::string_view name;     ///< "grouped_gemm", the first word of its problems
  std::string_view summary;  ///< one line
  std::string_view example;  ///< a problem that every build takes on the CPU
};

/// One implementation that did not take a problem, and why.
struct Refusal {
  std::string_view name;
  std::string why;
};

/// The choice of an implementation for a problem on a device. A value; making it launches nothing
/// and reads no memory of a tensor. `entry` belongs to the library.
template <class Problem>
struct Plan {
  Problem problem;
  Device device;
  std::string_view name;        ///< the implementation, such as "cpu_onednn", "sm90_ragged_rows"
  int64_t workspace_bytes = 0;  ///< what `run` needs
  bool exact = true;            ///< same bits on every run, whatever else is in the batch
  int fraction_bits = 23;  ///< that its sums keep below their largest addend; in fp32 all of them
  std::vector<Refusal> refusals;  ///< implementations that come before `name` and refused
  const void* entry = nullptr;
  std::shared_ptr<const void> inner{};  ///< the plans of operations that it is composed of, if any
};

}  // namespace cadre
#pragma GCC visibility pop
