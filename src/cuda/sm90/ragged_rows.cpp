#include "cuda/sm90/ragged_rows.h"

namespace cadre::cuda::sm90 {
namespace {

struct Instance {
  RaggedRowsKind kind;
  LaunchRaggedRows launch;
};

template <RaggedRowsKind kKind>
constexpr Instance instance() {
  return {kKind, launch_ragged_rows<kKind>};
}

constexpr Instance kInstances[] = {
    instance<RaggedRowsKind{true, DType::kBf16, DType::kBf16}>(),
    instance<RaggedRowsKind{true, DType::kBf16, DType::kF32}>(),
    instance<RaggedRowsKind{true, DType::kF16, DType::kF16}>(),
    instance<RaggedRowsKind{true, DType::kF16, DType::kF32}>(),
    instance<RaggedRowsKind{false, DType::kBf16, DType::kBf16}>(),
    instance<RaggedRowsKind{false, DType::kBf16, DType::kF32}>(),
    instance<RaggedRowsKind{false, DType::kF16, DType::kF16}>(),
    instance<RaggedRowsKind{false, DType::kF16, DType::kF32}>(),
};

}  // namespace

LaunchRaggedRows find_ragged_rows(const RaggedRowsKind& kind) {
  for (const Instance& instance : kInstances)
    if (instance.kind == kind) return instance.launch;
  return nullptr;
}

}  // namespace cadre::cuda::sm90
