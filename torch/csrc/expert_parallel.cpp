#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "arguments.h"
#include "autograd.h"
#include "exchange.h"

// torch.ops.cadre._window_*: the exchanges of ranks that read each other's memory, and their
// gradients (docs/layers/expert_parallel.md). torch/cadre/windows.py tells compilers their order.
namespace cadre::door {
namespace {

using Name = c10::string_view;

/// Where rows came from and go to: ExchangeMap as tensors.
struct ExchangeTensors {
  Tensor offsets, row_of, slot_of, row_here, verdict, place_of, sum_of;

  variable_list list() const {
    return {offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
  }
  ExchangeMap map() const {
    return {ints(row_of, "row_of"),
            ints(slot_of, "slot_of"),
            ints(row_here, "row_here"),
            ints(offsets, "offsets"),
            ints(verdict, "verdict"),
            place_of.numel() > 0 ? ints(place_of, "place_of") : nullptr,
            sum_of.numel() > 0 ? ints(sum_of, "sum_of") : nullptr};
  }
};

/// rows, row_prob, routed, then the map.
using Dispatched =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
/// rows, row_scales, then as above from row_prob on.
using DispatchedCodes = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                   Tensor, Tensor, Tensor>;
using TensorPair = std::tuple<Tensor, Tensor>;

DispatchedCodes with_scales(const Dispatched& d, const Tensor& row_scales) {
  return std::apply(
      [&](const Tensor& rows, const auto&... others) {
        return DispatchedCodes(rows, row_scales, others...);
      },
      d);
}

/// What a dispatch moves, and where to; scales are those of codes.
struct Moved {
  Tensor tokens, rows, token_scales, row_scales;
};

using DispatchOp = Dispatched(Name, const Tensor&, const Tensor&, const Maybe&);
using DispatchBackwardOp = TensorPair(Name, const Tensor&, const Maybe&, const Tensor&,
                                      const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                      const Tensor&, const Tensor&);
/// Of y, and of dout.
using RowsOp = Tensor(Name, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&, const Tensor&, const Tensor&);

Tensor new_ints(at::IntArrayRef shape, const Tensor& on) {
  return at::empty(shape, on.options().dtype(at::kInt));
}
Tensor new_floats(bool wanted, at::IntArrayRef shape, const Tensor& on) {
  return at::empty(wanted ? shape : at::IntArrayRef{0}, on.options().dtype(at::kFloat));
}

/// The choices as int32; of int64 those that it cannot hold stay choices of nobody.
Tensor choices(const Tensor& experts, const Expected& expected, int64_t all_experts) {
  index_type(experts.scalar_type(), "experts");
  require(experts, expected);
  if (experts.scalar_type() == at::kInt) return experts.contiguous();
  return experts.clamp(-1, all_experts).to(at::kInt).contiguous();
}

Tensor matrix(const Tensor& t, const char* what) {
  TORCH_CHECK_VALUE(t.dim() == 2, what, " has ", t.dim(), " dimensions, must have 2");
  return with_rows(t, what);
}

ExchangeTensors new_map(const ExpertParallelProblem& p, int64_t tokens, const Tensor& on) {
  return {new_ints({p.experts + 1}, on),
          new_ints({tokens, p.top_k}, on),
          new_ints({p.rows}, on),
          new_ints({p.ranks, p.tokens, p.top_k}, on),
          new_ints({1}, on),
          new_ints({p.push ? p.rows : 0}, on),
          new_ints({p.sum == RowSum::kRank ? tokens : 0, p.ranks}, on)};
}

/// Of codes, beside scales, or of numbers.
Dispatched dispatch_rows(const Exchange& exchange, const Moved& moved, const Tensor& experts,
                         const Maybe& prob) {
  const ExpertParallelPlan& plan = exchange.plan();
  const ExpertParallelProblem& p = plan.problem;
  const Tensor& tokens = moved.tokens;
  const int64_t shape[] = {tokens.size(0), p.top_k};
  const Tensor chosen = choices(experts, {"experts", shape, tokens}, int64_t(p.ranks) * p.experts);
  const Tensor factors = read_floats(prob, {"prob", shape, tokens});
  const ExchangeTensors to = new_map(p, shape[0], tokens);
  const Tensor row_prob = new_floats(p.prob, {p.rows}, tokens);
  const Tensor routed = new_ints({p.ranks}, tokens);
  translate_errors([&] {
    const CurrentStream current(tokens);
    const Scratch scratch(plan.workspace_bytes, tokens);
    cadre::dispatch(plan, exchange.rank_window(),
                    {.x = view(tokens, "x"),
                     .x_scales = view(moved.token_scales, "x_scales"),
                     .experts = ints(chosen, "experts"),
                     .prob = floats(factors, "prob"),
                     .rows = view(moved.rows, "rows"),
                     .row_scales = view(moved.row_scales, "row_scales"),
                     .row_prob = p.prob ? floats(row_prob, "row_prob") : nullptr,
                     .routed = ints(routed, "routed"),
                     .map = to.map()},
                    scratch.workspace(), current.stream());
  });
  return {moved.rows, row_prob,    routed,     to.offsets,  to.row_of,
          to.slot_of, to.row_here, to.verdict, to.place_of, to.sum_of};
}

Dispatched dispatch_op(Name name, const Tensor& x, const Tensor& experts, const Maybe& prob) {
  const auto exchange = Exchange::of(name);
  const Tensor tokens = matrix(x, "x");
  const Tensor rows = at::empty({exchange->plan().problem.rows, tokens.size(1)}, tokens.options());
  return dispatch_rows(*exchange, {tokens, rows, {}, {}}, experts, prob);
}

/// Scales of rows as the problem has them lie: row by row, or column by column, each beginning
/// at a multiple of 16 bytes.
Tensor new_row_scales(const ExpertParallelProblem& p, const Tensor& like) {
  const int64_t blocks = like.size(1);
  if (p.scales_major == Major::kRow) return at::empty({p.rows, blocks}, like.options());
  constexpr int64_t kStep = 4;
  const int64_t step = (p.rows + kStep - 1) / kStep * kStep;
  return at::empty({blocks, step}, like.options()).narrow(1, 0, p.rows).t();
}

DispatchedCodes dispatch_codes_op(Name name, const Tensor& x, const Tensor& x_scales,
                                  const Tensor& experts, const Maybe& prob) {
  const auto exchange = Exchange::of(name);
  const ExpertParallelProblem& p = exchange->plan().problem;
  const Tensor codes = matrix(x, "x"), scales = matrix(x_scales, "x_scales");
  require_same_device(codes, scales, "x_scales");
  const Tensor rows = at::empty({p.rows, codes.size(1)}, codes.options());
  const Tensor row_scales = new_row_scales(p, scales);
  return with_scales(dispatch_rows(*exchange, {codes, rows, scales, row_scales}, experts, prob),
                     row_scales);
}

/// Rows that are summed: where they are pushed, what stands for them.
Tensor results(const Exchange& exchange, const Tensor& rows, const char* what) {
  if (!exchange.plan().problem.push) return matrix(rows, what);
  TORCH_CHECK_VALUE(exchange.is_pushed(rows), what, " is a tensor of its own, must be what the ",
                    "experts returned, whose rows are pushed while they are computed [",
                    to_string(exchange.plan().problem), "]");
  return rows;
}

TensorPair dispatch_backward_op(Name name, const Tensor& drows, const Maybe& drow_prob,
                                const Tensor& offsets, const Tensor& row_of, const Tensor& slot_of,
                                const Tensor& row_here, const Tensor& verdict,
                                const Tensor& place_of, const Tensor& sum_of) {
  const auto exchange = Exchange::of(name);
  const ExpertParallelPlan& plan = exchange->plan();
  const ExpertParallelProblem& p = plan.problem;
  const Tensor given = results(*exchange, drows, "drows");
  const Tensor factors = read_floats(drow_prob, {"drow_prob", {p.rows}, given});
  const ExchangeTensors from{offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
  const Tensor dx = at::empty({row_of.size(0), drows.size(1)}, drows.options());
  const Tensor dprob = new_floats(p.prob, row_of.sizes(), given);
  translate_errors([&] {
    const CurrentStream current(given);
    const Scratch scratch(plan.workspace_bytes, given);
    cadre::dispatch_backward(plan, exchange->rank_window(),
                             {.drows = p.push ? TensorView() : view(given, "drows"),
                              .drow_prob = floats(factors, "drow_prob"),
                              .dx = view(dx, "dx"),
                              .dprob = p.prob ? floats(dprob, "dprob") : nullptr,
                              .map = from.map()},
                             scratch.workspace(), current.stream());
  });
  return {dx, dprob};
}

Tensor collect_op(Name name, const Tensor& y, const Tensor& offsets, const Tensor& row_of,
                  const Tensor& slot_of, const Tensor& row_here, const Tensor& verdict,
                  const Tensor& place_of, const Tensor& sum_of) {
  const auto exchange = Exchange::of(name);
  const Tensor given = results(*exchange, y, "y");
  const bool pushes = exchange->plan().problem.push;
  const ExchangeTensors from{offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
  const Tensor out = at::empty({row_of.size(0), given.size(1)}, given.options());
  translate_errors([&] {
    const CurrentStream current(given);
    cadre::collect(
        exchange->plan(), exchange->rank_window(),
        {.y = pushes ? TensorView() : view(given, "y"), .out = view(out, "out"), .map = from.map()},
        current.stream());
  });
  return out;
}

Tensor collect_backward_op(Name name, const Tensor& dout, const Tensor& offsets,
                           const Tensor& row_of, const Tensor& slot_of, const Tensor& row_here,
                           const Tensor& verdict, const Tensor& place_of, const Tensor& sum_of) {
  const auto exchange = Exchange::of(name);
  const Tensor given = matrix(dout, "dout");
  const ExchangeTensors from{offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
  const Tensor dy = at::empty({slot_of.size(0), given.size(1)}, given.options());
  translate_errors([&] {
    const CurrentStream current(given);
    cadre::collect_backward(exchange->plan(), exchange->rank_window(),
                            {.dout = view(given, "dout"), .dy = view(dy, "dy"), .map = from.map()},
                            current.stream());
  });
  return dy;
}

// Gradients

/// Of an exchange, which lives until its backward.
void keep_exchange(AutogradContext* ctx, Name name) {
  ctx->saved_data["name"] = std::string(name);
  ctx->saved_data["exchange"] = c10::IValue::make_capsule(Exchange::of(name));
}

struct Dispatch : torch::autograd::Function<Dispatch> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Maybe& prob, Name name,
                               const Tensor& experts) {
    static const auto call = op<DispatchOp>("cadre::_window_dispatch");
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [rows, row_prob, routed, offsets, row_of, slot_of, row_here, verdict, place_of,
                sum_of] = call.call(name, x, experts, prob);
    const ExchangeTensors map{offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
    ctx->set_materialize_grads(false);
    variable_list constant = map.list();
    constant.push_back(routed);
    if (!requires_grad(x)) constant.push_back(rows);
    if (!requires_grad(prob)) constant.push_back(row_prob);
    ctx->mark_non_differentiable(constant);
    ctx->save_for_backward(map.list());
    keep_exchange(ctx, name);
    ctx->saved_data["hidden"] = x.sym_size(1);
    ctx->saved_data["type"] = int64_t(x.scalar_type());
    ctx->saved_data["prob"] = prob.has_value();
    ctx->saved_data["wants"] = bits_of<2>({requires_grad(x), requires_grad(prob)});
    return {rows, row_prob, routed, offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
  }

  /// Both gradients travel, also where autograd has only one.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call = op<DispatchBackwardOp>("cadre::_window_dispatch_backward");
    auto& data = ctx->saved_data;
    const variable_list map = ctx->get_saved_variables();
    const c10::SymInt rows = map[2].sym_size(0);
    const auto type = at::ScalarType(data["type"].toInt());
    std::array<bool, 2> wants{};
    read_bits(data["wants"].toInt(), wants);
    const auto no_rows = [&] {
      const auto exchange = Exchange::of(data["name"].toStringRef());
      if (!exchange->plan().problem.push)
        return map[2].new_zeros_symint({rows, data["hidden"].toSymInt()}, type);
      TORCH_CHECK(!wants[0], "the experts made no gradient of their rows, must push one [",
                  to_string(exchange->plan().problem), "]");
      return exchange->pushed();
    };
    const Tensor drows = grads[0].defined() ? grads[0] : no_rows();
    Maybe drow_prob;
    if (data["prob"].toBool())
      drow_prob = grads[1].defined() ? grads[1] : map[2].new_zeros_symint({rows}, at::kFloat);
    const auto [dx, dprob] = call.call(data["name"].toStringRef(), drows, drow_prob, map[0], map[1],
                                       map[2], map[3], map[4], map[5], map[6]);
    return without_second_derivatives(
        "cadre.ExpertParallel", grads,
        {if_wanted(wants[0], dx), if_wanted(wants[1], dprob), Tensor(), Tensor()});
  }
};

struct Collect : torch::autograd::Function<Collect> {
  static Tensor forward(AutogradContext* ctx, const Tensor& y, Name name,
                        const ExchangeTensors& map) {
    static const auto call = op<RowsOp>("cadre::_window_collect");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward(map.list());
    keep_exchange(ctx, name);
    return call.call(name, y, map.offsets, map.row_of, map.slot_of, map.row_here, map.verdict,
                     map.place_of, map.sum_of);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call = op<RowsOp>("cadre::_window_collect_backward");
    const variable_list map = ctx->get_saved_variables();
    const Tensor dy = call.call(ctx->saved_data["name"].toStringRef(), grads[0], map[0], map[1],
                                map[2], map[3], map[4], map[5], map[6]);
    return without_second_derivatives("cadre.ExpertParallel", grads, {dy, Tensor(), Tensor()});
  }
};

Dispatched dispatch_autograd(Name name, const Tensor& x, const Tensor& experts, const Maybe& prob) {
  const variable_list out = Dispatch::apply(x, prob, name, experts);
  return {out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7], out[8], out[9]};
}

Tensor collect_autograd(Name name, const Tensor& y, const Tensor& offsets, const Tensor& row_of,
                        const Tensor& slot_of, const Tensor& row_here, const Tensor& verdict,
                        const Tensor& place_of, const Tensor& sum_of) {
  return Collect::apply(
      y, name, ExchangeTensors{offsets, row_of, slot_of, row_here, verdict, place_of, sum_of});
}

void implement(torch::Library& m) {
  m.impl("_window_dispatch", dispatch_op);
  m.impl("_window_dispatch_codes", dispatch_codes_op);
  m.impl("_window_dispatch_backward", dispatch_backward_op);
  m.impl("_window_collect", collect_op);
  m.impl("_window_collect_backward", collect_backward_op);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "_window_dispatch(str name, Tensor x, Tensor experts, Tensor? prob) -> "
      "(Tensor rows, Tensor row_prob, Tensor routed, Tensor offsets, Tensor row_of, Tensor "
      "slot_of, Tensor row_here, Tensor verdict, Tensor place_of, Tensor sum_of)");
  m.def(
      "_window_dispatch_codes(str name, Tensor x, Tensor x_scales, Tensor experts, Tensor? prob) "
      "-> "
      "(Tensor rows, Tensor row_scales, Tensor row_prob, Tensor routed, Tensor offsets, Tensor "
      "row_of, Tensor slot_of, Tensor row_here, Tensor verdict, Tensor place_of, Tensor sum_of)");
  m.def(
      "_window_dispatch_backward(str name, Tensor drows, Tensor? drow_prob, "
      "Tensor offsets, Tensor row_of, Tensor slot_of, Tensor row_here, Tensor verdict, "
      "Tensor place_of, Tensor sum_of) -> (Tensor dx, Tensor dprob)");
  m.def(
      "_window_collect(str name, Tensor y, Tensor offsets, Tensor row_of, "
      "Tensor slot_of, Tensor row_here, Tensor verdict, Tensor place_of, Tensor sum_of) -> Tensor");
  m.def(
      "_window_collect_backward(str name, Tensor dout, Tensor offsets, Tensor "
      "row_of, Tensor slot_of, Tensor row_here, Tensor verdict, Tensor place_of, Tensor sum_of) -> "
      "Tensor");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("_window_dispatch", dispatch_autograd);
  m.impl("_window_collect", collect_autograd);
  m.impl("_window_dispatch_codes", torch::autograd::autogradNotImplementedFallback());
  m.impl("_window_dispatch_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_window_collect_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace cadre::door
