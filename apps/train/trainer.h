#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "apps/train/checkpoint.h"
#include "apps/train/corpus.h"
#include "apps/train/network.h"

namespace cadre::train {

/// Bits per byte of the held-out text under the weights: `most` evenly spaced positions, or all,
/// which a signal cuts short (interrupt.h).
double held_out_bits(Network&, std::span<const Weight>, const Corpus&,
                     std::optional<int64_t> most = {});

/// Takes one run step by step. Everything that later steps depend on is in its state: batches and
/// roundings are functions of the seed and the step. On a GPU the host runs ahead of the steps, and
/// waits for them only where their result is read.
class Trainer {
 public:
  /// Errors    InvalidArgument for an unknown recipe; Unsupported where a plan finds no
  ///           implementation.
  Trainer(Engine&, const Corpus&, RunState);

  int64_t step() const { return step_; }  ///< steps begun
  bool done() const { return step_ == state_.settings.steps; }

  /// The run after all steps that were begun.
  /// Errors    InvalidArgument where a loss is no number any more.
  const RunState& state();
  /// The losses alone, which costs less.
  const std::vector<double>& losses();

  /// One step of the optimizer, and a look at the held-out text where one is due.
  /// Errors    as `state`, now or later.
  void advance();

  /// After the last step: scores all of the held-out text. A signal ends it with nothing done.
  void finish();

 private:
  void fill_batch(int64_t step);
  void collect();
  void look_at_held_out();

  Engine& engine_;
  const Corpus& corpus_;
  RunState state_;
  int64_t step_;
  bool behind_ = false;  ///< the state's weights and loads are older than the engine's
  Network network_, predictor_;
  Weights weights_;
  Mirror<int64_t> load_;
  Buffer<double> losses_;  ///< of the steps that the history does not have yet, summed over rows
  int64_t pending_ = 0;    ///< their number
  std::vector<uint8_t> window_;
};

}  // namespace cadre::train
