#pragma once
#include <array>

#include "activations/clamped_swiglu.h"
#include "activations/geglu.h"
#include "activations/geglu_tanh.h"
#include "activations/gelu.h"
#include "activations/gelu_tanh.h"
#include "activations/reglu.h"
#include "activations/relu.h"
#include "activations/relu_squared.h"
#include "activations/silu.h"
#include "activations/swiglu.h"

namespace cadre::activations {

/// Types as a list, to expand and to visit.
template <class... Rows>
struct List {
  static constexpr std::array kInfo = {Rows::kInfo...};

  /// Calls `work` with a value of the row of that kind.
  template <class Work>
  CADRE_HD static constexpr void visit(ActivationKind kind, Work&& work) {
    (void)((kind == Rows::kInfo.kind && (work(Rows{}), true)) || ...);
  }
};

/// Every activation, in the order of ActivationKind. To add one: its header and one word here.
using All =
    List<SwiGlu, GeGlu, GeGluTanh, ReGlu, ClampedSwiGlu, Silu, Gelu, GeluTanh, Relu, ReluSquared>;

constexpr bool in_order_of_kinds() {
  for (size_t i = 0; i < All::kInfo.size(); ++i)
    if (All::kInfo[i].kind != ActivationKind(i)) return false;
  return true;
}
static_assert(in_order_of_kinds());

}  // namespace cadre::activations
