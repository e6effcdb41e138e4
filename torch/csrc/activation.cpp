#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "arguments.h"
#include "autograd.h"
#include "call_memory.h"
#include "words.h"

// torch.ops.cadre.activation and its gradient: docs/ops/activation.md.
namespace cadre::door {
namespace {

using ActivationGradients = std::tuple<Tensor, Tensor>;  ///< dz, dprob

using ActivationOp = Tensor(const Tensor&, const Tensor&, const Maybe&, c10::string_view);
using ActivationBackwardOp = ActivationGradients(const Tensor&, const Tensor&, const Tensor&,
                                                 const Maybe&, c10::string_view);

/// What both directions read.
struct ActivationInputs {
  const Tensor& z;
  const Tensor& offsets;
  const Maybe& prob;
  c10::string_view activation;
};

/// Parses such as "swiglu layout=interleave32".
ActivationProblem parsed(c10::string_view activation) {
  return translate_errors([&] {
    const auto p =
        parse_activation_problem(text("activation forward ", activation, " R=0 F=32 E=1"));
    require_activation_names(activation);
    return p;
  });
}

ActivationProblem problem_of(const ActivationInputs& in) {
  TORCH_CHECK_VALUE(in.z.dim() == 2, "z has shape ", in.z.sizes(),
                    ", must be [R, 2F] for a gated activation, else [R, F]");
  ActivationProblem p = parsed(in.activation);
  const bool gated = info(p.kind).gated;
  TORCH_CHECK_VALUE(!gated || in.z.size(1) % 2 == 0, "z has shape ", in.z.sizes(),
                    ", must have an even number of columns; ", in.activation,
                    " wants gate and up of every feature");
  p.rows = in.z.size(0);
  p.features = gated ? in.z.size(1) / 2 : in.z.size(1);
  p.z = float_type(in.z.scalar_type(), "z");
  p.h = p.z;
  p.prob = in.prob.has_value();
  return p;
}

void forward_to(const ActivationInputs& in, const Tensor& h, Tail tail) {
  auto p = problem_of(in);
  p.h = float_type(h.scalar_type(), "h");
  p.tail = tail;
  const Tensor z = with_rows(in.z, "z");
  const Tensor prob = read_floats(in.prob, {"prob", {p.rows}, z});
  require_same_device(z, h, "h");
  ActivationArgs args{
      .z = view(z, "z"), .prob = floats(prob, "prob"), .offsets = offsets(in.offsets, z)};
  p.experts = args.offsets.experts;
  args.h = view(h, "h");
  launch(p, args, z);
}

void backward_to(const ActivationInputs& in, const Tensor& dh_in, const ActivationGradients& out,
                 Tail tail) {
  auto p = problem_of(in);
  p.backward = true;
  p.h = float_type(dh_in.scalar_type(), "dh");
  p.tail = tail;
  const auto& [dz, dprob] = out;
  const Tensor z = with_rows(in.z, "z"), dh = with_rows(dh_in, "dh");
  const Tensor prob = read_floats(in.prob, {"prob", {p.rows}, z});
  require_same_device(z, dh, "dh");
  ActivationArgs args{
      .z = view(z, "z"), .prob = floats(prob, "prob"), .offsets = offsets(in.offsets, z)};
  p.experts = args.offsets.experts;
  args.dh = view(dh, "dh");
  args.dz = view(dz, "dz");
  if (p.prob) args.dprob = written_floats(dprob, {"dprob", {p.rows}, z});
  launch(p, args, z);
}

Tensor activation_op(const Tensor& z, const Tensor& offsets, const Maybe& prob,
                     c10::string_view activation) {
  const ActivationInputs in{z, offsets, prob, activation};
  const auto p = problem_of(in);
  Tensor h = at::empty({p.rows, p.features}, z.options());
  forward_to(in, h, Tail::kZero);
  return h;
}

ActivationGradients backward_op(const Tensor& dh, const Tensor& z, const Tensor& offsets,
                                const Maybe& prob, c10::string_view activation) {
  const int64_t probs = prob ? z.size(0) : 0;
  const ActivationGradients out{at::empty(z.sizes(), z.options()),
                                at::empty({probs}, z.options().dtype(at::kFloat))};
  backward_to({z, offsets, prob, activation}, dh, out, Tail::kZero);
  return out;
}

struct Activation : torch::autograd::Function<Activation> {
  static Tensor forward(AutogradContext* ctx, const Tensor& z, const Tensor& offsets,
                        const Maybe& prob, c10::string_view activation) {
    static const auto call = op<ActivationOp>("cadre::activation");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({z, offsets, prob.value_or(Tensor())});
    ctx->saved_data["activation"] = std::string(activation);
    return call.call(z, offsets, prob, activation);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call = op<ActivationBackwardOp>("cadre::activation_backward");
    const auto saved = ctx->get_saved_variables();
    const bool has_prob = saved[2].defined();
    auto [dz, dprob] = call.call(grads[0], saved[0], saved[1], has_prob ? Maybe(saved[2]) : Maybe(),
                                 ctx->saved_data["activation"].toStringView());
    return {dz, Tensor(), has_prob ? dprob : Tensor(), Tensor()};
  }
};

void implement(torch::Library& m) {
  m.impl("activation", activation_op);
  implement_out(
      m, "activation",
      +[](const Tensor& z, const Tensor& offsets, const Maybe& prob, c10::string_view activation,
          const Tensor& h) {
        forward_to({z, offsets, prob, activation}, written(h, "h", z), Tail::kKeep);
      });
  m.impl("activation_backward", backward_op);
  implement_out(
      m, "activation_backward",
      +[](const Tensor& dh, const Tensor& z, const Tensor& offsets, const Maybe& prob,
          c10::string_view activation, const Tensor& dz, const Tensor& dprob) {
        backward_to({z, offsets, prob, activation}, dh,
                    {written_like(dz, "dz", z), written(dprob, "dprob", z)}, Tail::kKeep);
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def("activation(Tensor z, Tensor offsets, Tensor? prob, str activation) -> Tensor");
  m.def(
      "activation.out(Tensor z, Tensor offsets, Tensor? prob, str activation, *, Tensor(a!) h) -> "
      "()");
  m.def(
      "activation_backward(Tensor dh, Tensor z, Tensor offsets, Tensor? prob, str activation) -> "
      "(Tensor dz, Tensor dprob)");
  m.def(
      "activation_backward.out(Tensor dh, Tensor z, Tensor offsets, Tensor? prob, str activation, "
      "*, Tensor(a!) dz, Tensor(b!) dprob) -> ()");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, Meta, m) {
  m.impl("activation", [](const Tensor& z, const Tensor& offsets, const Maybe& prob,
                          c10::string_view activation) {
    require_same_device(z, offsets, "offsets");
    if (prob) require_same_device(z, *prob, "prob");
    const c10::SymInt columns = z.sym_size(1) / (info(parsed(activation).kind).gated ? 2 : 1);
    return at::empty_symint({z.sym_size(0), columns}, z.options());
  });
}
TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("activation_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("activation", [](const Tensor& z, const Tensor& offsets, const Maybe& prob,
                          c10::string_view activation) {
    return Activation::apply(z, offsets, prob, activation);
  });
}

}  // namespace cadre::door
