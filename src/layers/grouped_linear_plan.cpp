// Planning a grouped linear layer: which tensors are copied into which format, where the copies
// lie, and which implementation runs each step.
#include "cadre/error.h"
#include "cadre/grouped_linear.h"
#include "layers/explain.h"
#include "layers/grouped_linear.h"
#include "layers/linear_copies.h"
#include "layers/paying_recipe.h"
#include "layers/planner.h"
#include "layers/route.h"
#include "ops/amax_eps.h"

namespace cadre {
namespace {

using enum layers::linear::Tensor;

using layers::HeldWgrad;
using layers::linear::Copied;
using layers::linear::Copies;
using layers::linear::Copy;
using layers::linear::DecodedPasses;
using layers::linear::is_hopper;
using layers::linear::kFp8Rows;
using layers::linear::kPackedRows;

std::string refuses_copies(const GroupedLinearProblem& p, const Device&) {
  const Copies copies(p, {});
  const auto why = [](std::string_view tensor, const Copied& of, const Format& along_k,
                      const Format& along_rows) {
    return text(tensor, of.given ? " comes in " : " is copied into ",
                to_string(of.along_k.is_there ? along_k : along_rows));
  };
  const Recipe& r = p.recipe;
  if (copies.w.copies()) return why("w", copies.w, r.fprop.rhs, r.dgrad.rhs);
  if (copies.x.copies()) return why("x", copies.x, r.fprop.lhs, r.wgrad.rhs);
  if (copies.dy.copies()) return why("dy", copies.dy, r.dgrad.lhs, r.wgrad.lhs);
  return {};
}

std::string refuses_none(const GroupedLinearProblem& p, const Device& device) {
  return refuses_copies(p, device).empty() ? "every product reads its tensors as they are" : "";
}

class Planner {
 public:
  Planner(const GroupedLinearProblem& problem, const Device& device, const DecodedPasses& decoded,
          HeldWgrad wgrad = HeldWgrad::kLater)
      : p_(problem), decoded_(decoded), wgrad_(wgrad), copies_(problem, decoded), row_(plan_) {
    plan_.problem = problem;
    plan_.device = device;
  }

  GroupedLinearPlan take() {
    name_tensors();
    add_forward();
    add_backward();
    if (p_.wgrad) add_wgrad();
    row_.share_memory(p_.options.deferred ? layers::WgradRuns::kLater : layers::WgradRuns::kWithin);
    return std::move(plan_);
  }

 private:
  /// In the order of linear::Tensor.
  void name_tensors() {
    for (const char* own : {"x", "y", "dy", "dx", "w", "dw", "bias", "dbias", "bias_scale",
                            "dbias_scale", "z", "prob", "tokens", "slot_of", "place_of"})
      row_.own(own);
    const Recipe& r = p_.recipe;
    const bool cache = p_.options.cache_weights;
    copy("x along K", rows_shape(p_.k, r.fprop.lhs, Axis::kAlongK, x_.along_k),
         x_.given || x_.given_along_k);
    copy("x along rows", rows_shape(p_.k, r.wgrad.rhs, Axis::kAlongRows, x_.along_rows), x_.given);
    const QuantizedShape w = weights_shape(r.fprop.rhs, Axis::kAlongK, w_.along_k);
    w_.given ? row_.own("w along K", w) : row_.made("w along K", w, cache);
    row_.made("w along rows", weights_shape(r.dgrad.rhs, Axis::kAlongRows, w_.along_rows), cache);
    copy("dy along K", rows_shape(p_.n, r.dgrad.lhs, Axis::kAlongK, dy_.along_k),
         dy_.given_along_k);
    row_.made("dy along rows", rows_shape(p_.n, r.wgrad.lhs, Axis::kAlongRows, dy_.along_rows));
    numbers("x along K decoded", x_.along_k.id);
    numbers("w along K decoded", w_.along_k.id);
    numbers("x along rows decoded", x_.written_rows());
    numbers("dy along rows decoded", dy_.written_rows());
    const QuantizedShape factors = layers::plain_rows(DType::kF32, p_.experts, 1);
    for (const char* product : {"y scales", "dx scales", "dw scales"}) row_.made(product, factors);
  }
  void copy(const char* name, const QuantizedShape& shape, bool given) {
    given ? row_.own(name, shape) : row_.made(name, shape);
  }
  void numbers(const char* name, int codes) {
    QuantizedShape shape = plan_.tensors[size_t(codes)].shape;
    shape.decoded = !is_plain(shape.format);
    row_.made(name, shape);
  }
  QuantizedShape rows_shape(int64_t cols, const Format& format, Axis axis, const Copy& copy) const {
    return {.kind = RowsKind::kRagged,
            .rows = p_.rows,
            .cols = cols,
            .experts = p_.experts,
            .format = format,
            .axis = axis,
            .scales_major = copy.scales_major,
            .decoded = copy.decoded};
  }
  QuantizedShape weights_shape(const Format& format, Axis axis, const Copy& copy) const {
    return {.kind = RowsKind::kWeights,
            .rows = p_.n,
            .cols = p_.k,
            .experts = p_.experts,
            .format = format,
            .axis = axis,
            .codes_major = copy.codes_major,
            .decoded = copy.decoded};
  }

