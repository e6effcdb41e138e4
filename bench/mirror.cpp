#include "bench/mirror.h"

#include <algorithm>
#include <cstring>

namespace cadre::bench {
namespace {

constexpr int64_t kAlignment = 256;

int64_t padded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Mirror::Mirror(const Buffers& buffers, Accelerator& accelerator) : accelerator_(accelerator) {
  int64_t total = 0;
  for (const Buffers::Piece& p : buffers.pieces()) total += padded(p.bytes);
  memory_ = static_cast<std::byte*>(accelerator.take(std::max(total, kAlignment)));
  std::byte* place = memory_;
  for (const Buffers::Piece& p : buffers.pieces()) {
    regions_.push_back({p.start, place, p.bytes, p.pointers});
    place += padded(p.bytes);
  }
  std::sort(regions_.begin(), regions_.end(),
            [](const Region& a, const Region& b) { return a.host < b.host; });
  upload();
}

void Mirror::upload() const {
  for (const Region& r : regions_) upload(r);
}

Mirror::~Mirror() { accelerator_.give_back(memory_); }

const Mirror::Region* Mirror::region_of(const void* p) const {
  const auto* place = static_cast<const std::byte*>(p);
  const auto behind =
      std::upper_bound(regions_.begin(), regions_.end(), place,
                       [](const std::byte* at, const Region& r) { return at < r.host; });
  if (behind == regions_.begin()) return nullptr;
  const Region& r = *(behind - 1);
  return place < r.host + r.bytes ? &r : nullptr;
}

void* Mirror::place_of(const void* p) const {
  const Region* r = region_of(p);
  return r ? r->device + (static_cast<const std::byte*>(p) - r->host) : const_cast<void*>(p);
}

// No other word of a struct of pointers, sizes and strides has the value of a host address.
void Mirror::move_words(void* words, size_t count) const {
  auto* at = static_cast<std::byte*>(words);
  for (size_t i = 0; i < count; ++i, at += sizeof(void*)) {
    const void* word = nullptr;
    std::memcpy(&word, at, sizeof(word));
    word = place_of(word);
    std::memcpy(at, &word, sizeof(word));
  }
}

void Mirror::upload(const Region& r) const {
  if (!r.pointers) return accelerator_.upload(r.device, r.host, r.bytes);
  std::vector<std::byte> table(r.host, r.host + r.bytes);
  move_words(table.data(), table.size() / sizeof(void*));
  accelerator_.upload(r.device, table.data(), r.bytes);
}

void Mirror::fetch() const {
  for (const Region& r : regions_)
    if (!r.pointers) accelerator_.download(r.host, r.device, r.bytes);
  fetch_canaries();
}

void Mirror::fetch(const void* place) const {
  if (const Region* r = region_of(place)) accelerator_.download(r->host, r->device, r->bytes);
}

void Mirror::fetch_canaries() const {
  constexpr int64_t kBytes = Buffers::kCanaryBytes;
  for (const Region& r : regions_) {
    accelerator_.download(r.host, r.device, kBytes);
    const int64_t last = r.bytes - kBytes;
    accelerator_.download(r.host + last, r.device + last, kBytes);
  }
}

}  // namespace cadre::bench
