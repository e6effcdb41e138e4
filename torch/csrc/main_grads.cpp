#include "main_grads.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace cadre::door {

MainGrads main_grads_of(const std::vector<Tensor>& weight, bool first_microbatch) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("cadre::_main_grads", "");
  torch::jit::Stack stack{weight, first_microbatch};
  op.callBoxed(stack);
  MainGrads found{stack[0].toTensorVector(),
                  parse_accumulate(stack[1].toStringView()),
                  stack[2].toOptional<Tensor>(),
                  {}};
  for (const c10::IValue& stand_in : stack[3].toListRef())
    found.stand_ins.push_back(stand_in.isNone() ? Tensor() : stand_in.toTensor());
  return found;
}

}  // namespace cadre::door
