#pragma once
#include <cstdlib>
#include <iostream>

#include "cadre/error.h"

// What the fuzz targets share. Each is one LLVMFuzzerTestOneInput(); libFuzzer looks for inputs
// that crash, hang, take too much memory, or end here.
namespace cadre::fuzz {

/// Ends the program, so that libFuzzer keeps the input, unless `holds`.
template <class... Parts>
void expect(bool holds, const Parts&... parts) {
  if (holds) return;
  std::cerr << "accepted in silence: " << text(parts...) << "\n";
  std::abort();
}

/// False if `work` refused in words; any other exception is a crash.
template <class Work>
bool accepted(Work&& work) {
  try {
    work();
    return true;
  } catch (const InvalidArgument& refusal) {
    expect(refusal.what()[0] != '\0', "a refusal without words");
  } catch (const Unsupported& refusal) {
    expect(refusal.what()[0] != '\0', "a refusal without words");
  }
  return false;
}

}  // namespace cadre::fuzz
