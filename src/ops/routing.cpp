#include "cadre/routing.h"

#include <cmath>

#include "backend/walk.h"
#include "ops/checks.h"
#include "ops/problem_text.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const RoutingProblem usual;
  ops::direction(io, p.backward);
  io.word("score", p.score);
  io.always("T", p.tokens);
  io.always("E", p.experts);
  io.always("top_k", p.top_k);
  io.always("logits", p.logits);
  io.unless("normalize", p.normalize, usual.normalize);
  io.unless("scale", p.scale, usual.scale);
  io.unless("expert_bias", p.expert_bias, usual.expert_bias);
  io.unless("groups", p.groups, usual.groups);
  io.unless("group_top_k", p.group_top_k, usual.group_top_k);
  io.unless("map", p.map, usual.map);
  io.unless("row_prob", p.row_prob, usual.row_prob);
}

std::string to_string(const RoutingProblem& p) { return ops::write_problem("routing", p); }

RoutingProblem parse_routing_problem(std::string_view words) {
  return ops::read_problem<RoutingProblem>("routing", words);
}

namespace {

void check_groups(const RoutingProblem& p, const ops::Checks<RoutingProblem>& checks) {
  checks.at_least("groups", p.groups, 1);
  checks.holds(p.experts % p.groups == 0, "groups is ", p.groups, ", must divide E, ", p.experts,
               "; groups are equal");
  checks.at_least("group_top_k", p.group_top_k, 1);
  checks.holds(p.group_top_k <= p.groups, "group_top_k is ", p.group_top_k,
               ", must be at most groups, ", p.groups);
  const int64_t group = p.experts / p.groups;
  checks.holds(p.top_k <= p.group_top_k * group, "top_k is ", p.top_k, ", must be at most ",
               p.group_top_k * group, "; that many experts are in group_top_k groups");
}

void check(const RoutingProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("routing", p);
  checks.at_least("T", p.tokens, 0);
  checks.fits_int32("T", p.tokens);
  checks.experts(p.experts);
  checks.at_least("top_k", p.top_k, 1);
  checks.holds(p.top_k <= p.experts, "top_k is ", p.top_k, ", must be at most E, ", p.experts);
  checks.fits_int32("T * top_k", p.tokens * p.top_k);
  checks.countable("T * E", {p.tokens, p.experts});
  checks.plain_float("logits", p.logits);
  checks.holds(std::isfinite(p.scale), "scale is ", p.scale, ", must be finite");
  check_groups(p, checks);
  checks.holds(!p.backward || !p.map, "map is yes, must be no; only forward chooses");
  checks.holds(p.map || !p.row_prob, "row_prob is yes, must be no; the problem says map=no");
}

void check_map(const RoutingProblem& p, const RoutingArgs& args) {
  const ops::Checks checks("routing", p);
  if (p.row_prob)
    checks.present("row_prob", args.row_prob, p.tokens * p.top_k, "the problem says row_prob=yes");
  else
    checks.absent("row_prob", args.row_prob, "the problem says row_prob=no");
  if (p.map) {
    checks.present("offsets", args.offsets, int64_t(p.experts) + 1, "the problem says map=yes");
    checks.aligned("map.row_of", args.map.row_of, alignof(int32_t));
    checks.aligned("map.slot_of", args.map.slot_of, alignof(int32_t));
    return;
  }
  checks.absent("offsets", args.offsets, "the problem says map=no");
  checks.absent("map.row_of", args.map.row_of, "the problem says map=no");
  checks.absent("map.slot_of", args.map.slot_of, "the problem says map=no");
}

void check_forward(const RoutingProblem& p, const RoutingArgs& args) {
  const ops::Checks checks("routing", p);
  checks.present("experts", args.experts, p.tokens * p.top_k);
  checks.present("prob", args.prob, p.tokens * p.top_k);
  checks.aligned("scores", args.scores, alignof(float));
  if (p.expert_bias)
    checks.present("expert_bias", args.expert_bias, p.experts, "the problem says expert_bias=yes");
  else
    checks.absent("expert_bias", args.expert_bias, "the problem says expert_bias=no");
  checks.absent("dprob", args.dprob, "only backward reads it");
  checks.absent("dscores", args.dscores, "only backward reads it");
  checks.absent("dlogits", args.dlogits, "only backward writes it");
}

void check_backward(const RoutingProblem& p, const RoutingArgs& args) {
  const ops::Checks checks("routing", p);
  checks.present("experts", args.experts, p.tokens * p.top_k, "forward chose them");
  checks.present("dprob", args.dprob, p.tokens * p.top_k);
  checks.aligned("dscores", args.dscores, alignof(float));
  checks.view("dlogits", args.dlogits, p.logits, {p.tokens, p.experts});
  checks.absent("expert_bias", args.expert_bias, "the bias has no gradient");
  checks.absent("prob", args.prob, "only forward writes it");
  checks.absent("scores", args.scores, "only forward writes it");
}

}  // namespace

RoutingPlan plan(const RoutingProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  return backend::choose(problem, device, only);
}

void run(const RoutingPlan& plan, const RoutingArgs& args, Workspace workspace, Stream stream) {
  const RoutingProblem& p = plan.problem;
  ops::Checks("routing", p).view("logits", args.logits, p.logits, {p.tokens, p.experts});
  check_map(p, args);
  p.backward ? check_backward(p, args) : check_forward(p, args);
  backend::launch(plan, args, workspace, stream);
}

}  // namespace cadre
