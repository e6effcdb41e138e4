#pragma once
#include <cuda_runtime_api.h>

#include "cadre/tensor.h"
#include "schedule/row_blocks.h"

// Blocks of rows that GPUs exchange: see parallel::HostLink.
namespace cadre::cuda {

void make_places(const schedule::RowBlocks&, cudaStream_t);
void judge_blocks(const schedule::RowBlocks&, cudaStream_t);
void spoil_rows(const TensorView& rows, const int32_t* verdict, cudaStream_t);

}  // namespace cadre::cuda
