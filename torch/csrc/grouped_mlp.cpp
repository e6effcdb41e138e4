// torch.ops.cadre.grouped_mlp and its backward; grouped_mlp_autograd.cpp differentiates it.
#include "grouped_mlp.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "arguments.h"
#include "call_memory.h"
#include "exchange.h"
#include "expert_launch.h"

namespace cadre::door {
namespace {

const char* const kBackwardSchema =
    "grouped_mlp_backward(Tensor dy, Tensor x, Tensor saved, Tensor offsets, Tensor? prob, "
    "Tensor[] weight1, Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale, *, "
    "Tensor? rng=None, bool[6] wants=[True, True, True, True, True, True], bool deferred=False, "
    "str activation=\"swiglu\", str recipe=\"\", bool keep_h=False, int unit_budget=0, "
    "str window=\"\", Tensor? place_of=None, bool x_in_codes=False, "
    "ScalarType? dweight_dtype=None) -> "
    "(Tensor dx, Tensor dprob, Tensor[] dweight1, Tensor[] dbias1, Tensor[] dweight2, "
    "Tensor[] dbias2, Tensor dbias2_scale, Tensor pending)";

const char* const kSchemas[] = {
    "grouped_mlp(Tensor x, Tensor offsets, Tensor? prob, Tensor[] weight1, Tensor[] bias1, "
    "Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale=None, *, Tensor? rng=None, "
    "bool[6] wants=[False, False, False, False, False, False], str activation=\"swiglu\", "
    "str recipe=\"\", bool keep_h=False, int unit_budget=0, str window=\"\", "
    "Tensor? place_of=None, Tensor? x_codes=None, Tensor? x_scales=None) -> "
    "(Tensor y, Tensor saved)",

    "grouped_mlp.out(Tensor x, Tensor offsets, Tensor? prob, Tensor[] weight1, Tensor[] bias1, "
    "Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale=None, *, Tensor? rng=None, "
    "bool[6] wants=[True, True, True, True, True, True], str activation=\"swiglu\", "
    "str recipe=\"\", bool keep_h=False, int unit_budget=0, bool zero_tail=False, "
    "Tensor(a!) y, Tensor(b!) saved) -> ()",

    kBackwardSchema,

    "grouped_mlp_backward.out(Tensor dy, Tensor x, Tensor saved, Tensor offsets, Tensor? prob, "
    "Tensor[] weight1, Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale, *, "
    "Tensor? rng=None, bool[6] wants=[True, True, True, True, True, True], "
    "str activation=\"swiglu\", str recipe=\"\", bool keep_h=False, int unit_budget=0, "
    "bool zero_tail=False, Tensor(a!)? dx, Tensor(b!)? dprob, Tensor(c!)[] dbias1, "
    "Tensor(d!)[] dbias2, Tensor(e!)? dbias2_scale, Tensor(f!) pending) -> ()",

    "grouped_mlp_wgrad.out(Tensor dy, Tensor x, Tensor saved, Tensor pending, Tensor offsets, "
    "Tensor? prob, Tensor[] weight1, Tensor[] weight2, *, bool[2] biases, "
    "bool[6] wants=[True, True, True, True, True, True], str activation=\"swiglu\", "
    "str recipe=\"\", bool keep_h=False, int unit_budget=0, str accumulate=\"no\", "
    "Tensor? accumulate_flags=None, Tensor(a!)[] dweight1, Tensor(b!)[] dweight2) -> ()",
};

/// A call's tensors as the arguments that the library takes.
struct MlpLaunch : ExpertLaunch<GroupedMlpProblem, GroupedMlpArgs> {
  MlpLaunch(const MlpCall& call, const GroupedMlpProblem& problem) : ExpertLaunch(problem, call.x) {
    fc1.bind(call.weight1, call.bias1);
    fc2.bind(call.weight2, call.bias2);
    args.offsets = offsets(call.offsets, call.x);
    args.prob = floats(call.prob, "prob");
    args.bias2_scale = floats(call.bias2_scale, "bias2_scale");
    if (call.rng) args.rng = random_state(*call.rng, call.x);
  }
};

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0; }

/// Scales of rows in that order; columns begin at multiples of 16 bytes, as products read them.
Tensor scales_in(Major order, const Tensor& scales) {
  if (order == Major::kRow || scales.dim() != 2) return scales.contiguous();
  constexpr int64_t kStep = 4;
  const bool is_ordered = scales.stride(0) == 1 && scales.stride(1) >= scales.size(0) &&
                          scales.stride(1) % kStep == 0 && is_aligned(scales);
  if (is_ordered) return scales;
  const int64_t rows = scales.size(0), step = (rows + kStep - 1) / kStep * kStep;
  const Tensor columns = at::empty({scales.size(1), step}, scales.options());
  return columns.narrow(1, 0, rows).t().copy_(scales);
}

/// x that comes in codes, as the plan wants them to lie.
struct CodesOfX {
  Tensor codes, scales;

