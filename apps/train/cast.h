#pragma once
#include <cstdint>

#include "apps/train/buffer.h"
#include "cadre/dtype.h"

namespace cadre::train {

/// A tensor between the products: f32 or bf16, as the recipe wants it.
class Cast {
 public:
  Cast() = default;
  Cast(Engine& engine, DType dtype, int64_t count)
      : engine_(&engine), dtype_(dtype), count_(count), bytes_(engine, bytes_for(dtype, count)) {}

  DType dtype() const { return dtype_; }
  void* data() const { return bytes_.data(); }

  /// Takes as many values as it holds, rounded to the type.
  void store(const float* values) const { engine_->cast(dtype_, data(), values, count_); }

  /// Adds what is stored to `values`.
  void add_to(float* values) const { engine_->add(dtype_, values, data(), count_); }

 private:
  Engine* engine_ = nullptr;
  DType dtype_ = DType::kF32;
  int64_t count_ = 0;
  Buffer<std::byte> bytes_;
};

}  // namespace cadre::train
