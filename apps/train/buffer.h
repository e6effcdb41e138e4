#pragma once
#include <cstdint>
#include <span>
#include <utility>

#include "apps/train/engine.h"
#include "cadre/layer.h"
#include "cadre/workspace.h"

namespace cadre::train {

/// An owned array in the memory of an engine, 256-byte aligned as the library asks, zero at first.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Engine& engine, int64_t count)
      : engine_(&engine),
        data_(static_cast<T*>(engine.take(count * int64_t{sizeof(T)}))),
        count_(count) {}
  Buffer(Buffer&& other) noexcept
      : engine_(other.engine_), data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(engine_, other.engine_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) engine_->give_back(data_);
  }

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  int64_t bytes() const { return count_ * int64_t{sizeof(T)}; }
  Memory memory() const { return {data_, bytes()}; }
  Workspace workspace() const { return {data_, bytes()}; }

 private:
  Engine* engine_ = nullptr;
  T* data_ = nullptr;
  int64_t count_ = 0;
};

/// An array of the host within the reach of an engine: the array itself, or a copy on the device.
template <class T>
class Mirror {
 public:
  Mirror() = default;
  Mirror(Engine& engine, std::span<T> host) : engine_(&engine), host_(host) {
    if (engine.is_host()) return;
    copy_ = Buffer<T>(engine, std::ssize(host));
    engine.upload(copy_.data(), host.data(), copy_.bytes());
  }

  T* data() const { return copy_.data() != nullptr ? copy_.data() : host_.data(); }
  /// The host sees what the engine has written.
  void fetch() const {
    if (copy_.data() != nullptr) engine_->download(host_.data(), copy_.data(), copy_.bytes());
  }

 private:
  Engine* engine_ = nullptr;
  std::span<T> host_;
  Buffer<T> copy_;
};

}  // namespace cadre::train
