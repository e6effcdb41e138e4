#include "cadre/quantize.h"

#include <cmath>

#include "backend/walk.h"
#include "ops/amax_eps.h"
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
  io.unless("gather", p.gather, false);
  io.unless("T", p.tokens, int64_t{0});
  io.unless("top_k", p.top_k, 1);
  io.unless("along_k_scales_major", p.along_k_scales_major, Major::kRow);
  io.unless("along_rows_codes_major", p.along_rows_codes_major, Major::kRow);
  io.unless("along_rows_scales_major", p.along_rows_scales_major, Major::kRow);
  io.unless("along_k_decoded", p.along_k_decoded, false);
  io.unless("along_rows_decoded", p.along_rows_decoded, false);
}

QuantizedShape copy_shape(const QuantizeProblem& p, Axis axis) {
  QuantizedShape s{.kind = p.kind, .rows = p.rows, .cols = p.cols, .experts = p.experts};
  const bool along_k = axis == Axis::kAlongK;
  s.format = along_k ? *p.along_k : *p.along_rows;
  s.axis = axis;
  s.codes_major = along_k ? Major::kRow : p.along_rows_codes_major;
  s.scales_major = along_k ? p.along_k_scales_major : p.along_rows_scales_major;
  s.decoded = along_k ? p.along_k_decoded : p.along_rows_decoded;
  return s;
}

std::string to_string(const QuantizeProblem& p) { return ops::write_problem("quantize", p); }

QuantizeProblem parse_quantize_problem(std::string_view words) {
  return ops::read_problem<QuantizeProblem>("quantize", words);
}

namespace {

using ops::CopyNames;

constexpr CopyNames kCopyAlongK{"along_k", "along_k_codes_major", "along_k_scales_major",
                                "along_k_decoded"};
constexpr CopyNames kCopyAlongRows{"along_rows", "along_rows_codes_major",
                                   "along_rows_scales_major", "along_rows_decoded"};
constexpr ops::PartNames kPartsAlongRows{"along_rows.codes", "along_rows.scales",
                                         "along_rows.expert_scale", "along_rows.block_offsets"};

/// Calls `work(names, shape, view)` for the copies that are wanted.
template <class Work>
void for_each_copy(const QuantizeProblem& p, const QuantizeArgs& args, Work&& work) {
  if (p.along_k) work(kCopyAlongK, copy_shape(p, Axis::kAlongK), args.along_k);
  if (p.along_rows) work(kCopyAlongRows, copy_shape(p, Axis::kAlongRows), args.along_rows);
}

/// What is said of a copy that is not wanted.
void check_absent(const ops::Checks<QuantizeProblem>& checks, const QuantizeProblem& p) {
  const auto row = [&](bool wanted, std::string_view field, Major major, std::string_view axis) {
    checks.holds(wanted || major == Major::kRow, field, " is column, must be row; no copy along ",
                 axis, " is wanted");
  };
  row(p.along_k.has_value(), kCopyAlongK.scales_major, p.along_k_scales_major, "K");
  row(p.along_rows.has_value(), kCopyAlongRows.codes_major, p.along_rows_codes_major, "rows");
  row(p.along_rows.has_value(), kCopyAlongRows.scales_major, p.along_rows_scales_major, "rows");
  const auto decoded = [&](bool good, std::string_view field, std::string_view axis) {
    checks.holds(good, field, " is yes, must be no; no copy along ", axis, " is wanted");
  };
  decoded(p.along_k || !p.along_k_decoded, kCopyAlongK.decoded, "K");
  decoded(p.along_rows || !p.along_rows_decoded, kCopyAlongRows.decoded, "rows");
}

void check_gather(const ops::Checks<QuantizeProblem>& checks, const QuantizeProblem& p) {
  if (!p.gather) {
    checks.holds(p.tokens == 0, "T is ", p.tokens, ", must be 0; the problem says gather=no");
    checks.holds(p.top_k == 1, "top_k is ", p.top_k, ", must be 1; the problem says gather=no");
    return;
  }
  checks.holds(p.kind == RowsKind::kRagged,
               "gather is yes, must be no; weights are read where they lie");
  checks.at_least("T", p.tokens, 1);
  checks.fits_int32("T", p.tokens);
  checks.at_least("top_k", p.top_k, 1);
  checks.fits_int32("T * top_k", p.tokens * p.top_k);
  checks.countable("T * C", {p.tokens, p.cols});
}

void check(const QuantizeProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("quantize", p);
  checks.holds(p.along_k || p.along_rows,
               "along_k and along_rows are absent, must be given one or "
               "both; they say what to write");
  for_each_copy(p, {},
                [&](const CopyNames& names, const QuantizedShape& shape, const QuantizedView&) {
                  ops::check_quantized(checks, names, shape);
                });
  check_absent(checks, p);
  checks.plain_float("source", p.source);
  checks.holds(p.amax_eps >= 0 && std::isfinite(p.amax_eps), "amax_eps is ", p.amax_eps,
               ", must be finite and 0 or more");
  checks.holds(p.amax_eps == 0 || ops::hears_amax_eps(p), "amax_eps is ", p.amax_eps,
               ops::kAmaxEpsUnheard);
  checks.holds(!p.discrete || p.kind == RowsKind::kWeights,
               "discrete is yes, must be no; routed rows are one tensor");
  check_gather(checks, p);
}

void check_source(const ops::Checks<QuantizeProblem>& checks, const QuantizeProblem& p,
                  const QuantizeArgs& args) {
  if (p.gather)
    checks.present("slot_of", args.slot_of, p.rows, "the problem says gather=yes");
  else
    checks.absent("slot_of", args.slot_of, "the problem says gather=no");
  if (p.kind == RowsKind::kRagged) {
    checks.view("source", args.source, p.source, {p.gather ? p.tokens : p.rows, p.cols});
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
      p, args, [&](const CopyNames&, const QuantizedShape& shape, const QuantizedView& view) {
        const bool along_k = shape.axis == Axis::kAlongK;
        ops::check_parts(checks, along_k ? ops::kPartsAlongK : kPartsAlongRows, shape, view);
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