  void add_forward() {
    const bool rows_of_w = p_.options.cache_weights && w_.copies_rows();
    const bool rows_of_x = !p_.options.save_input && x_.copies_rows();
    quantize(Phase::kForward, "quantize w", w_, {w_.along_k.is_there, rows_of_w});
    quantize(Phase::kForward, "quantize x", x_, {x_.along_k.is_there, rows_of_x});
    if (x_.along_k.decodes) decode(Phase::kForward, "decode x", x_.along_k.id, x_.along_k.numbers);
    if (w_.along_k.decodes) decode(Phase::kForward, "decode w", w_.along_k.id, w_.along_k.numbers);
    GroupedGemmProblem fprop = layers::linear::product(p_, Pass::kFprop, decoded_);
    fprop.bias = adds_bias();
    fprop.discrete_bias = fprop.bias && p_.parameters.discrete_bias;
    fprop.bias_scale = p_.bias_scale;
    if (fprop.bias) fprop.bias_dtype = p_.parameters.bias;
    fprop.activation = p_.activation;
    const bool prob = p_.activation && p_.activation->prob;
    const bool z = p_.activation && p_.activation->keep_z;
    const bool gathers = fprop.gather != Gather::kNo;
    const int alpha =
        factors(Phase::kForward, "y scales", fprop, {x_.along_k.id, w_.along_k.id, kYScales});
    row_.step(Phase::kForward, "multiply", plan(fprop, plan_.device, decoded_.fprop_by),
              {gathers ? kTokens : x_.read_along_k(), w_.read_along_k(), fprop.bias ? kBias : kNone,
               fprop.bias_scale ? kBiasScale : kNone, alpha, prob ? kProb : kNone,
               gathers      ? kSlotOf
               : p_.scatter ? kPlaceOf
                            : kNone},
              {kY, z ? kZ : kNone});
  }

  void add_backward() {
    const bool rows_of_w = !p_.options.cache_weights && w_.along_rows.is_there;
    quantize(Phase::kBackward, "quantize dy", dy_, {dy_.along_k.is_there, dy_.copies_rows()});
    quantize(Phase::kBackward, "quantize w again", w_, {false, rows_of_w});
    if (p_.dgrad) {
      const GroupedGemmProblem dgrad = layers::linear::product(p_, Pass::kDgrad, decoded_);
      const int alpha = factors(Phase::kBackward, "dx scales", dgrad,
                                {dy_.along_k.id, w_.written_rows(), kDxScales});
      row_.step(Phase::kBackward, "dx", plan(dgrad, plan_.device, decoded_.dgrad_by),
                {dy_.read_along_k(), w_.read_along_rows(), kNone, kNone, alpha, kNone,
                 p_.gather_dy    ? kSlotOf
                 : p_.scatter_dx ? kPlaceOf
                                 : kNone},
                {kDx});
    }
    if (adds_bias() && p_.dbias) add_bias_grad();
    if (wgrad_ == HeldWgrad::kLater) quantize_again(Phase::kInputAgain);
  }
  void quantize_again(Phase phase) {
    quantize(phase, "quantize x again", x_,
             {false, p_.options.save_input && x_.along_rows.is_there});
  }

