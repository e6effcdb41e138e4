#pragma once
#include <cstdint>
#include <type_traits>
#include <vector>

#include "bench/accelerator.h"
#include "bench/buffers.h"

namespace cadre::bench {

/// A copy of all buffers of a case, canaries too, in the memory of an accelerator. Tables of
/// pointers into the buffers point into the copy there.
class Mirror {
 public:
  Mirror(const Buffers&, Accelerator&);
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  ~Mirror();

  /// The place in the copy of a place in a buffer; any other pointer as it is.
  void* place_of(const void*) const;

  /// The same arguments, with every pointer into a buffer moved.
  template <class Args>
  Args moved(Args args) const {
    static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) % sizeof(void*) == 0 &&
                  alignof(Args) == alignof(void*));
    move_words(&args, sizeof(Args) / sizeof(void*));
    return args;
  }

  /// Brings everything from the buffers once more.
  void upload() const;
  /// Brings everything but tables of pointers back to the buffers.
  void fetch() const;
  /// The same for the one buffer that holds this place, and for the canaries of all.
  void fetch(const void* place) const;
  void fetch_canaries() const;

 private:
  struct Region {
    std::byte* host;
    std::byte* device;
    int64_t bytes;
    bool pointers;
  };
  const Region* region_of(const void*) const;
  void move_words(void* words, size_t count) const;
  void upload(const Region&) const;

  Accelerator& accelerator_;
  std::byte* memory_ = nullptr;
  std::vector<Region> regions_;  // by their place on the host
};

}  // namespace cadre::bench
