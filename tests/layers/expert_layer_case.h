#pragma once
#include <optional>

#include "cadre/offsets.h"
#include "cadre/permute.h"
#include "cadre/routing.h"
#include "tests/layers/mlp_case.h"

// A whole expert layer: from the router's logits to the sum over top_k, and back to the gradient of
// the logits.
namespace cadre::test {

struct ExpertLayerSizes {
  int64_t tokens = 0;
  int top_k = 1;
  int64_t dropped = 0;  ///< choices for which there are no rows
  /// With prob rows are weighted in the activation, else when combined; with bias2_scale the second
  /// bias is weighted by the same probabilities.
  GroupedMlpProblem mlp{};
  RoutingProblem routing{.normalize = true};  ///< its sizes follow from the rest
  bool has_scores = false;                    ///< scores are made, and have a gradient
  int64_t shared_features = 0;                ///< of an expert that all tokens visit; 0: none
  bool shared_gate = false;                   ///< its result has a factor per token
};

/// The steps around the expert MLP, in their order.
enum class LayerStage {
  kRoute,
  kPlace,
  kPermute,
  kCombine,
  kCombineBack,
  kPermuteBack,
  kRouteBack
};
inline constexpr LayerStage kLayerStages[] = {
    LayerStage::kRoute,       LayerStage::kPlace,       LayerStage::kPermute,  LayerStage::kCombine,
    LayerStage::kCombineBack, LayerStage::kPermuteBack, LayerStage::kRouteBack};

/// One layer with every tensor between its steps. The expert MLP begins with what permute made.
struct ExpertLayerCase {
  ExpertLayerSizes sizes;
  Device device;
  MlpCase mlp;
  std::optional<MlpCase> shared;
  Tensor logits, expert_bias, tokens, dout, dscores;  ///< read
  Tensor experts, prob, row_of, slot_of, status;      ///< made by routing and offsets
  Tensor out, dtokens, dprob, dlogits, scores;        ///< written
  OwnedWorkspace scratch;

  /// `skew` of the logits' range goes to one expert: with 1 all tokens choose it first.
  ExpertLayerCase(const ExpertLayerSizes& s, unsigned seed, const MadeFor& where, double skew = 0)
      : sizes(s),
        device(where.device),
        mlp(problem(s), {s.tokens * s.top_k - s.dropped, std::vector<int64_t>(experts_of(s))}, seed,
            where),
        scratch(scratch_bytes()) {
    const int64_t t = s.tokens, e = s.mlp.experts, h = s.mlp.hidden, k = s.top_k;
    logits = Tensor(s.routing.logits, {t, e});
    expert_bias = Tensor(DType::kF32, {e});
    scores = Tensor(DType::kF32, {t, e});
    dscores = Tensor(DType::kF32, {t, e});
    tokens = Tensor(s.mlp.dtype, {t, h}, {.row_gap = where.step});
    dout = Tensor(s.mlp.dtype, {t, h}, {.row_gap = 2 * where.step});
    experts = Tensor(DType::kI32, {t, k});
    row_of = Tensor(DType::kI32, {t, k});
    slot_of = Tensor(DType::kI32, {rows()});
    status = Tensor(DType::kI32, {1});
    prob = Tensor(DType::kF32, {t, k});
    dprob = Tensor(DType::kF32, {t, k});
    out = Tensor(s.mlp.dtype, {t, h}, {.row_gap = where.step});
    dtokens = Tensor(s.mlp.dtype, {t, h}, {.row_gap = 3 * where.step});
    dlogits = Tensor(s.routing.logits, {t, e});
    std::mt19937 random(seed);
    logits.fill(random, -2, 2);
    tokens.fill(random, -2, 2);
    dout.fill(random, -1, 1);
    dscores.fill(random, -1, 1);
    for (int64_t i = 0; i < e; ++i) expert_bias.set({i}, double(random() % 100) / 99);
    for (int64_t i = 0; i < t; ++i) logits.set({i, e / 2}, logits.at(i, e / 2) + 9 * skew);
    mlp.x.poison();
    mlp.dy.poison();
    mlp.prob.poison();
    if (s.shared_features > 0) {
      shared.emplace(shared_problem(s), Counts{s.tokens, {s.tokens}}, seed + 1000, where);
      shared->x.poison();
      shared->dy.poison();
      shared->change_args = [this](GroupedMlpArgs& a) { a.x = tokens.view(), a.dy = dout.view(); };
    }
    if (s.mlp.bias2_scale)
      mlp.change_args = [this](GroupedMlpArgs& a) { a.bias2_scale = mlp.prob.data<float>(); };
  }
  ExpertLayerCase(const ExpertLayerCase&) = delete;

