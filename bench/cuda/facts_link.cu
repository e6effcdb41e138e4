// What crosses between two GPUs of one host: by their DMA engines, by ordinary loads and stores and
// by TMA, from few SMs and from all, in rows here and there; and how long a word takes.
#include <array>

#include "bench/cuda/check.h"
#include "bench/cuda/facts.h"
#include "cadre/host_device.h"
#include "cuda/device/flag.h"
#include "cuda/device/launch.h"
#include "cuda/device/tma.h"

namespace cadre::bench {
namespace {

using cuda::Barrier;

constexpr int64_t kBytes = int64_t(512) << 20;  // that cross in one direction
constexpr int kThreads = 512, kWarp = 32, kBlocksPerSm = 2;
constexpr int kStages = 8, kMostRowBytes = 16 << 10;
constexpr int kExchanges = 2000;                       // of a word, there and back
constexpr uint64_t kLimitNanoseconds = 2'000'000'000;  // of waiting for one

/// Rows that are read in another order than they are written, as those of an exchange are.
struct Rows {
  const uint4* from;
  uint4* to;
  int64_t count;
  int words;  ///< of 16 bytes, of a row

  CADRE_HD const uint4* source(int64_t row) const {
    constexpr int64_t kStride = 9973;  // a prime that divides none of the counts
    return from + row * kStride % count * words;
  }
};

__global__ void __launch_bounds__(kThreads) warps_kernel(const __grid_constant__ Rows rows) {
  constexpr int kMany = 4;
  const int lane = int(threadIdx.x) % kWarp, warps = int(gridDim.x) * (kThreads / kWarp);
  for (int64_t row = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
       row < rows.count; row += warps) {
    const uint4* from = rows.source(row);
    uint4* to = rows.to + row * rows.words;
    for (int i = lane; i < rows.words; i += kMany * kWarp) {
      uint4 some[kMany];
#pragma unroll
      for (int j = 0; j < kMany; ++j)
        if (i + j * kWarp < rows.words) some[j] = from[i + j * kWarp];
#pragma unroll
      for (int j = 0; j < kMany; ++j)
        if (i + j * kWarp < rows.words) to[i + j * kWarp] = some[j];
    }
  }
}

struct Stages {
  uint8_t row[kStages][kMostRowBytes];
  Barrier full[kStages];
};

/// One thread a block: a row is loaded while those before it are stored.
__global__ void tma_kernel(const __grid_constant__ Rows rows) {
  auto& shared = *reinterpret_cast<Stages*>(cuda::dynamic_shared());
  const auto bytes = uint32_t(rows.words * 16);
  for (Barrier& barrier : shared.full) cuda::init(barrier, 1);
  cuda::fence_mbarrier_init();
  const int64_t mine = (rows.count - int64_t(blockIdx.x) + gridDim.x - 1) / gridDim.x;
  const auto row_of = [&](int64_t i) { return int64_t(blockIdx.x) + i * gridDim.x; };
  const auto load = [&](int64_t i) {
    const int stage = int(i % kStages);
    cuda::arrive_expect_tx(shared.full[stage], bytes);
    cuda::bulk_load(shared.row[stage], rows.source(row_of(i)), bytes, shared.full[stage]);
  };
  for (int64_t i = 0; i < mine && i < kStages; ++i) load(i);
  for (int64_t i = 0; i < mine; ++i) {
    const int stage = int(i % kStages);
    cuda::wait(shared.full[stage], uint32_t(i / kStages) & 1);
    cuda::bulk_store(rows.to + row_of(i) * rows.words, shared.row[stage], bytes);
    cuda::tma_commit();
    cuda::tma_wait_read<1>();  // so the stage before this one is free
    if (i > 0 && i - 1 + kStages < mine) load(i - 1 + kStages);
  }
  cuda::tma_wait();
}

/// Two GPUs tell each other numbers in turns. Gives up after a while, and then says so.
__global__ void words_kernel(uint32_t* mine, uint32_t* theirs, bool begins, uint32_t* failed) {
  for (uint32_t i = 1; i <= kExchanges; ++i) {
    if (begins) cuda::store_release_system(theirs, i);
    const uint64_t begin = cuda::nanoseconds();
    while (cuda::load_acquire_system(mine) < i)
      if (cuda::nanoseconds() - begin > kLimitNanoseconds) {
        *failed = 1;
        return;
      }
    if (!begins) cuda::store_release_system(theirs, i);
  }
}

/// One of two GPUs: its memory, which the other one reads, and memory of its own beside it.
struct Side {
  Device device;
  std::unique_ptr<Accelerator> accelerator = open_accelerator(device);
  DeviceMemory shown{*accelerator, kBytes}, own{*accelerator, kBytes};
  cudaEvent_t event{};

