#include "apps/train/dense.h"

#include <algorithm>

namespace cadre::train {
namespace {

Format plain_format(DType dtype) {
  return format(dtype == DType::kF32 ? FormatKind::kF32 : FormatKind::kBf16);
}

GroupedGemmProblem problem(const DensePlans::Shape& shape, Pass pass) {
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

int64_t DensePlans::workspace_bytes() const {
  int64_t bytes = fprop.workspace_bytes;
  for (const auto& backward : {dgrad, wgrad}) {
    if (backward) bytes = std::max(bytes, backward->workspace_bytes);
  }
  return bytes;
}

DensePlans plan_dense(const DensePlans::Shape& shape, const Device& device) {
  DensePlans plans{shape, plan(problem(shape, Pass::kFprop), device), {}, {}};
  if (!shape.backward) return plans;
  plans.dgrad = plan(problem(shape, Pass::kDgrad), device);
  plans.wgrad = plan(problem(shape, Pass::kWgrad), device);
  return plans;
}

Dense::Dense(const DensePlans& plans, Engine& engine)
    : plans_(plans), stream_(engine.stream()), offsets_(engine, 2) {
  const int32_t offsets[2] = {0, static_cast<int32_t>(plans.shape.rows)};
  engine.upload(offsets_.data(), offsets, sizeof offsets);
}

void Dense::forward(const void* x, const void* w, float* y, Workspace workspace) const {
  const DensePlans::Shape& s = plans_.shape;
  GroupedGemmArgs args;
  args.lhs = operand(x, s.dtype, {s.rows, s.k});
  args.rhs = operand(w, s.dtype, {1, s.n, s.k});
  args.offsets = all_rows();
  args.out = view(y, DType::kF32, {s.rows, s.n});
  run(plans_.fprop, args, workspace, stream_);
}

void Dense::input_gradient(const void* dy, const void* w, float* dx, Workspace workspace) const {
  const DensePlans::Shape& s = plans_.shape;
  GroupedGemmArgs args;
  args.lhs = operand(dy, s.dtype, {s.rows, s.n});
  args.rhs = operand(w, s.dtype, {1, s.n, s.k});
  args.offsets = all_rows();
  args.out = view(dx, DType::kF32, {s.rows, s.k});
  run(*plans_.dgrad, args, workspace, stream_);
}

void Dense::weight_gradient(const void* dy, const void* x, float* dw, Workspace workspace) const {
  const DensePlans::Shape& s = plans_.shape;
  GroupedGemmArgs args;
  args.lhs = operand(dy, s.dtype, {s.rows, s.n});
  args.rhs = operand(x, s.dtype, {s.rows, s.k});
  args.offsets = all_rows();
  args.out = view(dw, DType::kF32, {1, s.n, s.k});
  run(*plans_.wgrad, args, workspace, stream_);
}

}  // namespace cadre::train
