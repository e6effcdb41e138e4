#include "cli/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "cadre/error.h"
#include "cadre/recipe.h"
#include "cli/train/adamw.h"
#include "cli/train/random.h"

namespace cadre::train {
namespace {

constexpr uint64_t kBatchStream = 1;
constexpr int64_t kCurvePositions = 4096;  ///< held-out bytes behind a point of the curve

NetworkShape network_shape(const RunState& state, Mode mode) {
  return {state.settings, parse_recipe(state.recipe), state.settings.rows, mode};
}

}  // namespace

double held_out_bits(Network& network, std::span<const Parameter> parameters, const Corpus& corpus,
                     std::optional<int64_t> most) {
  const int64_t rows = network.shape().rows, held = corpus.held.count();
  const int64_t count = std::min(held, most.value_or(held));
  std::vector<uint8_t> window(network.shape().settings.window);
  std::vector<uint8_t> windows(rows * window.size()), targets(rows);
  double nats = 0;
  network.forget_weights();
  for (int64_t first = 0; first < count; first += rows) {
    const int64_t filled = std::min(rows, count - first);
    for (int64_t t = 0; t < filled; ++t) {
      const int64_t position = corpus.held[(first + t) * held / count];
      window_before(corpus, position, window);
      std::copy(window.begin(), window.end(), windows.begin() + t * std::ssize(window));
      targets[t] = corpus.bytes[position];
    }
    // Rows past `filled` hold an earlier batch, or zeros; their loss is not counted.
    nats += network.loss(parameters, windows, std::span(targets).first(filled));
  }
  return nats / static_cast<double>(count) / std::numbers::ln2;
}

Trainer::Trainer(const Corpus& corpus, RunState state)
    : corpus_(corpus),
      state_(std::move(state)),
      network_(network_shape(state_, Mode::kTrain)),
      predictor_(network_shape(state_, Mode::kPredict)),
      windows_(state_.settings.rows * state_.settings.window),
      targets_(state_.settings.rows),
      window_(state_.settings.window) {}

void Trainer::fill_batch(int64_t step) {
  const Settings& s = state_.settings;
  for (int64_t t = 0; t < s.rows; ++t) {
    const auto place = static_cast<uint64_t>(step * s.rows + t);
    const double uniform = random_uniform({static_cast<uint64_t>(s.seed), kBatchStream, place});
    const auto index = static_cast<int64_t>(uniform * static_cast<double>(corpus_.train.count()));
    const int64_t position = corpus_.train[index];
    window_before(corpus_, position, window_);
    std::copy(window_.begin(), window_.end(), windows_.begin() + t * s.window);
    targets_[t] = corpus_.bytes[position];
  }
}

void Trainer::record_load(int64_t step) {
  const Settings& s = state_.settings;
  const int64_t bin = (step - 1) * kLoadBins / s.steps;
  for (int64_t b = 0; b < s.blocks; ++b) {
    const std::vector<int64_t> counts = network_.blocks()[b].counts();
    for (int64_t e = 0; e < s.experts; ++e) {
      state_.history.load[(bin * s.blocks + b) * s.experts + e] += counts[e];
    }
  }
}

double Trainer::advance() {
  const Settings& s = state_.settings;
  const int64_t step = state_.step + 1;
  fill_batch(step);
  const auto rows = static_cast<double>(s.rows);
  const double loss = network_.loss(state_.parameters, windows_, targets_) / rows;
  require(std::isfinite(loss), "train: loss is ", loss, " at step ", step,
          ", must be a number; the run has diverged, lower --lr");
  network_.backward(state_.parameters, windows_, step);
  AdamW adamw;
  adamw.rate = learning_rate(s, step);
  adamw.decay = s.weight_decay;
  adamw.grad_scale = 1 / rows;
  adamw.step = step;
  adamw.update(state_.parameters);
  state_.step = step;
  state_.history.loss.push_back(loss);
  record_load(step);
  if (step % s.eval_every == 0 && !done()) {
    state_.history.eval_step.push_back(step);
    state_.history.eval_bits.push_back(
        held_out_bits(predictor_, state_.parameters, corpus_, kCurvePositions));
  }
  return loss;
}

void Trainer::finish() {
  if (state_.finished()) return;
  const double bits = held_out_bits(predictor_, state_.parameters, corpus_);
  state_.history.eval_step.push_back(state_.step);
  state_.history.eval_bits.push_back(bits);
  state_.history.held_bits.push_back(bits);
}

}  // namespace cadre::train
