#pragma once
#include <cstdint>

#include "cadre/grouped_gemm.h"

namespace cadre::cpu {

/// Whether an expert's result is added to what its output holds. `words` are those of the caller.
inline bool accumulates(Accumulate how, const int32_t* words, int expert) {
  switch (how) {
    case Accumulate::kNo:
      return false;
    case Accumulate::kYes:
      return true;
    case Accumulate::kDevice:
      return words[0] != 0;
    case Accumulate::kPerExpert:
      return words[expert] != 0;
  }
  return false;
}

}  // namespace cadre::cpu
