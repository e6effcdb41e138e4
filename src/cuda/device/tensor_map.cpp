#include "cuda/device/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

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
  cuuint32_t box[kRank];
};

template <int kRank>
CUtensorMap encode(const TensorView& v, const Layout<kRank>& layout) {
  static const Encode kEncode = encode_function();
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const int64_t row_bytes = bytes_for(v.dtype, layout.box[0]);
  const CUtensorMapSwizzle swizzle = row_bytes == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
                                     : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_128B;
  cuuint64_t extent[kRank];
  cuuint32_t box[kRank];
  std::copy_n(layout.extent, kRank, extent), std::copy_n(layout.box, kRank, box);
  if (v.dtype == DType::kE2m1) extent[0] /= 2, box[0] /= 2;  // bytes
  CUtensorMap map;
  const auto encoded = [&] {
    return kEncode(&map, type_of(v.dtype), kRank, v.data, extent, layout.bytes, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
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

/// Elements from a row to the next. The stride of a single row means nothing, and may be one that
/// TMA does not take.
int64_t row_step(const TensorView& v, int outer, int inner) {
  const int64_t sixteen = 128 / bits(v.dtype);
  if (v.shape[outer] > 1) return v.stride[outer];
  return (v.shape[inner] + sixteen - 1) / sixteen * sixteen;
}

}  // namespace

CUtensorMap ragged_map(const TensorView& v, int rows, int columns) {
  constexpr cuuint64_t kRows = cuuint64_t(1) << 30, kMost = (cuuint64_t(1) << 31) - 1;
  const auto row = cuuint64_t(bytes_for(v.dtype, row_step(v, 0, 1)));
  const cuuint64_t around = (cuuint64_t(1) << 34) * cuuint64_t(bits(v.dtype)) / 8 - row;
  const auto width = cuuint32_t(columns == 0 ? box_columns(v.dtype) : columns);
  return encode<4>(v, {{cuuint64_t(v.shape[1]), kRows, kMost, kMost},
                       {row, row, around},
                       {width, cuuint32_t(rows), 1, 1}});
}

CUtensorMap expert_map(const TensorView& v, int rows, int columns) {
  const int outer = v.stride[v.rank - 1] == 1 ? v.rank - 2 : v.rank - 1;
  const int inner = 2 * v.rank - 3 - outer;
  const int64_t experts = v.rank == 3 ? v.shape[0] : 1;
  const int64_t row = row_step(v, outer, inner);
  const int64_t step = v.rank == 3 && experts > 1 ? v.stride[0] : row * v.shape[outer];
  return encode<3>(
      v, {{cuuint64_t(v.shape[inner]), cuuint64_t(v.shape[outer]), cuuint64_t(experts)},
          {cuuint64_t(bytes_for(v.dtype, row)), cuuint64_t(bytes_for(v.dtype, step))},
          {cuuint32_t(columns == 0 ? box_columns(v.dtype) : columns), cuuint32_t(rows), 1}});
}

CUtensorMap glu_map(const TensorView& v, GluLayout layout) {
  constexpr cuuint32_t kTurn = 8, kTurns = 8, kTurnsOfBlock = 4;
  const auto row = cuuint64_t(bytes_for(v.dtype, v.stride[v.rank - 2]));
  const auto features = cuuint64_t(v.shape[v.rank - 2] / 2), k = cuuint64_t(v.shape[v.rank - 1]);
  const auto columns = cuuint32_t(box_columns(v.dtype));
  if (layout == GluLayout::kInterleave32)
    return encode<5>(v, {{k, kTurn, 2, kTurnsOfBlock, features / kTurn / kTurnsOfBlock},
                         {row, 32 * row, kTurn * row, 64 * row},
                         {columns, kTurn, 2, kTurnsOfBlock, kTurns / kTurnsOfBlock}});
  const bool pairs = layout == GluLayout::kInterleave1;
  const cuuint64_t next = pairs ? 2 * row : row, up = pairs ? row : features * row;
  const bool many = v.rank == 3 && v.shape[0] > 1;
  const auto experts = cuuint64_t(many ? v.shape[0] : 1);
  const cuuint64_t step = many ? cuuint64_t(bytes_for(v.dtype, v.stride[0])) : 2 * features * row;
  return encode<5>(v, {{k, kTurn, 2, features / kTurn, experts},
                       {next, up, kTurn * next, step},
                       {columns, kTurn, 2, kTurns, 1}});
}

}  // namespace cadre::cuda
