#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/shared_memory.h"

namespace cadre::cuda {

/// The memory of several GPUs, or of one, that processes share, mapped side by side: CUDA's virtual
/// memory, which travels between processes as file descriptors. Whoever has mapped it may use it
/// after its maker's end.
class RankMemory {
 public:
  RankMemory() = default;
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;
  ~RankMemory();

  /// So many bytes in whole pages of that GPU.
  static int64_t whole_pages(int64_t bytes, int device);
  /// Memory of that GPU.
  static parallel::File make(int64_t bytes, int device);
  /// Maps a file a rank for that GPU.
  /// Errors    DeviceError where it cannot reach a rank's memory.
  char* map(std::span<const parallel::File> files, int64_t bytes_each, int device);
  /// Maps once more what is mapped at an address a rank: allocations of virtual memory, whoever
  /// made them, in whatever process, in which the addresses lie equally far from the beginning.
  /// Errors    as map; also for other memory, and for too little.
  char* map_again(const std::vector<void*>& addresses, int64_t bytes, int device);
  int64_t bytes_each() const { return bytes_each_; }

 private:
  /// Takes the addresses.
  void reserve(size_t ranks, int64_t bytes_each);
  /// Maps the memory of the next rank.
  void map_next(uint64_t memory, int device);

  uint64_t place_ = 0;
  int64_t bytes_each_ = 0, bytes_ = 0, mapped_ = 0;
};

}  // namespace cadre::cuda
