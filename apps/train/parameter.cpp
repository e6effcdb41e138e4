#include "apps/train/parameter.h"

#include <cmath>

#include "apps/train/cross_entropy.h"
#include "apps/train/random.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

/// Fills `count` values from `first` on with normals of that deviation.
void draw(Parameter& p, uint64_t seed, int64_t first, int64_t count, double deviation) {
  uint64_t stream = 0;
  for (const char c : p.name) stream = scatter(stream ^ static_cast<uint8_t>(c));
#pragma omp parallel for
  for (int64_t i = first; i < first + count; ++i) {
    p.value[i] =
        static_cast<float>(deviation * random_normal({seed, stream, static_cast<uint64_t>(i)}));
  }
}

/// Near bytes predict most, so the vector of distance d starts with a deviation of 1 / (1 + d); all
/// distances together give 1/2.
void draw_embedding(Parameter& p, const Settings& s, uint64_t seed) {
  const int64_t table = kSymbols * s.hidden;
  double squares = 0;
  for (int64_t d = 0; d < s.window; ++d) squares += std::pow(1.0 + static_cast<double>(d), -2);
  for (int64_t d = 0; d < s.window; ++d) {
    draw(p, seed, d * table, table, 0.5 / (1.0 + static_cast<double>(d)) / std::sqrt(squares));
  }
}

}  // namespace

int64_t elements(const Parameter& p) {
  int64_t count = 1;
  for (const int64_t length : p.shape) count *= length;
  return count;
}

std::vector<Parameter> parameter_list(const Settings& s) {
  std::vector<Parameter> list;
  const auto add = [&](std::string name, std::vector<int64_t> shape) {
    const bool decays = shape.size() > 1;
    list.push_back({std::move(name), std::move(shape), decays, {}, {}, {}});
  };
  add("embedding", {s.window, kSymbols, s.hidden});
  for (int64_t block = 0; block < s.blocks; ++block) {
    const std::string prefix = text("block", block, '.');
    add(prefix + "norm", {s.hidden});
    add(prefix + "router", {s.experts, s.hidden});
    add(prefix + "w1", {s.experts, 2 * s.features, s.hidden});
    add(prefix + "w2", {s.experts, s.hidden, s.features});
  }
  add("norm", {s.hidden});
  add("head", {kSymbols, s.hidden});
  return list;
}

std::vector<Parameter> initial_parameters(const Settings& s) {
  std::vector<Parameter> list = parameter_list(s);
  const auto seed = static_cast<uint64_t>(s.seed);
  for (Parameter& p : list) {
    const int64_t count = elements(p);
    p.value.assign(count, 1.0f);
    p.mean.assign(count, 0.0f);
    p.square.assign(count, 0.0f);
  }
  const double in_hidden = 1 / std::sqrt(static_cast<double>(s.hidden));
  const double in_features = std::sqrt(0.5 / static_cast<double>(s.features * s.blocks));
  const auto draw_all = [&](size_t which, double deviation) {
    draw(list[which], seed, 0, elements(list[which]), deviation);
  };
  draw_embedding(list[kEmbedding], s, seed);
  for (int64_t block = 0; block < s.blocks; ++block) {
    draw_all(block_parameter(block, kRouter), in_hidden);
    draw_all(block_parameter(block, kW1), in_hidden);
    draw_all(block_parameter(block, kW2), in_features);
  }
  draw_all(head_weight(s), 0.02);
  return list;
}

}  // namespace cadre::train
