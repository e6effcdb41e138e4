#include "cadre/dequantize.h"

#include "backend/walk.h"
#include "ops/problem_text.h"
#include "ops/quantized_checks.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  io.word("kind", p.source.kind);
  io.always(p.source.kind == RowsKind::kRagged ? "R" : "N", p.source.rows);
  io.always(p.source.kind == RowsKind::kRagged ? "C" : "K", p.source.cols);
  io.always("E", p.source.experts);
  io.always("format", p.source.format);
  io.always("axis", p.source.axis);
  io.always("out", p.out);
  io.unless("codes_major", p.source.codes_major, Major::kRow);
  io.unless("scales_major", p.source.scales_major, Major::kRow);
  io.unless("decoded", p.decoded, false);
}

std::string to_string(const DequantizeProblem& p) { return ops::write_problem("dequantize", p); }

DequantizeProblem parse_dequantize_problem(std::string_view words) {
  return ops::read_problem<DequantizeProblem>("dequantize", words);
}

namespace {

/// Of the same values as the source.
QuantizedShape decoded_copy(const DequantizeProblem& p) {
  QuantizedShape s = p.source;
  s.codes_major = s.scales_major = Major::kRow;
  s.decoded = p.decoded;
  return s;
}

void check(const DequantizeProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("dequantize", p);
  ops::check_quantized(checks, {"format", "codes_major", "scales_major"}, p.source);
  checks.holds(!p.source.decoded,
               "source.decoded is yes, must be no; what is decoded has no codes");
  checks.plain_float("out", p.out);
  ops::check_decoded(checks, "decoded", decoded_copy(p));
}

void check(const DequantizeProblem& p, const DequantizeArgs& args) {
  const ops::Checks checks("dequantize", p);
  static constexpr ops::PartNames kParts{"source.codes", "source.scales", "source.expert_scale",
                                         "source.block_offsets"};
  ops::check_parts(checks, kParts, p.source, args.source);
  ops::check_offsets(checks, p.source, args.offsets);
  TensorView want = quantized_view(p.source, nullptr).codes;
  want.dtype = p.out;
  ops::check_view(checks, "out", args.out, want, Major::kRow);
  ops::check_block_offsets(checks, "block_offsets", decoded_copy(p), args.block_offsets);
}

}  // namespace

DequantizePlan plan(const DequantizeProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  return backend::choose(problem, device, only);
}

void run(const DequantizePlan& plan, const DequantizeArgs& args, Workspace workspace,
         Stream stream) {
  check(plan.problem, args);
  backend::launch(plan, args, workspace, stream);
}

}  // namespace cadre
