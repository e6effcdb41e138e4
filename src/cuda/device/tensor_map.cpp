#include "cuda/device/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/check.h"

namespace cadre::cuda {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

/// The driver's function, asked of the runtime, so that the library needs no driver to link.
Encode encode_function() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found),
        "find cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess)
    throw DeviceError(
        "cuda: the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12 or newer");
  return reinterpret_cast<Encode>(entry);
}

CUtensorMapDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

/// The driver works in the thread's context, which the runtime binds when a thread first needs it:
/// one of an autograd engine comes here before.
void bind_context() {
  int device = 0;
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaSetDevice(device), "make a device current");
}

template <int kRank>
struct Layout {
  cuuint64_t extent[kRank];
  cuuint64_t bytes[kRank - 1];  ///< of a step, from the second dimension on
};

template <int kRank>
CUtensorMap encode(const TensorView& v, const Layout<kRank>& layout, int rows) {
  static const Encode kEncode = encode_function();
  cuuint32_t box[kRank] = {cuuint32_t(box_columns(v.dtype)), cuuint32_t(rows)}, steps[kRank];
  for (int d = 0; d < kRank; ++d) steps[d] = 1;
  for (int d = 2; d < kRank; ++d) box[d] = 1;
  CUtensorMap map;
  const auto encoded = [&] {
    return kEncode(&map, type_of(v.dtype), kRank, v.data, layout.extent, layout.bytes, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult code = encoded();
  if (code == CUDA_ERROR_INVALID_CONTEXT) {
    bind_context();
    code = encoded();
  }
  if (code != CUDA_SUCCESS)
    throw DeviceError(text("cuda: cannot encode a tensor map: code ", int(code)));
  return map;
}

}  // namespace

CUtensorMap ragged_map(const TensorView& v, int rows) {
  constexpr cuuint64_t kRows = cuuint64_t(1) << 30, kMost = (cuuint64_t(1) << 31) - 1;
  const auto row = cuuint64_t(bytes_for(v.dtype, v.stride[0]));
  const cuuint64_t around = (cuuint64_t(1) << 34) * cuuint64_t(bits(v.dtype)) / 8 - row;
  return encode<4>(v, {{cuuint64_t(v.shape[1]), kRows, kMost, kMost}, {row, row, around}}, rows);
}

CUtensorMap expert_map(const TensorView& v, int rows) {
  const int outer = v.stride[v.rank - 1] == 1 ? v.rank - 2 : v.rank - 1;
  const int inner = 2 * v.rank - 3 - outer;
  const int64_t experts = v.rank == 3 ? v.shape[0] : 1;
  const int64_t step = v.rank == 3 && experts > 1 ? v.stride[0] : v.stride[outer] * v.shape[outer];
  return encode<3>(
      v,
      {{cuuint64_t(v.shape[inner]), cuuint64_t(v.shape[outer]), cuuint64_t(experts)},
       {cuuint64_t(bytes_for(v.dtype, v.stride[outer])), cuuint64_t(bytes_for(v.dtype, step))}},
      rows);
}

}  // namespace cadre::cuda
