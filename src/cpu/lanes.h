#pragma once

namespace cadre::cpu {

/// A few floats on the stack, the unit of fast code: loops over all of them vectorise.
template <int Count>
struct Lanes {
  alignas(64) float at[Count];
};

/// The sum in a fixed order: halves are added onto each other until one is left. Changes `lanes`.
template <int Count>
float total(Lanes<Count>& lanes) {
  static_assert((Count & (Count - 1)) == 0);
  for (int half = Count / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes.at[i] += lanes.at[i + half];
  return lanes.at[0];
}

/// sum[i] += factor * x[i], rounded twice.
void add_scaled(float* sum, const float* x, float factor, int count);

/// sum[i] += x[i] * y[i], rounded twice.
void add_products(float* sum, const float* x, const float* y, int count);

}  // namespace cadre::cpu
