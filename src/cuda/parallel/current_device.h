#pragma once
#include "cuda/check.h"

namespace cadre::cuda {

/// That GPU is the thread's own for the length of a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    check(cudaGetDevice(&before_), "ask for the current device");
    check(cudaSetDevice(index), text("use device ", index));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

}  // namespace cadre::cuda
