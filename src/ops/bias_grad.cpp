#include "cadre/bias_grad.h"

#include "backend/walk.h"
#include "ops/checks.h"
#include "ops/problem_text.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const BiasGradProblem usual;
  io.always("R", p.rows);
  io.always("N", p.n);
  io.always("E", p.experts);
  io.always("dy", p.dy);
  io.always("dbias", p.dbias);
  io.unless("discrete", p.discrete, usual.discrete);
  io.unless("bias_scale", p.bias_scale, usual.bias_scale);
  io.unless("bias", p.bias, usual.bias);
  io.unless("accumulate", p.accumulate, usual.accumulate);
  io.unless("tail", p.tail, usual.tail);
}

std::string to_string(const BiasGradProblem& p) { return ops::write_problem("bias_grad", p); }

BiasGradProblem parse_bias_grad_problem(std::string_view words) {
  return ops::read_problem<BiasGradProblem>("bias_grad", words);
}

namespace {

void check(const BiasGradProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("bias_grad", p);
  checks.at_least("R", p.rows, 0);
  checks.fits_int32("R", p.rows);
  checks.at_least("N", p.n, 1);
  checks.experts(p.experts);
  checks.countable("R * N", {p.rows, p.n});
  checks.countable("E * N", {p.experts, p.n});
  checks.plain_float("dy", p.dy);
  checks.plain_float("dbias", p.dbias);
  checks.plain_float("bias", p.bias);
}

/// dbias or bias, either as one tensor or as E pointers.
void check_packed_or_discrete(const BiasGradProblem& p, std::string_view what,
                              const TensorView& packed, const void* const* discrete) {
  const ops::Checks checks("bias_grad", p);
  const bool gradient = what == "dbias";
  const char* pointers = gradient ? "discrete_dbias" : "discrete_bias";
  if (p.discrete) {
    checks.absent(what, packed, "the problem says discrete=yes; give E pointers");
    checks.present(pointers, discrete, p.experts, "the problem says discrete=yes");
  } else {
    checks.view(what, packed, gradient ? p.dbias : p.bias, {p.experts, p.n});
    checks.absent(pointers, discrete, "the problem says discrete=no; give one tensor");
  }
}

void check_scale(const BiasGradProblem& p, const BiasGradArgs& args) {
  const ops::Checks checks("bias_grad", p);
  if (p.bias_scale) {
    checks.present("bias_scale", args.bias_scale, p.rows, "the problem says bias_scale=yes");
    checks.present("dbias_scale", args.dbias_scale, p.rows, "the problem says bias_scale=yes");
    check_packed_or_discrete(p, "bias", args.bias, args.discrete_bias);
    return;
  }
  constexpr const char* kWhy = "the problem says bias_scale=no";
  checks.absent("bias_scale", args.bias_scale, kWhy);
  checks.absent("dbias_scale", args.dbias_scale, kWhy);
  checks.absent("bias", args.bias, kWhy);
  checks.absent("discrete_bias", args.discrete_bias, kWhy);
}

void check(const BiasGradProblem& p, const BiasGradArgs& args) {
  const ops::Checks checks("bias_grad", p);
  checks.view("dy", args.dy, p.dy, {p.rows, p.n});
  checks.offsets(args.offsets, p.experts);
  check_packed_or_discrete(p, "dbias", args.dbias, args.discrete_dbias);
  check_scale(p, args);
  if (p.accumulate == Accumulate::kDevice)
    checks.present("accumulate", args.accumulate, 1, "the problem says accumulate=device");
  else if (p.accumulate == Accumulate::kPerExpert)
    checks.present("accumulate", args.accumulate, p.experts,
                   "the problem says accumulate=per_expert");
  else
    checks.absent("accumulate", args.accumulate,
                  "only accumulate=device and accumulate=per_expert read it");
}

}  // namespace

BiasGradPlan plan(const BiasGradProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  return backend::choose(problem, device, only);
}

void run(const BiasGradPlan& plan, const BiasGradArgs& args, Workspace workspace, Stream stream) {
  check(plan.problem, args);
  backend::launch(plan, args, workspace, stream);
}

}  // namespace cadre
