#pragma once
#include "tests/layers/mlp_case.h"

// The expert MLP put together by hand from two grouped linear layers and an activation, each with
// memory of its own.
namespace cadre::test {

class MlpComposition {
 public:
  explicit MlpComposition(MlpCase& c) : c_(c), p_(c.p()), z_(make(z_columns())) {
    h_ = make(p_.features);
    dh_ = make(p_.features);
    dz_ = make(z_columns());
  }

  void run() {
    const GroupedLinearPlan one = plan(fc1(), this_cpu()), two = plan(fc2(), this_cpu());
    GroupedLinearArgs first = args(one, c_.fc1), second = args(two, c_.fc2);
    const OwnedWorkspace saved1(one.memory.saved_bytes), saved2(two.memory.saved_bytes);
    first.saved = memory(saved1);
    second.saved = memory(saved2);
    first.x = c_.x.view();
    first.y = z_.view();
    first.dy = dz_.view();
    first.dx = c_.dx.view();
    second.x = h_.view();
    second.y = c_.y.view();
    second.dy = c_.dy.view();
    second.dx = dh_.view();
    second.bias_scale = c_.bias2_scale.data<float>();
    second.dbias_scale = c_.dbias2_scale.data<float>();
    forward(one, first);
    activate(false);
    forward(two, second);
    backward(two, second);
    activate(true);
    backward(one, first);
  }

 private:
  int64_t z_columns() const { return info(p_.activation).gated ? 2 * p_.features : p_.features; }
  Tensor make(int64_t columns) const { return Tensor(p_.dtype, {p_.rows, columns}); }

  GroupedLinearProblem linear(int64_t n, int64_t k) const {
    GroupedLinearProblem l{.rows = p_.rows, .n = n, .k = k, .experts = p_.experts};
    l.recipe = p_.recipe;
    l.dtype = p_.dtype;
    l.parameters = p_.parameters;
    l.options.accumulate = p_.options.accumulate;
    l.options.accumulate_bias = p_.options.accumulate_bias;
    l.options.tail = p_.options.tail;
    l.options.amax_eps = p_.options.amax_eps;
    return l;
  }
  GroupedLinearProblem fc1() const {
    GroupedLinearProblem l = linear(z_columns(), p_.hidden);
    l.bias = p_.bias1;
    l.dy_role = TensorRole::kDz;
    return l;
  }
  GroupedLinearProblem fc2() const {
    GroupedLinearProblem l = linear(p_.hidden, p_.features);
    l.bias = p_.bias2;
    l.bias_scale = p_.bias2_scale;
    l.x_role = TensorRole::kH;
    return l;
  }
  GroupedLinearArgs args(const GroupedLinearPlan&, Parameters& parameters) {
    GroupedLinearArgs a{.offsets = {c_.offsets.data(), p_.experts}};
    a.parameters = parameters.args();
    a.rng = c_.rng.data();
    return a;
  }

  static void forward(const GroupedLinearPlan& plan, const GroupedLinearArgs& a) {
    const OwnedWorkspace w(plan.memory.forward_workspace_bytes);
    cadre::forward(plan, a, w.get(), {});
  }
  static void backward(const GroupedLinearPlan& plan, const GroupedLinearArgs& a) {
    const OwnedWorkspace w(plan.memory.backward_workspace_bytes);
    cadre::backward(plan, a, w.get(), {});
  }
  void activate(bool backwards) {
    ActivationProblem problem{.backward = backwards, .kind = p_.activation};
    problem.constants = p_.constants;
    problem.layout = p_.layout;
    problem.rows = p_.rows;
    problem.features = p_.features;
    problem.experts = p_.experts;
    problem.z = problem.h = p_.dtype;
    problem.prob = p_.prob;
    problem.tail = p_.options.tail;
    ActivationArgs a{.z = z_.view(), .offsets = {c_.offsets.data(), p_.experts}};
    if (p_.prob) a.prob = c_.prob.data<float>();
    if (backwards) {
      a.dh = dh_.view();
      a.dz = dz_.view();
      if (p_.prob) a.dprob = c_.dprob.data<float>();
    } else {
      a.h = h_.view();
    }
    const ActivationPlan made = plan(problem, this_cpu());
    const OwnedWorkspace w(made.workspace_bytes);
    cadre::run(made, a, w.get(), {});
  }

  MlpCase& c_;
  const GroupedMlpProblem& p_;
  Tensor z_, h_, dh_, dz_;
};

}  // namespace cadre::test
