#include "cadre/permute.h"

#include "backend/walk.h"
#include "ops/checks.h"
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
  io.unless("prob", p.prob, usual.prob);
  io.unless("tail", p.tail, usual.tail);
}

std::string to_string(const PermuteProblem& p) { return ops::write_problem("permute", p); }

PermuteProblem parse_permute_problem(std::string_view words) {
  return ops::read_problem<PermuteProblem>("permute", words);
}

namespace {

void check(const PermuteProblem& p) {
  const ops::Checks checks("permute", p);
  checks.at_least("T", p.tokens, 0);
  checks.fits_int32("T", p.tokens);
  checks.at_least("top_k", p.top_k, 1);
  checks.fits_int32("T * top_k", p.tokens * p.top_k);
  checks.at_least("R", p.rows, 0);
  checks.fits_int32("R", p.rows);
  checks.at_least("H", p.hidden, 1);
  checks.experts(p.experts);
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
  const int64_t slots = p.tokens * p.top_k;
  array("prob", args.prob, p.pass != PermutePass::kPermuteBackward, slots);
  array("row_prob", args.row_prob, p.pass == PermutePass::kPermute, p.rows);
  array("drow_prob", args.drow_prob, p.pass == PermutePass::kPermuteBackward, p.rows);
  const bool scaled = p.pass == PermutePass::kPermuteBackward && args.drow_scale != nullptr;
  array("drow_scale", args.drow_scale, scaled, p.rows);
  if (p.pass != PermutePass::kCombineBackward || !p.prob) {
    checks.absent("y", args.y, "only combine backward with prob=yes reads it");
    return array("dprob", args.dprob, p.pass == PermutePass::kPermuteBackward, slots);
  }
  checks.aligned("dprob", args.dprob, alignof(float));
  if (args.dprob != nullptr)
    checks.view("y", args.y, p.dtype, {p.rows, p.hidden}, "dprob is made from it");
  else
    checks.absent("y", args.y, "dprob is null, and nothing else is made from it");
}

void check(const PermuteProblem& p, const PermuteArgs& args) {
  const ops::Checks checks("permute", p);
  checks.view("tokens", args.tokens, p.dtype, {p.tokens, p.hidden});
  checks.view("rows", args.rows, p.dtype, {p.rows, p.hidden});
  checks.offsets(args.offsets, p.experts);
  check_probabilities(p, args);
  const bool by_row = p.pass == PermutePass::kPermute || p.pass == PermutePass::kCombineBackward;
  if (by_row) checks.present("map.slot_of", args.map.slot_of, p.rows, "offsets of routing make it");
  if (!by_row || args.dprob != nullptr)
    checks.present("map.row_of", args.map.row_of, p.tokens * p.top_k, "offsets of routing make it");
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
