// The engine whose device is the CPU: memory of the host, loops over threads.
#include <algorithm>
#include <cstring>
#include <new>

#include "apps/train/adamw.h"
#include "apps/train/balance.h"
#include "apps/train/bf16.h"
#include "apps/train/cross_entropy.h"
#include "apps/train/embedding.h"
#include "apps/train/engine.h"
#include "apps/train/rms_norm.h"

namespace cadre::train {
namespace {

constexpr std::align_val_t kAlignment{256};

template <class T>
std::span<T> span_of(T* data, int64_t count) {
  return {data, static_cast<size_t>(count)};
}

class CpuEngine final : public Engine {
 public:
  const Device& device() const override { return device_; }
  std::string name() const override { return "CPU"; }
  Stream stream() const override { return {}; }
  bool is_host() const override { return true; }

  void* take(int64_t bytes) override {
    void* data = ::operator new[](static_cast<size_t>(bytes), kAlignment);
    clear(data, bytes);
    return data;
  }
  void give_back(void* data) noexcept override { ::operator delete[](data, kAlignment); }
  void upload(void* to, const void* from, int64_t bytes) override { copy(to, from, bytes); }
  void download(void* to, const void* from, int64_t bytes) override { copy(to, from, bytes); }
  void copy(void* to, const void* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void clear(void* to, int64_t bytes) override {
    if (bytes > 0) std::memset(to, 0, static_cast<size_t>(bytes));
  }

  void cast(DType dtype, void* to, const float* from, int64_t count) override {
    if (dtype == DType::kF32) return copy(to, from, count * int64_t{sizeof(float)});
    auto* codes = static_cast<uint16_t*>(to);
#pragma omp parallel for
    for (int64_t i = 0; i < count; ++i) codes[i] = to_bf16(from[i]);
  }

  void add(DType dtype, float* to, const void* from, int64_t count) override {
    const auto* floats = static_cast<const float*>(from);
    const auto* codes = static_cast<const uint16_t*>(from);
    const bool plain = dtype == DType::kF32;
#pragma omp parallel for
    for (int64_t i = 0; i < count; ++i) to[i] += plain ? floats[i] : from_bf16(codes[i]);
  }

  void embed(const WindowArgs& a, const float* table, float* x) override {
    embedding(a).forward(span_of(table, table_size(a)), windows(a), span_of(x, a.rows * a.hidden));
  }
  void embed_backward(const WindowArgs& a, const float* dx, float* dtable) override {
    embedding(a).backward(span_of(dx, a.rows * a.hidden), windows(a),
                          span_of(dtable, table_size(a)));
  }

  void norm(const NormArgs& a, float* u) override {
    rms_norm(a).forward(span_of(u, a.rows * a.width));
  }
  void norm_backward(const NormArgs& a, const float* du, float* dx, float* dgain) override {
    const int64_t count = a.rows * a.width;
    rms_norm(a).backward(span_of(du, count), span_of(dx, count), span_of(dgain, a.width));
  }

  void cross_entropy(float* logits, const uint8_t* targets, int64_t rows, double* loss) override {
    *loss += train::cross_entropy(span_of(logits, rows * kSymbols), span_of(targets, rows));
  }

  void balance(const LoadArgs& a, float weight, float* dscore, int64_t tokens) override {
    balance_gradient(weight, counts(a), span_of(dscore, tokens * a.experts));
  }
  void count_rows(const LoadArgs& a, int64_t* load) override {
    const std::vector<int64_t> rows = counts(a);
    for (size_t e = 0; e < rows.size(); ++e) load[e] += rows[e];
  }

  void update(const AdamW& adamw, std::span<const Weight> weights) override {
    adamw.update(weights);
  }

 private:
  static WindowEmbedding<float> embedding(const WindowArgs& a) { return {a.window, a.hidden}; }
  static std::span<const uint8_t> windows(const WindowArgs& a) {
    return span_of(a.windows, a.rows * a.window);
  }
  static int64_t table_size(const WindowArgs& a) { return a.window * kSymbols * a.hidden; }
  static RmsNorm<float> rms_norm(const NormArgs& a) {
    return {span_of(a.x, a.rows * a.width), span_of(a.gain, a.width), span_of(a.rstd, a.rows)};
  }
  static std::vector<int64_t> counts(const LoadArgs& a) {
    std::vector<int64_t> rows;
    for (int64_t e = 0; e < a.experts; ++e) rows.push_back(a.offsets[e + 1] - a.offsets[e]);
    return rows;
  }

  Device device_ = this_cpu();
};

}  // namespace

std::unique_ptr<Engine> open_cpu_engine() { return std::make_unique<CpuEngine>(); }

}  // namespace cadre::train
