#include "cadre/activation.h"

#include "activations/list.h"
#include "backend/walk.h"
#include "ops/activation_checks.h"
#include "ops/problem_text.h"

namespace cadre {

std::span<const ActivationInfo> activation_list() { return activations::All::kInfo; }

const ActivationInfo& info(ActivationKind kind) { return activations::All::kInfo[size_t(kind)]; }

ActivationKind parse_activation(std::string_view word) {
  std::string known;
  for (const ActivationInfo& row : activation_list()) {
    if (word == row.name) return row.kind;
    known += text(known.empty() ? "" : ", ", row.name);
  }
  throw InvalidArgument(text("activation: name is '", word, "', must be one of ", known));
}

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const ActivationProblem usual;
  ops::direction(io, p.backward);
  io.word("activation", p.kind);
  io.always("R", p.rows);
  io.always("F", p.features);
  io.always("E", p.experts);
  io.unless("layout", p.layout, usual.layout);
  io.always("z", p.z);
  io.always("h", p.h);
  io.unless("limit", p.constants.limit, usual.constants.limit);
  io.unless("alpha", p.constants.alpha, usual.constants.alpha);
  io.unless("offset", p.constants.offset, usual.constants.offset);
  io.unless("prob", p.prob, usual.prob);
  io.unless("tail", p.tail, usual.tail);
}

std::string to_string(const ActivationProblem& p) { return ops::write_problem("activation", p); }

ActivationProblem parse_activation_problem(std::string_view words) {
  return ops::read_problem<ActivationProblem>("activation", words);
}

namespace {

void check(const ActivationProblem& p) {
  const ops::Checks checks("activation", p);
  checks.at_least("R", p.rows, 0);
  checks.fits_int32("R", p.rows);
  checks.at_least("F", p.features, 1);
  checks.experts(p.experts);
  checks.countable("R * F", {p.rows, p.features});
  checks.plain_float("z", p.z);
  checks.plain_float("h", p.h);
  ops::check_activation(checks, {p.kind, p.constants, p.layout, p.features});
}

void check(const ActivationProblem& p, const ActivationArgs& args) {
  const ops::Checks checks("activation", p);
  const bool gated = info(p.kind).gated;
  const int64_t columns = gated ? 2 * p.features : p.features;
  const char* why = gated ? "gate and up of every feature" : "one column a feature";
  checks.view("z", args.z, p.z, {p.rows, columns}, why);
  checks.offsets(args.offsets, p.experts);
  if (p.prob) {
    checks.present("prob", args.prob, p.rows, "the problem says prob=yes");
  } else {
    checks.absent("prob", args.prob, "the problem says prob=no");
    checks.absent("dprob", args.dprob, "the problem says prob=no");
  }
  if (!p.backward || args.h) checks.view("h", args.h, p.h, {p.rows, p.features});
  if (p.backward) {
    checks.view("dh", args.dh, p.h, {p.rows, p.features});
    checks.view("dz", args.dz, p.z, {p.rows, columns}, why);
    checks.aligned("dprob", args.dprob, alignof(float));
  } else {
    checks.absent("dh", args.dh, "only backward reads it");
    checks.absent("dz", args.dz, "only backward writes it");
    checks.absent("dprob", args.dprob, "only backward writes it");
  }
}

}  // namespace

ActivationPlan plan(const ActivationProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  return backend::choose(problem, device, only);
}

void run(const ActivationPlan& plan, const ActivationArgs& args, Workspace workspace,
         Stream stream) {
  check(plan.problem, args);
  backend::launch(plan, args, workspace, stream);
}

}  // namespace cadre
