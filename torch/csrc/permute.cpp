#include <ATen/ops/empty.h>

#include <tuple>

#include "arguments.h"
#include "autograd.h"
#include "call_memory.h"

// torch.ops.cadre.permute, combine and their gradients: docs/ops/permute.md.
namespace cadre::door {
namespace {

using TensorPair = std::tuple<Tensor, Tensor>;

using PermuteOp = TensorPair(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Maybe&);
using PermuteBackwardOp = TensorPair(const Tensor&, const Maybe&, const Tensor&, const Tensor&);
using CombineOp = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Maybe&);
using CombineBackwardOp = TensorPair(const Tensor&, const Maybe&, const Tensor&, const Tensor&,
                                     const Tensor&, const Maybe&, bool);

/// Which row a token's choice became, and which choice a row was.
struct TensorRowMap {
  Tensor offsets, row_of, slot_of;  ///< slot_of only where the pass reads it
};

/// The tensors of all four passes. Which are inputs and which outputs depends on the pass: see
/// PermuteArgs.
struct PermuteTensors {
  Tensor tokens{}, rows{}, y{}, row_prob{}, dprob{};
  Maybe prob{}, drow_prob{};
};

PermuteProblem problem_of(PermutePass pass, const TensorRowMap& map, const Tensor& width_of) {
  TORCH_CHECK_VALUE(map.row_of.dim() == 2, "row_of has shape ", map.row_of.sizes(),
                    ", must be [T, top_k]");
  TORCH_CHECK_VALUE(width_of.dim() == 2, "tokens and rows have shape ", width_of.sizes(),
                    ", must have 2 dimensions");
  PermuteProblem p{.pass = pass};
  p.tokens = map.row_of.size(0);
  p.top_k = int(map.row_of.size(1));
  p.hidden = width_of.size(1);
  p.dtype = float_type(width_of.scalar_type(), "tokens or rows");
  return p;
}

/// Checks lengths and launches. `on` is a tensor that the pass reads.
void run_permute(PermuteProblem p, const TensorRowMap& map, const PermuteTensors& tensors,
                 const Tensor& on) {
  PermuteArgs args{.offsets = offsets(map.offsets, on)};
  p.experts = args.offsets.experts;
  const at::IntArrayRef choices = map.row_of.sizes();
  const bool by_row = p.pass == PermutePass::kPermute || p.pass == PermutePass::kCombineBackward;
  const Tensor row_of = read_ints(map.row_of, {"row_of", choices, on});
  const Tensor slot_of = by_row ? read_ints(map.slot_of, {"slot_of", {p.rows}, on}) : Tensor();
  const Tensor prob = read_floats(tensors.prob, {"prob", choices, on});
  const Tensor drow_prob = read_floats(tensors.drow_prob, {"drow_prob", {p.rows}, on});
  if (!by_row || tensors.dprob.defined()) args.map.row_of = row_of.data_ptr<int32_t>();
  if (by_row) args.map.slot_of = slot_of.data_ptr<int32_t>();
  args.prob = floats(prob, "prob");
  args.drow_prob = floats(drow_prob, "drow_prob");
  if (tensors.row_prob.defined())
    args.row_prob = written_floats(tensors.row_prob, {"row_prob", {p.rows}, on});
  if (tensors.dprob.defined()) args.dprob = written_floats(tensors.dprob, {"dprob", choices, on});
  require_same_device(on, tensors.tokens, "tokens");
  require_same_device(on, tensors.rows, "rows");
  args.tokens = view(tensors.tokens, "tokens");
  args.rows = view(tensors.rows, "rows");
  args.y = view(tensors.y, "rows");
  launch(p, args, on);
}

void permute_to(const Tensor& tokens, const TensorRowMap& map, const Maybe& prob,
                const TensorPair& out, Tail tail) {
  auto p = problem_of(PermutePass::kPermute, map, tokens);
  p.rows = map.slot_of.numel();
  p.prob = prob.has_value();
  p.tail = tail;
  const auto& [rows, row_prob] = out;
  const Tensor read = with_rows(tokens, "tokens");
  run_permute(
      p, map,
      {.tokens = read, .rows = rows, .row_prob = p.prob ? row_prob : Tensor(), .prob = prob}, read);
}

void permute_backward_to(const Tensor& drows, const Maybe& drow_prob, const TensorRowMap& map,
                         const TensorPair& out) {
  auto p = problem_of(PermutePass::kPermuteBackward, map, drows);
  p.rows = drows.size(0);
  p.prob = drow_prob.has_value();
  const auto& [dtokens, dprob] = out;
  const Tensor read = with_rows(drows, "drows");
  run_permute(
      p, map,
      {.tokens = dtokens, .rows = read, .dprob = p.prob ? dprob : Tensor(), .drow_prob = drow_prob},
      read);
}

void combine_to(const Tensor& rows, const TensorRowMap& map, const Maybe& prob,
                const Tensor& tokens) {
  auto p = problem_of(PermutePass::kCombine, map, rows);
  p.rows = rows.size(0);
  require_same_device(rows, map.slot_of, "slot_of");
  TORCH_CHECK_VALUE(map.slot_of.numel() == p.rows, "slot_of has ", map.slot_of.numel(),
                    " entries, must have ", p.rows, ", one for each row of rows");
  p.prob = prob.has_value();
  const Tensor read = with_rows(rows, "rows");
  run_permute(p, map, {.tokens = tokens, .rows = read, .prob = prob}, read);
}

/// What combine_backward reads beside the map.
struct CombineBackwardInputs {
  const Tensor& dtokens;
  const Maybe& rows;  ///< what combine read; for dprob
  const Maybe& prob;
  bool dprob;
};

void combine_backward_to(const CombineBackwardInputs& in, const TensorRowMap& map,
                         const TensorPair& out, Tail tail) {
  auto p = problem_of(PermutePass::kCombineBackward, map, in.dtokens);
  TORCH_CHECK_VALUE(!in.dprob || (in.prob && in.rows),
                    "want_dprob is true, must be false; it is made from "
                    "prob and rows, and one of them is None");
  p.rows = map.slot_of.numel();
  p.prob = in.prob.has_value();
  p.tail = tail;
  const auto& [drows, dprob] = out;
  const Tensor read = with_rows(in.dtokens, "dtokens");
  const bool makes_dprob = in.dprob && read.size(0) > 0;  // without tokens there is none
  const Tensor y = makes_dprob ? with_rows(*in.rows, "rows") : Tensor();
  require_same_device(read, y, "rows");
  run_permute(p, map,
              {.tokens = read,
               .rows = drows,
               .y = y,
               .dprob = makes_dprob ? dprob : Tensor(),
               .prob = in.prob},
              read);
}

/// A list of probabilities, empty where none is wanted.
Tensor new_floats(bool wanted, at::IntArrayRef shape, const Tensor& like) {
  return at::empty(wanted ? shape : at::IntArrayRef({0}), like.options().dtype(at::kFloat));
}

void require_rank(const Tensor& t, const char* what) {
  TORCH_CHECK_VALUE(t.dim() == 2, what, " has shape ", t.sizes(), ", must have 2 dimensions");
}

TensorPair permute_op(const Tensor& tokens, const Tensor& offsets, const Tensor& row_of,
                      const Tensor& slot_of, const Maybe& prob) {
  require_rank(tokens, "tokens");
  const int64_t rows = slot_of.numel();
  const TensorPair out{at::empty({rows, tokens.size(1)}, tokens.options()),
                       new_floats(prob.has_value(), {rows}, tokens)};
  permute_to(tokens, {offsets, row_of, slot_of}, prob, out, Tail::kZero);
  return out;
}

TensorPair permute_backward_op(const Tensor& drows, const Maybe& drow_prob, const Tensor& offsets,
                               const Tensor& row_of) {
  require_rank(drows, "drows");
  const TensorPair out{at::empty({row_of.size(0), drows.size(1)}, drows.options()),
                       new_floats(drow_prob.has_value(), row_of.sizes(), drows)};
  permute_backward_to(drows, drow_prob, {offsets, row_of, {}}, out);
  return out;
}

Tensor combine_op(const Tensor& rows, const Tensor& offsets, const Tensor& row_of,
                  const Tensor& slot_of, const Maybe& prob) {
  require_rank(rows, "rows");
  Tensor tokens = at::empty({row_of.size(0), rows.size(1)}, rows.options());
  combine_to(rows, {offsets, row_of, slot_of}, prob, tokens);
  return tokens;
}

struct Permute : torch::autograd::Function<Permute> {
  static variable_list forward(AutogradContext* ctx, const Tensor& tokens, const Maybe& prob,
                               const TensorRowMap& map) {
    static const auto call = op<PermuteOp>("cadre::permute");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({map.offsets, map.row_of});
    ctx->saved_data["prob"] = prob.has_value();
    auto [rows, row_prob] = call.call(tokens, map.offsets, map.row_of, map.slot_of, prob);
    return {rows, row_prob};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call = op<PermuteBackwardOp>("cadre::permute_backward");
    const auto saved = ctx->get_saved_variables();
    const bool prob = ctx->saved_data["prob"].toBool();
    auto [dtokens, dprob] =
        call.call(grads[0], prob ? Maybe(grads[1]) : std::nullopt, saved[0], saved[1]);
    return {dtokens, prob ? dprob : Tensor(), Tensor()};
  }
};

struct Combine : torch::autograd::Function<Combine> {
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Maybe& prob,
                        const TensorRowMap& map) {
    static const auto call = op<CombineOp>("cadre::combine");
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool dprob = requires_grad(prob);
    ctx->save_for_backward(
        {dprob ? rows : Tensor(), map.offsets, map.row_of, map.slot_of, prob.value_or(Tensor())});
    ctx->saved_data["dprob"] = dprob;
    return call.call(rows, map.offsets, map.row_of, map.slot_of, prob);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call = op<CombineBackwardOp>("cadre::combine_backward");
    const auto saved = ctx->get_saved_variables();
    const bool wanted = ctx->saved_data["dprob"].toBool();
    const Maybe rows = wanted ? Maybe(saved[0]) : std::nullopt;
    const Maybe prob = saved[4].defined() ? Maybe(saved[4]) : std::nullopt;
    auto [drows, dprob] = call.call(grads[0], rows, saved[1], saved[2], saved[3], prob, wanted);
    return {drows, wanted ? dprob : Tensor(), Tensor()};
  }
};

