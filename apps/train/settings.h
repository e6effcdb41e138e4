#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cadre::train {

/// Everything that decides the bits of a training run, apart from its recipe and its text.
struct Settings {
  int64_t window = 16;
  int64_t hidden = 128;
  int64_t features = 128;
  int64_t experts = 8;
  int64_t top_k = 2;
  int64_t blocks = 2;
  int64_t rows = 1024;
  int64_t steps = 400;
  int64_t eval_every = 50;
  int64_t seed = 1;
  double learning_rate = 4e-3;
  double warmup = 0.05;
  double weight_decay = 0.05;
  double balance = 0.03;
  double held_out = 0.05;

  bool operator==(const Settings&) const = default;
};

/// The values that one setting may have.
struct Range {
  double low = 0, high = 0;
};

/// Calls `f(name, value, range, summary)` for every field. The command line, the checkpoint, the
/// checks and the report all walk this one list.
template <class S, class F>
void each_setting(S& s, F&& f) {
  f("window", s.window, Range{1, 256}, "previous bytes that the model sees");
  f("hidden", s.hidden, Range{16, 8192}, "H: width of the residual stream, a multiple of 16");
  f("features", s.features, Range{16, 32768}, "F: width of one expert, a multiple of 16");
  f("experts", s.experts, Range{1, 1024}, "E: experts of a block");
  f("top-k", s.top_k, Range{1, 64}, "experts that each byte is routed to");
  f("blocks", s.blocks, Range{1, 64}, "residual blocks");
  f("rows", s.rows, Range{1, 65536}, "T: bytes predicted in one step");
  f("steps", s.steps, Range{1, 1e7}, "steps of the optimizer");
  f("eval-every", s.eval_every, Range{1, 1e7}, "steps between two looks at the held-out text");
  f("seed", s.seed, Range{0, 9007199254740992.0}, "seed of weights, batches and rounding");
  f("lr", s.learning_rate, Range{1e-8, 1}, "largest learning rate");
  f("warmup", s.warmup, Range{0, 1}, "share of the steps that the learning rate rises");
  f("weight-decay", s.weight_decay, Range{0, 10}, "decay of matrices, decoupled");
  f("balance", s.balance, Range{0, 10}, "weight of the load-balancing loss");
  f("held-out", s.held_out, Range{0.001, 0.5}, "share at the end of every file kept for testing");
}

/// Throws InvalidArgument naming the first option whose value cannot be used.
void require_legal(const Settings&);

/// "steps=400 lr=0.004 ...": every field, in the order of the list. Prints doubles so that they
/// parse back to the same bits.
std::string to_string(const Settings&);

/// Inverse of `to_string`.
/// Errors    InvalidArgument for unknown or missing names and for values that are no numbers; the
///           result is also `require_legal`.
Settings parse_settings(std::string_view);

/// Names of the fields in which the two differ.
std::vector<std::string> differences(const Settings&, const Settings&);

}  // namespace cadre::train