  explicit Side(const Device& d) : device(d) {
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "make an event");
    fill_random_bf16(shown.as<void>(), kBytes / 2, stream());
  }
  Side(const Side&) = delete;
  ~Side() { cudaEventDestroy(event); }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(accelerator->stream().handle); }
  void choose() const { check_cuda(cudaSetDevice(device.index), "choose the device"); }
  /// What it enqueues next comes behind all that the other one has enqueued.
  void follow(const Side& other) const {
    other.choose();
    check_cuda(cudaEventRecord(other.event, other.stream()), "record an event");
    choose();
    check_cuda(cudaStreamWaitEvent(stream(), other.event, 0), "wait for an event");
  }
};

enum class Mover { kWarps, kTma };
constexpr const char* kNameOf[] = {"warps", "TMA"};

class Link {
 public:
  Link(const Device& first, const Device& second, std::vector<Fact>& list)
      : sides_{Side(first), Side(second)}, list_(list) {}

  void measure() {
    const auto engine = [this](int at) {
      sides_[at].accelerator->copy(sides_[at].own.data(), sides_[1 - at].shown.data(), kBytes);
    };
    const std::string how = text("cudaMemcpyAsync of ", kBytes, " bytes; bytes that cross one way");
    add("DMA engine, one way", kBytes, us_of(engine, false), how);
    add("DMA engine, both ways", kBytes, us_of(engine, true), how);
    for (const Mover mover : {Mover::kWarps, Mover::kTma})
      for (const bool pulls : {true, false})
        for (const int sms : {8, 24, sides_[0].device.units})
          for (const int bytes : {2 << 10, 14 << 10}) add_rows(mover, pulls, sms, bytes);
    add_word();
  }

 private:
  /// Until both are through, if both have something to do.
  template <class Enqueue>
  double us_of(Enqueue&& enqueue, bool both) {
    return device_us(*sides_[0].accelerator, [&] {
      if (both) sides_[1].follow(sides_[0]);
      if (both) enqueue(1);
      sides_[0].choose();
      enqueue(0);
      if (both) sides_[0].follow(sides_[1]);
    });
  }
  void add(std::string name, int64_t bytes, double us, std::string how) {
    list_.push_back({std::move(name), double(bytes) / us / 1e3, "GB/s", std::move(how)});
  }

  void add_rows(Mover mover, bool pulls, int sms, int row_bytes) {
    const auto rows_of = [&](int at) {
      const Side &here = sides_[at], &there = sides_[1 - at];
      return Rows{.from = (pulls ? there : here).shown.as<uint4>(),
                  .to = (pulls ? here : there).own.as<uint4>(),
                  .count = kBytes / row_bytes,
                  .words = row_bytes / 16};
    };
    const auto run = [&](int at) {
      const unsigned blocks = unsigned(sms * (mover == Mover::kWarps ? kBlocksPerSm : 1));
      if (mover == Mover::kWarps)
        cuda::launch(&warps_kernel, {blocks, kThreads, 0, sides_[at].stream()}, rows_of(at));
      else
        cuda::launch(&tma_kernel, {blocks, 1, int(sizeof(Stages)), sides_[at].stream()},
                     rows_of(at));
    };
    const double us = us_of(run, true);
    check_rows(rows_of(0), pulls ? 0 : 1, pulls ? 1 : 0);
    add(text(pulls ? "pull" : "push", " by ", kNameOf[int(mover)], ", ", sms, " SMs, rows of ",
             row_bytes >> 10, " KiB"),
        kBytes / row_bytes * row_bytes, us, "both ways at once; bytes that cross one way");
  }

