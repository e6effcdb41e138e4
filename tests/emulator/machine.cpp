#include "tests/emulator/machine.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>

namespace cadre::emulator {
namespace {

constexpr int kSharedAlign = 1024;
constexpr uint8_t kPoison = 0xff;  // NaN in every float format

thread_local uint64_t next_seed = 1;

uint64_t mix(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e37'79b9'7f4a'7c15u;
  z = (z ^ z >> 30) * 0xbf58'476d'1ce4'e5b9u;
  z = (z ^ z >> 27) * 0x94d0'49bb'1331'11ebu;
  return z ^ z >> 31;
}

}  // namespace

// The threads of one cluster. Reused by the clusters of a grid, one after the other.
class Cluster {
 public:
  Cluster(const GridShape& shape, uint64_t seed);
  ~Cluster();
  void run(int64_t number, const std::function<void()>& kernel);

  Thread& self() { return *current_; }
  void suspend() { current_->fiber.leave(); }
  [[noreturn]] void fail(const std::string& why);
  void wait_until(const void* at, const char* what, const std::function<bool()>& over);
  void notify(const void* at);
  void later(std::function<void()> task) { tasks_.push_back(std::move(task)); }
  void may_switch();
  void poll();
  Block& block(int rank) { return blocks_[size_t(rank)]; }
  void meet_all() { meet(meeting_, int(threads_.size()), "the threads of its cluster"); }

 private:
  void start(const std::function<void()>& kernel);
  void finish_thread();
  void step();
  std::string report() const;
  size_t below(size_t count) { return size_t(mix(state_) % count); }

