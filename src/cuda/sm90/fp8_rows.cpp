#include "cuda/sm90/fp8_rows.h"

namespace cadre::cuda::sm90 {
namespace {

struct Instance {
  Fp8RowsKind kind;
  LaunchFp8Rows launch;
};

template <Fp8RowsKind kKind>
constexpr Instance instance() {
  return {kKind, launch_fp8_rows<kKind>};
}

constexpr Instance kInstances[] = {
    instance<Fp8RowsKind{DType::kE4m3, DType::kBf16}>(),
    instance<Fp8RowsKind{DType::kE4m3, DType::kF32}>(),
    instance<Fp8RowsKind{DType::kE5m2, DType::kBf16}>(),
    instance<Fp8RowsKind{DType::kE5m2, DType::kF32}>(),
    instance<Fp8RowsKind{DType::kE4m3, DType::kBf16, CodeScales::kOfExperts}>(),
    instance<Fp8RowsKind{DType::kE4m3, DType::kF32, CodeScales::kOfExperts}>(),
    instance<Fp8RowsKind{DType::kE5m2, DType::kBf16, CodeScales::kOfExperts}>(),
    instance<Fp8RowsKind{DType::kE5m2, DType::kF32, CodeScales::kOfExperts}>(),
    instance<Fp8RowsKind{DType::kE4m3, DType::kBf16, CodeScales::kOfRows}>(),
    instance<Fp8RowsKind{DType::kE4m3, DType::kF32, CodeScales::kOfRows}>(),
    instance<Fp8RowsKind{DType::kE5m2, DType::kBf16, CodeScales::kOfRows}>(),
    instance<Fp8RowsKind{DType::kE5m2, DType::kF32, CodeScales::kOfRows}>(),
};

}  // namespace

LaunchFp8Rows find_fp8_rows(const Fp8RowsKind& kind) {
  for (const Instance& instance : kInstances)
    if (instance.kind == kind) return instance.launch;
  return nullptr;
}

}  // namespace cadre::cuda::sm90
