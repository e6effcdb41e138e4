#include "bench/digest.h"

#include <cstdio>

#include "bench/compare.h"
#include "bench/element.h"

namespace cadre::bench {

void Digest::add(const void* data, int64_t bytes) {
  constexpr uint64_t kPrime = 0x100000001b3;
  const auto* at = static_cast<const unsigned char*>(data);
  for (const auto* end = at + bytes; at != end; ++at) hash_ = (hash_ ^ *at) * kPrime;
}

void Digest::add(const Output& out) {
  if (out.exact) {
    const auto bytes = snapshot(out);
    return add(bytes.data(), int64_t(bytes.size()));
  }
  const TensorView& v = out.view;
  const int64_t size = bytes_for(v.dtype, 1), row = v.shape[0] ? elements(v) / v.shape[0] : 0;
  for (int64_t i = 0; i < out.live * row; ++i)
    add(static_cast<const std::byte*>(v.data) + offset_of(v, i) * size, size);
}

void Digest::add(const Digest& other) { add(&other.hash_, sizeof(other.hash_)); }

std::string Digest::text() const {
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash_));
  return digits;
}

}  // namespace cadre::bench
