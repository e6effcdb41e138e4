#include "cpu/gemm/lines.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <utility>

#include "cadre/error.h"
#include "cpu/clones.h"
#include "formats/list.h"

namespace cadre::cpu::gemm {
namespace {

template <class Element>
[[gnu::always_inline]] inline void decode(const void* codes, int64_t first, int64_t count,
                                          float* to) {
  const auto* from = static_cast<const typename Element::Code*>(codes) + first;
  for (int64_t i = 0; i < count; ++i) to[i] = Element::decode(from[i]);
}

// A template cannot have clones, so every element type has its function.
CADRE_CLONES void decode_f32(const void* codes, int64_t first, int64_t count, float* to) {
  std::memcpy(to, static_cast<const float*>(codes) + first, size_t(count) * sizeof(float));
}
CADRE_CLONES void decode_bf16(const void* codes, int64_t first, int64_t count, float* to) {
  decode<formats::Bf16>(codes, first, count, to);
}
CADRE_CLONES void decode_f16(const void* codes, int64_t first, int64_t count, float* to) {
  decode<formats::Fp16>(codes, first, count, to);
}
CADRE_CLONES void decode_e4m3(const void* codes, int64_t first, int64_t count, float* to) {
  decode<formats::E4m3>(codes, first, count, to);
}
CADRE_CLONES void decode_e5m2(const void* codes, int64_t first, int64_t count, float* to) {
  decode<formats::E5m2>(codes, first, count, to);
}
CADRE_CLONES void decode_e8m0(const void* codes, int64_t first, int64_t count, float* to) {
  decode<formats::E8m0>(codes, first, count, to);
}
CADRE_CLONES void decode_e2m1(const void* codes, int64_t first, int64_t count, float* to) {
  const auto* bytes = static_cast<const uint8_t*>(codes) + first / 2;
  const int64_t odd = count > 0 ? first % 2 : 0;  // a half byte at the front
  if (odd) *to++ = formats::E2m1::decode(formats::nibble(*bytes++, 1));
  for (int64_t i = 0; i < (count - odd) / 2; ++i) {
    to[2 * i] = formats::E2m1::decode(formats::nibble(bytes[i], 0));
    to[2 * i + 1] = formats::E2m1::decode(formats::nibble(bytes[i], 1));
  }
  if ((count - odd) % 2)
    to[count - odd - 1] = formats::E2m1::decode(formats::nibble(bytes[(count - odd) / 2], 0));
}

/// Eight lines at a time: several streams of memory are faster than one.
template <class Element>
[[gnu::always_inline]] inline void decode_all(const void* codes, const Columns& all, float* to) {
  constexpr int64_t kStreams = 8, kWidth = 64;
  for (int64_t first = 0; first < all.lines; first += kStreams) {
    const int64_t end = std::min(first + kStreams, all.lines);
    for (int64_t c = 0; c < all.columns; ++c) {
      for (int64_t i = first; i < end; ++i) {
        const char* line = static_cast<const char*>(codes) + i * all.line_bytes;
        const auto* from = reinterpret_cast<const typename Element::Code*>(line) + c * kWidth;
        float* place = to + c * all.column_step + i * kWidth;
        for (int64_t j = 0; j < kWidth; ++j) place[j] = Element::decode(from[j]);
      }
    }
  }
}
CADRE_CLONES void decode_columns_f32(const void* codes, const Columns& all, float* to) {
  decode_all<formats::Fp32>(codes, all, to);
}
CADRE_CLONES void decode_columns_bf16(const void* codes, const Columns& all, float* to) {
  decode_all<formats::Bf16>(codes, all, to);
}

/// Writes 64 aligned bytes past the caches.
[[gnu::always_inline]] inline void stream_64(const void* from, void* to) {
#if defined(__x86_64__)
  for (int i = 0; i < 4; ++i)
    _mm_stream_si128(static_cast<__m128i*>(to) + i,
                     _mm_load_si128(static_cast<const __m128i*>(from) + i));
#else
  std::memcpy(to, from, 64);
#endif
}

CADRE_CLONES void encode_f32(const float* from, int64_t count, void* to) {
  std::memcpy(to, from, size_t(count) * sizeof(float));
}
CADRE_CLONES void encode_bf16(const float* from, int64_t count, void* to) {
  auto* codes = static_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; ++i) codes[i] = formats::Bf16::encode(from[i]);
}
CADRE_CLONES void encode_f16(const float* from, int64_t count, void* to) {
  auto* codes = static_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; ++i) codes[i] = formats::Fp16::encode(from[i]);
}

