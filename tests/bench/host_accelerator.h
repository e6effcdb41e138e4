#pragma once
#include <cstdlib>
#include <cstring>
#include <set>

#include "bench/accelerator.h"

namespace cadre::test {

/// An accelerator whose memory is elsewhere on the host: what runs on its copies runs on the CPU.
class HostAccelerator : public bench::Accelerator {
 public:
  std::string name() const override { return "host"; }
  Stream stream() const override { return {}; }
  void* take(int64_t bytes) override {
    void* data = std::aligned_alloc(256, size_t(bytes + 255) / 256 * 256);
    taken.insert(data);
    return data;
  }
  void give_back(void* data) override {
    taken.erase(data);
    std::free(data);
  }
  void upload(void* to, const void* from, int64_t bytes) override {
    std::memcpy(to, from, size_t(bytes));
  }
  void download(void* to, const void* from, int64_t bytes) override {
    std::memcpy(to, from, size_t(bytes));
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    std::memcpy(to, from, size_t(bytes));
  }
  void mark() override {}
  std::vector<double> us_between_marks() override { return {}; }

  std::set<void*> taken;  ///< and not given back
};

}  // namespace cadre::test
