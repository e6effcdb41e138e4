#pragma once
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "cadre/tensor.h"
#include "cadre/workspace.h"

namespace cadre::bench {

/// Owns the buffers of one case. Every buffer is 256-byte aligned, filled with 0xff (NaN in every
/// float type, -1 in every integer), and lies between canaries.
class Buffers {
 public:
  /// Rows of tensors lie `row_gap` elements further apart than they must, and tensors begin
  /// `shift_bytes`, or an element if that is more, behind an aligned address.
  explicit Buffers(int64_t row_gap = 0, int64_t shift_bytes = 0)
      : row_gap_(row_gap), shift_bytes_(shift_bytes) {}
  /// Buffers that processes which are forked later share.
  struct ForProcesses {};
  explicit Buffers(ForProcesses) : Buffers() { for_processes_ = true; }
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  /// At least one byte, so that no buffer is null.
  /// Errors    InvalidArgument where the buffers of all owners would take more than three quarters
  ///           of the memory.
  void* take(int64_t bytes) { return take(bytes, 0); }
  /// A row-major tensor; rows of 4-bit elements start at a byte.
  TensorView tensor(DType, std::initializer_list<int64_t> shape);
  template <class Element>
  Element* array(int64_t count) {
    return static_cast<Element*>(take(count * int64_t(sizeof(Element))));
  }
  /// Room for pointers into other buffers of this owner.
  void** pointers(int64_t count);
  Workspace workspace(int64_t bytes) { return {take(bytes), bytes}; }

  /// True while nobody has written before or behind a buffer.
  bool canaries_live() const;
  static constexpr int64_t kCanaryBytes = 256;  ///< or more before and behind; keeps the alignment
  int64_t bytes() const { return total_; }

  /// One buffer with its canaries.
  struct Piece {
    std::byte* start;
    int64_t bytes;
    bool pointers;  ///< holds pointers into other buffers
  };
  std::vector<Piece> pieces() const;

 private:
  void* take(int64_t bytes, int64_t shift_bytes);

  struct Free {
    int64_t mapped_bytes;  ///< 0: of the heap
    void operator()(std::byte* p) const;
  };
  using Start = std::unique_ptr<std::byte[], Free>;
  Start allocate(int64_t bytes) const;
  struct Buffer {
    Start start;
    int64_t bytes;
    int64_t first;  ///< byte of what was asked for
    bool pointers = false;
  };
  std::vector<Buffer> buffers_;
  int64_t total_ = 0;
  int64_t row_gap_, shift_bytes_;
  bool for_processes_ = false;
};

}  // namespace cadre::bench
