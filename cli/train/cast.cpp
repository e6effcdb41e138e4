#include "cli/train/cast.h"

#include <algorithm>

namespace cadre::train {

void Cast::store(std::span<const float> values) {
  const auto count = static_cast<int64_t>(values.size());
  if (dtype_ == DType::kF32) {
    std::copy(values.begin(), values.end(), static_cast<float*>(data()));
    return;
  }
  auto* codes = static_cast<uint16_t*>(data());
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) codes[i] = to_bf16(values[i]);
}

void Cast::add_to(std::span<float> values) const {
  const auto count = static_cast<int64_t>(values.size());
  const auto* floats = static_cast<const float*>(data());
  const auto* codes = static_cast<const uint16_t*>(data());
  const bool plain = dtype_ == DType::kF32;
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) values[i] += plain ? floats[i] : from_bf16(codes[i]);
}

}  // namespace cadre::train
