#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cadre/device.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"

namespace cadre::train {

struct AdamW;
struct Weight;

/// Rows of bytes before the ones to predict; see WindowEmbedding.
struct WindowArgs {
  const uint8_t* windows = nullptr;  ///< [T, W]
  int64_t rows = 0;                  ///< T
  int64_t window = 0;                ///< W
  int64_t hidden = 0;                ///< H
};

/// One norm; see RmsNorm.
struct NormArgs {
  const float* x = nullptr;     ///< [T, H]
  const float* gain = nullptr;  ///< [H]
  float* rstd = nullptr;        ///< [T], written by forward, read by backward
  int64_t rows = 0;             ///< T
  int64_t width = 0;            ///< H
};

/// What one block routed; see balance_gradient.
struct LoadArgs {
  const int32_t* offsets = nullptr;  ///< [E + 1]
  int64_t experts = 0;               ///< E
};

/// The device that a network lives on: its memory, its stream, and the dense operations that the
/// library does not have. All tensors are in its memory. Work is done in the order of the calls; on
/// a GPU a call only enqueues it, but for `download`, which waits for everything before it. Sums
/// have a fixed order: equal calls give equal bits.
class Engine {
 public:
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  virtual const Device& device() const = 0;
  /// For people: "CPU", or "NVIDIA H200 (sm_90)".
  virtual std::string name() const = 0;
  virtual Stream stream() const = 0;
  /// Memory of the host is memory of the engine, and every call is done when it returns.
  virtual bool is_host() const = 0;

  /// 256-byte aligned, zero.
  virtual void* take(int64_t bytes) = 0;
  virtual void give_back(void*) noexcept = 0;
  /// `from` is memory of the host and may change once the call returns.
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;
  virtual void download(void* to, const void* from, int64_t bytes) = 0;
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;
  virtual void clear(void* to, int64_t bytes) = 0;

  /// to[i] = from[i], rounded to `dtype`: f32 or bf16.
  virtual void cast(DType dtype, void* to, const float* from, int64_t count) = 0;
  /// to[i] += from[i].
  virtual void add(DType dtype, float* to, const void* from, int64_t count) = 0;
  virtual void embed(const WindowArgs&, const float* table, float* x) = 0;
  virtual void embed_backward(const WindowArgs&, const float* dx, float* dtable) = 0;
  virtual void norm(const NormArgs&, float* u) = 0;
  virtual void norm_backward(const NormArgs&, const float* du, float* dx, float* dgain) = 0;
  /// Adds the loss of the first `rows` rows to `*loss`; see cross_entropy.
  virtual void cross_entropy(float* logits, const uint8_t* targets, int64_t rows, double* loss) = 0;
  /// dscore [T, E] of the balance loss.
  virtual void balance(const LoadArgs&, float weight, float* dscore, int64_t tokens) = 0;
  /// load[e] += the rows of expert e.
  virtual void count_rows(const LoadArgs&, int64_t* load) = 0;
  virtual void update(const AdamW&, std::span<const Weight>) = 0;
};

/// The engine of a device of this machine.
/// Errors    Unsupported for a GPU in a build without CUDA.
std::unique_ptr<Engine> open_engine(const Device&);

std::unique_ptr<Engine> open_cpu_engine();
std::unique_ptr<Engine> open_cuda_engine(const Device&);

}  // namespace cadre::train
