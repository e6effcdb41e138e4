// Hashes of results: they see every bit that an operation computes, and no other.
#include "bench/digest.h"

#include <gtest/gtest.h>

#include "bench/element.h"

namespace cadre {
namespace {

using bench::Digest;
using bench::Output;

constexpr int64_t kRows = 5, kColumns = 3, kLive = 4, kGap = 2;

std::string hash_of(const Output& out) {
  Digest digest;
  digest.add(out);
  return digest.text();
}

// Whether the hash of an output changes with one bit of the byte.
bool sees(const Output& out, int64_t byte) {
  const std::string before = hash_of(out);
  auto* data = static_cast<std::byte*>(out.view.data);
  data[byte] ^= std::byte{4};
  const bool seen = hash_of(out) != before;
  data[byte] ^= std::byte{4};
  return seen;
}

TEST(Digest, IsFnv1a) {
  Digest digest;
  EXPECT_EQ(digest.text(), "cbf29ce484222325");
  digest.add("foobar", 6);
  EXPECT_EQ(digest.text(), "85944171f73967e8");
}

TEST(Digest, SeesLiveElementsOnly) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    bench::Buffers buffers(kGap);
    const Output out{"y", buffers.tensor(dtype, {kRows, kColumns}), kLive};
    bench::fill_normal(out.view, kLive, 3);
    const int64_t step = kColumns + kGap, size = bytes_for(dtype, 1);
    for (int64_t i = 0; i < kRows * step * size; ++i)
      EXPECT_EQ(sees(out, i), i / size / step < kLive && i / size % step < kColumns) << i;
  }
}

TEST(Digest, SeesEveryByteOfAnExactOutput) {
  bench::Buffers buffers;
  Output out{"codes", buffers.tensor(DType::kE2m1, {kRows, kColumns})};
  out.exact = true;
  for (int64_t i = 0; i < kRows * (kColumns + 1) / 2; ++i) EXPECT_TRUE(sees(out, i)) << i;
}

TEST(Digest, DependsOnTheOrder) {
  Digest one, two, both, turned;
  one.add("one", 3);
  two.add("two", 3);
  both.add(one);
  both.add(two);
  turned.add(two);
  turned.add(one);
  EXPECT_NE(both, turned);
}

}  // namespace
}  // namespace cadre