  CodesOfX(const MlpCall& call, const GroupedMlpProblem& problem) {
    if (!call.x_in_codes) return;
    TORCH_CHECK_VALUE(call.x_codes && call.x_scales, call.x_codes ? "x_scales" : "x_codes",
                      " is None, must be a tensor; x comes in codes and scales");
    const GroupedMlpPlan& plan = cached_plan(problem, device(call.x));
    codes = call.x_codes->contiguous();
    if (!is_aligned(codes)) codes = codes.clone();
    scales = scales_in(find_tensor(plan.fc1, "x along K")->shape.scales_major, *call.x_scales);
  }
  void bind(GroupedMlpArgs& args, const Tensor& x) const {
    if (!codes.defined()) return;
    args.x_along_k = {view(codes, x, "x_codes"), view(scales, x, "x_scales")};
  }
};

/// Where results go that an exchange moves next: into new memory, its window, or those of all
/// ranks, row by row.
class Results {
 public:
  Results(Text window, const Maybe& place_of, const Tensor& rows) : window_(window), rows_(rows) {
    if (!window.empty()) exchange_ = Exchange::of(window);
    TORCH_CHECK_VALUE(pushes() || !place_of,
                      "place_of is a tensor, must be None; results are not pushed");
    if (!pushes()) return;
    TORCH_CHECK_VALUE(place_of, "place_of is None, must be a tensor; results are pushed to places");
    place_of_ = read_ints(*place_of, {"place_of", {rows.size(0)}, rows});
  }

  bool pushes() const { return exchange_ && exchange_->plan().problem.push; }
  /// Rows in a window are the layer's own: nobody reads the tail.
  void add_to(GroupedMlpProblem& p) const {
    p.options.tail = window_.empty() ? Tail::kZero : Tail::kKeep;
    if (!pushes()) return;
    const ExpertParallelProblem& of = exchange_->plan().problem;
    p.scatter = true;
    p.tokens = of.tokens;
    p.top_k = of.top_k;
    p.ranks = of.ranks;
  }
  /// y, or dx.
  Tensor make() const { return new_rows(window_, rows_); }
  TensorView view_of(const Tensor& made, const char* what) const {
    if (pushes()) return exchange_->rank_window().places(exchange_->plan());
    require_type(made, rows_.scalar_type(), what);
    return view(made, rows_, what);
  }
  const int32_t* places() const { return pushes() ? ints(place_of_, "place_of") : nullptr; }

