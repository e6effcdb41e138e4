#pragma once
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cadre/workspace.h"

namespace cadre::test {

/// A workspace of exactly the bytes asked for, filled with 0xff.
class OwnedWorkspace {
 public:
  explicit OwnedWorkspace(int64_t bytes)
      : bytes_(bytes), data_(std::aligned_alloc(256, size_t(bytes + 255) / 256 * 256), std::free) {
    std::memset(data_.get(), 0xff, size_t(bytes + 255) / 256 * 256);
  }
  Workspace get() const { return {data_.get(), bytes_}; }

 private:
  int64_t bytes_;
  std::unique_ptr<void, void (*)(void*)> data_;
};

}  // namespace cadre::test