  /// Which copies a step makes.
  struct Axes {
    bool along_k, along_rows;
  };
  void quantize(Phase phase, const char* name, const Copied& tensor, Axes axes) {
    axes.along_k = axes.along_k && !tensor.given_along_k;
    if (tensor.given || (!axes.along_k && !axes.along_rows)) return;
    const QuantizedShape& like = plan_.tensors[size_t(tensor.along_k.id)].shape;
    const bool weights = like.kind == RowsKind::kWeights;
    QuantizeProblem q{.kind = like.kind, .rows = like.rows, .cols = like.cols};
    q.experts = p_.experts;
    q.source = weights ? p_.parameters.weight : p_.dtype;
    q.role = weights ? TensorRole::kW : tensor.itself == kX ? p_.x_role : p_.dy_role;
    q.discrete = weights && p_.parameters.discrete_weight;
    if (axes.along_k) q.along_k = like.format;
    if (axes.along_rows) q.along_rows = plan_.tensors[size_t(tensor.along_rows.id)].shape.format;
    if (ops::hears_amax_eps(q)) q.amax_eps = p_.options.amax_eps;
    if (axes.along_k) q.along_k_scales_major = tensor.along_k.scales_major;
    if (axes.along_rows) q.along_rows_codes_major = tensor.along_rows.codes_major;
    q.along_k_decoded = axes.along_k && tensor.along_k.decoded;
    q.along_rows_decoded = axes.along_rows && tensor.along_rows.decoded;
    q.gather = p_.gather && tensor.itself == kX;
    if (q.gather) q.tokens = p_.tokens, q.top_k = p_.top_k;
    row_.step(
        phase, name, plan(q, plan_.device),
        {q.gather ? kTokens : tensor.itself, q.gather ? kSlotOf : kNone},
        {axes.along_k ? tensor.along_k.id : kNone, axes.along_rows ? tensor.along_rows.id : kNone});
  }
  void decode(Phase phase, const char* name, int codes, int numbers) {
    const QuantizedShape& source = plan_.tensors[size_t(codes)].shape;
    const DType out = decoded_format(source.format).element;
    row_.step(phase, name, plan(DequantizeProblem{source, out, true}, plan_.device), {codes},
              {numbers});
  }

  /// The tensors that the factors of a product come with, and where both are multiplied.
  struct Factors {
    int lhs, rhs, product;
  };
  /// The tensor whose expert scales a product of decoded operands takes as alpha.
  int factors(Phase phase, const char* name, const GroupedGemmProblem& g, const Factors& of) {
    if (!g.alpha) return kNone;
    const OperandFormats& formats = formats_of(p_.recipe, g.pass);
    if (!info(formats.lhs.kind).has_expert_scale) return of.rhs;
    if (!info(formats.rhs.kind).has_expert_scale) return of.lhs;
    row_.step(phase, name, ScaleProduct{p_.experts}, {of.lhs, of.rhs}, {of.product});
    return of.product;
  }

  void add_wgrad() {
    constexpr Phase kPhase = Phase::kWgrad;
    if (wgrad_ == HeldWgrad::kWithin) quantize_again(kPhase);
    if (dy_.along_rows.decodes)
      decode(kPhase, "decode dy along rows", dy_.written_rows(), dy_.along_rows.numbers);
    if (x_.along_rows.decodes)
      decode(kPhase, "decode x along rows", x_.written_rows(), x_.along_rows.numbers);
    const GroupedGemmProblem wgrad = layers::linear::product(p_, Pass::kWgrad, decoded_);
    const int alpha =
        factors(kPhase, "dw scales", wgrad, {dy_.written_rows(), x_.written_rows(), kDwScales});
    const bool gathers = wgrad.gather != Gather::kNo, gathers_x = wgrad.gather == Gather::kRhs;
    row_.step(kPhase, "dw", plan(wgrad, plan_.device),
              {dy_.read_along_rows(), gathers_x ? kTokens : x_.read_along_rows(), kNone, kNone,
               alpha, kNone, gathers ? kSlotOf : kNone},
              {kDw});
  }

