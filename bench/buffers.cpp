#include "bench/buffers.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace cadre::bench {
namespace {

constexpr std::byte kCanary{0xa5}, kPoison{0xff};
constexpr std::align_val_t kAlignment{256};
constexpr int64_t kPiece = 1 << 22;  // bytes that a thread poisons at a time

}  // namespace

void Buffers::Free::operator()(std::byte* p) const { ::operator delete[](p, kAlignment); }

void* Buffers::take(int64_t bytes, int64_t shift_bytes) {
  const int64_t inside = std::max<int64_t>(bytes, 1), first = kCanaryBytes + shift_bytes;
  const int64_t size = first + inside + kCanaryBytes;
  auto* start = static_cast<std::byte*>(::operator new[](size_t(size), kAlignment));
  buffers_.push_back({std::unique_ptr<std::byte[], Free>(start), size, first, false});
  std::fill_n(start, first, kCanary);
#pragma omp parallel for if (inside > kPiece)
  for (int64_t at = 0; at < inside; at += kPiece)
    std::fill_n(start + first + at, std::min(kPiece, inside - at), kPoison);
  std::fill_n(start + size - kCanaryBytes, kCanaryBytes, kCanary);
  total_ += size;
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
