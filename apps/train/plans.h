#pragma once
#include <string>

#include "apps/train/dense.h"
#include "apps/train/settings.h"
#include "cadre/moe.h"

namespace cadre::train {

/// Whether gradients will be computed.
enum class Mode : uint8_t { kTrain, kPredict };

/// What a network is made for.
struct NetworkShape {
  Settings settings;
  Recipe recipe;
  int64_t rows = 0;  ///< T of every call
  Mode mode = Mode::kTrain;
};

/// Type of everything between the products: f32 for the recipe f32, else bf16.
DType row_type(const Recipe&);

/// How the operations of a block will run. All blocks of a network are alike.
struct BlockPlans {
  DensePlans router;
  MoePlan experts;

  int64_t workspace_bytes() const;
};

/// How everything that a network leaves to the library will run. Nothing is allocated.
struct NetworkPlans {
  NetworkShape shape;
  BlockPlans block;
  DensePlans head;

  int64_t workspace_bytes() const;
};

/// Errors    Unsupported naming the recipe, where an operation has no implementation.
NetworkPlans plan_network(const NetworkShape&, const Device&);

/// "grouped_gemm cpu_onednn, routing cpu_routing, ...": operations with all their implementations.
std::string implementations(const NetworkPlans&);

}  // namespace cadre::train
