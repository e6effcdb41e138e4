#pragma once
#include <cstdint>

namespace cadre::cpu {

/// Whether work on so many elements is worth several threads: waking them costs some microseconds.
/// For the `if` clause of parallel loops, whose results never depend on it.
constexpr bool worth_threads(int64_t elements) { return elements >= 8192; }

}  // namespace cadre::cpu
