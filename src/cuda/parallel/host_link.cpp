// Numbers that cross between a GPU and its host, in memory that both reach.
#include "parallel/host_link.h"

#include "cuda/parallel/current_device.h"
#include "cuda/parallel/row_blocks.h"
#include "cuda/parallel/token_messages.h"

namespace cadre::cuda {
namespace {

class GpuHostLink final : public parallel::HostLink {
 public:
  GpuHostLink(const Device& device, int64_t bytes) : index_(device.index) {
    const CurrentDevice current(device.index);
    check(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming), "make an event");
    const cudaError_t code =
        cudaHostAlloc(&memory_, size_t(bytes), cudaHostAllocPortable | cudaHostAllocMapped);
    if (code != cudaSuccess) cudaEventDestroy(copied_);
    check(code, "take memory of the host");
  }
  /// Waits for the last copies. Nothing here can be told that it failed.
  ~GpuHostLink() override {
    cudaEventSynchronize(copied_);  // tidy: synchronisation because no run is under way behind it
    cudaEventDestroy(copied_);
    cudaFreeHost(memory_);
  }

  char* memory() const override { return static_cast<char*>(memory_); }
  void copy(void* to, const void* from, int64_t bytes, Stream stream) override {
    auto* on = static_cast<cudaStream_t>(stream.handle);
    if (bytes > 0)
      check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, on), "copy counts of rows");
    mark(stream);
  }
  void mark(Stream stream) override {
    check(cudaEventRecord(copied_, static_cast<cudaStream_t>(stream.handle)), "record an event");
  }
  void await() override {
    // tidy: synchronisation because the host must know how many rows ranks exchange (decision 8)
    check(cudaEventSynchronize(copied_), "wait for counts of rows");
  }
  void await_device() override {
    const CurrentDevice current(index_);
    // tidy: synchronisation because who asks whether rows overflowed waits for graphs (decision 8)
    check(cudaDeviceSynchronize(), "wait for a verdict");
  }
  void fill(const TensorView& rows, int byte, Stream stream) override {
    const auto bytes = [&](int64_t count) { return size_t(bytes_for(rows.dtype, count)); };
    auto* on = static_cast<cudaStream_t>(stream.handle);
    if (elements(rows) == 0) return;
    check(is_contiguous(rows) ? cudaMemsetAsync(rows.data, byte, bytes(elements(rows)), on)
                              : cudaMemset2DAsync(rows.data, bytes(rows.stride[0]), byte,
                                                  bytes(rows[1]), size_t(rows[0]), on),
          "fill rows");
  }
  void make_places(const schedule::RowBlocks& blocks, Stream stream) override {
    cuda::make_places(blocks, static_cast<cudaStream_t>(stream.handle));
  }
  void judge(const schedule::RowBlocks& blocks, Stream stream) override {
    judge_blocks(blocks, static_cast<cudaStream_t>(stream.handle));
  }
  void spoil(const TensorView& rows, const int32_t* verdict, Stream stream) override {
    spoil_rows(rows, verdict, static_cast<cudaStream_t>(stream.handle));
  }
  void find_first_choices(const schedule::LeavingTokens& tokens, Stream stream) override {
    cuda::find_first_choices(tokens, static_cast<cudaStream_t>(stream.handle));
  }
  void number_tokens(const schedule::LeavingTokens& tokens, Stream stream) override {
    cuda::number_tokens(tokens, static_cast<cudaStream_t>(stream.handle));
  }
  void find_tokens(const schedule::ComingTokens& tokens, Stream stream) override {
    cuda::find_tokens(tokens, static_cast<cudaStream_t>(stream.handle));
  }

 private:
  int index_;
  cudaEvent_t copied_ = nullptr;
  void* memory_ = nullptr;
};

}  // namespace

std::unique_ptr<parallel::HostLink> host_link(const Device& device, int64_t bytes) {
  return std::make_unique<GpuHostLink>(device, bytes);
}

}  // namespace cadre::cuda
