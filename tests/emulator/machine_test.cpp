// The emulator itself: that it does what a GPU does, and sees what would go wrong on one.
#include "tests/emulator/words.h"
//
#include <gtest/gtest.h>

#include <numeric>

#include "cuda/device/barrier.h"
#include "cuda/device/launch.h"
#include "cuda/device/tensor_map.h"
#include "cuda/device/tma.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 64;

// What the emulator says of a kernel, under some orders of its threads; empty if it is content.
template <class... Params, class... Args>
std::string complaint(void (*kernel)(Params...), const Grid& grid, const Args&... args) {
  for (int order = 0; order < 40; ++order) try {
      launch(kernel, grid, args...);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
  return "";
}

__global__ void lanes_kernel(int* sums, unsigned* votes) {
  int sum = int(threadIdx.x);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, unsigned(step));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  votes[threadIdx.x] = __ballot_sync(~0u, threadIdx.x % 3 == 0);
}

TEST(Emulator, LanesSeeEachOther) {
  int sums[2] = {};
  unsigned votes[kThreads] = {}, wanted[2] = {};
  launch(lanes_kernel, {1, kThreads, 0, nullptr}, &sums[0], &votes[0]);
  for (unsigned t = 0; t < kThreads; ++t) wanted[t / 32] |= unsigned(t % 3 == 0) << t % 32;
  EXPECT_EQ(sums[0], 31 * 32 / 2);
  EXPECT_EQ(sums[1], 31 * 32 / 2 + 32 * 32);
  for (size_t t = 0; t < kThreads; ++t) EXPECT_EQ(votes[t], wanted[t / 32]);
}

__global__ void reverse_kernel(int* numbers, bool waits) {
  __shared__ int shared[kThreads];
  shared[threadIdx.x] = numbers[threadIdx.x];
  if (waits) __syncthreads();
  const int taken = shared[kThreads - 1 - threadIdx.x];
  __syncthreads();
  numbers[threadIdx.x] = taken;
}

TEST(Emulator, BarriersOfABlockHoldAndAreMissed) {
  for (const bool waits : {true, false}) {
    int wrong = 0;
    for (int order = 0; order < 20; ++order) {
      int numbers[kThreads];
      std::iota(numbers, numbers + kThreads, 1000 * order);
      launch(reverse_kernel, {1, kThreads, 0, nullptr}, &numbers[0], waits);
      for (int i = 0; i < kThreads; ++i) wrong += numbers[i] != 1000 * order + kThreads - 1 - i;
    }
    EXPECT_EQ(wrong == 0, waits) << wrong;
  }
}

// A ring of one place between two threads of different warps.
__global__ void ring_kernel(int rounds, bool answers, int* sum) {
  auto* full = reinterpret_cast<Barrier*>(dynamic_shared());
  Barrier* empty = full + 1;
  int* place = reinterpret_cast<int*>(full + 2);
  if (threadIdx.x == 0) init(*full, 1), init(*empty, 1), fence_mbarrier_init();
  __syncthreads();
  for (uint32_t i = 0; i < uint32_t(rounds); ++i) {
    if (threadIdx.x == 0) {
      wait(*empty, i % 2 ^ 1);
      *place = int(i);
      arrive(*full);
    } else if (threadIdx.x == 32) {
      wait(*full, i % 2);
      *sum += *place;
      if (answers) arrive(*empty);
    }
  }
}

TEST(Emulator, SeesADeadlock) {
  int sum = 0;
  EXPECT_EQ(complaint(ring_kernel, {1, kThreads, 64, nullptr}, 10, true, &sum), "");
  EXPECT_EQ(sum, 40 * 45);
  const std::string why = complaint(ring_kernel, {1, kThreads, 64, nullptr}, 10, false, &sum);
  EXPECT_NE(why.find("deadlock"), std::string::npos) << why;
  EXPECT_NE(why.find("block 0 warp 0 waits for a barrier"), std::string::npos) << why;
}

__global__ void misuse_kernel(int which) {
  auto* barrier = reinterpret_cast<Barrier*>(dynamic_shared());
  if (which == 0) arrive(*barrier);
  init(*barrier, 1);
  fence_mbarrier_init();
  if (which == 1) shared_address(dynamic_shared() + 64);
  if (which == 2) __syncwarp(1);
  if (which == 3) init(*barrier, 2), arrive(*barrier), wait(*barrier, 0);
}

