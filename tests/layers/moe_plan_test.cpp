// What the expert layer plans and what it complains about.
#include <gtest/gtest.h>

#include <algorithm>

#include "cadre/error.h"
#include "cadre/wgrad_queue.h"
#include "tests/judge/errors.h"
#include "tests/layers/moe_case.h"

using namespace cadre;
using test::MoeCase;

namespace {

constexpr int64_t kTokens = 64, kTopK = 5, kRows = kTokens * kTopK;

MoeProblem problem(std::string_view recipe) {
  MoeProblem p{.tokens = kTokens, .top_k = kTopK, .hidden = 96, .features = 64, .experts = 6};
  p.recipe = parse_recipe(recipe);
  return p;
}
MoePlan planned(const MoeProblem& p) { return plan(p, this_cpu()); }
bool has(const LayerPlan& plan, std::string_view step) {
  return std::any_of(plan.steps.begin(), plan.steps.end(),
                     [&](const LayerStep& own) { return own.name == step; });
}

TEST(MoeText, PrintsWhatIsNotUsualAndParsesBack) {
  MoeProblem p = problem("mxfp8");
  EXPECT_EQ(to_string(p), "moe T=64 top_k=5 H=96 F=64 E=6 act=swiglu recipe=mxfp8");
  p.score = RoutingScore::kSigmoid;
  p.normalize = true;
  p.scale = 2.5f;
  p.keep_rows = p.dlogits = false;
  EXPECT_EQ(to_string(p),
            "moe T=64 top_k=5 H=96 F=64 E=6 act=swiglu recipe=mxfp8 score=sigmoid normalize=yes "
            "scale=2.5 dlogits=no keep_rows=no");
  EXPECT_EQ(parse_moe_problem(to_string(p)), p);
  p = problem("bf16");
  p.shared_features = 128;
  p.shared_gate = true;
  EXPECT_EQ(to_string(p),
            "moe T=64 top_k=5 H=96 F=64 E=6 act=swiglu recipe=bf16 shared_F=128 shared_gate=yes");
}

TEST(MoeText, EveryFieldParsesBack) {
  std::mt19937 random(1);
  const auto draw = [&](unsigned end) { return int(random() % end); };
  for (int i = 0; i < 300; ++i) {
    MoeProblem p{.tokens = draw(99), .top_k = draw(9), .hidden = draw(99), .features = draw(99)};
    p.experts = draw(9);
    p.activation = ActivationKind(draw(10));
    if (p.activation == ActivationKind::kClampedSwiGlu)
      p.constants = {float(draw(9)), float(draw(9)) / 3, float(draw(3))};
    p.layout = GluLayout(draw(3));
    p.recipe = recipe_list()[size_t(draw(8))].recipe;
    p.score = RoutingScore(draw(3));
    p.scale = float(draw(9)) / 7;
    p.shared_features = draw(3);
    for (int* number : {&p.groups, &p.group_top_k, &p.options.unit_budget}) *number = draw(5);
    for (DType* type : {&p.dtype, &p.logits, &p.parameters.weight, &p.parameters.bias,
                        &p.parameters.dw, &p.parameters.dbias})
      *type = DType(draw(3));
    for (bool* flag : {&p.parameters.discrete_weight,
                       &p.parameters.discrete_bias,
                       &p.parameters.discrete_dw,
                       &p.normalize,
                       &p.shared_gate,
                       &p.expert_bias,
                       &p.bias1,
                       &p.bias2,
                       &p.dgrad,
                       &p.dlogits,
                       &p.wgrad1,
                       &p.wgrad2,
                       &p.dbias,
                       &p.keep_h,
                       &p.keep_rows,
                       &p.options.deferred,
                       &p.options.save_input,
                       &p.options.cache_weights,
                       &p.options.quantized_x,
                       &p.options.overwrite_saved})
      *flag = draw(2);
    p.parameters.weight_major = Major(draw(2));
    p.options.accumulate = Accumulate(draw(4));
    EXPECT_EQ(parse_moe_problem(to_string(p)), p) << to_string(p);
  }
}

TEST(MoePlan, NamesItsRouteAndExplainsIt) {
  MoeProblem p = problem("bf16");
  p.bias2 = true;
  const MoePlan made = planned(p);
  EXPECT_EQ(made.name, "permuted");
  EXPECT_EQ(plan(p, this_cpu(), "permuted").name, "permuted");
  EXPECT_TRUE(made.exact);
  const std::string words = explain(made);
  for (const char* part :
       {"route permuted", "route: cpu",
        "logits -> experts, prob, scores, offsets, row_of, slot_of, prob of rows\n",
        "x, offsets, row_of, slot_of -> rows\n",
        "dx of rows, offsets, row_of, dprob of rows, dscale of rows -> dx, dprob",
        "experts: grouped_mlp R=320 H=96 F=64 E=6 act=swiglu recipe=bf16 prob=yes bias2=yes "
        "bias2_scale=yes",
        "kept for backward, of each token: rows 960"})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
  const LayerMemory& m = made.memory;
  // Which workspace is the larger depends on the processor.
  const std::string peak =
      text("at most at once: ",
           m.saved_bytes + std::max(m.forward_workspace_bytes, m.backward_workspace_bytes));
  EXPECT_GT(m.backward_workspace_bytes, 0);
  EXPECT_NE(words.find(peak), std::string::npos) << peak << " in\n" << words;
}

/// Bytes kept of one token, by the name of the part.
double kept_of(const MoePlan& plan, std::string_view name) {
  for (const KeptPart& part : kept(plan))
    if (part.name == name) return bytes_per_token({&part, 1}, kTokens);
  return 0;
}

TEST(MoePlan, StatesTheBytesOfAToken) {
  // bf16: rows and z, two bytes an element; probability, expert and both maps, a word a row.
  const MoePlan direct = planned(problem("bf16"));
  EXPECT_DOUBLE_EQ(kept_of(direct, "rows"), kTopK * 2 * 96);
  EXPECT_DOUBLE_EQ(kept_of(direct, "z"), kTopK * 2 * 128);
  EXPECT_DOUBLE_EQ(kept_of(direct, "logits"), 4 * 6);
  for (const char* words : {"experts", "row_of", "slot_of", "prob of rows"})
    EXPECT_DOUBLE_EQ(kept_of(direct, words), kTopK * 4) << words;
  EXPECT_EQ(kept_of(direct, "x") + kept_of(direct, "prob"), 0);
  EXPECT_EQ(direct.memory.saved_bytes, kRows * 2 * (96 + 128) + 3 * kRows * 4);

  MoeProblem p = problem("bf16");
  p.keep_rows = false;
  const MoePlan again = planned(p);
  EXPECT_DOUBLE_EQ(kept_of(again, "x"), 2 * 96);
  EXPECT_EQ(kept_of(again, "rows"), 0);
  EXPECT_EQ(find_tensor(again, "rows")->place, Place::kWorkspace);
  EXPECT_EQ(find_tensor(again, "rows again")->place, Place::kWorkspace);
  p.options.deferred = true;
  EXPECT_EQ(find_tensor(planned(p), "rows again")->place, Place::kPending);
  p.wgrad1 = false;
  EXPECT_EQ(find_tensor(planned(p), "rows again"), nullptr);

  // A recipe that keeps a copy of x reads the rows no more.
  const MoePlan mxfp8 = planned(problem("mxfp8"));
  EXPECT_EQ(kept_of(mxfp8, "rows") + kept_of(mxfp8, "x"), 0);
  EXPECT_GT(kept_of(mxfp8, "x along rows"), 0);
  // Backward makes that copy of tokens where no rows are kept: wgrad reads the copy alone.
  p = problem("mxfp8");
  p.keep_rows = false;
  p.options.deferred = true;
  const MoePlan late = planned(p);
  EXPECT_DOUBLE_EQ(kept_of(late, "x"), 2 * 96);
  EXPECT_EQ(find_tensor(late, "rows again"), nullptr);
  EXPECT_EQ(late.memory.pending_bytes, late.mlp.memory.pending_bytes);
  EXPECT_EQ(late.memory.pending_bytes, 129024);
  EXPECT_EQ(find_tensor(plan(p, this_cpu(), "permuted"), "rows again")->place, Place::kWorkspace);
}

/// [begin, end) of a tensor in its place.
std::pair<int64_t, int64_t> bytes_of(const LayerPlan& plan, std::string_view name) {
  const LayerTensor& t = *find_tensor(plan, name);
  return {t.offset, t.offset + t.layout.bytes};
}

/// What a step of training has in memory beside parameters and their gradients, x, dout and dx: z,
/// and once the rows.
TEST(MoePlan, RowsLieWhereOtherRowsLay) {
  MoeProblem p = problem("bf16");
  p.keep_rows = false;
  p.options.overwrite_saved = true;
  const MoePlan made = planned(p);
  EXPECT_EQ(bytes_of(made, "y of rows"), bytes_of(made, "rows"));
  EXPECT_EQ(bytes_of(made, "dx of rows"), bytes_of(made, "dy of rows"));
  EXPECT_EQ(bytes_of(made, "rows again"), bytes_of(made, "dy of rows"));
  EXPECT_EQ(find_tensor(made.mlp, "dz")->place, Place::kSaved);
  EXPECT_EQ(bytes_of(made.mlp, "dz"), bytes_of(made.mlp, "z"));
  for (const char* between : {"dh", "h again"})
    EXPECT_EQ(find_tensor(made.mlp, between)->place, Place::kGradient);
  const int64_t rows = kRows * 2 * 96, words = 2 * kRows * 4 + kTokens * 4;
  EXPECT_LE(made.memory.backward_workspace_bytes,
            rows + words + made.mlp.memory.backward_workspace_bytes);

  // What was saved stays, unless the caller says that backward runs but once.
  p.options.overwrite_saved = false;
  EXPECT_EQ(find_tensor(planned(p).mlp, "dz")->place, Place::kPending);
  EXPECT_EQ(planned(p).memory.backward_workspace_bytes,
            made.memory.backward_workspace_bytes + kRows * 2 * 128);
  // Gradients that are added to, or lie apart, or are too small, have no room for others.
  const auto place_of_dh = [](MoeProblem own, void (*change)(MoeProblem&)) {
    change(own);
    return find_tensor(planned(own).mlp, "dh")->place;
  };
  EXPECT_EQ(place_of_dh(p, [](MoeProblem&) {}), Place::kGradient);
  for (const auto change :
       {+[](MoeProblem& o) { o.options.accumulate = Accumulate::kDevice; },
        +[](MoeProblem& o) { o.parameters.discrete_dw = true; },
        +[](MoeProblem& o) { o.dtype = DType::kF32; },
        +[](MoeProblem& o) { o.options.deferred = true; }, +[](MoeProblem& o) { o.wgrad1 = false; },
        +[](MoeProblem& o) { o.tokens = 6 * 2 * 96 / 5 + 1; }})
    EXPECT_EQ(place_of_dh(p, change), Place::kWorkspace);
}

TEST(MoePlan, ASharedExpertWritesWhereTheSumsGo) {
  MoeProblem p = problem("bf16");
  EXPECT_FALSE(has(planned(p), "shared expert"));
  p.shared_features = 128;
  p.shared_gate = true;
  const MoePlan made = planned(p);
  EXPECT_TRUE(find_step<PermutePlan>(made, "combine")->problem.addend);
  EXPECT_TRUE(find_step<PermutePlan>(made, "permute backward")->problem.addend);
  EXPECT_FALSE(find_step<PermutePlan>(made, "permute")->problem.addend);
  const std::string words = explain(made);
  for (const char* part :
       {"offsets[E] -> shared offsets", "x, shared offsets, shared_gate -> out",
        "dout, shared offsets, shared_gate, x -> dx, dshared_gate",
        "permute combine T=64 top_k=5 R=320 H=96 E=6 dtype=bf16 addend=yes",
        "shared expert: grouped_mlp R=64 H=96 F=128 E=1 act=swiglu recipe=bf16 prob=yes"})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
  // Its result takes no memory, but its z of 2 * 128 elements a token is kept, and the gate.
  const MoePlan without = planned(problem("bf16"));
  EXPECT_DOUBLE_EQ(kept_of(made, "shared expert"), 2 * 256);
  EXPECT_DOUBLE_EQ(kept_of(made, "x"), 2 * 96);
  EXPECT_DOUBLE_EQ(kept_of(made, "shared_gate"), 4);
  const int64_t offsets = 256;  // two words, as memory is shared out
  EXPECT_EQ(made.memory.saved_bytes,
            without.memory.saved_bytes + made.shared.memory.saved_bytes + offsets);
  EXPECT_EQ(find_tensor(made, "shared offsets")->place, Place::kSaved);
}

TEST(MoePlan, AFrozenSharedExpertTakesNoStepBackward) {
  MoeProblem p = problem("bf16");
  p.shared_features = 128;
  p.dgrad = p.wgrad1 = p.wgrad2 = false;
  EXPECT_TRUE(has(planned(p), "experts backward"));  // the router learns
  EXPECT_FALSE(has(planned(p), "shared expert backward"));
  EXPECT_EQ(kept_of(planned(p), "x") + kept_of(planned(p), "shared expert"), 0);
  p.shared_gate = true;
  EXPECT_TRUE(has(planned(p), "shared expert backward"));  // and its gate
  EXPECT_FALSE(find_step<PermutePlan>(planned(p), "permute backward")->problem.addend);
}

TEST(MoePlan, FrozenPartsTakeNoStep) {
  MoeProblem p = problem("bf16");
  p.wgrad1 = false;
  EXPECT_EQ(kept_of(planned(p), "rows"), 0);
  p.dgrad = false;
  EXPECT_TRUE(has(planned(p), "permute backward"));  // the router learns
  EXPECT_EQ(find_tensor(planned(p), "dx of rows"), nullptr);
  p.dlogits = false;
  const MoePlan last = planned(p);
  EXPECT_FALSE(has(last, "permute backward") || has(last, "route backward"));
  EXPECT_TRUE(has(last, "experts backward"));
  p.wgrad2 = false;
  EXPECT_FALSE(learns(planned(p)));
  EXPECT_TRUE(kept(planned(p)).empty());
  EXPECT_EQ(planned(p).memory.saved_bytes, 0);
}

TEST(MoeErrors, OfProblems) {
  const auto says = [](auto change) {
    MoeProblem p = problem("bf16");
    change(p);
    const std::string what = test::invalid([&] { planned(p); });
    return what.substr(0, what.find(" ["));
  };
  using P = MoeProblem;
  EXPECT_EQ(says([](P& p) { p.tokens = -1; }), "moe: T is -1, must be 0 or more");
  EXPECT_EQ(says([](P& p) { p.tokens = int64_t{1} << 31; }),
            "moe: T is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(says([](P& p) { p.tokens = (int64_t{1} << 31) - 1; }),
            "moe: T * top_k is 10737418235, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(says([](P& p) { p.top_k = 0; }), "moe: top_k is 0, must be 1 or more");
  EXPECT_EQ(says([](P& p) { p.top_k = 7; }), "routing: top_k is 7, must be at most E, 6");
  EXPECT_EQ(says([](P& p) { p.hidden = 0; }), "moe: H is 0, must be 1 or more");
  EXPECT_EQ(says([](P& p) { p.features = 0; }), "moe: F is 0, must be 1 or more");
  EXPECT_EQ(says([](P& p) { p.features = INT64_MAX; }),
            "moe: E * H * F is 6 * 96 * 9223372036854775807, must be at most 2^44; no tensor has "
            "more elements");
  EXPECT_EQ(says([](P& p) { p.experts = 0; }), "moe: E is 0, must be 1 or more");
  EXPECT_EQ(says([](P& p) { p.shared_features = -1; }), "moe: shared_F is -1, must be 0 or more");
  EXPECT_EQ(says([](P& p) { p.shared_gate = true; }),
            "moe: shared_gate is yes, must be no; shared_F is 0, so no expert is shared");
  EXPECT_EQ(says([](P& p) { p.experts = 0; }), "moe: E is 0, must be 1 or more");
  EXPECT_EQ(says([](P& p) { p.dtype = DType::kI32; }),
            "moe: dtype is i32, must be f32, bf16 or f16");
  EXPECT_EQ(says([](P& p) { p.logits = DType::kI32; }),
            "routing: logits is i32, must be f32, bf16 or f16");
  EXPECT_EQ(says([](P& p) { p.options.quantized_x = true; }),
            "moe: quantized_x is yes, must be no; x comes in token order and is permuted as it is");
  EXPECT_EQ(says([](P& p) {
              p.bias2 = true;
              p.dbias = false;
            }),
            "moe: dbias is no, must be yes; the gradient of the probabilities that weigh bias2 is "
            "made with that of bias2, so say dlogits=no or dbias=yes");
  EXPECT_EQ(says([](P& p) { p.recipe = parse_recipe("nvfp4,wgrad=nvfp4*nvfp4:sr"); }),
            "moe: keep_h is no, must be yes; h is rounded stochastically for wgrad, and computing "
            "it again would give other codes");
}

TEST(MoeErrors, OfRoutes) {
  EXPECT_EQ(test::invalid([] { plan(problem("bf16"), this_cpu(), "fused"); }),
            "plan: route is 'fused', must be one of gathered, permuted "
            "[moe T=64 top_k=5 H=96 F=64 E=6 act=swiglu recipe=bf16]");
}

enum Run { kForward, kBackward, kWgrad };
using Args = MoeArgs;

/// What a run with changed arguments says, without the problem behind it; and that no output was
/// touched.
template <class Change>
std::string run_error(const MoeProblem& p, Run which, Change&& change) {
  MoeCase c(p, 1, {});
  const LayerMemory& m = c.plan.memory;
  const int64_t bytes[] = {m.forward_workspace_bytes, m.backward_workspace_bytes,
                           m.wgrad_workspace_bytes};
  const test::OwnedWorkspace workspace(bytes[which] + 256);
  Args args = c.args();
  Workspace w = workspace.get();
  change(args, w);
  const auto before = results(c);
  const std::string what = test::invalid([&] {
    if (which == kForward) forward(c.plan, args, w, {});
    if (which == kBackward) backward(c.plan, args, w, {});
    if (which == kWgrad) wgrad(c.plan, args, w, {});
  });
  const auto after = results(c);
  for (size_t i = 0; i < after.size(); ++i)
    EXPECT_EQ(test::first_difference(after[i].second, before[i].second), "") << what;
  EXPECT_TRUE(c.experts.untouched(0, p.tokens)) << what;
  return what.substr(0, what.find(" [moe"));
}

MoeProblem small() {
  MoeProblem p{.tokens = 4, .top_k = 2, .hidden = 6, .features = 4, .experts = 2};
  p.recipe = parse_recipe("bf16");
  p.bias1 = p.bias2 = true;
  return p;
}

TEST(MoeErrors, OfSharedExperts) {
  MoeProblem shares = small();
  shares.shared_features = 8;
  const float gate[4] = {};
  float dgate[4] = {};
  EXPECT_EQ(run_error(shares, kForward, [&](Args& a, Workspace&) { a.shared_gate = gate; }),
            "moe: shared_gate is given, must be null; the problem says shared_gate=no");
  EXPECT_EQ(run_error(shares, kBackward, [&](Args& a, Workspace&) { a.dshared_gate = dgate; }),
            "moe: dshared_gate is given, must be null; the problem says shared_gate=no or "
            "dlogits=no");
  const auto no_weight = [](Args& a, Workspace&) { a.shared_fc1.w = {}; };
  EXPECT_EQ(run_error(shares, kForward, no_weight)
                .find("grouped_mlp fc1: w is f32[], must be bf16[1, 16, 6] [grouped_linear R=4 "),
            0u);
  EXPECT_EQ(run_error(shares, kBackward, [](Args& a, Workspace&) { a.x = {}; }),
            "moe: x is f32[], must be bf16[4, 6]");
  shares.shared_gate = true;
  EXPECT_EQ(run_error(shares, kForward, [](Args& a, Workspace&) { a.shared_gate = nullptr; }),
            "moe: shared_gate is null, must point to 4 elements; the problem says shared_gate=yes");
  EXPECT_EQ(run_error(shares, kBackward, [](Args& a, Workspace&) { a.dshared_gate = nullptr; }),
            "moe: dshared_gate is null, must point to 4 elements; the problem says dlogits=yes");
  shares.options.deferred = true;
  WgradQueue two(2);
  EXPECT_EQ(run_error(shares, kBackward, [&](Args& a, Workspace&) { a.queue = &two; }),
            "moe: queue has 0 of 2 tasks, must have room for 4; make a larger one");
}

TEST(MoeErrors, OfForward) {
  const auto says = [](auto change) {
    return run_error(small(), kForward, [&](Args& a, Workspace&) { change(a); });
  };
  EXPECT_EQ(says([](Args& a) { a.logits = {}; }), "moe: logits is f32[], must be f32[4, 2]");
  EXPECT_EQ(says([](Args& a) { a.x.dtype = DType::kF16; }),
            "moe: x is f16[4, 6] strides (7, 1), must be bf16[4, 6]");
  EXPECT_EQ(says([](Args& a) { a.out.shape[1] = 5; }),
            "moe: out is bf16[4, 5] strides (7, 1), must be bf16[4, 6]");
  const float bias[2] = {};
  EXPECT_EQ(says([&](Args& a) { a.expert_bias = bias; }),
            "moe: expert_bias is given, must be null; the problem says expert_bias=no");
  MoeProblem biased = small();
  biased.expert_bias = true;
  EXPECT_EQ(run_error(biased, kForward, [](Args& a, Workspace&) { a.expert_bias = nullptr; }),
            "moe: expert_bias is null, must point to 2 elements; the problem says expert_bias=yes");
  const auto misplaced = [](const auto* pointer) {
    return reinterpret_cast<std::remove_const_t<std::remove_pointer_t<decltype(pointer)>>*>(
        uintptr_t(pointer) + 1);
  };
  EXPECT_EQ(says([&](Args& a) { a.scores = misplaced(a.scores); }).find("moe: scores is at "), 0u);
  EXPECT_EQ(says([&](Args& a) { a.experts = misplaced(a.experts); }).find("moe: experts is at "),
            0u);
  EXPECT_EQ(says([](Args& a) { a.experts = nullptr; }),
            "moe: experts is null, must point to 8 elements; forward writes it");
  EXPECT_EQ(says([](Args& a) { a.offsets = nullptr; }),
            "moe: offsets is null, must point to 3 elements; forward writes it");
  EXPECT_EQ(says([&](Args& a) { a.prob = misplaced(a.prob); }).find("moe: prob is at "), 0u);
  EXPECT_EQ(says([&](Args& a) { a.offsets = misplaced(a.offsets); }).find("moe: offsets is at "),
            0u);
  EXPECT_EQ(says([](Args& a) { a.fc2.w = {}; }).find("grouped_mlp fc2: w is f32[], must be"), 0u);
  EXPECT_EQ(says([](Args& a) { a.saved.bytes = 1; }).find("moe: saved is 1 bytes, must be "), 0u);
  EXPECT_EQ(run_error(small(), kForward, [](Args&, Workspace& w) { w = {}; })
                .find("moe: workspace is 0 bytes, must be "),
            0u);
}

TEST(MoeErrors, OfBackward) {
  const auto says = [](auto change) {
    return run_error(small(), kBackward, [&](Args& a, Workspace&) { change(a); });
  };
  EXPECT_EQ(says([](Args& a) { a.dout = {}; }), "moe: dout is f32[], must be bf16[4, 6]");
  EXPECT_EQ(says([](Args& a) { a.dx = {}; }), "moe: dx is f32[], must be bf16[4, 6]");
  EXPECT_EQ(says([](Args& a) { a.logits = {}; }), "moe: logits is f32[], must be f32[4, 2]");
  EXPECT_EQ(says([](Args& a) { a.dlogits = {}; }), "moe: dlogits is f32[], must be f32[4, 2]");
  EXPECT_EQ(says([](Args& a) { a.experts = nullptr; }),
            "moe: experts is null, must point to 8 elements; forward writes it");
  EXPECT_EQ(says([](Args& a) { a.offsets = nullptr; }),
            "moe: offsets is null, must point to 3 elements; forward writes it");
  EXPECT_EQ(says([](Args& a) { a.fc1.dw = {}; }).find("grouped_mlp fc1: dw is f32[], must be"), 0u);
  WgradQueue queue(2);
  EXPECT_EQ(says([&](Args& a) {
              a.queue = &queue;
            }).find("grouped_mlp: queue is given, must be null; the problem says deferred=no"),
            0u);
  MoeProblem again = small();
  again.keep_rows = false;
  EXPECT_EQ(run_error(again, kBackward, [](Args& a, Workspace&) { a.x = {}; }),
            "moe: x is f32[], must be bf16[4, 6]");
  MoeProblem frozen = small();
  frozen.dlogits = false;
  const float one[8] = {};
  EXPECT_EQ(run_error(frozen, kBackward, [&](Args& a, Workspace&) { a.dscores = one; }),
            "moe: dscores is given, must be null; the problem says dlogits=no");
  EXPECT_EQ(run_error(frozen, kBackward, [](Args& a, Workspace&) { a.dlogits = a.logits; }),
            "moe: dlogits is given, must be null; the problem says dlogits=no");
  frozen.dgrad = frozen.wgrad1 = frozen.wgrad2 = frozen.dbias = false;
  EXPECT_EQ(run_error(frozen, kBackward, [](Args&, Workspace&) {}),
            "moe: dgrad, dlogits, wgrad1, wgrad2 and dbias are no, must be yes for one of them; "
            "backward has nothing to compute");
}

TEST(MoeErrors, OfDeferredWeightGradients) {
  MoeProblem deferred = small();
  deferred.options.deferred = true;
  EXPECT_EQ(run_error(deferred, kBackward, [](Args& a, Workspace&) { a.pending = {}; })
                .find("moe: pending is 0 bytes, must be "),
            0u);
  EXPECT_EQ(run_error(deferred, kWgrad, [](Args& a, Workspace&) { a.pending.data = nullptr; })
                .find("moe: pending is null, must be "),
            0u);
  EXPECT_EQ(run_error(deferred, kWgrad, [](Args& a, Workspace&) { a.offsets = nullptr; }),
            "moe: offsets is null, must point to 3 elements; forward writes it");
  EXPECT_EQ(run_error(small(), kWgrad, [](Args&, Workspace&) {}),
            "moe: no weight gradient is deferred, must be one or more; plan with deferred=yes and "
            "wgrad1=yes or wgrad2=yes");
  const MoePlan empty;
  EXPECT_EQ(test::invalid([&] { forward(empty, {}, {}, {}); }).substr(0, 45),
            "moe: the plan is empty; make it with plan() [");
}

}  // namespace
