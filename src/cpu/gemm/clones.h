#pragma once

/// Before a function: it is compiled for AVX-512, for AVX2 and for any x86-64, and the processor
/// picks when the program starts. Results do not differ: nothing is fused (-ffp-contract=off).
#if defined(__x86_64__)
#define CADRE_CLONES [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#else
#define CADRE_CLONES
#endif
