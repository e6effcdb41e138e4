#include "backend/composed_gemm.h"

#include <algorithm>

#include "backend/composed.h"
#include "cadre/activation.h"
#include "cadre/permute.h"

namespace cadre::backend {
namespace {

/// For checks: aligned as memory of the workspace. Nobody reads it.
alignas(kAlignment) constexpr char kSomewhere[1] = {};

/// Rows in expert order from rows in token order, and the product that reads them.
struct CopyAndProduct {
  PermutePlan copy;
  GroupedGemmPlan product;

  static PermuteProblem copy_of(const GroupedGemmProblem& p) {
    const bool lhs = p.gather == Gather::kLhs;
    return {.tokens = p.tokens,
            .top_k = p.top_k,
            .rows = p.rows,
            .hidden = (lhs ? lhs_shape(p) : rhs_shape(p)).cols,
            .experts = p.experts,
            .dtype = (lhs ? p.lhs : p.rhs).element};
  }
  static int64_t rows_bytes(const GroupedGemmProblem& p) {
    const PermuteProblem copy = copy_of(p);
    return aligned(bytes_for(copy.dtype, copy.rows * copy.hidden));
  }
  /// The rows of the copy lie without gaps, which may be less than the caller promises of its own.
  static GroupedGemmProblem product_of(const GroupedGemmProblem& p) {
    const PermuteProblem copy = copy_of(p);
    const int64_t pitch = bytes_for(copy.dtype, copy.hidden) | kAlignment;
    GroupedGemmProblem product = p;
    product.gather = Gather::kNo;
    product.tokens = 0;
    product.top_k = 1;
    product.align = int(std::min<int64_t>(p.align, pitch & -pitch));
    return product;
  }
  static CopyAndProduct of(const GroupedGemmProblem& p, const Device& device) {
    return {plan(copy_of(p), device), plan(product_of(p), device)};
  }
  int64_t workspace_bytes(const GroupedGemmProblem& p) const {
    return rows_bytes(p) + std::max(copy.workspace_bytes, product.workspace_bytes);
  }
  static TensorView& operand(const GroupedGemmProblem& p, GroupedGemmArgs& args) {
    return (p.gather == Gather::kLhs ? args.lhs : args.rhs).codes;
  }
  /// Of the product, whose rows lie at `memory`.
  static GroupedGemmArgs product_args(const GroupedGemmProblem& p, GroupedGemmArgs args,
                                      const void* memory) {
    TensorView& rows = operand(p, args);
    rows = view(memory, rows.dtype, {p.rows, rows.shape[1]});
    args.slot_of = nullptr;
    return args;
  }
  void check(const GroupedGemmProblem& p, const GroupedGemmArgs& args) const {
    cadre::check(product, product_args(p, args, kSomewhere));
  }
  void run(const GroupedGemmProblem& p, const GroupedGemmArgs& args, Workspace workspace,
           Stream stream) const {
    const Workspace rest = behind(workspace, rows_bytes(p));
    GroupedGemmArgs behind_it = product_args(p, args, workspace.data);
    PermuteArgs rows{.rows = operand(p, behind_it), .offsets = args.offsets};
    rows.tokens = (p.gather == Gather::kLhs ? args.lhs : args.rhs).codes;
    rows.map.slot_of = const_cast<int32_t*>(args.slot_of);  // permute reads it
    cadre::run(copy, rows, rest, stream);
    run_checked(product, behind_it, rest, stream);
  }
};

/// The product and its activation.
struct ProductAndActivation {
  GroupedGemmPlan product;
  ActivationPlan activation;

  static bool keeps_z(const GroupedGemmProblem& p) { return p.activation->keep_z; }
  static int64_t z_bytes(const GroupedGemmProblem& p) {
    return !keeps_z(p) ? aligned(bytes_for(p.out, p.rows * p.n)) : 0;
  }
  /// Without a tail that nobody reads.
  static GroupedGemmProblem product_of(const GroupedGemmProblem& p) {
    GroupedGemmProblem plain = p;
    plain.activation.reset();
    if (!keeps_z(p)) plain.tail = Tail::kKeep;
    return plain;
  }
  static ActivationProblem activation_of(const GroupedGemmProblem& p) {
    const GemmActivation& a = *p.activation;
    ActivationProblem act{.kind = a.kind, .constants = a.constants, .layout = a.layout};
    act.rows = p.rows;
    act.features = out_columns(p);
    act.experts = p.experts;
    act.z = act.h = p.out;
    act.prob = a.prob;
    act.tail = p.tail;
    return act;
  }
  static ProductAndActivation of(const GroupedGemmProblem& p, const Device& device) {
    return {plan(product_of(p), device), plan(activation_of(p), device)};
  }
  int64_t workspace_bytes(const GroupedGemmProblem& p) const {
    return z_bytes(p) + std::max(product.workspace_bytes, activation.workspace_bytes);
  }
  /// Of the product, whose result lies at `memory` where the caller does not keep it.
  static GroupedGemmArgs product_args(const GroupedGemmProblem& p, GroupedGemmArgs args,
                                      const void* memory) {
    args.out = keeps_z(p) ? args.z : view(memory, p.out, {p.rows, p.n});
    args.prob = nullptr;
    args.z = {};
    return args;
  }
  void check(const GroupedGemmProblem& p, const GroupedGemmArgs& args) const {
    cadre::check(product, product_args(p, args, kSomewhere));
  }
  void run(const GroupedGemmProblem& p, const GroupedGemmArgs& args, Workspace workspace,
           Stream stream) const {
    const Workspace rest = behind(workspace, z_bytes(p));
    const GroupedGemmArgs gemm = product_args(p, args, workspace.data);
    run_checked(product, gemm, rest, stream);
    const ActivationArgs act{
        .z = gemm.out, .prob = args.prob, .offsets = args.offsets, .h = args.out};
    cadre::run(activation, act, rest, stream);
  }
};

/// Calls `with` for whichever of the two a problem is.
template <class With>
auto as_two(const GroupedGemmProblem& p, With&& with) {
  return p.gather != Gather::kNo ? with.template operator()<CopyAndProduct>()
                                 : with.template operator()<ProductAndActivation>();
}

}  // namespace

std::string refuses_composed_gemm(const GroupedGemmProblem& p, const Device& device) {
  if (p.gather == Gather::kNo && !p.activation)
    return "is for products with an activation, or of rows that are gathered";
  return refusal_of([&] { as_two(p, [&]<class Two>() { Two::of(p, device); }); });
}

int64_t composed_gemm_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return as_two(p, [&]<class Two>() { return Two::of(p, device).workspace_bytes(p); });
}

Inner composed_gemm_plans(const GroupedGemmProblem& p, const Device& device) {
  return as_two(p, [&]<class Two>() -> Inner {
    // tidy: allocation because it is made with the plan, before any run
    const auto two = std::make_shared<Two>(Two::of(p, device));
    return {two, two->product.fraction_bits};
  });
}

void check_composed_gemm(const GroupedGemmPlan& of, const GroupedGemmArgs& args) {
  as_two(of.problem,
         [&]<class Two>() { static_cast<const Two*>(of.inner.get())->check(of.problem, args); });
}

void composed_gemm(const GroupedGemmPlan& of, const GroupedGemmArgs& args, Workspace workspace,
                   Stream stream) {
  as_two(of.problem, [&]<class Two>() {
    static_cast<const Two*>(of.inner.get())->run(of.problem, args, workspace, stream);
  });
}

}  // namespace cadre::backend