TensorPair permute_autograd(const Tensor& tokens, const Tensor& offsets, const Tensor& row_of,
                            const Tensor& slot_of, const Maybe& prob) {
  const auto out = Permute::apply(tokens, prob, TensorRowMap{offsets, row_of, slot_of});
  return {out[0], out[1]};
}

Tensor combine_autograd(const Tensor& rows, const Tensor& offsets, const Tensor& row_of,
                        const Tensor& slot_of, const Maybe& prob) {
  return Combine::apply(rows, prob, TensorRowMap{offsets, row_of, slot_of});
}

void implement_forward(torch::Library& m) {
  m.impl("permute", permute_op);
  implement_out(
      m, "permute",
      +[](const Tensor& tokens, const Tensor& offsets, const Tensor& row_of, const Tensor& slot_of,
          const Maybe& prob, const Tensor& rows, const Tensor& row_prob) {
        const TensorPair out{written_like(rows, "rows", tokens),
                             written(row_prob, "row_prob", tokens)};
        permute_to(tokens, {offsets, row_of, slot_of}, prob, out, Tail::kKeep);
      });
  m.impl("combine", combine_op);
  implement_out(
      m, "combine",
      +[](const Tensor& rows, const Tensor& offsets, const Tensor& row_of, const Tensor& slot_of,
          const Maybe& prob, const Tensor& tokens) {
        combine_to(rows, {offsets, row_of, slot_of}, prob, written_like(tokens, "tokens", rows));
      });
}

