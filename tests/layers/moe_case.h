#pragma once
#include "cadre/moe.h"
#include "tests/layers/expert_layer_case.h"

// The expert layer as one plan, over the same tensors as its steps one by one.
namespace cadre::test {

inline ExpertLayerSizes sizes_of(const MoeProblem& p) {
  ExpertLayerSizes s{.tokens = p.tokens, .top_k = p.top_k, .has_scores = true};
  s.mlp.hidden = p.hidden;
  s.mlp.features = p.features;
  s.mlp.experts = p.experts;
  s.mlp.activation = p.activation;
  s.mlp.constants = p.constants;
  s.mlp.layout = p.layout;
  s.mlp.recipe = p.recipe;
  s.mlp.dtype = p.dtype;
  s.mlp.parameters = p.parameters;
  s.mlp.prob = true;
  s.mlp.bias1 = p.bias1;
  s.mlp.bias2 = s.mlp.bias2_scale = p.bias2;
  s.mlp.options.accumulate = p.options.accumulate;
  s.mlp.options.accumulate_bias = p.options.accumulate_bias;
  s.routing = {.score = p.score, .logits = p.logits, .normalize = p.normalize, .scale = p.scale};
  s.routing.expert_bias = p.expert_bias;
  s.routing.groups = p.groups;
  s.routing.group_top_k = p.group_top_k;
  s.shared_features = p.shared_features;
  s.shared_gate = p.shared_gate;
  return s;
}

struct MoeCase : ExpertLayerCase {
  MoePlan plan;
  OwnedWorkspace saved, pending, weight_cache;
  Tensor wide_experts;  ///< those that are given, of index=i64
  bool refresh_weights = true;
  WgradQueue* queue = nullptr;
  std::function<void(MoeArgs&)> change_args{};

  MoeCase(const MoeProblem& p, unsigned seed, const MadeFor& where, double skew = 0)
      : ExpertLayerCase(sizes_of(p), seed, where, skew),
        plan(cadre::plan(p, where.device, where.route)),
        saved(plan.memory.saved_bytes),
        pending(plan.memory.pending_bytes),
        weight_cache(plan.memory.weight_cache_bytes),
        wide_experts(DType::kI64, {p.tokens, p.top_k}) {}

  const MoeProblem& p() const { return plan.problem; }

  /// Another plan of the same problem.
  void take(MoePlan other) {
    plan = std::move(other);
    saved = OwnedWorkspace(plan.memory.saved_bytes);
    pending = OwnedWorkspace(plan.memory.pending_bytes);
    weight_cache = OwnedWorkspace(plan.memory.weight_cache_bytes);
  }

  MoeArgs args() {
    MoeArgs a{.x = tokens.view()};
    p().routed ? add_choice(a) : add_routing(a);
    if (p().expert_bias) a.expert_bias = expert_bias.data<float>();
    a.fc1 = mlp.fc1.args();
    a.fc2 = mlp.fc2.args();
    if (shared) {
      a.shared_fc1 = shared->fc1.args();
      a.shared_fc2 = shared->fc2.args();
      if (p().shared_gate) a.shared_gate = shared->prob.data<float>();
      if (p().shared_gate && p().dlogits) a.dshared_gate = shared->dprob.data<float>();
    }
    a.out = out.view();
    a.offsets = mlp.offsets.data();
    a.dout = dout.view();
    a.dx = dtokens.view();
    a.rng = mlp.rng.data();
    a.saved = memory(saved);
    a.pending = memory(pending);
    a.weight_cache = memory(weight_cache);
    a.refresh_weights = refresh_weights;
    a.queue = queue;
    if (change_args) change_args(a);
    return a;
  }
  void add_routing(MoeArgs& a) {
    a.logits = logits.view();
    a.scores = scores.data<float>();
    a.experts = experts.data<int32_t>();
    a.prob = prob.data<float>();
    if (!p().dlogits) return;
    a.dscores = dscores.data<float>();
    a.dlogits = dlogits.view();
  }
  /// What routing would have made.
  void add_choice(MoeArgs& a) {
    a.choice = p().index == DType::kI64 ? wide_experts.view().data : experts.view().data;
    a.choice_prob = prob.data<float>();
    if (p().dlogits) a.dchoice_prob = dprob.data<float>();
  }
  bool learns() const { return cadre::learns(plan); }
  bool defers() const { return p().options.deferred && (p().wgrad1 || p().wgrad2); }

  template <class Visit>
  void for_pieces(Visit&& visit) const {
    ExpertLayerCase::for_pieces(visit);
    visit(piece("expert numbers", wide_experts, Holds::kInput));
    visit(piece("saved of the layer", saved));
    visit(piece("pending of the layer", pending));
    visit(piece("weight_cache of the layer", weight_cache));
  }
};

/// Everything that a step of the layer writes for its caller, by name.
inline std::vector<std::pair<const char*, Values>> results(const ExpertLayerCase& c) {
  std::vector<std::pair<const char*, Values>> all = {{"out", c.out.values()},
                                                     {"scores", c.scores.values()},
                                                     {"prob", c.prob.values()},
                                                     {"dx", c.dtokens.values()},
                                                     {"dlogits", c.dlogits.values()},
                                                     {"dw1", c.mlp.fc1.dw.values()},
                                                     {"dw2", c.mlp.fc2.dw.values()},
                                                     {"dbias1", c.mlp.fc1.dbias.values()},
                                                     {"dbias2", c.mlp.fc2.dbias.values()}};
  if (!c.shared) return all;
  all.emplace_back("shared dw1", c.shared->fc1.dw.values());
  all.emplace_back("shared dw2", c.shared->fc2.dw.values());
  all.emplace_back("dshared_gate", c.shared->dprob.values());
  return all;
}

}  // namespace cadre::test
