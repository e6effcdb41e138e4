#pragma once

/// Marks a function that host code and CUDA device code both call. Empty for a plain C++ compiler.
#ifdef __CUDACC__
#define CADRE_HD __host__ __device__
#else
#define CADRE_HD
#endif
