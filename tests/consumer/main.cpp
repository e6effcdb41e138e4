#include <cadre/cadre.h>

#include <iostream>
#include <memory>
#include <vector>

int main() {
  // y[r] = x[r] w_e^T for three experts. The second has no rows; rows 4 and 5 belong to nobody.
  const cadre::GroupedGemmProblem problem =
      cadre::parse_grouped_gemm_problem("grouped_gemm fprop R=6 N=2 K=3 E=3 format=f32 out=f32");
  const std::vector<int32_t> offsets = {0, 1, 1, 4};
  const std::vector<float> x(6 * 3, 1.0f);
  std::vector<float> w(3 * 2 * 3), y(6 * 2, -1.0f);
  for (size_t i = 0; i < w.size(); ++i) w[i] = float(i);

  // Choose an implementation, then run it: no allocation, no waiting, nothing read on the host.
  const cadre::GroupedGemmPlan plan = cadre::plan(problem, cadre::this_cpu());
  std::vector<std::byte> memory(size_t(plan.workspace_bytes) + 256);
  void* scratch = memory.data();
  size_t room = memory.size();
  std::align(256, size_t(plan.workspace_bytes), scratch, room);

  cadre::GroupedGemmArgs args;
  args.lhs.codes = cadre::view(x.data(), cadre::DType::kF32, {6, 3});
  args.rhs.codes = cadre::view(w.data(), cadre::DType::kF32, {3, 2, 3});
  args.offsets = {offsets.data(), 3};
  args.out = cadre::view(y.data(), cadre::DType::kF32, {6, 2});
  cadre::run(plan, args, {scratch, plan.workspace_bytes}, {});

  std::cout << to_string(problem) << " by " << plan.name << "\n";
  for (size_t r = 0; r < 6; ++r) std::cout << y[2 * r] << " " << y[2 * r + 1] << "\n";
}