  /// Whether some rows of `to`, in memory of one side, are those of `from`, in that of the other.
  void check_rows(const Rows& rows, int to, int from) {
    constexpr int64_t kLooks = 64;
    const auto bytes = int64_t(rows.words) * 16;
    std::vector<char> want(static_cast<size_t>(bytes)), got(static_cast<size_t>(bytes));
    for (int64_t i = 0; i < kLooks; ++i) {
      const int64_t row = i * (rows.count - 1) / (kLooks - 1);
      sides_[to].choose();
      sides_[to].accelerator->download(got.data(), rows.to + row * rows.words, bytes);
      sides_[from].choose();
      sides_[from].accelerator->download(want.data(), rows.source(row), bytes);
      if (got != want) throw DeviceError(text("bench: row ", row, " did not cross as it was"));
    }
  }

  void add_word() {
    uint32_t failed = 0;
    const auto clear = [&](const Side& side) {
      side.choose();
      check_cuda(cudaMemsetAsync(side.own.data(), 0, 2 * sizeof(uint32_t), side.stream()), "clear");
    };
    const auto run = [&](int at) {
      auto* mine = sides_[at].own.as<uint32_t>();
      words_kernel<<<1, 1, 0, sides_[at].stream()>>>(mine, sides_[1 - at].own.as<uint32_t>(),
                                                     at == 0, mine + 1);
      check_cuda(cudaGetLastError(), "launch an exchange of words");
    };
    const double us = us_of(
        [&](int at) {
          if (at == 1) {  // the first of both
            clear(sides_[0]), clear(sides_[1]);
            sides_[1].follow(sides_[0]), sides_[0].follow(sides_[1]);
            sides_[1].choose();
          }
          run(at);
        },
        true);
    for (const Side& side : sides_) {
      side.choose();
      side.accelerator->download(&failed, side.own.as<uint32_t>() + 1, sizeof failed);
      if (failed != 0)
        throw DeviceError("bench: a word that a GPU wrote was not seen by the other");
    }
    list_.push_back({"word", us / (2 * kExchanges), "us",
                     text("from a store with release to a load with acquire, one of ", kExchanges,
                          " there and back")});
  }

  std::array<Side, 2> sides_;
  std::vector<Fact>& list_;
};

/// An attribute of two devices, of the way from the first to the second.
int attribute_of(const Device& from, const Device& to, cudaDeviceP2PAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetP2PAttribute(&value, which, from.index, to.index), "read an attribute");
  return value;
}

void allow(const Device& from, const Device& to) {
  if (attribute_of(from, to, cudaDevP2PAttrAccessSupported) == 0)
    throw DeviceError(text("bench: ", from, " cannot read memory of ", to));
  check_cuda(cudaSetDevice(from.index), "choose the device");
  const cudaError_t code = cudaDeviceEnablePeerAccess(to.index, 0);
  if (code == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();
  else
    check_cuda(code, "map the memory of the other GPU");
}

}  // namespace

std::vector<Fact> measure_link_facts(const Device& first, const Device& second) {
  std::vector<Fact> list;
  allow(first, second), allow(second, first);
  list.push_back({"rank of the link",
                  double(attribute_of(first, second, cudaDevP2PAttrPerformanceRank)), "",
                  "as the driver says; 0 is the best"});
  list.push_back({"atomics across",
                  double(attribute_of(first, second, cudaDevP2PAttrNativeAtomicSupported)), "",
                  "as the driver says"});
  Link(first, second, list).measure();
  return list;
}

}  // namespace cadre::bench