void implement_backward(torch::Library& m) {
  m.impl("permute_backward", permute_backward_op);
  implement_out(
      m, "permute_backward",
      +[](const Tensor& drows, const Maybe& drow_prob, const Tensor& offsets, const Tensor& row_of,
          const Tensor& dtokens, const Tensor& dprob) {
        permute_backward_to(
            drows, drow_prob, {offsets, row_of, {}},
            {written_like(dtokens, "dtokens", drows), written(dprob, "dprob", drows)});
      });
  m.impl("combine_backward",
         [](const Tensor& dtokens, const Maybe& rows, const Tensor& offsets, const Tensor& row_of,
            const Tensor& slot_of, const Maybe& prob, bool want_dprob) {
           require_rank(dtokens, "dtokens");
           const TensorPair out{at::empty({slot_of.numel(), dtokens.size(1)}, dtokens.options()),
                                new_floats(want_dprob, row_of.sizes(), dtokens)};
           combine_backward_to({dtokens, rows, prob, want_dprob}, {offsets, row_of, slot_of}, out,
                               Tail::kZero);
           return out;
         });
  implement_out(
      m, "combine_backward",
      +[](const Tensor& dtokens, const Maybe& rows, const Tensor& offsets, const Tensor& row_of,
          const Tensor& slot_of, const Maybe& prob, bool want_dprob, const Tensor& drows,
          const Tensor& dprob) {
        const TensorPair out{written_like(drows, "drows", dtokens),
                             written(dprob, "dprob", dtokens)};
        combine_backward_to({dtokens, rows, prob, want_dprob}, {offsets, row_of, slot_of}, out,
                            Tail::kKeep);
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "permute(Tensor tokens, Tensor offsets, Tensor row_of, Tensor slot_of, Tensor? prob=None) -> "
      "(Tensor rows, Tensor row_prob)");
  m.def(
      "permute.out(Tensor tokens, Tensor offsets, Tensor row_of, Tensor slot_of, Tensor? "
      "prob=None, *, Tensor(a!) rows, Tensor(b!) row_prob) -> ()");
  m.def(
      "permute_backward(Tensor drows, Tensor? drow_prob, Tensor offsets, Tensor row_of) -> (Tensor "
      "dtokens, Tensor dprob)");
  m.def(
      "permute_backward.out(Tensor drows, Tensor? drow_prob, Tensor offsets, Tensor row_of, *, "
      "Tensor(a!) dtokens, Tensor(b!) dprob) -> ()");
  m.def(
      "combine(Tensor rows, Tensor offsets, Tensor row_of, Tensor slot_of, Tensor? prob=None) -> "
      "Tensor");
  m.def(
      "combine.out(Tensor rows, Tensor offsets, Tensor row_of, Tensor slot_of, Tensor? prob=None, "
      "*, Tensor(a!) tokens) -> ()");
  m.def(
      "combine_backward(Tensor dtokens, Tensor? rows, Tensor offsets, Tensor row_of, Tensor "
      "slot_of, Tensor? prob, bool want_dprob) -> (Tensor drows, Tensor dprob)");
  m.def(
      "combine_backward.out(Tensor dtokens, Tensor? rows, Tensor offsets, Tensor row_of, Tensor "
      "slot_of, Tensor? prob, bool want_dprob, *, Tensor(a!) drows, Tensor(b!) dprob) -> ()");
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
  m.impl("permute_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("combine_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("permute", permute_autograd);
  m.impl("combine", combine_autograd);
}

}  // namespace cadre::door
