#include "bench/buffers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <new>

#include "cadre/error.h"

namespace cadre::bench {
namespace {

constexpr std::byte kCanary{0xa5}, kPoison{0xff};
constexpr std::align_val_t kAlignment{256};
constexpr int64_t kPiece = 1 << 22;  // bytes that a thread poisons at a time

std::atomic<int64_t> in_all = 0;  // bytes of all owners

/// Bytes that this process may have: of the machine, or of its control group.
int64_t memory_of_machine() {
  const int64_t all = int64_t(::sysconf(_SC_PHYS_PAGES)) * int64_t(::sysconf(_SC_PAGESIZE));
  int64_t group = 0;
  const bool limited = bool(std::ifstream("/sys/fs/cgroup/memory.max") >> group);
  return limited ? std::min(all, group) : all;
}

/// The system would promise more memory than there is, and end the program when it is written.
void require_room(int64_t bytes) {
  static const int64_t most = memory_of_machine() / 4 * 3;
  const int64_t taken = in_all;
  require(bytes <= most - taken, "memory: tensors of the problem need ", (taken + bytes) >> 20,
          " MB, must be at most ", most >> 20,
          ", three quarters of the memory here; make the problem smaller");
}

}  // namespace

Buffers::~Buffers() { in_all -= total_; }

void Buffers::Free::operator()(std::byte* p) const {
  if (mapped_bytes > 0)
    munmap(p, size_t(mapped_bytes));
  else
    ::operator delete[](p, kAlignment);
}

Buffers::Start Buffers::allocate(int64_t bytes) const {
  if (!for_processes_)
    return Start(static_cast<std::byte*>(::operator new[](size_t(bytes), kAlignment)), Free{0});
  void* mapped =
      mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  return Start(static_cast<std::byte*>(mapped), Free{bytes});
}

void* Buffers::take(int64_t bytes, int64_t shift_bytes) {
  const int64_t inside = std::max<int64_t>(bytes, 1), first = kCanaryBytes + shift_bytes;
  require_room(inside);
  const int64_t size = first + inside + kCanaryBytes;
  buffers_.push_back({allocate(size), size, first, false});
  std::byte* start = buffers_.back().start.get();
  std::fill_n(start, first, kCanary);
#pragma omp parallel for if (inside > kPiece)
  for (int64_t at = 0; at < inside; at += kPiece)
    std::fill_n(start + first + at, std::min(kPiece, inside - at), kPoison);
  std::fill_n(start + size - kCanaryBytes, kCanaryBytes, kCanary);
  total_ += size;
  in_all += size;
  return start + first;
}

void** Buffers::pointers(int64_t count) {
  auto* table = array<void*>(count);
  buffers_.back().pointers = true;
  return table;
}

std::vector<Buffers::Piece> Buffers::pieces() const {
  std::vector<Piece> all;
  for (const Buffer& b : buffers_) all.push_back({b.start.get(), b.bytes, b.pointers});
  return all;
}

TensorView Buffers::tensor(DType dtype, std::initializer_list<int64_t> shape) {
  TensorView v = view(nullptr, dtype, shape);
  int64_t step = 1;
  for (int d = v.rank - 1; d >= 0; --d) {
    v.stride[d] = step;
    step *= v.shape[d];
    if (d != v.rank - 1 || v.rank == 1) continue;
    step += row_gap_;
    if (bits(dtype) == 4) step += step % 2;
  }
  const int64_t element = bytes_for(dtype, 1);
  v.data = take(bytes_for(dtype, step), shift_bytes_ == 0 ? 0 : std::max(shift_bytes_, element));
  return v;
}

bool Buffers::canaries_live() const {
  return std::all_of(buffers_.begin(), buffers_.end(), [](const Buffer& b) {
    const auto live = [](std::byte x) { return x == kCanary; };
    const std::byte* start = b.start.get();
    return std::all_of(start, start + b.first, live) &&
           std::all_of(start + b.bytes - kCanaryBytes, start + b.bytes, live);
  });
}

}  // namespace cadre::bench
