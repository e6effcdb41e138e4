#include "cadre/permute.h"

#include "backend/walk.h"
#include "ops/checks.h"
#include "ops/moved_codes.h"
#include "ops/problem_text.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const PermuteProblem usual;
  io.word("pass", p.pass);
  io.always("T", p.tokens);
  io.always("top_k", p.top_k);
  io.always("R", p.rows);
  io.always("H", p.hidden);
  io.always("E", p.experts);
  io.always("dtype", p.dtype);
  io.unless("ranks", p.ranks, usual.ranks);
  io.unless("prob", p.prob, usual.prob);
  io.unless("addend", p.addend, usual.addend);
  io.unless("tail", p.tail, usual.tail);
  io.unless("format", p.format, usual.format);
  io.unless("scales_major", p.scales_major, usual.scales_major);
}

std::string to_string(const PermuteProblem& p) { return ops::write_problem("permute", p); }

PermuteProblem parse_permute_problem(std::string_view words) {
  return ops::read_problem<PermuteProblem>("permute", words);
}

namespace {

/// Slots and rows that the map names.
int64_t slots(const PermuteProblem& p) {
  return (reads_tokens(p.pass) ? p.ranks : 1) * p.tokens * p.top_k;
}
int64_t rows_read(const PermuteProblem& p) { return p.ranks * p.rows; }

void check_ranks(const PermuteProblem& p, const ops::Checks<PermuteProblem>& checks) {
  checks.at_least("ranks", p.ranks, 1);
  if (p.ranks == 1) return;
  checks.holds(p.ranks < (1 << 15), "ranks is ", p.ranks, ", must be below 2^15");
  checks.fits_int32("ranks * T * top_k", p.ranks * p.tokens * p.top_k);
  checks.fits_int32("ranks * R", p.ranks * p.rows);
  checks.holds(!p.prob || p.pass != PermutePass::kCombineBackward,
               "prob is yes, must be no; combine backward of several ranks has no probabilities");
}

void check(const PermuteProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("permute", p);
  checks.at_least("T", p.tokens, 0);
  checks.fits_int32("T", p.tokens);
  checks.at_least("top_k", p.top_k, 1);
  checks.fits_int32("T * top_k", p.tokens * p.top_k);
  checks.at_least("R", p.rows, 0);
  checks.fits_int32("R", p.rows);
  checks.at_least("H", p.hidden, 1);
  if (p.experts != 0 || reads_tokens(p.pass)) checks.experts(p.experts);
  checks.holds(!p.addend || !reads_tokens(p.pass),
               "addend is yes, must be no; only combine and permute_backward write sums");
  check_ranks(p, checks);
  ops::check_moved_format(checks, "format", p.format, p.scales_major, p.hidden);
  checks.holds(!p.format || p.pass == PermutePass::kPermute, "format is given, must be left out; ",
               "only permute moves rows as they are stored");
  checks.countable("T * H", {p.tokens, p.hidden});
  checks.countable("R * H", {p.rows, p.hidden});
  checks.plain_float("dtype", p.dtype);
}

void check_probabilities(const PermuteProblem& p, const PermuteArgs& args) {
  const ops::Checks checks("permute", p);
  const auto array = [&](const char* what, const float* pointer, bool wanted, int64_t count) {
    if (wanted && p.prob) return checks.present(what, pointer, count, "the problem says prob=yes");
    checks.absent(what, pointer,
                  p.prob ? "this pass has no use for it" : "the problem says prob=no");
  };
  array("prob", args.prob, p.pass != PermutePass::kPermuteBackward, slots(p));
  array("row_prob", args.row_prob, p.pass == PermutePass::kPermute, p.rows);
  array("drow_prob", args.drow_prob, p.pass == PermutePass::kPermuteBackward, rows_read(p));
  const bool scaled = p.pass == PermutePass::kPermuteBackward && args.drow_scale != nullptr;
  array("drow_scale", args.drow_scale, scaled, rows_read(p));
  if (p.pass != PermutePass::kCombineBackward || !p.prob) {
    checks.absent("y", args.y, "only combine backward with prob=yes reads it");
    return array("dprob", args.dprob, p.pass == PermutePass::kPermuteBackward, slots(p));
  }
  checks.aligned("dprob", args.dprob, alignof(float));
  if (args.dprob != nullptr)
    checks.view("y", args.y, p.dtype, {p.rows, p.hidden}, "dprob is made from it");
  else
    checks.absent("y", args.y, "dprob is null, and nothing else is made from it");
}

void check_scales(const PermuteProblem& p, const PermuteArgs& args) {
  const ops::Checks checks("permute", p);
  if (!p.format) {
    checks.absent("token_scales", args.token_scales, "the problem has no format");
    return checks.absent("row_scales", args.row_scales, "the problem has no format");
  }
  const DType dtype = info(p.format->kind).scale;
  const int64_t columns = ops::scales_of_row(*p.format, p.hidden);
  if (p.ranks == 1)
    checks.view("token_scales", args.token_scales, dtype, {p.tokens, columns});
  else
    checks.view("token_scales", args.token_scales, dtype, {p.ranks, p.tokens, columns});
  if (p.scales_major == Major::kRow)
    checks.view("row_scales", args.row_scales, dtype, {p.rows, columns});
  else
    checks.column_view("row_scales", args.row_scales, dtype, {p.rows, columns});
  ops::check_even(checks, "tokens", args.tokens);
  ops::check_even(checks, "rows", args.rows);
  ops::check_even(checks, "token_scales", args.token_scales);
  ops::check_even(checks, "row_scales", args.row_scales);
}

void check(const PermuteProblem& p, const PermuteArgs& args) {
  const ops::Checks checks("permute", p);
  const bool by_row = reads_tokens(p.pass);
  const DType dtype = ops::moved_dtype(p.format, p.dtype);
  const auto matrix = [&](const char* what, const TensorView& v, int64_t count, bool is_read) {
    if (p.ranks == 1 || !is_read) return checks.view(what, v, dtype, {count, p.hidden});
    checks.view(what, v, dtype, {p.ranks, count, p.hidden});
  };
  matrix("tokens", args.tokens, p.tokens, by_row);
  matrix("rows", args.rows, p.rows, !by_row);
  if (p.addend)
    checks.view("addend", args.addend, p.dtype, {p.tokens, p.hidden},
                "the problem says addend=yes");
  else
    checks.absent("addend", args.addend, "the problem says addend=no");
  if (p.experts > 0 && (p.ranks == 1 || by_row))
    checks.offsets(args.offsets, p.experts);
  else
    checks.absent("offsets.data", args.offsets.data,
                  "rows of several ranks, or of E=0, have no tail");
  check_probabilities(p, args);
  check_scales(p, args);
  if (by_row) checks.present("map.slot_of", args.map.slot_of, p.rows, "offsets of routing make it");
  checks.aligned("map.row_of", args.map.row_of, alignof(int32_t));
  if (!by_row || args.dprob != nullptr)
    checks.present("map.row_of", args.map.row_of, slots(p), "offsets of routing make it");
}

}  // namespace

PermutePlan plan(const PermuteProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  return backend::choose(problem, device, only);
}

void run(const PermutePlan& plan, const PermuteArgs& args, Workspace workspace, Stream stream) {
  check(plan.problem, args);
  backend::launch(plan, args, workspace, stream);
}

}  // namespace cadre
