#include "parallel/exchange.h"

#include <algorithm>
#include <limits>

namespace cadre::parallel {

void publish(const TensorView& from, int64_t rows, char* to) {
  if (from.data == to) return;
  const int64_t bytes = bytes_for(from.dtype, from[1]),
                step = bytes_for(from.dtype, from.stride[0]);
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(to + r * bytes, static_cast<const char*>(from.data) + r * step, size_t(bytes));
}

TensorView of_ranks(const Window::State& window, int64_t part, DType dtype, int64_t rows,
                    int64_t columns) {
  char* first = window.of(0) + part;
  if (window.ranks == 1) return view(first, dtype, {rows, columns});
  const int64_t step = window.memory.bytes_each() * 8 / bits(dtype);
  return view(first, dtype, {window.ranks, rows, columns}, {step, columns, 1});
}

// A number all of whose bits are set is NaN in each of our types.
void fill_nan(const TensorView& v) {
  const int64_t bytes = bytes_for(v.dtype, v[1]), step = bytes_for(v.dtype, v.stride[0]);
  for (int64_t r = 0; r < v[0] && v.data != nullptr; ++r)
    std::memset(static_cast<char*>(v.data) + r * step, 0xff, size_t(bytes));
}

void fill_nan(float* data, int64_t count) {
  if (data != nullptr) std::fill(data, data + count, std::numeric_limits<float>::quiet_NaN());
}

Offsets offsets_of_sums(const ExpertParallelProblem& p, const ExchangeMap& map) {
  return p.ranks == 1 ? Offsets{map.offsets, p.experts} : Offsets{};
}

PermutePlan with_tokens(const PermutePlan& plan, int64_t tokens) {
  PermutePlan fewer{};
  fewer.problem = plan.problem;
  fewer.problem.tokens = tokens;
  fewer.device = plan.device;
  fewer.name = plan.name;
  fewer.entry = plan.entry;
  return fewer;
}

}  // namespace cadre::parallel
