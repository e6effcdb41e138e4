#include "cpu/gemm/means.h"

#include <algorithm>

namespace cadre::cpu::gemm {
namespace {

/// Products below which another thread costs more than it brings.
constexpr int64_t kProductsOfThread = 1 << 20;

}  // namespace

Means means_of(const GroupedGemmProblem& p, const Device& device, Multiplicand type) {
  const int units = std::max(device.units, 1);
  const int allowed = p.unit_budget > 0 ? std::min(p.unit_budget, units) : units;
  const double useful = 1 + double(p.rows) * double(p.n) * double(p.k) / kProductsOfThread;
  const int threads = int(std::min<double>(allowed, useful));
  return {type, threads, threads * Means::kWaveOfThread};
}

}  // namespace cadre::cpu::gemm
