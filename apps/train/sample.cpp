#include "apps/train/sample.h"

#include <algorithm>
#include <cmath>

#include "apps/train/cross_entropy.h"
#include "apps/train/interrupt.h"
#include "apps/train/network.h"
#include "apps/train/random.h"
#include "cadre/recipe.h"

namespace cadre::train {
namespace {

constexpr uint64_t kSampleStream = 2;

/// The byte at which the running sum of probabilities passes `uniform`.
uint8_t draw(std::span<const float> logits, double temperature, double uniform) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  if (temperature <= 0) return static_cast<uint8_t>(likeliest - logits.begin());
  std::vector<double> weight;
  double total = 0;
  for (const float logit : logits) {
    weight.push_back(std::exp((logit - *likeliest) / temperature));
    total += weight.back();
  }
  double left = uniform * total;
  for (size_t byte = 0; byte < weight.size(); ++byte) {
    left -= weight[byte];
    if (left < 0) return static_cast<uint8_t>(byte);
  }
  return static_cast<uint8_t>(likeliest - logits.begin());
}

}  // namespace

std::string sample_text(Engine& engine, const RunState& state, const SampleOptions& options) {
  const Settings& s = state.settings;
  Network network({s, parse_recipe(state.recipe), 1, Mode::kPredict}, engine);
  const Weights weights(engine, state.parameters);
  std::vector<float> logits(kSymbols);
  std::vector<uint8_t> window(s.window, 0);
  const auto push = [&](uint8_t byte) {
    std::copy_backward(window.begin(), window.end() - 1, window.end());
    window[0] = byte;
  };
  for (const char c : options.prompt) push(static_cast<uint8_t>(c));
  std::string drawn;
  for (int64_t i = 0; i < options.bytes && InterruptGuard::signal() == 0; ++i) {
    const double uniform =
        random_uniform({static_cast<uint64_t>(s.seed), kSampleStream, static_cast<uint64_t>(i)});
    std::copy(window.begin(), window.end(), network.batch().windows().begin());
    network.batch().send();
    const float* scores = network.logits(weights.list());
    engine.download(logits.data(), scores, kSymbols * int64_t{sizeof(float)});
    const uint8_t byte = draw(logits, options.temperature, uniform);
    if (byte == 0) break;
    drawn.push_back(static_cast<char>(byte));
    push(byte);
  }
  return drawn;
}

}  // namespace cadre::train
