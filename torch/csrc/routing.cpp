#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "arguments.h"
#include "autograd.h"
#include "call_memory.h"
#include "words.h"

// torch.ops.cadre.routing and its gradient: docs/ops/routing.md.
namespace cadre::door {
namespace {

using RoutingOutputs = std::tuple<Tensor, Tensor, Tensor>;  ///< experts, prob, scores

using RoutingOp = RoutingOutputs(const Tensor&, int64_t, c10::string_view, bool, double,
                                 const Maybe&, int64_t, int64_t);
using RoutingBackwardOp = Tensor(const Tensor&, const Tensor&, const Maybe&, const Maybe&, int64_t,
                                 c10::string_view, bool, double, int64_t, int64_t);

/// How experts are chosen, as the schemas spell it.
struct RoutingRule {
  int64_t top_k;
  c10::string_view score;
  bool normalize;
  double scale;
  int64_t groups, group_top_k;
};

RoutingProblem problem_of(const Tensor& logits, const RoutingRule& rule) {
  TORCH_CHECK_VALUE(logits.dim() == 2, "logits has shape ", logits.sizes(), ", must be [T, E]");
  TORCH_CHECK_VALUE(rule.top_k >= 1, "top_k is ", rule.top_k, ", must be 1 or more");
  RoutingProblem p = translate_errors([&] {
    return parse_routing_problem(text("routing forward ", rule.score, " T=1 E=1 top_k=1"));
  });
  require_names("score", rule.score, {});
  p.tokens = logits.size(0);
  p.experts = int(logits.size(1));
  p.top_k = int_of(rule.top_k, "top_k");
  p.logits = float_type(logits.scalar_type(), "logits");
  p.normalize = rule.normalize;
  p.scale = float(rule.scale);
  p.groups = int_of(rule.groups, "groups");
  p.group_top_k = int_of(rule.group_top_k, "group_top_k");
  return p;
}

void route_to(const Tensor& logits, const RoutingRule& rule, const Maybe& expert_bias,
              const RoutingOutputs& out) {
  auto p = problem_of(logits, rule);
  p.expert_bias = expert_bias.has_value();
  const auto& [experts, prob, scores] = out;
  const int64_t choices[] = {p.tokens, p.top_k};
  const Tensor dense = with_rows(logits, "logits");
  const Tensor bias = read_floats(expert_bias, {"expert_bias", {p.experts}, dense});
  RoutingArgs args{.logits = view(dense, "logits"), .expert_bias = floats(bias, "expert_bias")};
  args.experts = written_ints(experts, {"experts", choices, dense});
  args.prob = written_floats(prob, {"prob", choices, dense});
  args.scores = written_floats(scores, {"scores", dense.sizes(), dense});
  launch(p, args, dense);
}

/// The experts that forward chose, and the gradients of its other outputs.
struct RoutingBackwardInputs {
  const Tensor& experts;
  const Maybe& dprob;
  const Maybe& dscores;
};

void route_backward_to(const Tensor& logits, const RoutingRule& rule,
                       const RoutingBackwardInputs& in, const Tensor& dlogits) {
  auto p = problem_of(logits, rule);
  p.backward = true;
  const int64_t choices[] = {p.tokens, p.top_k};
  const Tensor dense = with_rows(logits, "logits");
  const Tensor experts = read_ints(in.experts, {"experts", choices, dense});
  const Tensor none = in.dprob ? Tensor() : at::zeros(choices, experts.options().dtype(at::kFloat));
  const Tensor dprob = read_floats(in.dprob.value_or(none), {"dprob", choices, dense});
  const Tensor dscores = read_floats(in.dscores, {"dscores", dense.sizes(), dense});
  require_same_device(dense, dlogits, "dlogits");
  RoutingArgs args{.logits = view(dense, "logits"), .experts = ints(experts, "experts")};
  args.dprob = floats(dprob, "dprob");
  args.dscores = floats(dscores, "dscores");
  args.dlogits = view(dlogits, "dlogits");
  launch(p, args, dense);
}

RoutingOutputs route(const Tensor& logits, const RoutingRule& rule, const Maybe& expert_bias) {
  const auto p = problem_of(logits, rule);
  const auto options = logits.options();
  const RoutingOutputs out{at::empty({p.tokens, p.top_k}, options.dtype(at::kInt)),
                           at::empty({p.tokens, p.top_k}, options.dtype(at::kFloat)),
                           at::empty(logits.sizes(), options.dtype(at::kFloat))};
  route_to(logits, rule, expert_bias, out);
  return out;
}

struct Routing : torch::autograd::Function<Routing> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Maybe& expert_bias,
                               const RoutingRule& rule) {
    static const auto call = op<RoutingOp>("cadre::routing");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [experts, prob, scores] =
        call.call(logits, rule.top_k, rule.score, rule.normalize, rule.scale, expert_bias,
                  rule.groups, rule.group_top_k);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({logits, experts});
    ctx->saved_data["top_k"] = rule.top_k;
    ctx->saved_data["score"] = std::string(rule.score);
    ctx->saved_data["normalize"] = rule.normalize;
    ctx->saved_data["scale"] = rule.scale;
    ctx->saved_data["groups"] = rule.groups;
    ctx->saved_data["group_top_k"] = rule.group_top_k;
    return {experts, prob, scores};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call = op<RoutingBackwardOp>("cadre::routing_backward");
    if (!grads[1].defined() && !grads[2].defined()) return {Tensor(), Tensor(), Tensor()};
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const auto maybe = [](const Tensor& t) { return t.defined() ? Maybe(t) : std::nullopt; };
    Tensor dlogits =
        call.call(saved[0], saved[1], maybe(grads[1]), maybe(grads[2]), data["top_k"].toInt(),
                  data["score"].toStringView(), data["normalize"].toBool(),
                  data["scale"].toDouble(), data["groups"].toInt(), data["group_top_k"].toInt());
    return {dlogits, Tensor(), Tensor()};
  }
};

