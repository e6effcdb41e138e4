#pragma once
#include "cadre/quantize.h"
#include "cadre/recipe.h"
#include "tests/judge/tensor.h"
#include "tests/judge/workspace.h"

namespace cadre::test {

/// Both copies of x, as the first linear's recipe reads them.
struct GivenCopies {
  OwnedWorkspace along_k_bytes, along_rows_bytes;
  QuantizedView along_k, along_rows;

  GivenCopies(const Recipe& recipe, const Tensor& x, const Offsets& offsets)
      : along_k_bytes(bytes(recipe.fprop.lhs, Axis::kAlongK, x, offsets)),
        along_rows_bytes(bytes(recipe.wgrad.rhs, Axis::kAlongRows, x, offsets)) {
    along_k = made(recipe.fprop.lhs, Axis::kAlongK, x, offsets);
    along_rows = made(recipe.wgrad.rhs, Axis::kAlongRows, x, offsets);
  }

 private:
  static QuantizedShape shape(const Format& format, Axis axis, const Tensor& x,
                              const Offsets& offsets) {
    const TensorView v = x.view();
    return {RowsKind::kRagged, v[0], v[1], offsets.experts, format, axis};
  }
  static int64_t bytes(const Format& format, Axis axis, const Tensor& x, const Offsets& offsets) {
    return quantized_bytes(shape(format, axis, x, offsets));
  }
  QuantizedView made(const Format& format, Axis axis, const Tensor& x, const Offsets& offsets) {
    const QuantizedShape s = shape(format, axis, x, offsets);
    const bool k = axis == Axis::kAlongK;
    const QuantizedView view = quantized_view(s, (k ? along_k_bytes : along_rows_bytes).get().data);
    QuantizeProblem q{.kind = RowsKind::kRagged, .rows = s.rows, .cols = s.cols};
    q.experts = s.experts;
    q.source = x.view().dtype;
    (k ? q.along_k : q.along_rows) = format;
    QuantizeArgs args{.source = x.view(), .offsets = offsets};
    (k ? args.along_k : args.along_rows) = view;
    const QuantizePlan chosen = plan(q, this_cpu());
    const OwnedWorkspace workspace(chosen.workspace_bytes);
    run(chosen, args, workspace.get(), {});
    return view;
  }
};

}  // namespace cadre::test
