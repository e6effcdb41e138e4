// torch.ops.cadre.routed_experts and its backward; routed_experts_autograd.cpp differentiates it.
#include <ATen/ops/empty.h>

#include "arguments.h"
#include "call_memory.h"
#include "expert_launch.h"
#include "moe.h"

namespace cadre::door {
namespace {

const char* const kSchema =
    "routed_experts(Tensor x, Tensor experts, Tensor prob, int num_experts, Tensor[] weight1, "
    "Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, *, Tensor? rng=None, "
    "bool[5] wants=[False, False, False, False, False], str activation=\"swiglu\", "
    "str recipe=\"\", bool keep_h=False, bool keep_rows=False) -> "
    "(Tensor out, Tensor offsets, Tensor saved)";

const char* const kBackwardSchema =
    "routed_experts_backward(Tensor dout, Tensor x, Tensor offsets, Tensor saved, int top_k, "
    "Tensor[] weight1, Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, *, Tensor? rng=None, "
    "bool[5] wants=[True, True, True, True, True], str activation=\"swiglu\", str recipe=\"\", "
    "bool keep_h=False, bool keep_rows=False, ScalarType? dweight_dtype=None) -> "
    "(Tensor dx, Tensor dprob, Tensor[] dweight1, "
    "Tensor[] dbias1, Tensor[] dweight2, Tensor[] dbias2)";

/// A call's tensors as the arguments that the library takes.
class RoutedLaunch : public ExpertLaunch<MoeProblem, MoeArgs> {
 public:
  RoutedLaunch(const RoutedCall& call, const MoeProblem& p) : ExpertLaunch(p, call.x) {
    fc1.bind(call.weight1, call.bias1);
    fc2.bind(call.weight2, call.bias2);
    args.offsets = written_ints(call.offsets, {"offsets", {p.experts + 1}, call.x});
    if (call.rng) args.rng = random_state(*call.rng, call.x);
  }
};

using List = std::vector<Tensor>;

std::tuple<Tensor, Tensor, Tensor> routed_experts(const Tensor& x, const Tensor& experts,
                                                  const Tensor& prob, int64_t num_experts,
                                                  TensorList weight1, TensorList bias1,
                                                  TensorList weight2, TensorList bias2,
                                                  const Maybe& rng, MoeWants wants, Text activation,
                                                  Text recipe, bool keep_h, bool keep_rows) {
  return translate_errors([&] {
    const Tensor tokens = rows_of(x, "x");
    TORCH_CHECK_VALUE(num_experts >= 1, "num_experts is ", num_experts, ", must be 1 or more");
    const Choice choice = read_choice(experts, prob, x);
    const int64_t top_k = choice.top_k();
    const Tensor offsets =
        at::empty({int_of(num_experts, "num_experts") + int64_t{1}}, x.options().dtype(at::kInt));
    const RoutedCall call{tokens, top_k, offsets,    weight1, bias1,  weight2,  bias2,
                          rng,    wants, activation, recipe,  keep_h, keep_rows};
    MoeProblem p = problem_of(call);
    p.index = choice.index;
    const Tensor saved = bytes(memory_bounds(p, device(x)).saved.bytes(p.tokens), x);
    const Tensor out = at::empty(tokens.sizes(), tokens.options());
    RoutedLaunch launch(call, p);
    launch.args.choice = choice.experts.data_ptr();
    launch.args.choice_prob = floats(choice.prob, "prob");
    launch.args.out = view(out, x, "out");
    const AlignedOutput memory(saved, "saved");
    launch.args.saved = memory.memory();
    launch.run(kForward, &LayerMemory::forward_workspace_bytes);
    return std::tuple(out, offsets, saved);
  });
}

template <bool kOverwrite>
std::tuple<Tensor, Tensor, List, List, List, List> routed_experts_backward(
    const Tensor& dout, const Tensor& x, const Tensor& offsets, const Tensor& saved, int64_t top_k,
    TensorList weight1, TensorList bias1, TensorList weight2, TensorList bias2, const Maybe& rng,
    MoeWants wants, Text activation, Text recipe, bool keep_h, bool keep_rows,
    std::optional<at::ScalarType> dweight_dtype) {
  return translate_errors([&] {
    const Tensor tokens = rows_of(x, "x");
    const RoutedCall call{tokens, top_k, offsets,    weight1, bias1,  weight2,  bias2,
                          rng,    wants, activation, recipe,  keep_h, keep_rows};
    MoeProblem p = problem_of(call);
    if (dweight_dtype) p.parameters.dw = float_type(*dweight_dtype, "dweight");
    p.options.overwrite_saved = kOverwrite;
    const auto all_like = [](bool wanted, TensorList list,
                             std::optional<at::ScalarType> type = std::nullopt) {
      return wanted ? empty_like(list, type) : List();
    };
    const Tensor dx = at::empty(p.dgrad ? tokens.sizes() : at::IntArrayRef{0}, tokens.options());
    const Tensor dprob =
        at::empty({p.dlogits ? p.tokens : 0, top_k}, x.options().dtype(at::kFloat));
    std::tuple gradients(dx, dprob, all_like(p.wgrad1, weight1, dweight_dtype),
                         all_like(p.dbias, bias1), all_like(p.wgrad2, weight2, dweight_dtype),
                         all_like(p.dbias, bias2));
    if (!learns(p)) return gradients;
    const auto& [to_x, to_prob, dw1, dbias1, dw2, dbias2] = gradients;
    RoutedLaunch launch(call, p);
    const Tensor read = rows_for(dout, "dout", p.options.align), kept = aligned(saved, "saved");
    launch.args.dout = view(read, x, "dout");
    require_same_device(x, kept, "saved");
    launch.args.saved = memory_of(kept, "saved");
    if (p.dgrad) launch.args.dx = view(dx, x, "dx");
    if (p.dlogits) launch.args.dchoice_prob = dprob.data_ptr<float>();
    launch.fc1.bind_dbias(dbias1);
    launch.fc2.bind_dbias(dbias2);
    launch.fc1.bind_dw(dw1);
    launch.fc2.bind_dw(dw2);
    launch.run(kBackward, &LayerMemory::backward_workspace_bytes);
    if (kOverwrite) bump_versions({saved});
    return gradients;
  });
}

void implement(torch::Library& m) {
  m.impl("routed_experts", routed_experts);
  m.impl("routed_experts_backward", routed_experts_backward<false>);
  m.impl("routed_experts_backward.overwrite_saved", routed_experts_backward<true>);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(kSchema);
  m.def(kBackwardSchema);
  m.def(overwriting_saved(kBackwardSchema).c_str());
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
