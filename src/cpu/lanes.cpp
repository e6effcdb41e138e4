#include "cpu/lanes.h"

#include "cpu/clones.h"

namespace cadre::cpu {

CADRE_CLONES void add_scaled(float* sum, const float* x, float factor, int count) {
  for (int i = 0; i < count; ++i) sum[i] += factor * x[i];
}

CADRE_CLONES void add_products(float* sum, const float* x, const float* y, int count) {
  for (int i = 0; i < count; ++i) sum[i] += x[i] * y[i];
}

}  // namespace cadre::cpu
