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

constexpr int64_t kBlock = 6;    // rows whose sums stay in registers: 24 of 32
constexpr int64_t kVectors = 4;  // of sums in a row
constexpr int64_t kStride = 16;  // steps between two looks ahead

/// Asks memory for the lines ahead, in equal portions.
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

template <class Type>
struct Operands {
  const typename Type::Element *a, *b;
  float* t;
};

/// `kRows` rows of t.
template <class Type, int64_t kRows>
CADRE_INLINE void multiply_block(const TileShape& s, const Operands<Type>& o, Asker& asker) {
  __m512 sum[kRows][kVectors];
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kVectors; ++j)
      sum[i][j] =
          s.accumulate ? _mm512_loadu_ps(o.t + i * kTileWidth + j * 16) : _mm512_setzero_ps();
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
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kVectors; ++j)
      _mm512_storeu_ps(o.t + i * kTileWidth + j * 16, sum[i][j]);
}

template <class Type>
CADRE_INLINE void multiply_rows(int64_t rows, const TileShape& s, const Operands<Type>& o,
                                Asker& asker) {
  switch (rows) {
    case 1:
      return multiply_block<Type, 1>(s, o, asker);
    case 2:
      return multiply_block<Type, 2>(s, o, asker);
    case 3:
      return multiply_block<Type, 3>(s, o, asker);
    case 4:
      return multiply_block<Type, 4>(s, o, asker);
    case 5:
      return multiply_block<Type, 5>(s, o, asker);
    default:
      return multiply_block<Type, kBlock>(s, o, asker);
  }
}

/// In blocks of about the same height.
template <class Type>
CADRE_INLINE void multiply(const TileShape& s, Operands<Type> o, const Ahead& ahead) {
  const int64_t blocks = (s.rows + kBlock - 1) / kBlock, steps = s.depth / Type::kDepth;
  Asker asker(ahead, blocks * ((steps + kStride - 1) / kStride));
  for (int64_t i = 0, row = 0; i < blocks; ++i) {
    const int64_t rows = (s.rows - row + blocks - i - 1) / (blocks - i);
    multiply_rows<Type>(rows, s, o, asker);
    o.a += rows * s.a_step, o.t += rows * kTileWidth, row += rows;
  }
}

[[CADRE_AVX512]] void multiply_f32(const TileShape& s, const Operands<F32>& o, const Ahead& ahead) {
  multiply(s, o, ahead);
}
[[CADRE_AVX512]] void multiply_bf16(const TileShape& s, const Operands<Bf16>& o,
                                    const Ahead& ahead) {
  multiply(s, o, ahead);
}

}  // namespace

void tile_product(Multiplicand type, const TileShape& shape, const TileFactors& factors, float* t,
                  const Ahead& ahead) {
  const auto of = [&]<class Type>(Type) {
    using Element = typename Type::Element;
    return Operands<Type>{static_cast<const Element*>(factors.a),
                          static_cast<const Element*>(factors.b), t};
  };
  type == Multiplicand::kF32 ? multiply_f32(shape, of(F32{}), ahead)
                             : multiply_bf16(shape, of(Bf16{}), ahead);
}

#else

void tile_product(Multiplicand, const TileShape&, const TileFactors&, float*, const Ahead&) {
  throw Unsupported("grouped_gemm: tiles need AVX-512");
}

#endif

}  // namespace cadre::cpu::gemm
