// Ranks that are processes, or threads, of the CPU: memory as files, flags as atomic words, and
// everything done when a call returns.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "cadre/error.h"
#include "parallel/rank_device.h"
#include "schedule/exchange.h"
#include "schedule/expert_rows.h"
#include "schedule/rank_rows.h"

namespace cadre::parallel {
namespace {

using Step = schedule::Exchange::Step;

/// Flags lie in memory that processes share.
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free &&
              std::atomic_ref<uint32_t>::is_always_lock_free);

constexpr auto kNothing = [] {};

/// The flags of the windows as the state machine sees them, and what a rank writes between.
template <class Write>
struct WindowFlags {
  const Window::State& window;
  const Write& bring;

  Control& home() const { return window.control(window.rank); }
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
  void write() const { bring(); }
  void read() const {}
};

template <class Write>
WindowFlags(const Window::State&, const Write&) -> WindowFlags<Write>;

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

/// Tells every rank, and throws.
[[noreturn]] void fail(const Window::State& window, const Failure& failure) {
  for (int p = 0; p < window.ranks; ++p) {
    uint64_t none = 0;
    std::atomic_ref(window.control(p).failure).compare_exchange_strong(none, failure.word());
  }
  window.check_failure();
  std::abort();  // the word is never reset
}

/// Goes through an exchange up to that step. Throws if a rank is late or at another call, on every
/// rank.
template <class Flags>
void run_to(Step end, schedule::Exchange exchange, ExchangeKind kind, const Flags& flags) {
  const Window::State& window = flags.window;
  Deadline deadline(window.limit);
  const auto failed = [&](Failure::Why why) {
    fail(window, {why, kind, uint16_t(exchange.peer()), exchange.epoch()});
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

void bring(const BroughtRows& b, char* to) {
  const int64_t used = b.used == nullptr ? b.rows : schedule::clamp_row(*b.used, 0, b.rows);
  for (int64_t r = 0; r < used && b.from != to; ++r)
    std::memcpy(to + r * b.row_bytes, static_cast<const char*>(b.from) + r * b.step,
                size_t(b.row_bytes));
  if (b.filled > used)
    std::memset(to + used * b.row_bytes, 0xff, size_t((b.filled - used) * b.row_bytes));
}

void bring_to_places(const BroughtRows& b, const Window::State& window) {
  const int64_t used = schedule::clamp_row(*b.used, 0, b.rows);
  for (int64_t r = 0; r < used; ++r) {
    const int64_t place = b.place_of[r];
    if (place < 0 || place >= window.ranks * b.places) continue;
    const auto rank = int(place / b.places);
    std::memcpy(b.to + (rank - window.rank) * window.bytes_each + place % b.places * b.row_bytes,
                static_cast<const char*>(b.from) + r * b.step, size_t(b.row_bytes));
  }
}

void bring(const BroughtRows& b, const Window::State& window) {
  if (b.to == nullptr) return;
  if (b.place_of != nullptr) return bring_to_places(b, window);
  if (!b.to_all) return bring(b, b.to);
  for (int p = 0; p < window.ranks; ++p) bring(b, b.to + (p - window.rank) * window.bytes_each);
}

/// A rank's rows, in the order of all, stand as its places do: with each row the place is known.
void find_places(const MapJob& job, const schedule::RankRows& rows) {
  std::array<int64_t, kMostRanks> next{};
  for (int64_t row = 0; row < rows.first(job.ranks); ++row) {
    const int64_t slot = job.slot_sorted[row], rank = slot / job.choices;
    const int64_t place = next[size_t(rank)]++;
    const int32_t here = rows.row_of_rank(row, job.rank);
    if (here >= 0) job.map.place_of[here] = int32_t(rank * job.choices + place);
    if (rank != job.rank) continue;
    int32_t& own = job.map.row_of[slot % job.choices];
    if (own >= 0) own = int32_t(place);
  }
}

/// The exchange that comes next, past all ranks.
schedule::Exchange next_exchange(const Window::State& window, const ExchangeName& name,
                                 Step from = Step::kAwaitReaders) {
  return {{0, window.ranks}, {window.control(window.rank).epoch + 1, name.tag()}, from};
}

class CpuRankDevice final : public RankDevice {
 public:
  std::string place() const override { return {}; }
  int64_t whole_bytes(int64_t bytes) const override { return whole_pages(bytes); }
  File make_memory(int64_t bytes) override { return parallel::make_memory(bytes); }
  char* map(std::span<const File> files, int64_t bytes_each, int) override {
    for (const File& file : files)
      require(length_of(file) == bytes_each, "a rank's file has ", length_of(file),
              " bytes, must have ", bytes_each);
    memory_ = SharedMemory(files, bytes_each);
    return memory_.data();
  }
  SideBySide map_again(const std::vector<void*>& addresses, int64_t bytes) override {
    memory_ = SharedMemory(addresses, whole_pages(bytes));
    return {memory_.data(), memory_.bytes_each()};
  }
  void write_word(void* window, uint64_t word) override { std::memcpy(window, &word, sizeof word); }
  uint64_t word(const void* window) override {
    uint64_t word = 0;
    std::memcpy(&word, window, sizeof word);
    return word;
  }
  void clear_flags(void* window) override { new (window) Control{}; }

  void await_readers(const Window::State& window, const ExchangeName& name, Stream) override {
    run_to(Step::kWrite, next_exchange(window, name), name.kind, WindowFlags{window, kNothing});
  }
  void begin(const Window::State& window, const ExchangeJob& job, Stream) override {
    const auto write = [&] {
      for (const BroughtRows& brought : job.brought) bring(brought, window);
    };
    run_to(Step::kRead, next_exchange(window, job.name), job.name.kind, WindowFlags{window, write});
  }
  void end(const Window::State& window, const ExchangeJob& job, Stream) override {
    if (*job.verdict != 0) spoil(job);
    run_to(Step::kDone, next_exchange(window, job.name, Step::kRead), job.name.kind,
           WindowFlags{window, kNothing});
    ++window.control(window.rank).epoch;
  }
  void run_few(const Window::State&, const ExchangeJob&, const ExchangeRead&, Stream) override {
    std::abort();  // no plan for a CPU asks for it
  }
  void spoil(const ExchangeJob& job) override {
    for (const Outcome& o : job.outcomes)
      for (int64_t r = 0; r < o.rows && o.data != nullptr; ++r)
        std::memset(static_cast<char*>(o.data) + r * o.step, 0xff, size_t(o.row_bytes));
  }

  /// Of all rows, sorted, those of this rank, and where its tokens went.
  void make_map(const Window::State&, const MapJob& job, Stream stream) override {
    cadre::run(*job.sort,
               {.source = job.chosen,
                .offsets = job.sorted,
                .map = {.row_of = job.row_sorted, .slot_of = job.slot_sorted}},
               job.scratch, stream);
    const schedule::RankRows rows{job.sorted, job.experts, job.bound};
    const ExchangeMap& map = job.map;
    for (int e = 0; e <= job.experts; ++e) map.offsets[e] = rows.offset(job.rank, e);
    std::copy_n(job.slot_sorted + rows.first(job.rank), map.offsets[job.experts], map.slot_of);
    const int64_t first = job.rank * job.choices;
    for (int64_t i = 0; i < job.own; ++i) {
      const int32_t expert = job.chosen[first + i];
      map.row_of[i] = rows.row_at_rank_of(job.row_sorted[first + i], expert);
      job.note_sum(i, expert / job.experts, map.row_of[i]);
    }
    for (int64_t i = 0; i < job.ranks * job.choices; ++i)
      map.row_here[i] = rows.row_of_rank(job.row_sorted[i], job.rank);
    if (map.place_of != nullptr) find_places(job, rows);
    for (int q = 0; q < job.ranks && job.routed != nullptr; ++q)
      job.routed[q] = int32_t(rows.routed(q));
    const int worst = rows.fullest(job.ranks);
    *map.verdict = job.overflow_is_error && rows.routed(worst) > job.bound;
    if (*map.verdict != 0) overflow_ = {job.problem, worst, int32_t(rows.routed(worst))};
  }

  Failure failure(const Window::State& window) const override {
    return Failure::of(
        std::atomic_ref(window.control(window.rank).failure).load(std::memory_order_acquire));
  }
  OverflowNote take_overflow() override { return std::exchange(overflow_, {}); }

 private:
  SharedMemory memory_;  ///< of all ranks, one after another
  OverflowNote overflow_;
};

}  // namespace

std::unique_ptr<RankDevice> rank_device(const Device& device) {
  if (device.kind == DeviceKind::kCuda) return cuda::rank_device(device);
  return std::make_unique<CpuRankDevice>();
}

}  // namespace cadre::parallel
