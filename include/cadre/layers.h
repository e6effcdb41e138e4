#pragma once
#include <span>
#include <string>
#include <string_view>

#include "cadre/device.h"
#include "cadre/layer.h"

#pragma GCC visibility push(default)
namespace cadre {

/// What planning a layer came to, without its problem's type.
struct LayerExplanation {
  std::string problem{};          ///< as it prints back
  std::string plan{};             ///< the route's name; empty if a step has no implementation
  bool exact = true;              ///< every step is
  LayerMemory memory{};           ///< what the caller provides
  double kept_bytes_per_row = 0;  ///< of what stays from forward to backward
  std::string steps{};     ///< the steps with their implementations, and the memory; many lines
  std::string refusals{};  ///< why a step has none; many lines
};

/// One layer, printed by `cadre info`.
struct LayerInfo {
  std::string_view name;     ///< "grouped_mlp", the first word of its problems
  std::string_view summary;  ///< one line
  std::string_view example;  ///< a problem that every build takes on the CPU
  /// Parses the problem and plans it.
  LayerExplanation (*explain)(std::string_view problem, const Device&);
};

/// All layers.
std::span<const LayerInfo> layer_list();

}  // namespace cadre
#pragma GCC visibility pop