TEST(Emulator, SeesMisuse) {
  const char* says[] = {"not initialised", "outside of the block's", "some lanes", "deadlock"};
  for (int which = 0; which < 4; ++which) {
    const std::string why = complaint(misuse_kernel, {1, 1, 64, nullptr}, which);
    EXPECT_NE(why.find(says[which]), std::string::npos) << why;
  }
}

__global__ void dependent_kernel(bool waits) {
  if (waits) begin_dependent();
}

TEST(Emulator, SeesADependentKernelThatDoesNotWait) {
  const Grid grid{.blocks = 2, .threads = 3, .dependent = true};
  EXPECT_EQ(complaint(dependent_kernel, grid, true), "");
  const std::string why = complaint(dependent_kernel, grid, false);
  EXPECT_NE(why.find("ended before it waited"), std::string::npos) << why;
}

constexpr int kRows = 8, kColumns = 32;  // a box of floats

// Loads a box, stores it at another place; perhaps too early, or without waiting at the end.
__global__ void copy_kernel(const CUtensorMap from, const CUtensorMap to, int fault) {
  uint8_t* box = dynamic_shared();
  auto* full = reinterpret_cast<Barrier*>(box + kRows * 128);
  init(*full, 1);
  fence_mbarrier_init();
  for (uint32_t i = 0; i < 2; ++i) {
    if (i > 0 && fault != 1) tma_wait_read<0>();
    arrive_expect_tx(*full, kRows * 128);
    tma_load(box, from, Box3{0, int(i) * kRows, 0}, *full);
    if (fault != 2) wait(*full, i);
    tma_store(to, Box3{0, int(i) * kRows, 0}, box);
    if (fault != 3) tma_commit();
  }
  if (fault == 0) tma_wait();
}

TEST(Emulator, CopiesHappenAtAnyMoment) {
  alignas(256) float from[2 * kRows][kColumns], to[2 * kRows][kColumns];
  for (int i = 0; i < 2 * kRows * kColumns; ++i) from[i / kColumns][i % kColumns] = float(i);
  const auto map = [](float(&m)[2 * kRows][kColumns]) {
    return expert_map(view(&m[0][0], DType::kF32, {2 * kRows, kColumns}), kRows);
  };
  for (int fault = 0; fault < 4; ++fault) {
    int bad = 0;
    for (int order = 0; order < 40; ++order) {
      std::memset(to, 0xff, sizeof(to));
      const Grid grid{1, 1, kRows * 128 + 64, nullptr};
      try {
        launch(copy_kernel, grid, map(from), map(to), fault);
      } catch (const std::runtime_error&) {
        ++bad;
      }
      bad += std::memcmp(from, to, sizeof(to)) != 0;
    }
    EXPECT_EQ(bad == 0, fault == 0) << "fault " << fault;
  }
}

TEST(Emulator, CapturesForbidWhatIsUnsafe) {
  for (const bool safe : {true, false}) {
    int sums[2] = {};
    unsigned votes[kThreads];
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    launch(lanes_kernel, {1, kThreads, 0, stream}, &sums[0], &votes[0]);
    EXPECT_EQ(sums[1], 0) << "a captured kernel has run";
    if (!safe) {
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
    }
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph),
              safe ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
    if (safe) {
      cudaGraphExec_t launchable = nullptr;
      ASSERT_EQ(cudaGraphInstantiate(&launchable, graph, 0), cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(launchable, stream), cudaSuccess);
      EXPECT_EQ(sums[0], 31 * 32 / 2);
      cudaGraphExecDestroy(launchable);
      cudaGraphDestroy(graph);
    }
    cudaStreamDestroy(stream);
  }
}

TEST(Emulator, RefusesWhatTheDriverRefuses) {
  int sum = 0;
  EXPECT_THROW(launch(ring_kernel, {1, 2048, 64, nullptr}, 1, true, &sum), DeviceError);
  EXPECT_THROW(launch(ring_kernel, {1, 32, 1 << 20, nullptr}, 1, true, &sum), DeviceError);
  EXPECT_THROW(launch(ring_kernel, {0, 32, 64, nullptr}, 1, true, &sum), DeviceError);
  alignas(256) float few[kRows][kColumns];
  EXPECT_THROW(expert_map(view(&few[0][1], DType::kF32, {kRows, kColumns}), kRows), DeviceError);
}

}  // namespace
}  // namespace cadre::cuda
