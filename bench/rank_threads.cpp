// Ranks that are threads of one process.
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "bench/ranks.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

class RankThreads final : public RankGroup {
 public:
  explicit RankThreads(int ranks)
      : ranks_(ranks), phases_(size_t(ranks), "its start"), words_(size_t(ranks), "") {}

  void enter(int rank, std::string_view phase) override { phases_[size_t(rank)] = phase; }
  void meet() override {
    std::unique_lock lock(mutex_);
    const int64_t round = round_;
    if (++come_ == ranks_) {
      come_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round || !error_.empty(); });
    if (round_ == round) throw DeviceError("another rank failed");
  }
  std::vector<std::string> gather(int rank, const std::string& own) override {
    words_[size_t(rank)] = own;
    meet();
    std::vector<std::string> all = words_;
    meet();
    return all;
  }

  void run(int number, const std::function<std::string(Rank&)>& work) {
    try {
      Rank rank(*this, number);
      std::string words = work(rank);
      meet();
      words_[size_t(number)] = std::move(words);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      if (error_.empty())
        error_ = text("expert_parallel: rank ", number, " failed in ", phases_[size_t(number)],
                      ": ", error.what());
      changed_.notify_all();
    }
  }
  std::vector<std::string> words() const {
    if (!error_.empty()) throw DeviceError(error_);
    return words_;
  }

 private:
  int ranks_, come_ = 0;
  int64_t round_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> phases_, words_;
  std::string error_;
};

}  // namespace

Device device_of_rank(const Device& device, int rank, int ranks) {
  if (device.kind == DeviceKind::kCpu) return device;
  const std::vector<Device> all = cuda_devices();
  return int(all.size()) < ranks ? device : all[size_t(device.index + rank) % all.size()];
}

std::vector<std::string> run_rank_threads(int ranks,
                                          const std::function<std::string(Rank&)>& work) {
  RankThreads group(ranks);
  std::vector<std::thread> threads;
  threads.reserve(size_t(ranks));
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { group.run(rank, work); });
  for (std::thread& thread : threads) thread.join();
  return group.words();
}

void let_ranks_share_a_gpu() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
}

std::vector<std::string> run_ranks_on(const Device& device, int ranks,
                                      const std::function<std::string(Rank&)>& work) {
  return device.kind == DeviceKind::kCpu ? run_ranks(ranks, work) : run_rank_threads(ranks, work);
}

}  // namespace cadre::bench