void implement_forward(torch::Library& m) {
  m.impl("routing",
         [](const Tensor& logits, int64_t top_k, c10::string_view score, bool normalize,
            double scale, const Maybe& expert_bias, int64_t groups, int64_t group_top_k) {
           return route(logits, {top_k, score, normalize, scale, groups, group_top_k}, expert_bias);
         });
  implement_out(
      m, "routing",
      +[](const Tensor& logits, int64_t top_k, c10::string_view score, bool normalize, double scale,
          const Maybe& expert_bias, int64_t groups, int64_t group_top_k, const Tensor& experts,
          const Tensor& prob, const Tensor& scores) {
        const RoutingOutputs out{written(experts, "experts", logits), written(prob, "prob", logits),
                                 written(scores, "scores", logits)};
        route_to(logits, {top_k, score, normalize, scale, groups, group_top_k}, expert_bias, out);
      });
}

void implement_backward(torch::Library& m) {
  m.impl("routing_backward", [](const Tensor& logits, const Tensor& experts, const Maybe& dprob,
                                const Maybe& dscores, int64_t top_k, c10::string_view score,
                                bool normalize, double scale, int64_t groups, int64_t group_top_k) {
    Tensor dlogits = at::empty(logits.sizes(), logits.options());
    route_backward_to(logits, {top_k, score, normalize, scale, groups, group_top_k},
                      {experts, dprob, dscores}, dlogits);
    return dlogits;
  });
  implement_out(
      m, "routing_backward",
      +[](const Tensor& logits, const Tensor& experts, const Maybe& dprob, const Maybe& dscores,
          int64_t top_k, c10::string_view score, bool normalize, double scale, int64_t groups,
          int64_t group_top_k, const Tensor& dlogits) {
        route_backward_to(logits, {top_k, score, normalize, scale, groups, group_top_k},
                          {experts, dprob, dscores}, written_like(dlogits, "dlogits", logits));
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "routing(Tensor logits, int top_k, str score='softmax', bool normalize=False, float "
      "scale=1.0, Tensor? expert_bias=None, int groups=1, int group_top_k=1) -> (Tensor experts, "
      "Tensor prob, Tensor scores)");
  m.def(
      "routing.out(Tensor logits, int top_k, str score='softmax', bool normalize=False, float "
      "scale=1.0, Tensor? expert_bias=None, int groups=1, int group_top_k=1, *, Tensor(a!) "
      "experts, "
      "Tensor(b!) prob, Tensor(c!) scores) -> ()");
  m.def(
      "routing_backward(Tensor logits, Tensor experts, Tensor? dprob, Tensor? dscores, int top_k, "
      "str score='softmax', bool normalize=False, float scale=1.0, int groups=1, int "
      "group_top_k=1) -> Tensor");
  m.def(
      "routing_backward.out(Tensor logits, Tensor experts, Tensor? dprob, Tensor? dscores, int "
      "top_k, str score='softmax', bool normalize=False, float scale=1.0, int groups=1, int "
      "group_top_k=1, *, Tensor(a!) dlogits) -> ()");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) {
  implement_forward(m);
  implement_backward(m);
}
TORCH_LIBRARY_IMPL(cadre, CUDA, m) {
  implement_forward(m);
  implement_backward(m);
}
TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("routing_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("routing",
         [](const Tensor& logits, int64_t top_k, c10::string_view score, bool normalize,
            double scale, const Maybe& expert_bias, int64_t groups, int64_t group_top_k) {
           const RoutingRule rule{top_k, score, normalize, scale, groups, group_top_k};
           const auto out = Routing::apply(logits, expert_bias, rule);
           return RoutingOutputs{out[0], out[1], out[2]};
         });
}

}  // namespace cadre::door
