#include "cpu/gemm/tile_product.h"

#include <algorithm>
#include <cstring>

#include "cadre/error.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Everything is inlined into one function for AVX-512.
#define CADRE_AVX512 gnu::target("arch=x86-64-v4")
#define CADRE_INLINE [[gnu::always_inline, CADRE_AVX512]] inline
#endif

namespace cadre::cpu::gemm {

const char* refuses_tile_product(Multiplicand type, const Processor& processor) {
  if (!processor.free_tiles) return "needs AVX-512";
  if (type == Multiplicand::kBf16 && processor.matrix_tiles)
    return "this processor has matrix tiles, which oneDNN uses";
  return nullptr;
}

#if defined(__x86_64__)
namespace {

constexpr int64_t kBlock = 6;    // rows of accumulators, in 24 of 32 registers
constexpr int64_t kVectors = 4;  // of accumulators in a row
constexpr int64_t kStride = 16;  // steps between two prefetches

/// Prefetches the lines ahead, in equal portions.
class Asker {
 public:
  Asker(const Ahead& ahead, int64_t portions) : ahead_(ahead) {
    const int64_t all = ahead.lines * ((ahead.bytes + kCacheLine - 1) / kCacheLine);
    portion_ = (all + portions - 1) / portions;
  }
  CADRE_INLINE void ask() {
    for (int64_t i = 0; i < portion_ && line_ < ahead_.lines; ++i) {
      _mm_prefetch(ahead_.data + line_ * ahead_.step + byte_, _MM_HINT_T1);
      byte_ += kCacheLine;
      if (byte_ >= ahead_.bytes) byte_ = 0, ++line_;
    }
  }

 private:
  static constexpr int64_t kCacheLine = 64;

  Ahead ahead_;
  int64_t portion_, line_ = 0, byte_ = 0;
};

struct F32 {
  using Element = float;
  static constexpr int64_t kDepth = 1;  // of a step

  CADRE_INLINE static __m512 add(__m512 sum, const float* a, __m512 b) {
    return _mm512_fmadd_ps(_mm512_set1_ps(*a), b, sum);
  }
};

struct Bf16 {
  using Element = uint16_t;
  static constexpr int64_t kDepth = 2;

  /// The one instruction beyond x86-64-v4.
  CADRE_INLINE static __m512 add(__m512 sum, const uint16_t* a, __m512 b) {
    int pair = 0;
    std::memcpy(&pair, a, sizeof(pair));
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(_mm512_set1_epi32(pair)), "v"(b));
    return sum;
  }
};

/// Rows of fp32 sums, which another product may go on with.
struct SumRows {
  float* t;

  CADRE_INLINE __m512 first(int64_t i, int64_t j, bool accumulate) const {
    return accumulate ? _mm512_loadu_ps(t + i * kTileWidth + j * 16) : _mm512_setzero_ps();
  }
  CADRE_INLINE void put(int64_t i, const __m512 (&sum)[kVectors], bool) const {
    for (int64_t j = 0; j < kVectors; ++j) _mm512_storeu_ps(t + i * kTileWidth + j * 16, sum[j]);
  }
  void skip(int64_t rows) { t += rows * kTileWidth; }
};

/// Rows of bf16. `kStream`: they begin at cache lines, and are written past the caches.
template <bool kStream>
struct Bf16Rows {
  uint16_t* t;
  int64_t step;

  CADRE_INLINE __m512 first(int64_t, int64_t, bool) const { return _mm512_setzero_ps(); }
  CADRE_INLINE void put(int64_t i, const __m512 (&sum)[kVectors], bool accumulate) const {
    for (int64_t j = 0; j < kVectors; j += 2) {
      uint16_t* at = t + i * step + j * 16;
      __m512 low = sum[j], high = sum[j + 1];
      if (accumulate)
        low = _mm512_add_ps(low, widen(at)), high = _mm512_add_ps(high, widen(at + 16));
      __m512i both;
      asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(low), "v"(high));
      kStream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(at), both)
              : _mm512_storeu_si512(at, both);
    }
  }
  void skip(int64_t rows) { t += rows * step; }

 private:
  /// Sixteen codes; with a mask, since GCC 12 warns of what the plain instructions leave undefined.
  CADRE_INLINE static __m512 widen(const uint16_t* at) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    constexpr __mmask16 kAll = 0xffff;
    const __m512i words = _mm512_maskz_cvtepu16_epi32(kAll, codes);
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, words, 16));
  }
};

