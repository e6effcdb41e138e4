#pragma once
#include <cstdint>
#include <string_view>

#pragma GCC visibility push(default)
namespace cadre {

/// The type of one stored element. Names are those of the formats pages: docs/formats.md.
enum class DType : uint8_t { kF32, kBf16, kF16, kE4m3, kE5m2, kE2m1, kE8m0, kI32, kI64, kU8 };

/// Bits of one element: 4 for e2m1 (two a byte, even index in the low nibble), else 8, 16, 32, 64.
int bits(DType);

/// Bytes that `count` consecutive elements take; a half-filled byte counts whole.
int64_t bytes_for(DType, int64_t count);

/// "f32", "bf16", "f16", "e4m3", "e5m2", "e2m1", "e8m0", "i32", "i64", "u8".
std::string_view name(DType);

/// Inverse of `name`; also takes "fp32", "float32", "fp16", "float16", "bfloat16".
/// Errors    InvalidArgument listing the known names.
DType parse_dtype(std::string_view);

/// True for f32, bf16 and f16: types that hold a value without a scale.
bool is_plain_float(DType);

}  // namespace cadre
#pragma GCC visibility pop
