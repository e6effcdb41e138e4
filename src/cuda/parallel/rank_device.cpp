// Ranks that are GPUs of one host.
#include "parallel/rank_device.h"

#include <atomic>

#include "cuda/check.h"
#include "cuda/parallel/current_device.h"
#include "cuda/parallel/exchange.h"
#include "cuda/parallel/rank_memory.h"

namespace cadre::cuda {
namespace {

using parallel::ExchangeJob;
using parallel::Failure;

class GpuRankDevice final : public parallel::RankDevice {
 public:
  explicit GpuRankDevice(const Device& device) : device_(device) {
    const CurrentDevice current(device.index);
    void* notes = nullptr;
    check(cudaHostAlloc(&notes, sizeof(HostNotes), cudaHostAllocPortable | cudaHostAllocMapped),
          "take memory of the host");
    notes_ = new (notes) HostNotes;
  }
  /// Waits for all that uses the windows. Nothing here can be told that it failed.
  ~GpuRankDevice() override {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device_.index);
    cudaDeviceSynchronize();  // tidy: synchronisation because no run is under way behind it
    cudaFreeHost(notes_);
    cudaSetDevice(before);
  }

  std::string place() const override {
    cudaDeviceProp all{};
    check(cudaGetDeviceProperties(&all, device_.index), "ask which GPU it is");
    std::string words;
    for (const char byte : all.uuid.bytes) words += text(int(uint8_t(byte)), "-");
    return words;
  }
  int64_t whole_bytes(int64_t bytes) const override {
    const CurrentDevice current(device_.index);
    return RankMemory::whole_pages(bytes, device_.index);
  }
  parallel::File make_memory(int64_t bytes) override {
    const CurrentDevice current(device_.index);
    return RankMemory::make(bytes, device_.index);
  }
  char* map(std::span<const parallel::File> files, int64_t bytes_each, int rank) override {
    const CurrentDevice current(device_.index);
    char* first = memory_.map(files, bytes_each, device_.index);
    clear_flags(first + rank * bytes_each);
    return first;
  }
  parallel::SideBySide map_again(const std::vector<void*>& addresses, int64_t bytes) override {
    const CurrentDevice current(device_.index);
    char* first = memory_.map_again(addresses, bytes, device_.index);
    return {first, memory_.bytes_each()};
  }
  void write_word(void* window, uint64_t word) override {
    const CurrentDevice current(device_.index);
    // tidy: synchronisation because a window is made before any run
    check(cudaMemcpy(window, &word, sizeof word, cudaMemcpyHostToDevice), "write into the window");
    finish();
  }
  uint64_t word(const void* window) override {
    const CurrentDevice current(device_.index);
    uint64_t word = 0;
    // tidy: synchronisation because a window is made before any run
    check(cudaMemcpy(&word, window, sizeof word, cudaMemcpyDeviceToHost), "read a rank's window");
    return word;
  }
  void clear_flags(void* window) override {
    const CurrentDevice current(device_.index);
    check(cudaMemset(window, 0, sizeof(parallel::Control)), "clear the flags");
    finish();
  }

  void await_readers(const Window::State& window, const parallel::ExchangeName& name,
                     Stream stream) override {
    cuda::await_readers(table(window), name, lane(window, stream).stream);
  }
  void begin(const Window::State& window, const ExchangeJob& job, Stream stream) override {
    begin_exchange(table(window), job, lane(window, stream));
  }
  void end(const Window::State& window, const ExchangeJob& job, Stream stream) override {
    end_exchange(table(window), job, lane(window, stream));
  }
  void spoil(const ExchangeJob&) override {}  // what was not enqueued writes nothing

  void run_few(const Window::State& window, const ExchangeJob& job,
               const parallel::ExchangeRead& read, Stream stream) override {
    exchange_few(table(window), job, read, lane(window, stream));
  }
  void make_map(const Window::State& window, const parallel::MapJob& job, Stream on) override {
    cuda::make_map(table(window), job, lane(window, on));
  }

  Failure failure(const Window::State&) const override {
    return Failure::of(std::atomic_ref(notes_->failure).load(std::memory_order_acquire));
  }
  parallel::OverflowNote take_overflow() override {
    return overflow_of(std::atomic_ref(notes_->overflow).exchange(0));
  }

 private:
  static void finish() {
    // tidy: synchronisation because a window is made before any run
    check(cudaDeviceSynchronize(), "write into the window");
  }
  Lane lane(const Window::State& window, Stream stream) const {
    return {static_cast<cudaStream_t>(stream.handle), device_.units, window.ranks_here};
  }
  WindowTable table(const Window::State& window) const {
    using std::chrono::nanoseconds;
    const auto limit = std::chrono::duration_cast<nanoseconds>(window.limit).count();
    return {window.memory, window.bytes_each, window.rank, window.ranks, uint64_t(limit), notes_};
  }

  Device device_;
  HostNotes* notes_ = nullptr;
  RankMemory memory_;
};

}  // namespace

std::unique_ptr<parallel::RankDevice> rank_device(const Device& device) {
  return std::make_unique<GpuRankDevice>(device);
}

}  // namespace cadre::cuda