template <class Type, class Rows>
struct Operands {
  const typename Type::Element *a, *b;
  Rows t;
};

/// `kRows` rows of t.
template <int64_t kRows, class Type, class Rows>
CADRE_INLINE void multiply_block(const TileShape& s, const Operands<Type, Rows>& o, Asker& asker) {
  __m512 sum[kRows][kVectors];
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kVectors; ++j) sum[i][j] = o.t.first(i, j, s.accumulate);
  const int64_t steps = s.depth / Type::kDepth;
  for (int64_t first = 0; first < steps; first += kStride) {
    asker.ask();
    for (int64_t k = first; k < std::min(first + kStride, steps); ++k) {
      __m512 b[kVectors];
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVectors; ++j)
        b[j] = _mm512_loadu_ps(o.b + (k * kTileWidth + j * 16) * Type::kDepth);
#pragma GCC unroll 6
      for (int64_t i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int64_t j = 0; j < kVectors; ++j)
          sum[i][j] = Type::add(sum[i][j], o.a + i * s.a_step + k * Type::kDepth, b[j]);
    }
  }
  for (int64_t i = 0; i < kRows; ++i) o.t.put(i, sum[i], s.accumulate);
}

template <class Type, class Rows>
CADRE_INLINE void multiply_rows(int64_t rows, const TileShape& s, const Operands<Type, Rows>& o,
                                Asker& asker) {
  switch (rows) {
    case 1:
      return multiply_block<1>(s, o, asker);
    case 2:
      return multiply_block<2>(s, o, asker);
    case 3:
      return multiply_block<3>(s, o, asker);
    case 4:
      return multiply_block<4>(s, o, asker);
    case 5:
      return multiply_block<5>(s, o, asker);
    default:
      return multiply_block<kBlock>(s, o, asker);
  }
}

/// In blocks of about the same height.
template <class Type, class Rows>
CADRE_INLINE void multiply(const TileShape& s, Operands<Type, Rows> o, const Ahead& ahead) {
  const int64_t blocks = (s.rows + kBlock - 1) / kBlock, steps = s.depth / Type::kDepth;
  Asker asker(ahead, blocks * ((steps + kStride - 1) / kStride));
  for (int64_t i = 0, row = 0; i < blocks; ++i) {
    const int64_t rows = (s.rows - row + blocks - i - 1) / (blocks - i);
    multiply_rows(rows, s, o, asker);
    o.a += rows * s.a_step, o.t.skip(rows), row += rows;
  }
}

template <class Type, class Rows>
[[CADRE_AVX512]] void multiply_into(const Rows& t, const TileShape& s, const TileFactors& f,
                                    const Ahead& ahead) {
  using Element = typename Type::Element;
  multiply<Type, Rows>(s, {static_cast<const Element*>(f.a), static_cast<const Element*>(f.b), t},
                       ahead);
}

bool begins_at_lines(const TileTarget& to) {
  constexpr uintptr_t kLine = 64;
  const auto address = reinterpret_cast<uintptr_t>(to.data);
  return address % kLine == 0 && uintptr_t(to.step) * sizeof(uint16_t) % kLine == 0;
}

}  // namespace

void tile_product(Multiplicand type, const TileShape& shape, const TileFactors& factors,
                  const TileTarget& to, const Ahead& ahead) {
  auto* codes = static_cast<uint16_t*>(to.data);
  const SumRows sums{static_cast<float*>(to.data)};
  if (type == Multiplicand::kF32) return multiply_into<F32>(sums, shape, factors, ahead);
  if (!to.bf16) return multiply_into<Bf16>(sums, shape, factors, ahead);
  if (to.stream && begins_at_lines(to))
    return multiply_into<Bf16>(Bf16Rows<true>{codes, to.step}, shape, factors, ahead);
  multiply_into<Bf16>(Bf16Rows<false>{codes, to.step}, shape, factors, ahead);
}

#else

void tile_product(Multiplicand, const TileShape&, const TileFactors&, const TileTarget&,
                  const Ahead&) {
  throw Unsupported("grouped_gemm: tiles need AVX-512");
}

#endif

}  // namespace cadre::cpu::gemm
