#include "ops/dense_gemm.h"

#include "backend/walk.h"

namespace cadre::ops {

void check_dense(const GroupedGemmProblem& p, const Checks<GroupedGemmProblem>& checks) {
  if (!p.dense) return;
  const auto holds = [&](bool good, const char* why) {
    checks.holds(good, "dense is yes, must be no; ", why);
  };
  holds(p.pass == Pass::kFprop, "only fprop is dense");
  holds(p.experts == 1, "only one expert can have all rows");
  holds(p.gather == Gather::kNo && !p.scatter, "its rows are neither gathered nor scattered");
  holds(!p.activation, "it computes no activation");
}

void check_offsets(const GroupedGemmProblem& p, const Offsets& offsets,
                   const Checks<GroupedGemmProblem>& checks) {
  if (p.dense)
    checks.absent("offsets.data", offsets.data, "the problem says dense=yes");
  else
    checks.offsets(offsets, p.experts);
}

void launch_gemm(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                 Stream stream) {
  if (!plan.problem.dense || plan.device.kind != DeviceKind::kCpu)
    return backend::launch(plan, args, workspace, stream);
  const int32_t all[] = {0, int32_t(plan.problem.rows)};
  GroupedGemmArgs known = args;
  known.offsets = {all, 1};
  backend::launch(plan, known, workspace, stream);
}

}  // namespace cadre::ops
