#include "apps/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "apps/train/adamw.h"
#include "apps/train/interrupt.h"
#include "apps/train/random.h"
#include "cadre/error.h"
#include "cadre/recipe.h"

namespace cadre::train {
namespace {

constexpr uint64_t kBatchStream = 1;
constexpr int64_t kCurvePositions = 4096;  ///< held-out bytes behind a point of the curve
constexpr int64_t kMostPending = 256;      ///< steps whose losses a GPU keeps

NetworkShape network_shape(const RunState& state, Mode mode) {
  return {state.settings, parse_recipe(state.recipe), state.settings.rows, mode};
}

}  // namespace

double held_out_bits(Network& network, std::span<const Weight> weights, const Corpus& corpus,
                     std::optional<int64_t> most) {
  const int64_t rows = network.shape().rows, held = corpus.held.count();
  const int64_t count = std::min(held, most.value_or(held));
  std::vector<uint8_t> window(network.shape().settings.window);
  Batch& batch = network.batch();
  const Buffer<double> loss(network.engine(), 1);
  network.forget_weights();
  for (int64_t first = 0; first < count; first += rows) {
    if (!most && InterruptGuard::signal() != 0) break;
    const int64_t filled = std::min(rows, count - first);
    for (int64_t t = 0; t < filled; ++t) {
      const int64_t position = corpus.held[(first + t) * held / count];
      window_before(corpus, position, window);
      std::copy(window.begin(), window.end(), batch.windows().begin() + t * std::ssize(window));
      batch.targets()[t] = corpus.bytes[position];
    }
    // Rows past `filled` hold an earlier batch, or zeros; their loss is not counted.
    batch.send();
    network.add_loss(weights, filled, loss.data());
  }
  double nats = 0;
  network.engine().download(&nats, loss.data(), sizeof nats);
  return nats / static_cast<double>(count) / std::numbers::ln2;
}

Trainer::Trainer(Engine& engine, const Corpus& corpus, RunState state)
    : engine_(engine),
      corpus_(corpus),
      state_(std::move(state)),
      step_(state_.step),
      network_(network_shape(state_, Mode::kTrain), engine),
      predictor_(network_shape(state_, Mode::kPredict), engine),
      weights_(engine, state_.parameters),
      load_(engine, std::span(state_.history.load)),
      losses_(engine, engine.is_host() ? 1 : kMostPending),
      window_(state_.settings.window) {}

void Trainer::fill_batch(int64_t step) {
  const Settings& s = state_.settings;
  Batch& batch = network_.batch();
  for (int64_t t = 0; t < s.rows; ++t) {
    const auto place = static_cast<uint64_t>(step * s.rows + t);
    const double uniform = random_uniform({static_cast<uint64_t>(s.seed), kBatchStream, place});
    const auto index = static_cast<int64_t>(uniform * static_cast<double>(corpus_.train.count()));
    const int64_t position = corpus_.train[index];
    window_before(corpus_, position, window_);
    std::copy(window_.begin(), window_.end(), batch.windows().begin() + t * s.window);
    batch.targets()[t] = corpus_.bytes[position];
  }
  for (int64_t b = 0; b < s.blocks; ++b) {
    batch.rng()[2 * b] = static_cast<uint64_t>(s.seed);
    batch.rng()[2 * b + 1] = static_cast<uint64_t>(step * s.blocks + b);
  }
  batch.send();
}

/// Waits for the pending losses and moves them into the history. Where one is no number nothing is
/// moved, so that the state is never handed out again.
void Trainer::collect() {
  if (pending_ == 0) return;
  std::vector<double> sums(pending_);
  engine_.download(sums.data(), losses_.data(), pending_ * int64_t{sizeof(double)});
  for (int64_t i = 0; i < pending_; ++i) {
    sums[i] /= static_cast<double>(state_.settings.rows);
    require(std::isfinite(sums[i]), "train: loss is ", sums[i], " at step ", state_.step + i + 1,
            ", must be a number; the run has diverged, lower --lr");
  }
  state_.history.loss.insert(state_.history.loss.end(), sums.begin(), sums.end());
  state_.step += pending_;
  engine_.clear(losses_.data(), pending_ * int64_t{sizeof(double)});
  pending_ = 0;
}

const std::vector<double>& Trainer::losses() {
  collect();
  return state_.history.loss;
}

const RunState& Trainer::state() {
  collect();
  if (behind_) {
    weights_.fetch();
    load_.fetch();
  }
  behind_ = false;
  return state_;
}

void Trainer::look_at_held_out() {
  state_.history.eval_step.push_back(step_);
  state_.history.eval_bits.push_back(
      held_out_bits(predictor_, weights_.list(), corpus_, kCurvePositions));
}

void Trainer::advance() {
  const Settings& s = state_.settings;
  const int64_t step = step_ + 1;
  if (pending_ == losses_.size()) collect();
  fill_batch(step);
  network_.add_loss(weights_.list(), s.rows, losses_.data() + pending_++);
  if (engine_.is_host()) collect();  // before anything is written
  network_.backward(weights_.list());
  AdamW adamw;
  adamw.rate = learning_rate(s, step);
  adamw.decay = s.weight_decay;
  adamw.grad_scale = 1 / static_cast<double>(s.rows);
  adamw.step = step;
  engine_.update(adamw, weights_.list());
  const int64_t bin = (step - 1) * kLoadBins / s.steps;
  network_.count_rows(load_.data() + bin * s.blocks * s.experts);
  step_ = step;
  behind_ = true;
  if (step % s.eval_every == 0 && !done()) look_at_held_out();
}

void Trainer::finish() {
  if (state().finished()) return;
  const double bits = held_out_bits(predictor_, weights_.list(), corpus_);
  if (InterruptGuard::signal() != 0) return;  // it has not seen all
  state_.history.eval_step.push_back(step_);
  state_.history.eval_bits.push_back(bits);
  state_.history.held_bits.push_back(bits);
}

}  // namespace cadre::train
