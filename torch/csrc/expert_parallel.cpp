#include "expert_parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "arguments.h"

// torch.ops.cadre._window_*: the exchanges of ranks that read each other's memory
// (docs/layers/expert_parallel.md). expert_parallel_autograd.cpp differentiates them, and
// torch/cadre/windows.py tells compilers their order.
namespace cadre::door {
namespace {

DispatchedCodes with_scales(const Dispatched& d, const Tensor& row_scales, const Tensor& numbers) {
  return std::apply(
      [&](const Tensor& rows, const auto&... others) {
        return DispatchedCodes(rows, row_scales, others..., numbers);
      },
      d);
}

/// What a dispatch moves, and where to; scales are those of codes.
struct Moved {
  Tensor tokens, rows, token_scales, row_scales;
};

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
  exchange.require_here(tokens, "x");
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

/// What the codes of rows say, as numbers of the layer's type; their tail stays.
void decode(const ExpertParallelProblem& p, const Moved& moved, const Tensor& row_offsets,
            const Tensor& numbers) {
  QuantizedShape shape{.rows = p.rows, .cols = p.hidden, .experts = p.experts, .format = *p.x};
  shape.scales_major = p.scales_major;
  DequantizeArgs args;
  args.source.codes = view(moved.rows, "rows");
  args.source.scales = view(moved.row_scales, "row_scales");
  args.offsets = offsets(row_offsets, numbers);
  args.out = view(numbers, "numbers");
  launch(DequantizeProblem{shape, p.dtype}, args, numbers);
}

void require_numbers(const ExpertParallelProblem& p, const Tensor& numbers, const Tensor& codes) {
  require_same_device(codes, numbers, "numbers");
  TORCH_CHECK_VALUE(
      numbers.sizes() == codes.sizes() && numbers.scalar_type() == scalar_type(p.dtype),
      "numbers is ", described(numbers), ", must be ", dtype_name(scalar_type(p.dtype)),
      codes.sizes(), ", of which x has the codes [", to_string(p), "]");
}

/// With the numbers that x are codes of, those of rows come back: what gradients go through.
DispatchedCodes dispatch_codes_op(Name name, const Tensor& x, const Tensor& x_scales,
                                  const Tensor& experts, const Maybe& prob, const Maybe& numbers,
                                  bool decodes) {
  const auto exchange = Exchange::of(name);
  const ExpertParallelProblem& p = exchange->plan().problem;
  const Tensor codes = matrix(x, "x"), scales = matrix(x_scales, "x_scales");
  require_same_device(codes, scales, "x_scales");
  if (numbers) require_numbers(p, *numbers, codes);
  const Tensor rows = at::empty({p.rows, codes.size(1)}, codes.options());
  const Moved moved{codes, rows, scales, new_row_scales(p, scales)};
  const Dispatched made = dispatch_rows(*exchange, moved, experts, prob);
  const Tensor of_rows = !numbers ? at::empty({0}, codes.options().dtype(at::kFloat))
                         : p.tail == Tail::kZero
                             ? at::zeros({p.rows, p.hidden}, numbers->options())
                             : at::empty({p.rows, p.hidden}, numbers->options());
  if (numbers && decodes) decode(p, moved, std::get<3>(made), of_rows);
  return with_scales(made, moved.row_scales, of_rows);
}

/// Rows that are summed: where they are pushed, what stands for them.
Tensor results(const Exchange& exchange, const Tensor& rows, const char* what) {
  exchange.require_here(rows, what);
  if (!exchange.plan().problem.push) return matrix(rows, what);
  TORCH_CHECK_VALUE(exchange.is_pushed(rows), what, " is a tensor of its own, must be what the ",
                    "experts returned, whose rows are pushed while they are computed [",
                    to_string(exchange.plan().problem), "]");
  return rows;
}

TensorPair dispatch_backward_op(Name name, const Tensor& drows, const Maybe& drow_prob,
                                const Tensor& offsets, const Tensor& row_of, const Tensor& slot_of,
                                const Tensor& row_here, const Tensor& verdict,
                                const Tensor& place_of, const Tensor& sum_of, bool wants_dx,
                                bool wants_dprob) {
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
                              .map = from.map(),
                              .wants_dx = wants_dx,
                              .wants_dprob = wants_dprob},
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
  exchange->require_here(given, "dout");
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
      "_window_dispatch_codes(str name, Tensor x, Tensor x_scales, Tensor experts, Tensor? prob, "
      "Tensor? numbers=None, bool decode=False) -> "
      "(Tensor rows, Tensor row_scales, Tensor row_prob, Tensor routed, Tensor offsets, Tensor "
      "row_of, Tensor slot_of, Tensor row_here, Tensor verdict, Tensor place_of, Tensor sum_of, "
      "Tensor row_numbers)");
  m.def(
      "_window_dispatch_backward(str name, Tensor drows, Tensor? drow_prob, "
      "Tensor offsets, Tensor row_of, Tensor slot_of, Tensor row_here, Tensor verdict, "
      "Tensor place_of, Tensor sum_of, bool wants_dx=True, bool wants_dprob=True) -> "
      "(Tensor dx, Tensor dprob)");
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
}  // namespace cadre::door
