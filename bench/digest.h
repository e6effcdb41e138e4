#pragma once
#include <cstdint>
#include <string>

#include "bench/case.h"

namespace cadre::bench {

/// A 64-bit hash (FNV-1a) of results, so that two builds or two machines can be compared bit for
/// bit.
class Digest {
 public:
  void add(const void* data, int64_t bytes);
  /// What an operation computes of an output: its live elements, or every byte of an exact one.
  void add(const Output&);
  void add(const Digest&);

  bool operator==(const Digest&) const = default;
  /// 16 hexadecimal digits.
  std::string text() const;

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace cadre::bench
