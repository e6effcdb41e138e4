#pragma once
#include "tests/cuda/mirror.h"
#include "tests/ops/quantize_pairs.h"

// A case of quantising on the GPU.
namespace cadre::test {

inline bool is_cast(const QuantizeProblem& p) {
  return !(p.along_k && !is_plain(*p.along_k)) && !(p.along_rows && !is_plain(*p.along_rows));
}

/// A GPU of so few SMs that blocks have many tiles; 0: as it is.
inline int units_of_gpu = 0;
inline Device gpu() {
  Device device = first_gpu();
  if (units_of_gpu > 0) device.units = units_of_gpu;
  return device;
}

inline QuantizeCase::Out on_gpu(const QuantizeCase& c, int times = 1) {
  const QuantizePlan made = plan(c.problem, gpu());
  EXPECT_EQ(made.name, is_cast(c.problem) ? "cuda_cast" : "cuda_quantize");
  QuantizeCase::Out out = c.outputs();
  Mirror mirror;
  const QuantizeArgs args = c.args(
      out, [&](const Tensor& t) { return mirror.view(t); },
      [&](auto& list) { return mirror.data(list); });
  const Workspace workspace = mirror.workspace(made.workspace_bytes);
  mirror.replay(times, [&](Stream stream) { run(made, args, workspace, stream); });
  return out;
}

/// Formats along K, along rows, or both, in any order that the case takes.
inline void choose(QuantizeCase& c, const FormatPair& pair, unsigned seed) {
  c.formats(seed % 4 == 1 ? "" : pair.along_k, seed % 4 == 2 ? "" : pair.along_rows);
  c.problem.role = TensorRole(seed % 5);
  c.problem.along_k_scales_major = c.problem.along_rows_scales_major = Major::kRow;
  c.problem.along_rows_codes_major = Major::kRow;
  std::mt19937 random(seed);
  for (Major* order : orders_of(c))
    if (random() % 2 == 0) *order = Major::kColumn;
}

}  // namespace cadre::test
