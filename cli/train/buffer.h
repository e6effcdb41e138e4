#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

#include "cadre/layer.h"
#include "cadre/workspace.h"

namespace cadre::train {

/// An owned array of numbers, 256-byte aligned as the library asks, zero at first.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(::operator new[](bytes(count), kAlignment))), count_(count) {
    std::fill_n(data_.get(), count, T{});
  }

  T* data() const { return data_.get(); }
  int64_t size() const { return count_; }
  std::span<T> span() const { return {data_.get(), static_cast<size_t>(count_)}; }

  Memory memory() const { return {data(), count_ * static_cast<int64_t>(sizeof(T))}; }
  Workspace workspace() const { return {data(), count_ * static_cast<int64_t>(sizeof(T))}; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  static size_t bytes(int64_t count) { return static_cast<size_t>(count) * sizeof(T); }
  struct Release {
    void operator()(T* data) const { ::operator delete[](data, kAlignment); }
  };
  std::unique_ptr<T[], Release> data_;
  int64_t count_ = 0;
};

}  // namespace cadre::train
