#pragma once
#include <gtest/gtest.h>

#include "tests/layers/mlp_case.h"
#include "tests/layers/mlp_model.h"

// One step of the expert MLP in a plain recipe of its own dtype, stage by stage: every stage of the
// model begins with what the layer had, so that no bound is loose.
namespace cadre::test {

class MlpCheck {
 public:
  MlpCheck(const MlpCase& before, const MlpCase& after)
      : c_(before), got_(after), p_(before.p()), sizes_{p_, before.offsets} {
    w1_ = c_.fc1.w.values();
    w2_ = c_.fc2.w.values();
    if (p_.bias1) b1_ = c_.fc1.bias.values();
    if (p_.bias2) b2_ = c_.fc2.bias.values();
    if (p_.bias2_scale) scale_ = used(c_.bias2_scale);
    if (p_.prob) prob_ = used(c_.prob);
  }

  void check() const {
    const LinearStage one{sizes_, sizes_.z_columns(), p_.hidden, w1_, b1_, none_};
    const LinearStage two{sizes_, p_.hidden, p_.features, w2_, b2_, scale_};
    const ActivationStage activation{sizes_, prob_};
    const Values x = used(c_.x), dy = used(c_.dy), z = used(got_.z), dh = used(got_.dh);
    near("z", z, one.out(x));
    const Inexact h = activation.h(z, p_.dtype);
    near("y", used(got_.y), two.out(h));
    near("dh", dh, two.dx(dy));
    const ActivationStage::Backward back = activation.backward(z, dh, p_.dtype);
    if (p_.prob) near("dprob", used(got_.dprob), back.dprob, DType::kF32);
    near("dx", used(got_.dx), one.dx(back.dz));
    near("dw1", got_.fc1.dw.values(), one.dw(back.dz, x), p_.parameters.dw);
    near("dw2", got_.fc2.dw.values(), two.dw(dy, h), p_.parameters.dw);
    if (p_.bias1) near("dbias1", got_.fc1.dbias.values(), one.dbias(back.dz), p_.parameters.dbias);
    if (p_.bias2) near("dbias2", got_.fc2.dbias.values(), two.dbias(dy), p_.parameters.dbias);
    if (p_.bias2_scale) near("dbias2_scale", used(got_.dbias2_scale), two.dscale(dy), DType::kF32);
    for (const Tensor* t : {&got_.y, &got_.dx, &got_.z, &got_.dh}) check_tail(*t);
    EXPECT_EQ(got_.damage(), "") << to_string(p_);
  }

 private:
  Values used(const Tensor& t) const { return used_rows(t, c_.counts); }

  void near(const char* what, const Values& got, const std::vector<Sum>& want) const {
    near(what, got, want, p_.dtype);
  }
  void near(const char* what, const Values& got, const std::vector<Sum>& want, DType dtype) const {
    ASSERT_EQ(got.size(), want.size()) << what;
    Values bound;
    for (const Sum& sum : want) bound.push_back(sum.terms == 0 ? 0 : sum.bound(dtype));
    EXPECT_EQ(difference(got, values(want), bound, 1), "") << what << " of " << to_string(p_);
  }
  void check_tail(const Tensor& t) const {
    for (int64_t r = c_.counts.used(); r < p_.rows; ++r)
      for (int64_t i = 0; i < t.columns(); ++i)
        EXPECT_TRUE(p_.options.tail == Tail::kZero ? t.at(r, i) == 0 : std::isnan(t.at(r, i)));
  }

  const MlpCase& c_;
  const MlpCase& got_;
  const GroupedMlpProblem& p_;
  MlpSizes sizes_;
  Values w1_, w2_, b1_, b2_, scale_, prob_, none_;
};

}  // namespace cadre::test
