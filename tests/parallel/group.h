#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/error.h"
#include "cadre/expert_parallel.h"

namespace cadre::test {

/// Where tests of ranks run: the CPU, or the emulated GPU, whose memory is the CPU's too.
inline Device rank_device() {
#ifdef CADRE_EMULATED
  return cuda_devices().front();
#else
  return this_cpu();
#endif
}

/// The all-gather of ranks that are threads of this process.
class ThreadGroup {
 public:
  explicit ThreadGroup(int ranks) : ranks_(ranks) {}

  AllGather all_gather(int rank) {
    return [this, rank](const std::string& own) { return gather(rank, own); };
  }

  /// A rank has ended: where others wait for it, they fail.
  void leave() {
    const std::lock_guard lock(mutex_);
    left_ = true;
    changed_.notify_all();
  }

 private:
  std::vector<std::string> gather(int rank, const std::string& own) {
    std::unique_lock lock(mutex_);
    const size_t round = round_;
    if (words_.empty()) words_.resize(size_t(ranks_));
    words_[size_t(rank)] = own;
    if (++come_ == ranks_) {
      result_ = std::exchange(words_, {});
      come_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round || left_; });
    if (round_ == round) throw DeviceError("a rank has ended that others wait for");
    return result_;
  }

  int ranks_, come_ = 0;
  size_t round_ = 0;
  bool left_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> words_, result_;
};

/// Calls work(rank) in a thread for each; what each threw, empty where nothing.
template <class Work>
std::vector<std::string> on_ranks(int ranks, Work&& work) {
  std::vector<std::string> errors(size_t(ranks), "");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        work(rank);
      } catch (const std::exception& error) {
        errors[size_t(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The same of work(rank, all_gather).
template <class Work>
std::vector<std::string> on_gathered_ranks(int ranks, Work&& work) {
  ThreadGroup group(ranks);
  return on_ranks(ranks, [&](int rank) {
    const std::unique_ptr<ThreadGroup, void (*)(ThreadGroup*)> leaves(
        &group, [](ThreadGroup* of) { of->leave(); });
    work(rank, group.all_gather(rank));
  });
}

/// A window a rank, in the order of the ranks.
inline std::vector<Window> windows_of(const ExpertParallelPlan& plan,
                                      const WindowOptions& options = {}) {
  const int ranks = plan.problem.ranks;
  std::vector<std::unique_ptr<Window>> made(static_cast<size_t>(ranks));
  const auto errors = on_gathered_ranks(ranks, [&](int rank, const AllGather& gather) {
    made[size_t(rank)] = std::make_unique<Window>(Window::create(plan, rank, gather, options));
  });
  std::vector<Window> windows;
  for (int rank = 0; rank < ranks; ++rank) {
    if (!errors[size_t(rank)].empty()) throw DeviceError(errors[size_t(rank)]);
    windows.push_back(std::move(*made[size_t(rank)]));
  }
  return windows;
}

}  // namespace cadre::test