 private:
  Text window_;
  const Tensor& rows_;
  c10::intrusive_ptr<Exchange> exchange_{};
  Tensor place_of_{};
};

void run_forward(const MlpCall& call, const GroupedMlpProblem& problem, const Tensor& y,
                 const Tensor& saved, const Results& results) {
  const CodesOfX codes(call, problem);
  MlpLaunch mlp(call, problem);
  codes.bind(mlp.args, call.x);
  mlp.args.y = results.view_of(y, "y");
  mlp.args.place_of = results.places();
  require_same_device(call.x, saved, "saved");
  const AlignedOutput saved_memory(saved, "saved");
  mlp.args.saved = saved_memory.memory();
  mlp.run(kForward, &LayerMemory::forward_workspace_bytes);
}

std::tuple<Tensor, Tensor> grouped_mlp(const Tensor& x, const Tensor& offsets, const Maybe& prob,
                                       TensorList weight1, TensorList bias1, TensorList weight2,
                                       TensorList bias2, const Maybe& bias2_scale, const Maybe& rng,
                                       MlpWants wants, Text activation, Text recipe, bool keep_h,
                                       int64_t unit_budget, Text window, const Maybe& place_of,
                                       const Maybe& x_codes, const Maybe& x_scales) {
  return translate_errors([&] {
    const Tensor rows = rows_of(x, "x");
    MlpCall call{rows,        offsets, prob,  weight1,    bias1,  weight2, bias2,
                 bias2_scale, rng,     wants, activation, recipe, keep_h,  unit_budget};
    call.x_in_codes = x_codes || x_scales;
    call.x_codes = x_codes;
    call.x_scales = x_scales;
    GroupedMlpProblem p = problem_of(call);
    const Results results(window, place_of, rows);
    results.add_to(p);
    const Tensor y = results.make();
    if (!p.scatter) p.options.align = std::min(p.options.align, alignment({y}));
    const Tensor saved = bytes(memory_bounds(p, device(rows)).saved.bytes(p.rows), rows);
    run_forward(call, p, y, saved, results);
    return std::tuple(y, saved);
  });
}

void grouped_mlp_out(const Tensor& x, const Tensor& offsets, const Maybe& prob, TensorList weight1,
                     TensorList bias1, TensorList weight2, TensorList bias2,
                     const Maybe& bias2_scale, const Maybe& rng, MlpWants wants, Text activation,
                     Text recipe, bool keep_h, int64_t unit_budget, bool zero_tail, const Tensor& y,
                     const Tensor& saved) {
  translate_errors([&] {
    const Tensor rows = rows_of(x, "x");
    const MlpCall call{rows,        offsets, prob,  weight1,    bias1,  weight2, bias2,
                       bias2_scale, rng,     wants, activation, recipe, keep_h,  unit_budget};
    GroupedMlpProblem p = problem_of(call);
    p.options.tail = zero_tail ? Tail::kZero : Tail::kKeep;
    p.options.align = std::min(p.options.align, alignment({y}));
    run_forward(call, p, y, saved, Results({}, {}, rows));
    bump_versions({y, saved});
  });
}

/// Where backward writes; what is not wanted is empty.
struct MlpGradients {
  Tensor dx, dprob, dbias2_scale, pending;
  TensorList dw1{}, dbias1{}, dw2{}, dbias2{};
};

bool computes(const GroupedMlpProblem& p) {
  return p.dgrad || p.wgrad1 || p.wgrad2 || (p.prob && p.dprob) ||
         (p.dbias && (p.bias1 || p.bias2));
}

void run_backward(const MlpCall& call, const GroupedMlpProblem& p,
                  const std::pair<Tensor, Tensor>& dy_and_saved, const MlpGradients& out,
                  const Results& results) {
  if (!computes(p)) return;
  MlpLaunch mlp(call, p);
  const auto& [dy, saved] = dy_and_saved;
  mlp.args.dy = view(dy, call.x, "dy");
  require_same_device(call.x, saved, "saved");
  require_same_device(call.x, out.pending, "pending");
  mlp.args.saved = memory_of(saved, "saved");
  if (p.dgrad) {
    mlp.args.dx = results.view_of(out.dx, "dx");
    mlp.args.place_of = results.places();
  }
  if (p.prob && p.dprob) mlp.args.dprob = written_floats(out.dprob, {"dprob", {p.rows}, call.x});
  if (p.bias2 && p.dbias && p.bias2_scale)
    mlp.args.dbias2_scale = written_floats(out.dbias2_scale, {"dbias2_scale", {p.rows}, call.x});
  if (p.dbias) {
    require_like(out.dbias1, call.bias1, "dbias1");
    require_like(out.dbias2, call.bias2, "dbias2");
  }
  mlp.fc1.bind_dbias(out.dbias1);
  mlp.fc2.bind_dbias(out.dbias2);
  mlp.fc1.bind_dw(out.dw1);
  mlp.fc2.bind_dw(out.dw2);
  const AlignedOutput pending(out.pending, "pending");
  if (p.options.deferred) mlp.args.pending = pending.memory();
  mlp.run(kBackward, &LayerMemory::backward_workspace_bytes);
}

using List = std::vector<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, List, List, List, List, Tensor, Tensor>;

template <bool kOverwrite>
Gradients grouped_mlp_backward(const Tensor& dy, const Tensor& x, const Tensor& saved,
                               const Tensor& offsets, const Maybe& prob, TensorList weight1,
                               TensorList bias1, TensorList weight2, TensorList bias2,
                               const Maybe& bias2_scale, const Maybe& rng, MlpWants wants,
                               bool deferred, Text activation, Text recipe, bool keep_h,
                               int64_t unit_budget, Text window, const Maybe& place_of,
                               bool x_in_codes, std::optional<at::ScalarType> dweight_dtype) {
  return translate_errors([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    MlpCall call{rows,        offsets, prob,  weight1,    bias1,  weight2, bias2,
                 bias2_scale, rng,     wants, activation, recipe, keep_h,  unit_budget};
    call.x_in_codes = x_in_codes;
    GroupedMlpProblem p = problem_of(call);
    const Results results(window, place_of, rows);
    results.add_to(p);
    if (dweight_dtype) p.parameters.dw = float_type(*dweight_dtype, "dweight");
    p.options.deferred = deferred;
    p.options.overwrite_saved = kOverwrite;
    p.options.align = std::min(p.options.align, alignment({drows}));
    const auto row_floats = [&](bool wanted) {
      return at::empty({wanted ? p.rows : 0}, rows.options().dtype(at::kFloat));
    };
    const auto like = [](bool wanted, TensorList list,
                         std::optional<at::ScalarType> type = std::nullopt) {
      return wanted ? empty_like(list, type) : List();
    };
    Gradients out{p.dgrad ? results.make() : at::empty({0}, rows.options()),
                  row_floats(p.prob && p.dprob),
                  like(p.wgrad1 && !deferred, weight1, dweight_dtype),
                  like(p.dbias, bias1),
                  like(p.wgrad2 && !deferred, weight2, dweight_dtype),
                  like(p.dbias, bias2),
                  row_floats(p.dbias && p.bias2_scale),
                  bytes(deferred ? memory_bounds(p, device(rows)).pending.bytes(p.rows) : 0, rows)};
    const auto& [dx, dprob, dw1, dbias1, dw2, dbias2, dscale, pending] = out;
    run_backward(call, p, {drows, aligned(saved, "saved")},
                 {dx, dprob, dscale, pending, dw1, dbias1, dw2, dbias2}, results);
    if (kOverwrite) bump_versions({saved});
    return out;
  });
}

void grouped_mlp_backward_out(const Tensor& dy, const Tensor& x, const Tensor& saved,
                              const Tensor& offsets, const Maybe& prob, TensorList weight1,
                              TensorList bias1, TensorList weight2, TensorList bias2,
                              const Maybe& bias2_scale, const Maybe& rng, MlpWants wants,
                              Text activation, Text recipe, bool keep_h, int64_t unit_budget,
                              bool zero_tail, const Maybe& dx, const Maybe& dprob,
                              TensorList dbias1, TensorList dbias2, const Maybe& dbias2_scale,
                              const Tensor& pending) {
  translate_errors([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    const MlpCall call{rows,        offsets, prob,  weight1,    bias1,  weight2, bias2,
                       bias2_scale, rng,     wants, activation, recipe, keep_h,  unit_budget};
    GroupedMlpProblem p = problem_of(call);
    p.options.deferred = true;
    p.options.tail = zero_tail ? Tail::kZero : Tail::kKeep;
    const auto or_none = [](const Maybe& t) { return t.value_or(Tensor()); };
    p.options.align = std::min(p.options.align, alignment({drows, or_none(dx)}));
    run_backward(
        call, p, {drows, aligned(saved, "saved")},
        {or_none(dx), or_none(dprob), or_none(dbias2_scale), pending, {}, dbias1, {}, dbias2},
        Results({}, {}, rows));
    bump_versions({or_none(dx), or_none(dprob), or_none(dbias2_scale), pending});
    bump_versions(dbias1);
    bump_versions(dbias2);
  });
}

void grouped_mlp_wgrad_out(const Tensor& dy, const Tensor& x, const Tensor& saved,
                           const Tensor& pending, const Tensor& offsets, const Maybe& prob,
                           TensorList weight1, TensorList weight2, ExpertBiases biases,
                           MlpWants wants, Text activation, Text recipe, bool keep_h,
                           int64_t unit_budget, Text accumulate, const Maybe& accumulate_flags,
                           TensorList dweight1, TensorList dweight2) {
  translate_errors([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    const MlpCall call{rows, offsets, prob,  weight1,    {},     weight2, {},
                       {},   {},      wants, activation, recipe, keep_h,  unit_budget};
    GroupedMlpProblem p = problem_of(call);
    p.bias1 = biases[0];
    p.bias2 = biases[1];
    p.options.deferred = true;
    p.options.align = std::min(p.options.align, alignment({drows}));
    plan_dw(p.parameters, p.options, {weight1, weight2, dweight1, dweight2, accumulate}, offsets);
    require_same_device(rows, saved, "saved");
    require_same_device(rows, pending, "pending");
    const Tensor aligned_saved = aligned(saved, "saved");
    const Tensor aligned_pending = aligned(pending, "pending");
    MlpLaunch mlp(call, p);
    mlp.args.dy = view(drows, rows, "dy");
    mlp.args.saved = memory_of(aligned_saved, "saved");
    mlp.args.pending = memory_of(aligned_pending, "pending");
    mlp.fc1.bind_dw(dweight1);
    mlp.fc2.bind_dw(dweight2);
    mlp.fc1.parameters.accumulate = mlp.fc2.parameters.accumulate =
        accumulate_words(accumulate_flags, p.options.accumulate, p.experts, rows);
    mlp.run(kWgrad, &LayerMemory::wgrad_workspace_bytes);
    bump_versions(dweight1);
    bump_versions(dweight2);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  for (const char* schema : kSchemas) m.def(schema);
  m.def(overwriting_saved(kBackwardSchema).c_str());
}

static void implement(torch::Library& m) {
  m.impl("grouped_mlp", grouped_mlp);
  implement_out(m, "grouped_mlp", grouped_mlp_out);
  m.impl("grouped_mlp_backward", grouped_mlp_backward<false>);
  m.impl("grouped_mlp_backward.overwrite_saved", grouped_mlp_backward<true>);
  implement_out(m, "grouped_mlp_backward", grouped_mlp_backward_out);
  implement_out(m, "grouped_mlp_wgrad", grouped_mlp_wgrad_out);
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
