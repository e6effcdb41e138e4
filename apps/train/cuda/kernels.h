#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "apps/train/adamw.h"
#include "apps/train/engine.h"

// The dense operations of Engine as launches. Arrays are in device memory; `scratch` means nothing
// before and after.
namespace cadre::train::cuda {

void cast_to_bf16(uint16_t* to, const float* from, int64_t count, cudaStream_t);
void add_f32(float* to, const float* from, int64_t count, cudaStream_t);
void add_bf16(float* to, const uint16_t* from, int64_t count, cudaStream_t);

/// dscore [T, E] has `count` elements.
void balance(const LoadArgs&, float weight, float* dscore, int64_t count, cudaStream_t);
void count_rows(const LoadArgs&, int64_t* load, cudaStream_t);

void embed(const WindowArgs&, const float* table, float* x, cudaStream_t);
void embed_backward(const WindowArgs&, const float* dx, float* dtable, cudaStream_t);

struct NormGradients {
  const float* du;
  float *dx, *dgain;
  float* scratch;  ///< norm_scratch()
};
int64_t norm_scratch(const NormArgs&);  ///< numbers
void norm(const NormArgs&, float* u, cudaStream_t);
void norm_backward(const NormArgs&, const NormGradients&, cudaStream_t);

struct LossArgs {
  float* logits;           ///< [T, 256], replaced by the gradient
  const uint8_t* targets;  ///< [T]
  int64_t rows;            ///< T
  double* loss;            ///< added to
  double* scratch;         ///< [T]
};
void cross_entropy(const LossArgs&, cudaStream_t);

int64_t adamw_scratch(std::span<const Weight>);  ///< numbers
void adamw(const AdamW&, std::span<const Weight>, double* scratch, cudaStream_t);

}  // namespace cadre::train::cuda