  GridShape shape_;
  uint64_t state_;
  unsigned task_share_;  // of 8 steps, those that prefer a task
  std::vector<Block> blocks_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Thread*> ready_;
  std::vector<Thread*> polling_;
  int polls_in_vain_ = 0;  // since anything else could be done
  std::unordered_map<const void*, std::vector<Thread*>> waiting_;
  std::vector<std::function<void()>> tasks_;
  Meeting meeting_;
  Thread* current_ = nullptr;
  size_t left_ = 0;
  std::exception_ptr failure_;
};

namespace {

thread_local Cluster* active = nullptr;

// Those of grids that have ended: a new stack costs a mapping and its first pages.
thread_local std::vector<std::unique_ptr<Thread>> idle_threads;

std::unique_ptr<Thread> take_thread() {
  if (idle_threads.empty()) return std::make_unique<Thread>();
  std::unique_ptr<Thread> thread = std::move(idle_threads.back());
  idle_threads.pop_back();
  return thread;
}

Cluster& cluster() {
  if (active == nullptr) throw std::logic_error("emulator: a word of kernels outside of a kernel");
  return *active;
}

}  // namespace

int Thread::lanes() const {
  const int all = int(builtins.block_dim.x * builtins.block_dim.y * builtins.block_dim.z);
  return std::min(kWarp, all - number / kWarp * kWarp);
}

Cluster::Cluster(const GridShape& shape, uint64_t seed)
    : shape_(shape), state_(seed), blocks_(size_t(shape.cluster)) {
  constexpr unsigned kShares[] = {0, 1, 4, 8};
  task_share_ = kShares[seed % 4];
  const int count = int(shape.threads.x * shape.threads.y * shape.threads.z);
  for (Block& b : blocks_) {
    b.rank = int(&b - blocks_.data());
    b.shared_bytes = shape.shared_bytes;
    b.memory = std::make_unique_for_overwrite<uint8_t[]>(size_t(shape.shared_bytes) + kSharedAlign);
    const auto first = reinterpret_cast<uintptr_t>(b.memory.get());
    b.shared = b.memory.get() + (kSharedAlign - first % kSharedAlign) % kSharedAlign;
    std::memset(b.shared, 0xff, size_t(shape.shared_bytes));  // NaN, as nobody wrote it
    for (int t = 0; t < count; ++t) {
      threads_.push_back(take_thread());
      Thread& thread = *threads_.back();
      thread.block = &b;
      thread.number = t;
      const auto n = unsigned(t), width = shape.threads.x, height = shape.threads.y;
      thread.index = {n % width, n / width % height, n / width / height};
    }
  }
}

Cluster::~Cluster() {
  if (left_ > 0) return;  // of a grid that failed, some are in the middle of their work
  for (auto& thread : threads_) idle_threads.push_back(std::move(thread));
}

void Cluster::run(int64_t number, const std::function<void()>& kernel) {
  for (Block& b : blocks_) {
    const auto n = uint64_t(number * shape_.cluster + b.rank);
    const uint64_t width = shape_.blocks.x, height = shape_.blocks.y;
    b.index = {unsigned(n % width), unsigned(n / width % height), unsigned(n / width / height)};
    std::fill_n(b.shared, b.shared_bytes, kPoison);
    b.meetings = {};
    b.threads_left = int(threads_.size() / blocks_.size());
    b.warps.assign(size_t(b.threads_left + kWarp - 1) / kWarp, {});
    b.warpgroups = std::vector<Warpgroup>(size_t(b.threads_left + kWarpgroup - 1) / kWarpgroup);
  }
  meeting_ = {};
  start(kernel);
  while (left_ > 0 || !tasks_.empty()) {
    constexpr int kMostPolls = 10'000;  // in which all who poll surely have asked in vain
    const bool is_idle = ready_.empty() && tasks_.empty();
    polls_in_vain_ = is_idle ? polls_in_vain_ + 1 : 0;
    if (is_idle && (polling_.empty() || polls_in_vain_ > kMostPolls))
      throw std::runtime_error(report());
    step();
    if (failure_) std::rethrow_exception(failure_);
  }
}

void Cluster::start(const std::function<void()>& kernel) {
  left_ = threads_.size();
  for (const auto& thread : threads_) {
    thread->products = 0;
    thread->has_waited = false;
    thread->product_groups.clear();
    thread->store_groups.clear();
    thread->open_stores = nullptr;
    thread->copy_groups.clear();
    thread->open_copies = nullptr;
    thread->waits_for = nullptr;
    thread->fiber.start([this, &kernel] {
      try {
        kernel();
        finish_thread();
      } catch (...) {
        if (!failure_) failure_ = std::current_exception();
      }
    });
    ready_.push_back(thread.get());
  }
}

void Cluster::finish_thread() {
  Thread& t = self();
  if (shape_.dependent && !t.has_waited)
    fail("a thread of a dependent kernel ended before it waited");
  for (const auto& group : t.store_groups)
    if (group->reading > 0) fail("a thread ended while its copies still read shared memory");
  for (const auto& group : t.copy_groups)
    if (group->left > 0) fail("a thread ended before its copies to shared memory");
  if (t.open_copies) fail("a thread ended with copies to shared memory not closed");
  if (t.open_stores && t.open_stores->reading > 0) fail("a thread ended with copies not closed");
  --t.block->threads_left;
  --left_;
  notify(&t.block->meetings[0]);
}

void Cluster::step() {
  const bool wants_task = below(8) < task_share_;
  if (!tasks_.empty() && (ready_.empty() || wants_task)) {
    const size_t which = below(tasks_.size());
    const std::function<void()> task = std::move(tasks_[which]);
    tasks_[which] = std::move(tasks_.back());
    tasks_.pop_back();
    return task();
  }
  const bool asks = !polling_.empty() && (ready_.empty() || below(8) == 0);
  std::vector<Thread*>& from = asks ? polling_ : ready_;
  const size_t which = below(from.size());
  current_ = from[which];
  from[which] = from.back();
  from.pop_back();
  builtins.thread = current_->index;
  builtins.block = current_->block->index;
  current_->fiber.resume();
}

void Cluster::fail(const std::string& why) {
  const Thread& t = self();
  throw std::runtime_error("emulator: " + why + " (block " + std::to_string(t.block->index.x) +
                           ", thread " + std::to_string(t.number) + ")");
}

void Cluster::wait_until(const void* at, const char* what, const std::function<bool()>& over) {
  may_switch();
  while (!over()) {
    Thread& t = self();
    t.waits_for = what;
    waiting_[at].push_back(&t);
    suspend();
    t.waits_for = nullptr;
  }
}

void Cluster::notify(const void* at) {
  const auto found = waiting_.find(at);
  if (found == waiting_.end()) return;
  ready_.insert(ready_.end(), found->second.begin(), found->second.end());
  found->second.clear();  // its memory is wanted again
}

void Cluster::may_switch() {
  if (below(8) != 0) return;
  ready_.push_back(&self());
  suspend();
}

/// Tasks come before who asks again: else one that asks for ever would keep them from ever running.
void Cluster::poll() {
  Thread& t = self();
  t.waits_for = "what it polls";
  polling_.push_back(&t);
  suspend();
  t.waits_for = nullptr;
}

std::string Cluster::report() const {
  std::map<std::string, int> reasons;
  for (const auto& t : threads_)
    if (t->waits_for != nullptr)
      ++reasons["block " + std::to_string(t->block->index.x) + " warp " +
                std::to_string(t->number / kWarp) + " waits for " + t->waits_for];
  std::string all = "emulator: deadlock:";
  for (const auto& [reason, count] : reasons)
    all += "\n  " + std::to_string(count) + " threads of " + reason;
  return all;
}

void set_seed(uint64_t seed) { next_seed = seed; }
uint64_t seed() { return next_seed; }

void run_grid(const GridShape& shape, const std::function<void()>& kernel) {
  const int64_t blocks = int64_t(shape.blocks.x) * shape.blocks.y * shape.blocks.z;
  if (blocks == 0 || blocks % shape.cluster != 0)
    throw std::runtime_error("emulator: a grid of no whole clusters");
  uint64_t state = next_seed++;
  Cluster all(shape, mix(state));
  Cluster* const outer = std::exchange(active, &all);
  const Builtins before = builtins;
  builtins.block_dim = shape.threads;
  builtins.grid_dim = shape.blocks;
  std::exception_ptr failure;
  try {
    for (int64_t c = 0; c < blocks / shape.cluster; ++c) all.run(c, kernel);
  } catch (...) {
    failure = std::current_exception();
  }
  active = outer;
  builtins = before;
  if (failure) std::rethrow_exception(failure);
}

Thread& self() { return cluster().self(); }
void fail(const std::string& why) { cluster().fail(why); }
void wait_until(const void* at, const char* what, const std::function<bool()>& over) {
  cluster().wait_until(at, what, over);
}
void notify(const void* at) { cluster().notify(at); }
void later(std::function<void()> task) { cluster().later(std::move(task)); }
void may_switch() { cluster().may_switch(); }
void poll() { cluster().poll(); }

bool meet(Meeting& m, int threads, const char* what, bool vote) {
  const uint64_t round = m.round;
  m.vote = m.vote || vote;
  const auto full = [&] {
    if (m.round != round) return true;
    const int left = &m == &self().block->meetings[0] ? self().block->threads_left : threads;
    if (m.come < std::min(threads, left)) return false;
    m.come = 0, ++m.round;
    m.outcome = std::exchange(m.vote, false);
    notify(&m);
    return true;
  };
  ++m.come;
  wait_until(&m, what, std::cref(full));  // it is too large for a function without an allocation
  return m.outcome;
}

void meet_cluster() { cluster().meet_all(); }

const std::array<uint64_t, kWarp>& show(uint64_t value) {
  WarpBoard& board = self().warp();
  auto& shown = board.shown[board.meeting.round % 2];
  shown[size_t(self().number % kWarp)] = value;
  meet(board.meeting, self().lanes(), "the lanes of its warp");
  return shown;
}

void* in_block(const void* here, int rank) {
  return cluster().block(rank).shared + shared_offset(here);
}

uint32_t shared_offset(const void* memory) {
  const Block& b = *self().block;
  const auto* byte = static_cast<const uint8_t*>(memory);
  expect(byte >= b.shared && byte < b.shared + b.shared_bytes,
         "an address is outside of the block's dynamic shared memory");
  return uint32_t(byte - b.shared);
}

void* from_shared(uint32_t offset, int bytes) {
  const Block& b = *self().block;
  expect(int64_t(offset) + bytes <= b.shared_bytes, "an access is beyond shared memory");
  return b.shared + offset;
}

}  // namespace cadre::emulator