  bool adds_bias() const { return p_.bias && !p_.return_bias; }
  void add_bias_grad() {
    BiasGradProblem b{.rows = p_.rows, .n = p_.n, .experts = p_.experts, .dy = p_.dtype};
    b.dbias = p_.parameters.dbias;
    b.discrete = p_.parameters.discrete_bias;
    b.bias_scale = p_.bias_scale;
    if (p_.bias_scale) b.bias = p_.parameters.bias;
    b.accumulate = p_.options.accumulate_bias;
    b.tail = p_.options.tail;
    const bool scaled = p_.bias_scale;
    row_.step(Phase::kBackward, "dbias", plan(b, plan_.device),
              {kDy, scaled ? kBias : kNone, scaled ? kBiasScale : kNone},
              {kDbias, scaled ? kDbiasScale : kNone});
  }

  const GroupedLinearProblem& p_;
  const DecodedPasses decoded_;
  const HeldWgrad wgrad_;
  const Copies copies_;
  const Copied &x_ = copies_.x, &w_ = copies_.w, &dy_ = copies_.dy;
  GroupedLinearPlan plan_;
  layers::Row row_;
};

GroupedLinearPlan plan_codes(const GroupedLinearProblem& problem, const Device& device) {
  return Planner(problem, device, {}).take();
}
GroupedLinearPlan plan_codes_within(const GroupedLinearProblem& problem, const Device& device) {
  return Planner(problem, device, {}, HeldWgrad::kWithin).take();
}

/// It refuses here and not before, so that every product is asked once.
DecodedPasses some_to_decode(const GroupedLinearProblem& problem, const Device& device) {
  const DecodedPasses decoded = layers::linear::passes_to_decode(problem, device);
  if (!decoded.any()) throw Unsupported("every product takes its operands as they are quantised");
  return decoded;
}

DecodedPasses some_with_fp8_rows(const GroupedLinearProblem& problem, const Device& device) {
  const DecodedPasses passes = layers::linear::passes_with_fp8_rows(problem, device);
  if (passes.fprop_by.empty() && passes.dgrad_by.empty())
    throw Unsupported("it takes no product that others do not take");
  return passes;
}

DecodedPasses some_with_packed_rows(const GroupedLinearProblem& problem, const Device& device) {
  const DecodedPasses passes = layers::linear::passes_with_packed_rows(problem, device);
  if (passes.fprop_by.empty()) throw Unsupported("it does not take the product");
  return passes;
}

bool is_for_fp8_rows(const GroupedLinearProblem&, const Device& device) {
  return is_hopper(device);
}
bool is_for_packed_rows(const GroupedLinearProblem& p, const Device& device) {
  return is_hopper(device) && p.options.quantized_w;
}

std::string refuses_packed(const GroupedLinearProblem& p, const Device&) {
  return p.activation ? "no product of codes has an activation in it" : "";
}

/// Of an expert in the mean. Beyond, a decoded copy of w costs less than what codes cost every row.
int64_t most_packed_rows(DType codes) { return bits(codes) == 4 ? 4096 : 2048; }

std::string why_decoded_is_faster(const GroupedLinearProblem& p, const Device&) {
  const int64_t rows = p.rows / p.experts, most = most_packed_rows(p.recipe.fprop.rhs.element);
  if (rows <= most) return {};
  return text("experts have ", rows, " rows in the mean, for which w is decoded in less time; the ",
              "most is ", most, ", or name the route");
}

template <auto passes_of>
GroupedLinearPlan plan_passes(const GroupedLinearProblem& problem, const Device& device) {
  return Planner(problem, device, passes_of(problem, device)).take();
}

template <auto passes_of>
GroupedLinearPlan plan_passes_within(const GroupedLinearProblem& problem, const Device& device) {
  DecodedPasses passes = passes_of(problem, device);
  passes.wgrad_waits = false;
  return Planner(problem, device, passes, HeldWgrad::kWithin).take();
}

/// The steps are the same; what is copied, and in which form, makes the route.
constexpr layers::Route<GroupedLinearProblem, GroupedLinearPlan> kRoutes[] = {
    {"direct", refuses_copies, plan_codes},
    {"quantized", refuses_none, plan_codes},
    {kPackedRows, refuses_packed, plan_passes<some_with_packed_rows>, is_for_packed_rows,
     why_decoded_is_faster},
    {kFp8Rows, layers::takes_all, plan_passes<some_with_fp8_rows>, is_for_fp8_rows},
    {"decoded", layers::takes_all, plan_passes<some_to_decode>},
};
constexpr layers::Route<GroupedLinearProblem, GroupedLinearPlan> kRoutesWithin[] = {
    {"direct", refuses_copies, plan_codes_within},
    {"quantized", refuses_none, plan_codes_within},
    kRoutes[2],
    {kFp8Rows, layers::takes_all, plan_passes_within<some_with_fp8_rows>, is_for_fp8_rows},
    {"decoded", layers::takes_all, plan_passes_within<some_to_decode>},
};

}  // namespace

namespace layers {

GroupedLinearPlan plan_held(const GroupedLinearProblem& problem, const Device& device,
                            HeldWgrad wgrad) {
  check_problem(problem);
  const auto& routes = wgrad == HeldWgrad::kWithin ? kRoutesWithin : kRoutes;
  return choose<GroupedLinearPlan, GroupedLinearProblem>(routes, problem, device, {});
}

/// The tensor that wgrad reads as an operand, or what it makes that from in its own run.
static const LayerTensor& wgrad_operand(const GroupedLinearPlan& plan, size_t operand) {
  const LayerTensor& read = plan.tensors[size_t(plan.steps.back().reads[operand])];
  if (read.written < 0) return read;
  const LayerStep& writer = plan.steps[size_t(read.written)];
  return writer.phase == Phase::kWgrad ? plan.tensors[size_t(writer.reads[0])] : read;
}
const LayerTensor& wgrad_gradient(const GroupedLinearPlan& plan) { return wgrad_operand(plan, 0); }
const LayerTensor& wgrad_input(const GroupedLinearPlan& plan) { return wgrad_operand(plan, 1); }

}  // namespace layers

GroupedLinearPlan plan(const GroupedLinearProblem& problem, const Device& device,
                       std::string_view only) {
  layers::check_problem(problem);
  return layers::plan_paying(problem, device, only, [&](const GroupedLinearProblem& paying) {
    return layers::choose<GroupedLinearPlan, GroupedLinearProblem>(kRoutes, paying, device, only);
  });
}

std::vector<KeptPart> kept(const GroupedLinearPlan& plan) {
  layers::require_made(plan);
  const GroupedLinearProblem& p = plan.problem;
  std::vector<KeptPart> parts;
  const auto* again = find_step<QuantizePlan>(plan, "quantize x again");
  if (p.wgrad && (p.gather_dw || (again != nullptr && again->problem.gather))) {
    parts.push_back({"tokens", Place::kCaller, p.tokens * bytes_for(p.dtype, p.k)});
    parts.push_back({"slot_of", Place::kCaller, p.rows * int64_t(sizeof(int32_t))});
  } else if (p.wgrad) {
    const LayerTensor& x = layers::wgrad_input(plan);
    const bool given = p.options.quantized_x && &x != &plan.tensors[kX];
    if (x.place == Place::kSaved || given)
      parts.push_back({"x along rows", x.place, x.layout.bytes});
    else
      parts.push_back({"x", Place::kCaller, p.rows * bytes_for(p.dtype, p.k)});
  }
  if (p.gather_dy && (p.dgrad || p.wgrad) && !layers::has_part(parts, "slot_of"))
    parts.push_back({"slot_of", Place::kCaller, p.rows * int64_t(sizeof(int32_t))});
  if (p.bias_scale && find_step<BiasGradPlan>(plan, "dbias"))
    parts.push_back({"bias_scale", Place::kCaller, p.rows * int64_t(sizeof(float))});
  return parts;
}

std::string explain(const GroupedLinearPlan& plan) {
  return layers::explain_head(plan.problem, plan) + layers::explain_steps(plan) +
         layers::explain_memory(plan.memory, kept(plan), plan.problem.rows);
}

}  // namespace cadre
