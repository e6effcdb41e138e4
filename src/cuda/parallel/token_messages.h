#pragma once
#include <cuda_runtime_api.h>

#include "schedule/token_messages.h"

// Tokens that GPUs exchange once: see parallel::HostLink.
namespace cadre::cuda {

void find_first_choices(const schedule::LeavingTokens&, cudaStream_t);
void number_tokens(const schedule::LeavingTokens&, cudaStream_t);
void find_tokens(const schedule::ComingTokens&, cudaStream_t);

}  // namespace cadre::cuda
