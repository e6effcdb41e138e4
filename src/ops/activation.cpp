#include "cadre/activation.h"

#include "activations/list.h"
#include "backend/walk.h"
#include "ops/activation_checks.h"
#include "ops/amax_eps.h"
#include "ops/problem_text.h"
#include "ops/quantized_checks.h"

namespace cadre {

std::span<const ActivationInfo> activation_list() { return activations::All::kInfo; }

const ActivationInfo& info(ActivationKind kind) {
  constexpr auto& kInfo = activations::All::kInfo;
  require(size_t(kind) < kInfo.size(), "activation: kind is ", int(kind), ", must be 0 to ",
          kInfo.size() - 1);
  return kInfo[size_t(kind)];
}

int64_t z_columns(ActivationKind kind, int64_t features) {
  return info(kind).gated ? 2 * std::min(features, INT64_MAX / 2) : features;
}

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
  ops::constant_fields(io, p.kind, p.constants);
  io.unless("prob", p.prob, usual.prob);
  io.unless("tail", p.tail, usual.tail);
  io.unless("along_k", p.along_k, usual.along_k);
  io.unless("along_k_scales_major", p.along_k_scales_major, usual.along_k_scales_major);
  io.unless("amax_eps", p.amax_eps, usual.amax_eps);
  io.unless("plain", p.plain, usual.plain);
}

static int64_t columns_of_z(const ActivationProblem& p) { return z_columns(p.kind, p.features); }
static const char* why_columns(const ActivationProblem& p) {
  return info(p.kind).gated ? "gate and up of every feature" : "one column a feature";
}

QuantizedShape copy_shape(const ActivationProblem& p) {
  return {.kind = RowsKind::kRagged,
          .rows = p.rows,
          .cols = p.backward ? columns_of_z(p) : p.features,
          .experts = p.experts,
          .format = *p.along_k,
          .axis = Axis::kAlongK,
          .scales_major = p.along_k_scales_major};
}

std::string to_string(const ActivationProblem& p) { return ops::write_problem("activation", p); }

ActivationProblem parse_activation_problem(std::string_view words) {
  return ops::read_problem<ActivationProblem>("activation", words);
}

namespace {

void check_along_k(const ops::Checks<ActivationProblem>& checks, const ActivationProblem& p) {
  checks.holds(p.amax_eps >= 0 && std::isfinite(p.amax_eps), "amax_eps is ", p.amax_eps,
               ", must be finite and 0 or more");
  if (!p.along_k) {
    checks.holds(p.along_k_scales_major == Major::kRow,
                 "along_k_scales_major is column, must be row; no copy along K is wanted");
    checks.holds(p.amax_eps == 0, "amax_eps is ", p.amax_eps,
                 ", must be 0; no copy along K is wanted");
    checks.holds(!p.plain, "plain is yes, must be no; without along_k nothing else is written");
    return;
  }
  checks.holds(p.amax_eps == 0 || ops::hears_amax_eps(p.along_k), "amax_eps is ", p.amax_eps,
               ops::kAmaxEpsUnheard);
  ops::check_quantized(checks, {"along_k", "", "along_k_scales_major"}, copy_shape(p));
  std::string known;
  for (const FormatInfo& row : format_list())
    if (ops::has_row_scales(row)) known += text(known.empty() ? "" : ", ", row.name);
  checks.holds(ops::has_row_scales(*p.along_k), "along_k is ", to_string(*p.along_k),
               ", must be one of ", known,
               " without 2d and sr; other scales need more than a block of a row, and a quantise "
               "behind the activation");
}

void check(const ActivationProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("activation", p);
  checks.at_least("R", p.rows, 0);
  checks.fits_int32("R", p.rows);
  checks.at_least("F", p.features, 1);
  checks.experts(p.experts);
  checks.countable("R * F", {p.rows, p.features});
  checks.plain_float("z", p.z);
  checks.plain_float("h", p.h);
  ops::check_activation(checks, {p.kind, p.constants, p.layout, p.features});
  check_along_k(checks, p);
}

/// h of forward, or dz: as it is, as codes, or as both.
void check_result(const ops::Checks<ActivationProblem>& checks, const ActivationProblem& p,
                  const ActivationArgs& args) {
  const std::string_view name = p.backward ? "dz" : "h";
  const TensorView& result = p.backward ? args.dz : args.h;
  if (p.along_k && !p.plain)
    checks.absent(name, result, "the problem says plain=no");
  else if (p.backward)
    checks.view(name, result, p.z, {p.rows, columns_of_z(p)}, why_columns(p));
  else
    checks.view(name, result, p.h, {p.rows, p.features});
  if (p.along_k)
    ops::check_parts(checks, ops::kPartsAlongK, copy_shape(p), args.along_k);
  else
    checks.absent("along_k.codes", args.along_k.codes, "no copy along K is wanted");
}

void check(const ActivationProblem& p, const ActivationArgs& args) {
  const ops::Checks checks("activation", p);
  checks.view("z", args.z, p.z, {p.rows, columns_of_z(p)}, why_columns(p));
  checks.offsets(args.offsets, p.experts);
  if (p.prob) {
    checks.present("prob", args.prob, p.rows, "the problem says prob=yes");
  } else {
    checks.absent("prob", args.prob, "the problem says prob=no");
    checks.absent("dprob", args.dprob, "the problem says prob=no");
  }
  if (p.backward) {
    if (args.h) checks.view("h", args.h, p.h, {p.rows, p.features});
    checks.view("dh", args.dh, p.h, {p.rows, p.features});
    check_result(checks, p, args);
    checks.aligned("dprob", args.dprob, alignof(float));
  } else {
    check_result(checks, p, args);
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
