// torch.ops.cadre.moe and its backward; moe_autograd.cpp differentiates it.
#include "moe.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "arguments.h"
#include "call_memory.h"
#include "moe_launch.h"

namespace cadre::door {
namespace {

const char* const kBackwardSchema =
    "moe_backward(Tensor dout, Tensor? dscores, Tensor x, Tensor logits, Tensor experts, "
    "Tensor offsets, Tensor saved, Tensor[] weight1, Tensor[] bias1, Tensor[] weight2, "
    "Tensor[] bias2, *, Tensor? shared_weight1=None, Tensor? shared_weight2=None, "
    "Tensor? shared_gate=None, Tensor? rng=None, bool[5] wants=[True, True, True, True, True], "
    "bool deferred=False, str routing=\"softmax\", str activation=\"swiglu\", str recipe=\"\", "
    "bool keep_h=False, bool keep_rows=False, ScalarType? dweight_dtype=None) -> "
    "(Tensor dx, Tensor dlogits, Tensor[] dweight1, "
    "Tensor[] dbias1, Tensor[] dweight2, Tensor[] dbias2, Tensor pending, Tensor dshared_weight1, "
    "Tensor dshared_weight2, Tensor dshared_gate)";

const char* const kSchemas[] = {
    "moe(Tensor x, Tensor logits, int top_k, Tensor? expert_bias, Tensor[] weight1, "
    "Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, *, Tensor? shared_weight1=None, "
    "Tensor? shared_weight2=None, Tensor? shared_gate=None, Tensor? rng=None, "
    "bool[5] wants=[False, False, False, False, False], str routing=\"softmax\", "
    "str activation=\"swiglu\", str recipe=\"\", bool keep_h=False, bool keep_rows=False) -> "
    "(Tensor out, Tensor experts, Tensor prob, Tensor scores, Tensor offsets, Tensor saved)",

    "moe.out(Tensor x, Tensor logits, int top_k, Tensor? expert_bias, Tensor[] weight1, "
    "Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, *, Tensor? shared_weight1=None, "
    "Tensor? shared_weight2=None, Tensor? shared_gate=None, Tensor? rng=None, "
    "bool[5] wants=[True, True, True, True, True], str routing=\"softmax\", "
    "str activation=\"swiglu\", str recipe=\"\", bool keep_h=False, bool keep_rows=False, "
    "Tensor(a!) out, Tensor(b!) experts, Tensor(c!) prob, Tensor(d!) scores, Tensor(e!) offsets, "
    "Tensor(f!) saved) -> ()",

    kBackwardSchema,

    "moe_backward.out(Tensor dout, Tensor? dscores, Tensor x, Tensor logits, Tensor experts, "
    "Tensor offsets, Tensor saved, Tensor[] weight1, Tensor[] bias1, Tensor[] weight2, "
    "Tensor[] bias2, *, Tensor? shared_weight1=None, Tensor? shared_weight2=None, "
    "Tensor? shared_gate=None, Tensor? rng=None, bool[5] wants=[True, True, True, True, True], "
    "str routing=\"softmax\", str activation=\"swiglu\", str recipe=\"\", bool keep_h=False, "
    "bool keep_rows=False, Tensor(a!)? dx, Tensor(b!)? dlogits, Tensor(c!)[] dbias1, "
    "Tensor(d!)[] dbias2, Tensor(e!) pending, Tensor(f!)? dshared_gate=None) -> ()",

    "moe_wgrad.out(Tensor x, Tensor logits, Tensor experts, Tensor offsets, Tensor saved, "
    "Tensor pending, Tensor[] weight1, Tensor[] weight2, *, bool[2] biases, Tensor? dout=None, "
    "Tensor? shared_weight1=None, Tensor? shared_weight2=None, Tensor? shared_gate=None, "
    "bool[5] wants=[True, True, True, True, True], str routing=\"softmax\", "
    "str activation=\"swiglu\", str recipe=\"\", bool keep_h=False, bool keep_rows=False, "
    "str accumulate=\"no\", Tensor? accumulate_flags=None, Tensor(a!)[] dweight1, "
    "Tensor(b!)[] dweight2, Tensor(c!)? dshared_weight1=None, "
    "Tensor(d!)? dshared_weight2=None) -> ()",
};

/// Where forward writes, besides experts and offsets.
struct MoeOutputs {
  const Tensor &out, &prob, &scores, &saved;
};

void run_forward(const MoeCall& call, const MoeProblem& problem, const Maybe& expert_bias,
                 const MoeOutputs& to) {
  MoeProblem p = problem;
  p.expert_bias = expert_bias.has_value();
  MoeLaunch moe(call, p);
  const Tensor bias = read_floats(expert_bias, {"expert_bias", {p.experts}, call.x});
  moe.args.expert_bias = floats(bias, "expert_bias");
  require_type(to.out, call.x.scalar_type(), "out");
  moe.args.out = view(to.out, call.x, "out");
  moe.args.prob = written_floats(to.prob, {"prob", {p.tokens, p.top_k}, call.x});
  moe.args.scores = written_floats(to.scores, {"scores", {p.tokens, p.experts}, call.x});
  require_same_device(call.x, to.saved, "saved");
  const AlignedOutput saved(to.saved, "saved");
  moe.args.saved = saved.memory();
  moe.run(kForward, &LayerMemory::forward_workspace_bytes);
}

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Outputs moe(const Tensor& x, const Tensor& logits, int64_t top_k, const Maybe& expert_bias,
            TensorList weight1, TensorList bias1, TensorList weight2, TensorList bias2,
            const Maybe& shared1, const Maybe& shared2, const Maybe& shared_gate, const Maybe& rng,
            MoeWants wants, Text routing, Text activation, Text recipe, bool keep_h,
            bool keep_rows) {
  return translate_errors([&] {
    const Tensor tokens = rows_of(x, "x"), dense = rows_of(logits, "logits");
    TORCH_CHECK_VALUE(top_k >= 1, "top_k is ", top_k, ", must be 1 or more");
    const auto ints = x.options().dtype(at::kInt), floats = x.options().dtype(at::kFloat);
    const int64_t count = tokens.size(0), all = dense.size(1);
    const Tensor experts = at::empty({count, int_of(top_k, "top_k")}, ints);
    const Tensor offsets = at::empty({all + 1}, ints);
    const MoeCall call{tokens,  dense,   experts,    offsets, weight1,     bias1,
                       weight2, bias2,   shared1,    shared2, shared_gate, rng,
                       wants,   routing, activation, recipe,  keep_h,      keep_rows};
    const MoeProblem p = problem_of(call);
    const Tensor saved = bytes(memory_bounds(p, device(x)).saved.bytes(p.tokens), x);
    const Tensor out = at::empty(tokens.sizes(), tokens.options());
    const Tensor prob = at::empty(experts.sizes(), floats),
                 scores = at::empty({count, all}, floats);
    run_forward(call, p, expert_bias, {out, prob, scores, saved});
    return Outputs(out, experts, prob, scores, offsets, saved);
  });
}

void moe_out(const Tensor& x, const Tensor& logits, int64_t top_k, const Maybe& expert_bias,
             TensorList weight1, TensorList bias1, TensorList weight2, TensorList bias2,
             const Maybe& shared1, const Maybe& shared2, const Maybe& shared_gate, const Maybe& rng,
             MoeWants wants, Text routing, Text activation, Text recipe, bool keep_h,
             bool keep_rows, const Tensor& out, const Tensor& experts, const Tensor& prob,
             const Tensor& scores, const Tensor& offsets, const Tensor& saved) {
  translate_errors([&] {
    const Tensor tokens = rows_of(x, "x"), dense = rows_of(logits, "logits");
    written_ints(experts, {"experts", {tokens.size(0), top_k}, x});
    const MoeCall call{tokens,  dense,   experts,    offsets, weight1,     bias1,
                       weight2, bias2,   shared1,    shared2, shared_gate, rng,
                       wants,   routing, activation, recipe,  keep_h,      keep_rows};
    run_forward(call, problem_of(call), expert_bias, {out, prob, scores, saved});
    bump_versions({out, experts, prob, scores, offsets, saved});
  });
}

/// Where backward writes; what is not wanted is empty.
struct MoeGradients {
  Tensor dx, dlogits, pending;
  TensorList dw1{}, dbias1{}, dw2{}, dbias2{};
  Tensor dshared1{}, dshared2{}, dshared_gate{};
};

/// What backward is called with besides.
struct MoeBackwardInputs {
  const Tensor& dout;
  const Maybe& dscores;
  const Tensor& saved;
};

void run_backward(const MoeCall& call, const MoeProblem& p, const MoeBackwardInputs& in,
                  const MoeGradients& to) {
  if (!learns(p)) return;
  MoeLaunch moe(call, p);
  const Tensor dout = rows_for(in.dout, "dout", p.options.align),
               saved = aligned(in.saved, "saved");
  moe.args.dout = view(dout, call.x, "dout");
  require_same_device(call.x, saved, "saved");
  require_same_device(call.x, to.pending, "pending");
  moe.args.saved = memory_of(saved, "saved");
  const Tensor dscores = read_floats(in.dscores, {"dscores", call.logits.sizes(), call.x});
  if (p.dgrad) {
    require_type(to.dx, call.x.scalar_type(), "dx");
    moe.args.dx = view(to.dx, call.x, "dx");
  }
  if (p.dlogits) {
    require_type(to.dlogits, call.logits.scalar_type(), "dlogits");
    moe.args.dlogits = view(to.dlogits, call.x, "dlogits");
    moe.args.dscores = floats(dscores, "dscores");
    if (p.shared_gate)
      moe.args.dshared_gate = written_floats(to.dshared_gate, {"dshared_gate", {p.tokens}, call.x});
  }
  if (p.dbias) {
    require_like(to.dbias1, call.bias1, "dbias1");
    require_like(to.dbias2, call.bias2, "dbias2");
  }
  moe.fc1.bind_dbias(to.dbias1);
  moe.fc2.bind_dbias(to.dbias2);
  moe.fc1.bind_dw(to.dw1);
  moe.fc2.bind_dw(to.dw2);
  moe.bind_dshared(to.dshared1, to.dshared2);
  const AlignedOutput pending(to.pending, "pending");
  if (p.options.deferred) moe.args.pending = pending.memory();
  moe.run(kBackward, &LayerMemory::backward_workspace_bytes);
}

using List = std::vector<Tensor>;
using Gradients =
    std::tuple<Tensor, Tensor, List, List, List, List, Tensor, Tensor, Tensor, Tensor>;

/// The gradient of a weight of the shared expert, if there is one.
Tensor like_shared(bool wanted, const Maybe& weight, std::optional<at::ScalarType> type,
                   const Tensor& x) {
  return wanted && weight ? empty_like(*weight, type)[0] : at::empty({0}, x.options());
}

template <bool kOverwrite>
Gradients moe_backward(const Tensor& dout, const Maybe& dscores, const Tensor& x,
                       const Tensor& logits, const Tensor& experts, const Tensor& offsets,
                       const Tensor& saved, TensorList weight1, TensorList bias1,
                       TensorList weight2, TensorList bias2, const Maybe& shared1,
                       const Maybe& shared2, const Maybe& shared_gate, const Maybe& rng,
                       MoeWants wants, bool deferred, Text routing, Text activation, Text recipe,
                       bool keep_h, bool keep_rows, std::optional<at::ScalarType> dweight_dtype) {
  return translate_errors([&] {
    const Tensor tokens = rows_of(x, "x"), dense = rows_of(logits, "logits");
    const MoeCall call{tokens,  dense,   experts,    offsets, weight1,     bias1,
                       weight2, bias2,   shared1,    shared2, shared_gate, rng,
                       wants,   routing, activation, recipe,  keep_h,      keep_rows};
    MoeProblem p = problem_of(call);
    if (dweight_dtype) p.parameters.dw = float_type(*dweight_dtype, "dweight");
    p.options.deferred = deferred;
    p.options.overwrite_saved = kOverwrite;
    const auto like = [](bool wanted, const Tensor& t) {
      return at::empty(wanted ? t.sizes() : at::IntArrayRef{0}, t.options());
    };
    const auto all_like = [](bool wanted, TensorList list,
                             std::optional<at::ScalarType> type = std::nullopt) {
      return wanted ? empty_like(list, type) : List();
    };
    Gradients gradients{
        like(p.dgrad, tokens),
        like(p.dlogits, dense),
        all_like(p.wgrad1 && !deferred, weight1, dweight_dtype),
        all_like(p.dbias, bias1),
        all_like(p.wgrad2 && !deferred, weight2, dweight_dtype),
        all_like(p.dbias, bias2),
        bytes(deferred ? memory_bounds(p, device(x)).pending.bytes(p.tokens) : 0, x),
        like_shared(p.wgrad1 && !deferred, shared1, dweight_dtype, x),
        like_shared(p.wgrad2 && !deferred, shared2, dweight_dtype, x),
        at::empty({p.shared_gate && p.dlogits ? p.tokens : 0}, x.options().dtype(at::kFloat))};
    const auto& [dx, dlogits, dw1, dbias1, dw2, dbias2, pending, dshared1, dshared2, dgate] =
        gradients;
    run_backward(call, p, {dout, dscores, saved},
                 {dx, dlogits, pending, dw1, dbias1, dw2, dbias2, dshared1, dshared2, dgate});
    if (kOverwrite) bump_versions({saved});
    return gradients;
  });
}

void moe_backward_out(const Tensor& dout, const Maybe& dscores, const Tensor& x,
                      const Tensor& logits, const Tensor& experts, const Tensor& offsets,
                      const Tensor& saved, TensorList weight1, TensorList bias1, TensorList weight2,
                      TensorList bias2, const Maybe& shared1, const Maybe& shared2,
                      const Maybe& shared_gate, const Maybe& rng, MoeWants wants, Text routing,
                      Text activation, Text recipe, bool keep_h, bool keep_rows, const Maybe& dx,
                      const Maybe& dlogits, TensorList dbias1, TensorList dbias2,
                      const Tensor& pending, const Maybe& dshared_gate) {
  translate_errors([&] {
    const Tensor tokens = rows_of(x, "x"), dense = rows_of(logits, "logits");
    const MoeCall call{tokens,  dense,   experts,    offsets, weight1,     bias1,
                       weight2, bias2,   shared1,    shared2, shared_gate, rng,
                       wants,   routing, activation, recipe,  keep_h,      keep_rows};
    MoeProblem p = problem_of(call);
    p.options.deferred = true;
    const auto or_none = [](const Maybe& t) { return t.value_or(Tensor()); };
    run_backward(call, p, {dout, dscores, saved},
                 {or_none(dx),
                  or_none(dlogits),
                  pending,
                  {},
                  dbias1,
                  {},
                  dbias2,
                  {},
                  {},
                  or_none(dshared_gate)});
    bump_versions({or_none(dx), or_none(dlogits), pending, or_none(dshared_gate)});
    bump_versions(dbias1);
    bump_versions(dbias2);
  });
}

/// What wgrad takes for a shared expert, whose gradients are of the type of the others'.
struct SharedDw {
  const Maybe &dout, &dw1, &dw2;
};

void check_shared_dw(const MoeCall& call, const MoeProblem& p, const SharedDw& to,
                     const Tensor& like) {
  if (!call.shared1) return;
  TORCH_CHECK_VALUE(to.dout && to.dw1 && to.dw2,
                    "dout, dshared_weight1 and dshared_weight2 are None, must be given, all three; "
                    "there is a shared expert");
  TORCH_CHECK_VALUE(p.options.accumulate != Accumulate::kPerExpert,
                    "accumulate is 'per_expert', must be no, yes or device; there is no flag of a "
                    "shared expert");
  for (const auto& [dw, what] :
       {std::pair(&*to.dw1, "dshared_weight1"), std::pair(&*to.dw2, "dshared_weight2")}) {
    require_type(*dw, like.scalar_type(), what);
    require_same_device(call.x, *dw, what);
  }
}

void moe_wgrad_out(const Tensor& x, const Tensor& logits, const Tensor& experts,
                   const Tensor& offsets, const Tensor& saved, const Tensor& pending,
                   TensorList weight1, TensorList weight2, ExpertBiases biases, const Maybe& dout,
                   const Maybe& shared1, const Maybe& shared2, const Maybe& shared_gate,
                   MoeWants wants, Text routing, Text activation, Text recipe, bool keep_h,
                   bool keep_rows, Text accumulate, const Maybe& accumulate_flags,
                   TensorList dweight1, TensorList dweight2, const Maybe& dshared1,
                   const Maybe& dshared2) {
  translate_errors([&] {
    const Tensor tokens = rows_of(x, "x"), dense = rows_of(logits, "logits");
    const MoeCall call{tokens,  dense,   experts,    offsets, weight1,     {},
                       weight2, {},      shared1,    shared2, shared_gate, {},
                       wants,   routing, activation, recipe,  keep_h,      keep_rows};
    MoeProblem p = problem_of(call);
    p.bias1 = biases[0];
    p.bias2 = biases[1];
    p.options.deferred = true;
    plan_dw(p.parameters, p.options, {weight1, weight2, dweight1, dweight2, accumulate}, offsets);
    require_same_device(x, saved, "saved");
    require_same_device(x, pending, "pending");
    const Tensor aligned_saved = aligned(saved, "saved");
    const Tensor aligned_pending = aligned(pending, "pending");
    check_shared_dw(call, p, {dout, dshared1, dshared2}, dweight1[0]);
    const Tensor none, &ds1 = shared1 ? *dshared1 : none, &ds2 = shared1 ? *dshared2 : none;
    const Tensor dy = shared1 ? rows_for(*dout, "dout", p.options.align) : none;
    p.options.align = std::min(p.options.align, alignment({ds1, ds2}));
    MoeLaunch moe(call, p);
    if (shared1) moe.args.dout = view(dy, x, "dout");
    moe.bind_dshared(ds1, ds2);
    moe.args.saved = memory_of(aligned_saved, "saved");
    moe.args.pending = memory_of(aligned_pending, "pending");
    moe.fc1.bind_dw(dweight1);
    moe.fc2.bind_dw(dweight2);
    moe.accumulate(accumulate_words(accumulate_flags, p.options.accumulate, p.experts, x));
    moe.run(kWgrad, &LayerMemory::wgrad_workspace_bytes);
    bump_versions(dweight1);
    bump_versions(dweight2);
    bump_versions({ds1, ds2});
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  for (const char* schema : kSchemas) m.def(schema);
  m.def(overwriting_saved(kBackwardSchema).c_str());
}

static void implement(torch::Library& m) {
  m.impl("moe", moe);
  implement_out(m, "moe", moe_out);
  m.impl("moe_backward", moe_backward<false>);
  m.impl("moe_backward.overwrite_saved", moe_backward<true>);
  implement_out(m, "moe_backward", moe_backward_out);
  implement_out(m, "moe_wgrad", moe_wgrad_out);
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