  static GroupedMlpProblem problem(const ExpertLayerSizes& s) {
    GroupedMlpProblem p = s.mlp;
    p.rows = s.tokens * s.top_k - s.dropped;
    return p;
  }
  static GroupedMlpProblem shared_problem(const ExpertLayerSizes& s) {
    GroupedMlpProblem p = s.mlp;
    p.rows = s.tokens;
    p.features = s.shared_features;
    p.experts = 1;
    p.prob = s.shared_gate;
    p.bias1 = p.bias2 = p.bias2_scale = false;
    return p;
  }
  static size_t experts_of(const ExpertLayerSizes& s) { return size_t(s.mlp.experts); }
  int64_t rows() const { return mlp.p().rows; }
  bool weighs_rows() const { return sizes.mlp.prob; }

  template <class Visit>
  void for_pieces(Visit&& visit) const {
    mlp.for_pieces(visit);
    if (shared) shared->for_pieces(visit);
    for (const Tensor* t : {&logits, &expert_bias, &tokens, &dout, &dscores})
      visit(piece("input", *t, Holds::kInput));
    for (const auto& [name, t] : {std::pair("experts", &experts),
                                  {"row_of", &row_of},
                                  {"slot_of", &slot_of},
                                  {"status", &status},
                                  {"prob", &prob},
                                  {"out", &out},
                                  {"dtokens", &dtokens},
                                  {"dprob", &dprob},
                                  {"dlogits", &dlogits},
                                  {"scores", &scores}})
      visit(piece(name, *t, Holds::kOutput));
    visit(piece("workspace", scratch));
  }

  /// Launches one step. `move` says where arguments are.
  template <class Move>
  void launch(LayerStage stage, Move&& move, Stream stream) {
    const auto go = [&](const auto& made, const auto& args) {
      run(made, move(args), move(scratch.get()), stream);
    };
    switch (stage) {
      case LayerStage::kRoute:
        return go(route_plan(false), route_args(false));
      case LayerStage::kPlace:
        return go(place_plan(), place_args());
      case LayerStage::kPermute:
        return go(permute_plan(PermutePass::kPermute), permute_args());
      case LayerStage::kCombine:
        return go(permute_plan(PermutePass::kCombine), combine_args());
      case LayerStage::kCombineBack:
        return go(permute_plan(PermutePass::kCombineBackward), combine_back_args());
      case LayerStage::kPermuteBack:
        return go(permute_plan(PermutePass::kPermuteBackward), permute_back_args());
      case LayerStage::kRouteBack:
        return go(route_plan(true), route_args(true));
    }
  }

  /// What a step writes.
  std::vector<Tensor*> outputs(LayerStage stage) {
    switch (stage) {
      case LayerStage::kRoute:
        return {&experts, &prob};
      case LayerStage::kPlace:
        return {&row_of, &slot_of, &status};
      case LayerStage::kPermute:
        if (weighs_rows()) return {&mlp.x, &mlp.prob};
        return {&mlp.x};
      case LayerStage::kCombine:
        return {&out};
      case LayerStage::kCombineBack:
        if (weighs_rows()) return {&mlp.dy};
        return {&mlp.dy, &dprob};
      case LayerStage::kPermuteBack:
        if (weighs_rows()) return {&dtokens, &dprob};
        return {&dtokens};
      case LayerStage::kRouteBack:
        return {&dlogits};
    }
    return {};
  }

  /// All numbers of another case.
  void take(const ExpertLayerCase& other) {
    for (Tensor ExpertLayerCase::*t :
         {&ExpertLayerCase::logits, &ExpertLayerCase::tokens, &ExpertLayerCase::dout,
          &ExpertLayerCase::experts, &ExpertLayerCase::prob, &ExpertLayerCase::row_of,
          &ExpertLayerCase::slot_of, &ExpertLayerCase::status, &ExpertLayerCase::out,
          &ExpertLayerCase::dtokens, &ExpertLayerCase::dprob, &ExpertLayerCase::dlogits})
      this->*t = other.*t;
    for (Tensor MlpCase::*t :
         {&MlpCase::x, &MlpCase::y, &MlpCase::dy, &MlpCase::dx, &MlpCase::prob, &MlpCase::dprob})
      mlp.*t = other.mlp.*t;
    mlp.offsets = other.mlp.offsets;
  }
  /// The counts that the offsets say, which the MLP's judge goes by.
  void take_counts() {
    for (size_t e = 0; e < mlp.counts.of.size(); ++e)
      mlp.counts.of[e] = mlp.offsets[e + 1] - mlp.offsets[e];
  }

