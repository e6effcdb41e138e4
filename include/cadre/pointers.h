#pragma once
#include <span>

#include "cadre/device.h"
#include "cadre/stream.h"

#pragma GCC visibility push(default)
namespace cadre {

/// Writes addresses into memory of the device: a table as discrete weights and gradients want it.
///
/// Shapes    table [pointers.size()].
/// Stream    the addresses travel with the launch: the host's list may go when this returns, and a
///           captured graph writes the same addresses again. No allocation, no synchronisation.
/// Errors    InvalidArgument for a table that is null or not aligned to a pointer.
void write_pointers(std::span<const void* const> pointers, const void** table, const Device&,
                    Stream);

}  // namespace cadre
#pragma GCC visibility pop
