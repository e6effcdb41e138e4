#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "apps/train/parameter.h"
#include "apps/train/safetensors.h"

namespace cadre::train {

/// Stretches of a run over which the rows of each expert are summed.
inline constexpr int64_t kLoadBins = 40;

/// What a run has seen so far.
struct History {
  std::vector<double> loss;        ///< nats per byte of every step's batch
  std::vector<int64_t> eval_step;  ///< steps after which the held-out text was looked at
  std::vector<double> eval_bits;   ///< bits per byte then, on evenly spaced held-out bytes
  std::vector<int64_t> load;       ///< [kLoadBins, blocks, E]: rows of each expert
  std::vector<double> held_bits;   ///< one value at the end: bits per byte of all held-out bytes
};

/// Everything that a run consists of: two runs with equal states go on with equal bits.
struct RunState {
  Settings settings;
  std::string recipe;
  std::vector<std::string> recipes;  ///< all that the command trains, in order
  std::vector<std::string> paths;    ///< of the text, as they were named; empty: the default
  uint64_t fingerprint = 0;          ///< of the text
  int64_t step = 0;                  ///< steps done
  std::vector<Parameter> parameters;
  History history;

  bool finished() const { return !history.held_bits.empty(); }
};

/// A run before its first step.
RunState initial_state(const Settings&, const std::string& recipe);

/// The state as a safetensors file whose tensors look into it. Equal states give equal bytes.
SafeTensors to_safetensors(const RunState&);

/// Inverse of `to_safetensors`.
/// Errors    InvalidArgument naming `path`: a file of something else, settings out of range,
///           missing, surplus or misshapen tensors, a checksum that is off.
RunState from_safetensors(const SafeTensors&, const std::filesystem::path& path);

/// The bytes that `save_checkpoint` writes.
std::vector<uint8_t> checkpoint_content(const RunState&);

/// Writes the state so that a failure leaves the old file as it was.
void save_checkpoint(const RunState&, const std::filesystem::path&);
RunState load_checkpoint(const std::filesystem::path&);

/// Bytes that a checkpoint of these settings takes, roughly.
int64_t checkpoint_bytes(const Settings&);

}  // namespace cadre::train
