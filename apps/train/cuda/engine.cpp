// The engine whose device is a GPU.
#include "apps/train/engine.h"

#include <array>
#include <cstring>

#include "apps/train/buffer.h"
#include "apps/train/cuda/kernels.h"
#include "cadre/error.h"
#include "cuda/check.h"

namespace cadre::train {
namespace {

using cadre::cuda::check;

/// Pinned memory through which the host uploads: the caller goes on while the DMA engine copies,
/// and waits only where all pieces are in flight.
class PinnedUploads {
 public:
  PinnedUploads() {
    for (Piece& piece : pieces_) {
      check(cudaMallocHost(&piece.data, kPieceBytes), "take pinned memory");
      check(cudaEventCreateWithFlags(&piece.sent, cudaEventDisableTiming), "make an event");
    }
  }
  PinnedUploads(const PinnedUploads&) = delete;
  PinnedUploads& operator=(const PinnedUploads&) = delete;
  ~PinnedUploads() {
    for (const Piece& piece : pieces_) {
      cudaEventDestroy(piece.sent);
      cudaFreeHost(piece.data);
    }
  }

  void send(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
    for (int64_t at = 0; at < bytes; at += kPieceBytes) {
      const auto length = static_cast<size_t>(std::min(kPieceBytes, bytes - at));
      const Piece& piece = pieces_[next_++ % pieces_.size()];
      check(cudaEventSynchronize(piece.sent), "wait for a copy");
      std::memcpy(piece.data, static_cast<const char*>(from) + at, length);
      check(cudaMemcpyAsync(static_cast<char*>(to) + at, piece.data, length, cudaMemcpyHostToDevice,
                            stream),
            "copy to the device");
      check(cudaEventRecord(piece.sent, stream), "record an event");
    }
  }

 private:
  static constexpr int64_t kPieceBytes = 1 << 20;
  struct Piece {
    void* data = nullptr;
    cudaEvent_t sent = nullptr;
  };
  std::array<Piece, 8> pieces_;
  size_t next_ = 0;
};

class CudaEngine final : public Engine {
 public:
  explicit CudaEngine(const Device& device) : device_(device) {
    check(cudaSetDevice(device.index), "choose the device");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "make a stream");
    uploads_.emplace();
  }
  ~CudaEngine() override {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  const Device& device() const override { return device_; }
  std::string name() const override {
    cudaDeviceProp all;
    check(cudaGetDeviceProperties(&all, device_.index), "read the device's name");
    return text(all.name, " (", to_string(device_), ")");
  }
  Stream stream() const override { return {stream_}; }
  bool is_host() const override { return false; }

  void* take(int64_t bytes) override {
    void* data = nullptr;
    if (bytes == 0) return data;
    const cudaError_t code = cudaMalloc(&data, static_cast<size_t>(bytes));
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // or the next launch would report it
      throw DeviceError(text("train: ", name(), " has no ", bytes,
                             " bytes left; lower --rows, --hidden, --features or --experts"));
    }
    check(code, "take memory of the GPU");
    clear(data, bytes);
    return data;
  }
  void give_back(void* data) noexcept override { cudaFree(data); }
  void upload(void* to, const void* from, int64_t bytes) override {
    uploads_->send(to, from, bytes, stream_);
  }
  void download(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
          "copy from the device");
    check(cudaStreamSynchronize(stream_), "wait for the device");
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_),
          "copy on the device");
  }
  void clear(void* to, int64_t bytes) override {
    check(cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), stream_), "clear memory");
  }

  void cast(DType dtype, void* to, const float* from, int64_t count) override {
    if (dtype == DType::kF32) return copy(to, from, count * int64_t{sizeof(float)});
    cuda::cast_to_bf16(static_cast<uint16_t*>(to), from, count, stream_);
  }
  void add(DType dtype, float* to, const void* from, int64_t count) override {
    if (dtype == DType::kF32) {
      cuda::add_f32(to, static_cast<const float*>(from), count, stream_);
    } else {
      cuda::add_bf16(to, static_cast<const uint16_t*>(from), count, stream_);
    }
  }
  void embed(const WindowArgs& args, const float* table, float* x) override {
    cuda::embed(args, table, x, stream_);
  }
  void embed_backward(const WindowArgs& args, const float* dx, float* dtable) override {
    cuda::embed_backward(args, dx, dtable, stream_);
  }
  void norm(const NormArgs& args, float* u) override { cuda::norm(args, u, stream_); }
  void norm_backward(const NormArgs& args, const float* du, float* dx, float* dgain) override {
    auto* partial = scratch<float>(cuda::norm_scratch(args));
    cuda::norm_backward(args, {du, dx, dgain, partial}, stream_);
  }
  void cross_entropy(float* logits, const uint8_t* targets, int64_t rows, double* loss) override {
    cuda::cross_entropy({logits, targets, rows, loss, scratch<double>(rows)}, stream_);
  }
  void balance(const LoadArgs& args, float weight, float* dscore, int64_t tokens) override {
    cuda::balance(args, weight, dscore, tokens * args.experts, stream_);
  }
  void count_rows(const LoadArgs& args, int64_t* load) override {
    cuda::count_rows(args, load, stream_);
  }
  void update(const AdamW& adamw, std::span<const Weight> weights) override {
    cuda::adamw(adamw, weights, scratch<double>(cuda::adamw_scratch(weights)), stream_);
  }

 private:
  /// The largest so far, so that no step but the first allocates. One call of the stream uses it at
  /// a time.
  template <class T>
  T* scratch(int64_t count) {
    const int64_t bytes = count * int64_t{sizeof(T)};
    if (bytes > scratch_.size()) scratch_ = Buffer<std::byte>(*this, bytes);
    return reinterpret_cast<T*>(scratch_.data());
  }

  Device device_;
  cudaStream_t stream_ = nullptr;
  std::optional<PinnedUploads> uploads_;
  Buffer<std::byte> scratch_;
};

}  // namespace

std::unique_ptr<Engine> open_cuda_engine(const Device& device) {
  return std::make_unique<CudaEngine>(device);
}

}  // namespace cadre::train
