#include "bench/cases/parts.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "bench/element.h"

namespace cadre::bench {

TensorView random_tensor(Buffers& buffers, DType dtype, std::initializer_list<int64_t> shape,
                         int64_t live, uint64_t seed) {
  const TensorView v = buffers.tensor(dtype, shape);
  fill_normal(v, live, seed);
  return v;
}

float* random_floats(Buffers& buffers, int64_t count, int64_t live, uint64_t seed, float mean) {
  auto* data = buffers.array<float>(count);
  for (int64_t i = 0; i < live; ++i) data[i] = mean + 0.5f * normal(seed, uint64_t(i));
  return data;
}

TensorView absolute(Buffers& buffers, const TensorView& v) {
  TensorView copy = v;
  copy.dtype = DType::kF32;
  int64_t step = 1;
  for (int d = v.rank - 1; d >= 0; --d) {
    copy.stride[size_t(d)] = step;
    step *= v.shape[size_t(d)];
  }
  auto* data = buffers.array<float>(step);
  copy.data = data;
#pragma omp parallel for
  for (int64_t i = 0; i < step; ++i) data[i] = std::abs(load(v, offset_of(v, i)));
  return copy;
}

const float* absolute(Buffers& buffers, const float* given, int64_t count) {
  if (given == nullptr) return nullptr;
  return static_cast<const float*>(absolute(buffers, view(given, DType::kF32, {count})).data);
}

std::vector<float> values_of(const TensorView& v) {
  std::vector<float> values(size_t(elements(v)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = load(v, offset_of(v, int64_t(i)));
  return values;
}

void** pointers(Buffers& buffers, bool given, void* first, int64_t stride_bytes, int experts) {
  if (!given) return nullptr;
  void** list = buffers.pointers(experts);
  for (int64_t e = 0; e < experts; ++e) list[e] = static_cast<std::byte*>(first) + e * stride_bytes;
  return list;
}

const int32_t* accumulate_words(Buffers& buffers, Accumulate accumulate, int experts,
                                uint64_t seed) {
  if (accumulate == Accumulate::kNo || accumulate == Accumulate::kYes) return nullptr;
  const int count = accumulate == Accumulate::kPerExpert ? experts : 1;
  auto* words = buffers.array<int32_t>(count);
  for (int e = 0; e < count; ++e) words[e] = int32_t((uint64_t(e) + seed) % 2);
  return words;
}

bool adds(Accumulate accumulate, const int32_t* words, int expert) {
  if (words == nullptr) return accumulate == Accumulate::kYes;
  return words[accumulate == Accumulate::kPerExpert ? expert : 0] != 0;
}

namespace {

TensorView of_expert(TensorView v, int expert) {
  v.data = static_cast<std::byte*>(v.data) + bytes_for(v.dtype, v.stride[0] * expert);
  v.shape[0] = 1;
  return v;
}

}  // namespace

void fill_old(const TensorView& v, Accumulate accumulate, const int32_t* words, uint64_t seed) {
  for (int e = 0; e < int(v.shape[0]); ++e)
    if (adds(accumulate, words, e)) fill_normal(of_expert(v, e), 1, seed + uint64_t(e));
}

TensorView absolute_old(Buffers& buffers, const TensorView& v, Accumulate accumulate,
                        const int32_t* words) {
  const TensorView sizes = absolute(buffers, v);
  auto* data = static_cast<float*>(sizes.data);
  for (int e = 0; e < int(v.shape[0]); ++e)
    if (!adds(accumulate, words, e)) std::fill_n(data + e * sizes.stride[0], sizes.stride[0], 0.0f);
  return sizes;
}

RandomMap random_map(Buffers& buffers, const Draw& draw, const OffsetsProblem& problem) {
  RandomMap result;
  const auto choices = draw_choices(draw, problem.tokens, problem.top_k, problem.experts);
  result.map.row_of = buffers.array<int32_t>(int64_t(choices.size()));
  result.map.slot_of = buffers.array<int32_t>(problem.rows);
  auto* offsets = buffers.array<int32_t>(problem.experts + 1);
  run_on_cpu(problem, OffsetsArgs{choices.data(), offsets, result.map, nullptr});
  result.rows = {{offsets, problem.experts}, {offsets, offsets + problem.experts + 1}};
  return result;
}

int32_t* random_slots(Buffers& buffers, const Rows& rows, const Slots& of, uint64_t seed) {
  auto* slots = buffers.array<int32_t>(of.rows);
  std::vector<int32_t> used(size_t(of.tokens), 0), order(size_t(of.tokens));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 bits(seed);
  for (size_t e = 0; e + 1 < rows.host.size(); ++e) {
    const int64_t first = rows.host[e], count = rows.host[e + 1] - first;
    const int64_t some = std::min(count, of.tokens);
    std::shuffle(order.begin(), order.end(), bits);
    std::nth_element(order.begin(), order.begin() + some, order.end(),
                     [&](int32_t a, int32_t b) { return used[size_t(a)] < used[size_t(b)]; });
    std::sort(order.begin(), order.begin() + some);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = order[size_t(i * some / count)];
      slots[first + i] = token * of.top_k + used[size_t(token)]++ % of.top_k;
    }
  }
  return slots;
}

int32_t* random_places(Buffers& buffers, const Rows& rows, const Places& of, uint64_t seed) {
  constexpr int32_t kNone[] = {-1, 1 << 30};  // once in so many rows, and where no place is left
  constexpr int64_t kOften = 31;
  auto* places = buffers.array<int32_t>(of.rows);
  std::vector<int64_t> next(size_t(of.ranks), 0), left(size_t(of.ranks), of.each);
  std::mt19937_64 bits(seed);
  for (size_t e = 0; e + 1 < rows.host.size(); ++e) {
    const int64_t first = rows.host[e], count = rows.host[e + 1] - first;
    std::vector<int> owners(size_t(count), of.ranks);  // of each row; behind the last: none
    for (int& owner : owners) {
      if (std::all_of(left.begin(), left.end(), [](int64_t n) { return n == 0; })) break;
      std::discrete_distribution<int> any(left.begin(), left.end());
      --left[size_t(owner = any(bits))];
    }
    std::sort(owners.begin(), owners.end());
    for (int64_t i = 0; i < count; ++i) {
      const int owner = owners[size_t(i)];
      const int64_t r = first + i;
      places[r] = owner < of.ranks ? int32_t(owner * of.each + next[size_t(owner)]++)
                                   : kNone[size_t(r) % std::size(kNone)];
      if (r % kOften == kOften / 2) places[r] = kNone[size_t(r) % std::size(kNone)];
    }
  }
  return places;
}

void copy_rows(const TensorView& to, const TensorView& tokens, const int32_t* token_slots,
               const Slots& of, int64_t live) {
  for (int64_t r = 0; r < live; ++r)
    for (int64_t j = 0, token = token_slots[r] / of.top_k; j < to[1]; ++j)
      store(to, r * to.stride[0] + j, load(tokens, token * tokens.stride[0] + j));
}

double affordable(int64_t size, double cost_of_each, double budget) {
  return std::min(1.0, budget / std::max(1.0, cost_of_each * double(size)));
}

void scale(int64_t& size, double share, int64_t least) {
  size = std::max(std::min(size, least), int64_t(double(size) * share));
}

double bytes_of(const TensorView& v) { return double(elements(v)) * bits(v.dtype) / 8; }

double live_bytes(const TensorView& v, int64_t live) {
  return v.shape[0] ? bytes_of(v) / double(v.shape[0]) * double(live) : 0;
}

}  // namespace cadre::bench