 private:
  int64_t scratch_bytes() const {
    int64_t most = 0;
    for (bool backward : {false, true}) most = std::max(most, route_plan(backward).workspace_bytes);
    for (PermutePass pass : {PermutePass::kPermute, PermutePass::kPermuteBackward,
                             PermutePass::kCombine, PermutePass::kCombineBackward})
      most = std::max(most, permute_plan(pass).workspace_bytes);
    return std::max(most, place_plan().workspace_bytes);
  }
  RoutingPlan route_plan(bool backward) const {
    RoutingProblem p = sizes.routing;
    p.backward = backward;
    p.tokens = sizes.tokens;
    p.experts = sizes.mlp.experts;
    p.top_k = sizes.top_k;
    p.expert_bias = p.expert_bias && !backward;
    return plan(p, device);
  }
  OffsetsPlan place_plan() const {
    OffsetsProblem p{.source = OffsetsSource::kRouting, .rows = rows()};
    p.experts = sizes.mlp.experts;
    p.tokens = sizes.tokens;
    p.top_k = sizes.top_k;
    return plan(p, device);
  }
  PermutePlan permute_plan(PermutePass pass) const {
    PermuteProblem p{.pass = pass, .tokens = sizes.tokens, .top_k = sizes.top_k, .rows = rows()};
    p.hidden = sizes.mlp.hidden;
    p.experts = sizes.mlp.experts;
    p.dtype = sizes.mlp.dtype;
    const bool permutes = pass == PermutePass::kPermute || pass == PermutePass::kPermuteBackward;
    p.prob = permutes == weighs_rows();
    p.addend = shared && (pass == PermutePass::kCombine || pass == PermutePass::kPermuteBackward);
    return plan(p, device);
  }

  RoutingArgs route_args(bool backward) {
    RoutingArgs a{.logits = logits.view(), .experts = experts.data<int32_t>(), .dlogits = {}};
    if (!backward) {
      a.prob = prob.data<float>();
      if (sizes.routing.expert_bias) a.expert_bias = expert_bias.data<float>();
      if (sizes.has_scores) a.scores = scores.data<float>();
      return a;
    }
    a.dprob = dprob.data<float>();
    a.dlogits = dlogits.view();
    if (sizes.has_scores) a.dscores = dscores.data<float>();
    return a;
  }
  OffsetsArgs place_args() {
    return {.source = experts.data<int32_t>(),
            .offsets = mlp.offsets.data(),
            .map = map(),
            .status = status.data<int32_t>()};
  }
  RowMap map() const { return {row_of.data<int32_t>(), slot_of.data<int32_t>()}; }
  PermuteArgs moves(const Tensor& by_token, const Tensor& by_row) const {
    return {.tokens = by_token.view(),
            .rows = by_row.view(),
            .y = {},
            .map = map(),
            .offsets = {mlp.offsets.data(), sizes.mlp.experts}};
  }
  PermuteArgs permute_args() const {
    PermuteArgs a = moves(tokens, mlp.x);
    if (weighs_rows()) a.prob = prob.data<float>(), a.row_prob = mlp.prob.data<float>();
    return a;
  }
  PermuteArgs combine_args() const {
    PermuteArgs a = moves(out, mlp.y);
    if (shared) a.addend = shared->y.view();
    if (!weighs_rows()) a.prob = prob.data<float>();
    return a;
  }
  PermuteArgs combine_back_args() const {
    PermuteArgs a = moves(dout, mlp.dy);
    if (weighs_rows()) return a;
    a.prob = prob.data<float>();
    a.dprob = dprob.data<float>();
    a.y = mlp.y.view();
    return a;
  }
  PermuteArgs permute_back_args() const {
    PermuteArgs a = moves(dtokens, mlp.dx);
    if (shared) a.addend = shared->dx.view();
    if (!weighs_rows()) return a;
    a.drow_prob = mlp.dprob.data<float>();
    if (sizes.mlp.bias2_scale) a.drow_scale = mlp.dbias2_scale.data<float>();
    a.dprob = dprob.data<float>();
    return a;
  }
};

}  // namespace cadre::test
