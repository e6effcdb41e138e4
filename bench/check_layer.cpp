#include "bench/check_layer.h"

#include "bench/layer_case.h"
#include "bench/mirror.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

template <class AnyPlan, class Args>
void run_step(const AnyPlan& chosen, const Args& args, Workspace workspace, Stream stream) {
  forward(chosen, args, workspace, stream);
  if (!learns(chosen)) return;
  backward(chosen, args, workspace, stream);
  if (defers(chosen.problem)) wgrad(chosen, args, workspace, stream);
}

template <class AnyPlan, class Args>
void run_steps(const AnyPlan& chosen, Args args, Workspace workspace, Stream stream) {
  run_step(chosen, args, workspace, stream);
  if (chosen.memory.weight_cache_bytes == 0) return;
  args.refresh_weights = false;
  run_step(chosen, args, workspace, stream);
}

template <class AnyCase>
void run_case(AnyCase& c, Accelerator* accelerator) {
  if (accelerator == nullptr) return run_steps(c.plan, c.args, c.workspace, {});
  const Mirror mirror(*c.buffers, *accelerator);
  run_steps(c.plan, moved(mirror, c), mirror.moved(c.workspace), accelerator->stream());
  mirror.fetch();
}

template <class Problem>
CheckReport check_problem(const Problem& problem, const Draw& draw, const Device& device) {
  const auto accelerator = open_accelerator(device);
  CheckReport report{.problem = to_string(problem)};
  for (const bool is_first : {true, false}) {
    auto c = make_layer_case(problem, device, draw);
    run_case(c, accelerator.get());
    Digest digest;
    for (const Output& out : c.outputs) digest.add(out);
    if (is_first) report.digest = digest;
    report.plan = c.plan.name;
    if (!c.buffers->canaries_live())
      report.fault = "memory beside a buffer was written";
    else if (c.plan.exact && digest != report.digest)
      report.fault = "a second run has other bits";
  }
  return report;
}

}  // namespace

CheckReport check_layer(std::string_view problem, const Draw& draw, const Device& device) {
  return visit_layer(problem, [&](const auto& p) { return check_problem(p, draw, device); });
}

}  // namespace cadre::bench
