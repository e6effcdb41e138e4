#pragma once
#include <cstdint>

namespace cadre::cpu::gemm {

/// Deals out a workspace from its start. Over null it only measures, so that planning and running
/// cannot disagree.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* taken = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * int64_t(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return taken;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;

  char* base_;
  int64_t used_ = 0;
};

}  // namespace cadre::cpu::gemm
