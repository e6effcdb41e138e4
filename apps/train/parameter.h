#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "apps/train/settings.h"

namespace cadre::train {

/// One tensor that is learnt: the fp32 master copy and the moments of AdamW.
struct Parameter {
  std::string name;            ///< "block0.w1"
  std::vector<int64_t> shape;  ///< of all three
  bool decays = true;          ///< weight decay applies; not to gains
  std::vector<float> value, mean, square;
};

/// Where the tensors of one block stand in the list of parameters.
enum BlockParameter : size_t { kNormGain, kRouter, kW1, kW2, kBlockParameters };

inline constexpr size_t kEmbedding = 0;
constexpr size_t block_parameter(int64_t block, BlockParameter which) {
  return 1 + static_cast<size_t>(block) * kBlockParameters + which;
}
constexpr size_t final_gain(const Settings& s) { return block_parameter(s.blocks, kNormGain); }
constexpr size_t head_weight(const Settings& s) { return final_gain(s) + 1; }

/// Names and shapes of all parameters, in their order; no memory for values.
///
///   embedding [W, 256, H]   block<i>: norm [H], router [E, H], w1 [E, 2F, H], w2 [E, H, F]
///   norm [H]   head [256, H]
std::vector<Parameter> parameter_list(const Settings&);

/// The list with its values drawn from the seed, moments zero.
std::vector<Parameter> initial_parameters(const Settings&);

int64_t elements(const Parameter&);

}  // namespace cadre::train
