#include "cli/train/dense.h"

#include <algorithm>

namespace cadre::train {
namespace {

Format plain_format(DType dtype) {
  return format(dtype == DType::kF32 ? FormatKind::kF32 : FormatKind::kBf16);
}

GroupedGemmProblem problem(const Dense::Shape& shape, Pass pass) {
  GroupedGemmProblem p;
  p.pass = pass;
  p.rows = shape.rows;
  p.n = shape.n;
  p.k = shape.k;
  p.lhs = p.rhs = plain_format(shape.dtype);
  p.out = DType::kF32;
  return p;
}

Operand operand(const void* data, DType dtype, std::initializer_list<int64_t> shape) {
  Operand o;
  o.codes = view(data, dtype, shape);
  return o;
}

}  // namespace

Dense::Dense(const Shape& shape, const Device& device)
    : shape_(shape),
      offsets_{0, static_cast<int32_t>(shape.rows)},
      fprop_(plan(problem(shape, Pass::kFprop), device)) {
  if (!shape.backward) return;
  dgrad_ = plan(problem(shape, Pass::kDgrad), device);
  wgrad_ = plan(problem(shape, Pass::kWgrad), device);
}

int64_t Dense::workspace_bytes() const {
  int64_t bytes = fprop_.workspace_bytes;
  for (const auto& backward : {dgrad_, wgrad_}) {
    if (backward) bytes = std::max(bytes, backward->workspace_bytes);
  }
  return bytes;
}

void Dense::forward(const void* x, const void* w, float* y, Workspace workspace) const {
  GroupedGemmArgs args;
  args.lhs = operand(x, shape_.dtype, {shape_.rows, shape_.k});
  args.rhs = operand(w, shape_.dtype, {1, shape_.n, shape_.k});
  args.offsets = all_rows();
  args.out = view(y, DType::kF32, {shape_.rows, shape_.n});
  run(fprop_, args, workspace, {});
}

void Dense::input_gradient(const void* dy, const void* w, float* dx, Workspace workspace) const {
  GroupedGemmArgs args;
  args.lhs = operand(dy, shape_.dtype, {shape_.rows, shape_.n});
  args.rhs = operand(w, shape_.dtype, {1, shape_.n, shape_.k});
  args.offsets = all_rows();
  args.out = view(dx, DType::kF32, {shape_.rows, shape_.k});
  run(*dgrad_, args, workspace, {});
}

void Dense::weight_gradient(const void* dy, const void* x, float* dw, Workspace workspace) const {
  GroupedGemmArgs args;
  args.lhs = operand(dy, shape_.dtype, {shape_.rows, shape_.n});
  args.rhs = operand(x, shape_.dtype, {shape_.rows, shape_.k});
  args.offsets = all_rows();
  args.out = view(dw, DType::kF32, {1, shape_.n, shape_.k});
  run(*wgrad_, args, workspace, {});
}

}  // namespace cadre::train
