#pragma once
#include <span>

#include "cadre/stream.h"

// As write_pointers of include/cadre/pointers.h, on a GPU.
namespace cadre::cuda {

void write_pointers(std::span<const void* const> pointers, const void** table, Stream);

}  // namespace cadre::cuda
