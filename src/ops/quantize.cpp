#include "cadre/quantize.h"

#include <cmath>

#include "backend/walk.h"
#include "ops/problem_text.h"
#include "ops/quantized_checks.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  io.word("kind", p.kind);
  io.always(p.kind == RowsKind::kRagged ? "R" : "N", p.rows);
  io.always(p.kind == RowsKind::kRagged ? "C" : "K", p.cols);
  io.always("E", p.experts);
  io.always("source", p.source);
  io.unless("along_k", p.along_k, std::optional<Format>());
  io.unless("along_rows", p.along_rows, std::optional<Format>());
  io.always("role", p.role);
  io.unless("amax_eps", p.amax_eps, 0.0f);
  io.unless("discrete", p.discrete, false);
}

std::string to_string(const QuantizeProblem& p) { return ops::write_problem("quantize", p); }

QuantizeProblem parse_quantize_problem(std::string_view words) {
  return ops::read_problem<QuantizeProblem>("quantize", words);
}

namespace {

/// Calls `work(name, shape, view)` for the copies that are wanted.
template <class Work>
void for_each_copy(const QuantizeProblem& p, const QuantizeArgs& args, Work&& work) {
  const auto shape = [&](const Format& format, Axis axis) {
    return QuantizedShape{p.kind, p.rows, p.cols, p.experts, format, axis};
  };
  if (p.along_k) work("along_k", shape(*p.along_k, Axis::kAlongK), args.along_k);
  if (p.along_rows) work("along_rows", shape(*p.along_rows, Axis::kAlongRows), args.along_rows);
}

void check(const QuantizeProblem& p) {
  const ops::Checks checks("quantize", p);
  checks.holds(p.along_k || p.along_rows,
               "along_k and along_rows are absent, must be given one or "
               "both; they say what to write");
  for_each_copy(p, {},
                [&](std::string_view what, const QuantizedShape& shape, const QuantizedView&) {
                  ops::check_quantized(checks, what, shape);
                });
  checks.plain_float("source", p.source);
  checks.holds(p.amax_eps >= 0 && std::isfinite(p.amax_eps), "amax_eps is ", p.amax_eps,
               ", must be finite and 0 or more");
  checks.holds(!p.discrete || p.kind == RowsKind::kWeights,
               "discrete is yes, must be no; routed rows are one tensor");
}

void check_source(const ops::Checks<QuantizeProblem>& checks, const QuantizeProblem& p,
                  const QuantizeArgs& args) {
  if (p.kind == RowsKind::kRagged) {
    checks.view("source", args.source, p.source, {p.rows, p.cols});
    return;
  }
  TensorView source = args.source;
  if (p.discrete) {
    checks.present("discrete", args.discrete, p.experts);
    checks.absent("source", args.source, "discrete weights give shape and strides only");
    source.data = const_cast<const void**>(args.discrete);
  } else {
    checks.absent("discrete", args.discrete, "the problem's source is one tensor");
  }
  checks.view("source", source, p.source, {p.experts, p.rows, p.cols});
}

void check(const QuantizeProblem& p, const QuantizeArgs& args) {
  const ops::Checks checks("quantize", p);
  check_source(checks, p, args);
  for_each_copy(
      p, args, [&](std::string_view what, const QuantizedShape& shape, const QuantizedView& view) {
        ops::check_parts(checks, what, shape, view);
        ops::check_offsets(checks, shape, args.offsets);
        if (shape.format.stochastic)
          checks.present("rng", args.rng, 2, "stochastic rounding needs a seed and an offset");
      });
  if (!p.along_k) checks.absent("along_k.codes", args.along_k.codes, "no copy along K is wanted");
  if (!p.along_rows)
    checks.absent("along_rows.codes", args.along_rows.codes, "no copy along rows is wanted");
}

}  // namespace

QuantizePlan plan(const QuantizeProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  return backend::choose(problem, device, only);
}

void run(const QuantizePlan& plan, const QuantizeArgs& args, Workspace workspace, Stream stream) {
  check(plan.problem, args);
  backend::launch(plan, args, workspace, stream);
}

}  // namespace cadre
