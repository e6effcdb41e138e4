// The plain values of the public headers: dtypes and views.
#include <algorithm>
#include <array>
#include <utility>

#include "cadre/dtype.h"
#include "cadre/error.h"
#include "cadre/tensor.h"

namespace cadre {
namespace {

struct DTypeRow {
  DType dtype;
  std::string_view name;
  int bits;
};

constexpr std::array kDTypes = {
    DTypeRow{DType::kF32, "f32", 32},  DTypeRow{DType::kBf16, "bf16", 16},
    DTypeRow{DType::kF16, "f16", 16},  DTypeRow{DType::kE4m3, "e4m3", 8},
    DTypeRow{DType::kE5m2, "e5m2", 8}, DTypeRow{DType::kE2m1, "e2m1", 4},
    DTypeRow{DType::kE8m0, "e8m0", 8}, DTypeRow{DType::kI32, "i32", 32},
    DTypeRow{DType::kI64, "i64", 64},  DTypeRow{DType::kU8, "u8", 8},
};

struct Alias {
  std::string_view other, name;
};
constexpr std::array kAliases = {Alias{"fp32", "f32"}, Alias{"float32", "f32"},
                                 Alias{"fp16", "f16"}, Alias{"float16", "f16"},
                                 Alias{"bfloat16", "bf16"}};

// A view that was put together by hand may hold anything, and is printed in the error that says so.
constexpr DTypeRow kUnknown{DType{}, "unknown type", 0};

const DTypeRow& row(DType dtype) {
  return size_t(dtype) < kDTypes.size() ? kDTypes[size_t(dtype)] : kUnknown;
}
int rank_of(const TensorView& v) { return std::clamp(v.rank, 0, TensorView::kMaxRank); }

}  // namespace

int bits(DType dtype) { return row(dtype).bits; }
int64_t bytes_for(DType dtype, int64_t count) {
  const int each = bits(dtype);
  count = std::min(count, INT64_MAX / 8);
  return each >= 8 ? count * (each / 8) : (count * each + 7) / 8;
}
std::string_view name(DType dtype) { return row(dtype).name; }

DType parse_dtype(std::string_view word) {
  for (const Alias& alias : kAliases)
    if (word == alias.other) word = alias.name;
  std::string known;
  for (const DTypeRow& r : kDTypes) {
    if (word == r.name) return r.dtype;
    known += text(known.empty() ? "" : ", ", r.name);
  }
  throw InvalidArgument(text("dtype: name is '", word, "', must be one of ", known));
}

bool is_plain_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF16;
}

TensorView view(const void* data, DType dtype, std::initializer_list<int64_t> shape) {
  require(shape.size() <= size_t(TensorView::kMaxRank), "view: rank is ", shape.size(),
          ", must be at most ", TensorView::kMaxRank);
  TensorView v{const_cast<void*>(data), dtype, int(shape.size()), {}, {}};
  std::copy(shape.begin(), shape.end(), v.shape.begin());
  int64_t step = 1;
  for (int d = v.rank - 1; d >= 0; --d) {
    require(v.shape[d] >= 0, "view: dimension ", d, " is ", v.shape[d], ", must be 0 or more");
    v.stride[d] = step;
    require(!__builtin_mul_overflow(step, v.shape[d], &step), "view: dimension ", d, " is ",
            v.shape[d], ", must be smaller; the view has 2^63 elements or more");
  }
  return v;
}

TensorView view(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                std::initializer_list<int64_t> stride) {
  TensorView v = view(data, dtype, shape);
  require(stride.size() == shape.size(), "view: ", stride.size(), " strides for rank ", v.rank,
          "; give one stride a dimension");
  std::copy(stride.begin(), stride.end(), v.stride.begin());
  return v;
}

TensorView transposed(TensorView v) {
  require(v.rank >= 2 && v.rank <= TensorView::kMaxRank, "view: rank is ", v.rank,
          ", must be 2 to ", TensorView::kMaxRank, "; there is no matrix to transpose");
  const int rows = v.rank - 2, cols = v.rank - 1;
  std::swap(v.shape[rows], v.shape[cols]);
  std::swap(v.stride[rows], v.stride[cols]);
  return v;
}

int64_t elements(const TensorView& v) {
  const auto* end = v.shape.begin() + rank_of(v);
  if (std::find(v.shape.begin(), end, 0) != end) return 0;
  int64_t count = 1;
  for (int d = rank_of(v) - 1; d >= 0; --d)
    if (__builtin_mul_overflow(count, v.shape[d], &count)) return INT64_MAX;
  return count;
}

bool is_contiguous(const TensorView& v) {
  int64_t step = 1;
  for (int d = rank_of(v) - 1; d >= 0; --d) {
    if (v.shape[d] != 1 && v.stride[d] != step) return false;
    if (__builtin_mul_overflow(step, v.shape[d], &step)) return false;
  }
  return true;
}

std::string to_string(const TensorView& v) {
  std::string shape, stride;
  for (int d = 0; d < rank_of(v); ++d) {
    shape += text(d ? ", " : "", v.shape[d]);
    stride += text(d ? ", " : "", v.stride[d]);
  }
  if (v.rank != rank_of(v)) return text(name(v.dtype), " of rank ", v.rank);
  return text(name(v.dtype), "[", shape, "]",
              is_contiguous(v) ? std::string() : text(" strides (", stride, ")"));
}

}  // namespace cadre
