#include "bench/draw.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <random>

#include "bench/element.h"
#include "bench/text_file.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

std::vector<int64_t> read_counts(const std::string& path, int experts) {
  std::ifstream file = open_text_file("offsets", path);
  require(file.good(), "offsets: '", path,
          "' is no distribution and no readable file; give uniform, zipf:S, gamma:S, onehot, or a "
          "file of ",
          experts, " counts");
  std::vector<int64_t> counts;
  for (std::string word; file >> word;) {
    int64_t count = 0;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), count);
    const bool number = error == std::errc() && stop == word.data() + word.size();
    require(number && count >= 0 && count <= INT32_MAX, "offsets: '", path, "' holds '", word,
            "', must hold whole numbers of 0 or more, below 2^31");
    counts.push_back(count);
  }
  require(counts.size() == size_t(experts), "offsets: '", path, "' holds ", counts.size(),
          " counts, must hold ", experts, ", one an expert");
  return counts;
}

/// The number behind the colon of "zipf:1.2".
double parameter(std::string_view what, double least, const std::string& words) {
  const char *first = words.data() + words.find(':') + 1, *last = words.data() + words.size();
  double value = 0;
  const auto [stop, error] = std::from_chars(first, last, value);
  require(error == std::errc() && stop == last && value >= least && value <= 100, "offsets: ", what,
          " is '", first, "', must be a number from ", least, " to 100");
  return value;
}

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t(0));
}

}  // namespace

Distribution parse_distribution(const std::string& words, int experts, uint64_t seed) {
  Distribution d;
  if (words == "uniform") {
    d.weights.assign(size_t(experts), 1);
  } else if (words == "onehot") {
    d.weights.assign(size_t(experts), 0);
    d.weights[mix(seed) % uint64_t(experts)] = 1;
  } else if (words.rfind("zipf:", 0) == 0) {
    const double s = parameter("exponent of zipf", 0, words);
    for (int i = 0; i < experts; ++i) d.weights.push_back(std::pow(i + 1.0, -s));
    std::mt19937_64 bits(seed);
    std::shuffle(d.weights.begin(), d.weights.end(), bits);
  } else if (words.rfind("gamma:", 0) == 0) {
    std::gamma_distribution<double> weight(parameter("shape of gamma", 0.01, words));
    std::mt19937_64 bits(seed);
    for (int i = 0; i < experts; ++i) d.weights.push_back(weight(bits));
  } else {
    d.counts = read_counts(words, experts);
  }
  return d;
}

std::vector<int64_t> draw_counts(const Draw& draw, int64_t rows, int experts) {
  Distribution d = parse_distribution(draw.offsets, experts, draw.seed);
  if (!draw.counts.empty()) d.counts = draw.counts;
  if (draw.counts_are_weights && sum_of(d.counts) > 0) {
    d.weights.assign(d.counts.begin(), d.counts.end());
    d.counts.clear();
  }
  if (!d.counts.empty()) {
    const int64_t sum = sum_of(d.counts);
    require(sum <= rows, "offsets: counts of '", draw.offsets, "' sum to ", sum,
            ", must be R = ", rows, " or less");
    return d.counts;
  }
  std::vector<int64_t> counts(size_t(experts), 0);
  std::mt19937_64 bits(mix(draw.seed));
  std::discrete_distribution<int> expert(d.weights.begin(), d.weights.end());
  const auto live = int64_t(double(rows) * draw.live);
  for (int64_t r = 0; r < live; ++r) ++counts[size_t(expert(bits))];
  return counts;
}

std::vector<double> draw_weights(const Draw& draw, int experts) {
  const Distribution d = parse_distribution(draw.offsets, experts, draw.seed);
  if (d.counts.empty()) return d.weights;
  require(sum_of(d.counts) > 0, "offsets: counts of '", draw.offsets,
          "' sum to 0, must be above 0; tokens choose their experts in these proportions");
  return {d.counts.begin(), d.counts.end()};
}

Rows draw_rows(Buffers& buffers, const Draw& draw, int64_t rows, int experts) {
  Rows result;
  result.host.push_back(0);
  for (const int64_t count : draw_counts(draw, rows, experts))
    result.host.push_back(int32_t(result.host.back() + count));
  auto* data = buffers.array<int32_t>(experts + 1);
  std::copy(result.host.begin(), result.host.end(), data);
  result.offsets = {data, experts};
  return result;
}

std::vector<int64_t> draw_choices(const Draw& draw, int64_t tokens, int top_k, int experts) {
  const std::vector<double> weights = draw_weights(draw, experts);
  std::mt19937_64 bits(mix(draw.seed));
  std::discrete_distribution<int64_t> expert(weights.begin(), weights.end());
  std::vector<int64_t> choices;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto first = choices.end() - choices.begin();
    for (int j = 0; j < top_k; ++j) {
      int64_t e = expert(bits);
      const auto taken = [&] {
        return std::find(choices.begin() + first, choices.end(), e) != choices.end();
      };
      for (int tries = 0; taken() && tries < 2 * experts; ++tries) e = (e + 1) % experts;
      choices.push_back(e);
    }
  }
  for (int64_t& e : choices)
    if (bits() % 16 == 0) e = -1;
  return choices;
}

float normal(uint64_t seed, uint64_t index) {
  // The sum of four uniform 16-bit numbers: variance 1/3, so sqrt(3) brings it to 1.
  const uint64_t word = mix(seed * 0x2545f4914f6cdd1du ^ index);
  const auto sum = int64_t(word & 0xffff) + int64_t(word >> 16 & 0xffff) +
                   int64_t(word >> 32 & 0xffff) + int64_t(word >> 48);
  return float(double(sum - int64_t{2} * 0xffff) * (1.7320508 / 65536));
}

// The logarithms of weights with noise of Gumbel's distribution: their order is that of such draws.
void fill_logits(const TensorView& v, const Draw& draw) {
  constexpr double kRarest = 1e-9;  // of the weights, so that every logit is finite
  const auto experts = int(v.shape[1]);
  const std::vector<double> weights = draw_weights(draw, experts);
  const double most = *std::max_element(weights.begin(), weights.end());
  std::mt19937_64 bits(mix(draw.seed));
  std::uniform_real_distribution<double> uniform(1e-12, 1);
  for (int64_t t = 0; t < v.shape[0]; ++t)
    for (int64_t e = 0; e < experts; ++e) {
      const double weight = std::max(weights[size_t(e)], kRarest * std::max(most, kRarest));
      const double noise = -std::log(-std::log(uniform(bits)));
      store(v, t * v.stride[0] + e, float(std::log(weight) + noise));
    }
}

void fill_normal(const TensorView& v, int64_t live, uint64_t seed, float scale) {
  const int last = v.rank - 1;
  const int64_t length = v.shape[size_t(last)], step = v.stride[size_t(last)];
  const int64_t lines = length && v.shape[0] ? elements(v) / length / v.shape[0] * live : 0;
#pragma omp parallel for
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t start = offset_of(v, line * length);
    for (int64_t j = 0; j < length; ++j)
      store(v, start + j * step, scale * normal(seed, uint64_t(line * length + j)));
  }
}

}  // namespace cadre::bench
