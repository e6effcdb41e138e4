#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "apps/train/buffer.h"
#include "apps/train/parameter.h"

namespace cadre::train {

/// One parameter within the reach of an engine.
struct Weight {
  float* value = nullptr;
  float* grad = nullptr;  ///< this and the moments are absent where nothing is learnt
  float* mean = nullptr;
  float* square = nullptr;
  int64_t count = 0;
  bool decays = true;
};

/// The parameters within the reach of an engine. On the CPU they are the parameters themselves,
/// which must outlive this.
class Weights {
 public:
  /// For training.
  Weights(Engine&, std::vector<Parameter>&);
  /// Values only, which nobody writes.
  Weights(Engine&, const std::vector<Parameter>&);

  std::span<const Weight> list() const { return list_; }

  /// Values and moments as the engine has left them reach the parameters.
  void fetch() const;

 private:
  std::vector<Mirror<float>> mirrors_;
  std::vector<Buffer<float>> grads_;
  std::vector<Weight> list_;
};

}  // namespace cadre::train
