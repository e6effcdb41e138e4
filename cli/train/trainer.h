#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "cli/train/checkpoint.h"
#include "cli/train/corpus.h"
#include "cli/train/network.h"

namespace cadre::train {

/// Bits per byte of the held-out text under the parameters: `most` evenly spaced positions, or all.
double held_out_bits(Network&, std::span<const Parameter>, const Corpus&,
                     std::optional<int64_t> most = {});

/// Takes one run step by step. Everything that later steps depend on is in its state: batches and
/// roundings are functions of the seed and the step.
class Trainer {
 public:
  /// Errors    InvalidArgument for an unknown recipe; Unsupported where a plan finds no
  ///           implementation.
  Trainer(const Corpus&, RunState);

  const RunState& state() const { return state_; }
  bool done() const { return state_.step == state_.settings.steps; }

  /// One step of the optimizer, and a look at the held-out text where one is due. Returns the
  /// batch's cross entropy in nats per byte.
  /// Errors    InvalidArgument where the loss is no number any more.
  double advance();

  /// After the last step: scores all of the held-out text.
  void finish();

 private:
  void fill_batch(int64_t step);
  void record_load(int64_t step);

  const Corpus& corpus_;
  RunState state_;
  Network network_, predictor_;
  std::vector<uint8_t> windows_, targets_, window_;
};

}  // namespace cadre::train