/// Sixteen bytes at a time, since every x86-64 can; the processor joins them to lines.
CADRE_CLONES void stream_bf16(const float* from, int64_t count, void* to) {
  constexpr int64_t kLine = 32;
  auto* codes = static_cast<uint16_t*>(to);
  if (reinterpret_cast<uintptr_t>(to) % 64 != 0) return encode_bf16(from, count, to);
  int64_t at = 0;
  for (; at + kLine <= count; at += kLine) {
    alignas(64) uint16_t line[kLine];
    for (int64_t i = 0; i < kLine; ++i) line[i] = formats::Bf16::encode(from[at + i]);
    stream_64(line, codes + at);
  }
  encode_bf16(from + at, count - at, codes + at);
}

using Floats = float __attribute__((vector_size(64)));
/// Exchanges the halves of size `kSize` of two rows: the butterfly of a transpose.
template <int kSize, int... kLane>
[[gnu::always_inline]] inline void exchange(Floats& low, Floats& high,
                                            std::integer_sequence<int, kLane...>) {
  const Floats new_low =
      __builtin_shufflevector(low, high, (kLane & kSize ? 16 + kLane - kSize : kLane)...);
  high = __builtin_shufflevector(low, high, (kLane & kSize ? 16 + kLane : kLane + kSize)...);
  low = new_low;
}

template <int kSize>
[[gnu::always_inline]] inline void exchange_all(Floats (&row)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    if (!(i & kSize))
      exchange<kSize>(row[i], row[i + kSize], std::make_integer_sequence<int, 16>{});
}

}  // namespace

EncodeLine stream_line(DType dtype) {
  return dtype == DType::kBf16 ? stream_bf16 : encode_line(dtype);
}

void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

DecodeLine decode_line(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return decode_f32;
    case DType::kBf16:
      return decode_bf16;
    case DType::kF16:
      return decode_f16;
    case DType::kE4m3:
      return decode_e4m3;
    case DType::kE5m2:
      return decode_e5m2;
    case DType::kE8m0:
      return decode_e8m0;
    case DType::kE2m1:
      return decode_e2m1;
    default:
      throw InvalidArgument(text("cpu: dtype is ", name(dtype), ", must be a float"));
  }
}

DecodeColumns decode_columns(DType dtype) {
  if (dtype == DType::kF32) return decode_columns_f32;
  return dtype == DType::kBf16 ? decode_columns_bf16 : nullptr;
}

EncodeLine encode_line(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return encode_f32;
    case DType::kBf16:
      return encode_bf16;
    case DType::kF16:
      return encode_f16;
    default:
      throw InvalidArgument(text("cpu: dtype is ", name(dtype), ", must be f32, bf16 or f16"));
  }
}

CADRE_CLONES void scale_line(float* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

CADRE_CLONES void multiply_line(float* x, const float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= y[i];
}

CADRE_CLONES void add_line(float* x, const float* y, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) x[i] += factor * y[i];
}

CADRE_CLONES void narrow_line(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = uint16_t(formats::bits_of(from[i]) >> 16);
}

CADRE_CLONES void pair_lines(const float* even, const float* odd, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t pair =
        (formats::bits_of(even[i]) >> 16) | (formats::bits_of(odd[i]) & 0xffff'0000u);
    std::memcpy(to + 2 * i, &pair, sizeof(pair));
  }
}

CADRE_CLONES void pair_codes(const uint16_t* even, const uint16_t* odd, int64_t count,
                             uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[2 * i] = even[i];
    to[2 * i + 1] = odd[i];
  }
}

CADRE_CLONES void transpose_16(const float* from, int64_t from_step, float* to, int64_t to_step) {
  Floats row[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&row[i], from + i * from_step, sizeof(Floats));
  exchange_all<8>(row);
  exchange_all<4>(row);
  exchange_all<2>(row);
  exchange_all<1>(row);
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_step, &row[i], sizeof(Floats));
}

}  // namespace cadre::cpu::gemm
