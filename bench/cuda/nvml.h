#pragma once
#include <optional>

#include "bench/accelerator.h"

namespace cadre::bench {

/// What a GPU has drawn and how fast it runs, from the driver's library, which is opened at run
/// time; empty without it, and on a GPU that does not count its energy.
std::optional<PowerReading> read_power(int device_index);

}  // namespace cadre::bench
