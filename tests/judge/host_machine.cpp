// The CPU as a machine. Its memory is elsewhere on the host.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/judge/machine.h"

namespace cadre::test {
namespace {

class Again final : public Recorded {
 public:
  explicit Again(Work work) : work_(std::move(work)) {}
  void replay() override { work_(Stream{}); }

 private:
  Work work_;
};

class HostMachine final : public Machine {
 public:
  Device device() const override { return this_cpu(); }
  int draws(int most) const override { return std::max(std::min(most, 8), most / 8); }

  void* take(int64_t bytes) override {
    return std::aligned_alloc(256, size_t(bytes + 255) / 256 * 256);
  }
  void give_back(void* data) override { std::free(data); }
  void upload(void* to, const void* from, int64_t bytes) override {
    std::memcpy(to, from, size_t(bytes));
  }
  void download(void* to, const void* from, int64_t bytes) override {
    std::memcpy(to, from, size_t(bytes));
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    std::memcpy(to, from, size_t(bytes));
  }
  int64_t free_bytes() const override { return 64 << 20; }
  int ranks() const override { return 1 << 10; }

  void run(const Work& work) override { work(Stream{}); }
  void run_at_once(std::span<const Work> works) override {
    std::vector<std::thread> threads;
    for (const Work& work : works) threads.emplace_back([&work] { work(Stream{}); });
    for (std::thread& thread : threads) thread.join();
  }
  std::unique_ptr<Recorded> record(const Work& work) override {
    work(Stream{});
    return std::make_unique<Again>(work);
  }
};

}  // namespace

std::unique_ptr<Machine> open_machine(int) { return std::make_unique<HostMachine>(); }
std::string why_no_machine() { return {}; }

}  // namespace cadre::test
