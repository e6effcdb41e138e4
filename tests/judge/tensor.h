#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/tensor.h"
#include "cpu/load_store.h"

namespace cadre::test {

/// Memory that begins at a cache line, as that of users does.
template <class T>
struct LineAllocator {
  using value_type = T;

  LineAllocator() = default;
  template <class Other>
  LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const LineAllocator&) const = default;

 private:
  static constexpr std::align_val_t kLine{64};
};
using Bytes = std::vector<char, LineAllocator<char>>;

/// How a test tensor lies in memory.
struct Lie {
  int64_t row_gap = 0;  ///< elements between two rows of the last dimension
};

/// A tensor that owns its memory and watches it: elements begin as 0xff (NaN in floats, -1 in
/// integers), and canaries stand before, behind and between the rows.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<int64_t> shape, Lie lie = {})
      : view_(cadre::view(nullptr, dtype, shape)) {
    for (int d = 0; d + 1 < view_.rank; ++d)
      view_.stride[d] = view_.stride[d] / std::max<int64_t>(columns(), 1) * pitch(lie);
    row_bytes_ = bytes_for(dtype, columns());
    pitch_bytes_ = bytes_for(dtype, pitch(lie));
    memory_.assign(size_t(kGuard + rows() * pitch_bytes_ + kGuard), kCanary);
    poison();
  }

  /// The memory that an operation sees.
  TensorView view() const {
    TensorView v = view_;
    v.data = const_cast<char*>(memory_.data()) + kGuard;
    return v;
  }
  template <class Element>
  Element* data() const {
    return static_cast<Element*>(view().data);
  }

  double at(int64_t i, int64_t j = 0, int64_t k = 0) const { return cpu::read(view(), i, j, k); }
  void set(cpu::At at, double value) { cpu::write(view(), at, value); }

  /// Rows of the last dimension: all other dimensions together.
  int64_t rows() const {
    int64_t count = 1;
    for (int d = 0; d + 1 < view_.rank; ++d) count *= view_.shape[d];
    return count;
  }
  int64_t columns() const { return view_.rank == 0 ? 1 : view_.shape[view_.rank - 1]; }

  /// All elements of a plain float tensor, row by row.
  std::vector<double> values() const {
    std::vector<double> all;
    for (int64_t r = 0; r < rows(); ++r)
      for (int64_t c = 0; c < columns(); ++c)
        all.push_back(cpu::read(cadre::view(row(r), view_.dtype, {columns()}), c));
    return all;
  }

  /// Random numbers of a plain float tensor, in rows [first, last) of the last dimension.
  void fill(std::mt19937& random, double low, double high, int64_t first = 0, int64_t last = -1) {
    std::uniform_real_distribution<double> uniform(low, high);
    for (int64_t r = first; r < (last < 0 ? rows() : last); ++r)
      for (int64_t c = 0; c < columns(); ++c)
        cpu::write(cadre::view(row(r), view_.dtype, {columns()}), {c}, uniform(random));
  }

  /// Poison in all elements, as at the beginning.
  void poison() {
    for (int64_t r = 0; r < rows(); ++r) std::memset(row(r), 0xff, size_t(row_bytes_));
  }

  /// True if rows [first, last) still hold the poison.
  bool untouched(int64_t first, int64_t last) const {
    for (int64_t r = first; r < last; ++r)
      if (std::any_of(row(r), row(r) + row_bytes_, [](char byte) { return byte != '\xff'; }))
        return false;
    return true;
  }

  /// Empty if no canary changed, else where the first one stood.
  std::string damage() const {
    for (size_t at = 0; at < memory_.size(); ++at) {
      const int64_t inside = int64_t(at) - kGuard;
      const bool element =
          inside >= 0 && inside < rows() * pitch_bytes_ && inside % pitch_bytes_ < row_bytes_;
      if (!element && memory_[at] != kCanary)
        return text("byte ", inside, " of ", to_string(view_), " was written");
    }
    return {};
  }

  /// Every byte, canaries too, to compare two results bit for bit.
  const Bytes& bytes() const { return memory_; }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr char kCanary = '\x5a';

  int64_t pitch(Lie lie) const { return columns() + lie.row_gap; }
  const char* row(int64_t r) const { return memory_.data() + kGuard + r * pitch_bytes_; }
  char* row(int64_t r) { return memory_.data() + kGuard + r * pitch_bytes_; }

  TensorView view_;
  int64_t row_bytes_ = 0, pitch_bytes_ = 0;
  Bytes memory_;
};

}  // namespace cadre::test
