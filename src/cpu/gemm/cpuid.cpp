#include "cpu/gemm/cpuid.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace cadre::cpu::gemm {
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

/// All zero where the processor does not know the leaf.
Registers ask(unsigned leaf, unsigned part) {
  Registers r;
#if defined(__x86_64__)
  __get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d);
#else
  (void)leaf, (void)part;
#endif
  return r;
}

}  // namespace

bool has_matrix_tiles() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  const unsigned features = ask(7, 0).d;
  return (features & kBf16) != 0 && (features & kTiles) != 0;
}

bool matrix_tiles_are_described() { return ask(0x1d, 0).a != 0; }

#if defined(__x86_64__)

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return __builtin_cpu_supports("avx512bf16"); }

#else

bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }

#endif

}  // namespace cadre::cpu::gemm
