#pragma once

/// Before a function with a loop that vectorises: compiles it for several widths of vectors, of
/// which the program takes the widest that the machine has when it is loaded. The arithmetic is the
/// same in all of them, so the bits are too.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CADRE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CADRE_CLONES
#endif
