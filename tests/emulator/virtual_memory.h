#pragma once

namespace cadre::emulator {

/// The driver's function of that name for memory that processes share; null: it is none of these.
void* virtual_memory_entry(const char* name);

}  // namespace cadre::emulator
