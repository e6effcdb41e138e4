#pragma once

/// Marks a function that host code and CUDA device code both call. Empty for a plain C++ compiler.
#ifdef __CUDACC__
#define CADRE_HD __host__ __device__
#else
#define CADRE_HD
#endif

/// Before a template that both call and whose arguments are of either: nvcc would ask for both.
#ifdef __CUDACC__
#define CADRE_HD_OF_EITHER _Pragma("nv_exec_check_disable")
#else
#define CADRE_HD_OF_EITHER
#endif
