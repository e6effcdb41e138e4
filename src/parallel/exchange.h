#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "parallel/window.h"
#include "schedule/exchange.h"

// How a rank of the CPU goes through an exchange, and the words in which the four are written.
namespace cadre::parallel {

/// What a rank does in an exchange: fills its window, reads those of all, and makes its outputs NaN
/// if the exchange fails.
template <class Write, class Read, class Spoil>
struct ExchangeWork {
  Write write;
  Read read;
  Spoil spoil;
};
template <class Write, class Read, class Spoil>
ExchangeWork(Write, Read, Spoil) -> ExchangeWork<Write, Read, Spoil>;

/// The flags of the windows as the state machine sees them, and the work between.
template <class Work>
struct WindowFlags {
  const Window::State& window;
  const Work& work;

  Control& home() const { return window.control(window.rank); }
  uint32_t epoch() const { return home().epoch; }
  void set_epoch(uint32_t epoch) const { home().epoch = epoch; }
  uint32_t load_read(int peer) const {
    return std::atomic_ref(home().read[peer]).load(std::memory_order_acquire);
  }
  uint64_t load_ready(int peer) const {
    return std::atomic_ref(home().ready[peer]).load(std::memory_order_acquire);
  }
  void store_ready(int peer, uint64_t tag) const {
    std::atomic_ref(window.control(peer).ready[window.rank]).store(tag, std::memory_order_release);
  }
  void store_read(int peer, uint32_t epoch) const {
    std::atomic_ref(window.control(peer).read[window.rank]).store(epoch, std::memory_order_release);
  }
  void write() const { work.write(); }
  void read() const { work.read(); }
};

/// Since when a step waits, and whether that is too long.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds limit) : limit_(limit) {}
  void renew() {
    since_ = std::chrono::steady_clock::now();
    rests_ = 0;
  }
  bool is_over() const {
    return limit_.count() > 0 && std::chrono::steady_clock::now() - since_ >= limit_;
  }
  /// Lets others run: at once for a while, then for longer, since ranks may be more than cores.
  void rest() {
    if (++rests_ < kShortRests) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  static constexpr int kShortRests = 200;

  std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  int rests_ = 0;
};

/// Goes through an exchange up to that step. Throws if a rank is late or at another call, on every
/// rank.
template <class Work>
void run_to(schedule::Exchange::Step end, const ExchangeName& name, Window::State& window,
            const Work& work) {
  using Step = schedule::Exchange::Step;
  window.check_failure();
  schedule::Exchange exchange(window.rank, window.ranks, name.tag());
  const WindowFlags<Work> flags{window, work};
  Deadline deadline(window.limit);
  const auto failed = [&](Failure::Why why) {
    const bool is_begun = exchange.step() != Step::kAwaitReaders;
    window.fail({why, name.kind, uint16_t(exchange.peer()), flags.epoch() + (is_begun ? 0 : 1)});
  };
  while (exchange.step() != end && exchange.step() != Step::kOutOfStep) {
    if (exchange.advance(flags)) {
      deadline.renew();
      continue;
    }
    window.check_failure();
    if (deadline.is_over()) failed(Failure::Why::kLate);
    deadline.rest();
  }
  if (exchange.step() == Step::kOutOfStep) failed(Failure::Why::kOutOfStep);
}

template <class Write, class Read, class Spoil>
void run_exchange(const ExchangeName& name, Window::State& window,
                  const ExchangeWork<Write, Read, Spoil>& work) {
  try {
    run_to(schedule::Exchange::Step::kDone, name, window, work);
  } catch (...) {
    work.spoil();
    throw;
  }
}

/// The first rows of a matrix into a part of the own window, unless they lie there.
void publish(const TensorView& from, int64_t rows, char* to);

template <class Element>
void publish(const Element* from, int64_t count, char* to) {
  if (from != nullptr && count > 0) std::memcpy(to, from, size_t(count) * sizeof(Element));
}

/// The same list of every rank, one after another.
template <class Element>
void gather(const Window::State& window, int64_t part, int64_t count, Element* to) {
  for (int p = 0; p < window.ranks && count > 0; ++p)
    std::memcpy(to + p * count, window.of(p) + part, size_t(count) * sizeof(Element));
}

/// The same matrix of every rank as one tensor: [P, rows, columns].
TensorView of_ranks(const Window::State&, int64_t part, DType, int64_t rows, int64_t columns);

void fill_nan(const TensorView&);
void fill_nan(float* data, int64_t count);

/// Of a map where rows are summed: one rank's rows end at the tail, those of several have no end.
Offsets offsets_of_sums(const ExpertParallelProblem&, const ExchangeMap&);

/// A plan for fewer tokens than its own.
PermutePlan with_tokens(const PermutePlan&, int64_t tokens);

}  // namespace cadre::parallel
