#pragma once
#include <cmath>
#include <cstdint>
#include <span>

#include "apps/train/settings.h"
#include "apps/train/weights.h"
#include "cadre/host_device.h"

namespace cadre::train {

/// AdamW on fp32 master weights, with decoupled decay, bias correction and a clipped gradient:
///
///   g = grad * scale * min(1, 1 / |grad * scale|)      the norm is over all parameters
///   m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
///   w = w - rate * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * w)
struct AdamW {
  double rate = 1e-3;
  double decay = 0;
  double grad_scale = 1;  ///< what the gradients are multiplied with first
  int64_t step = 1;       ///< t, from 1
  double b1 = 0.9, b2 = 0.98, epsilon = 1e-8;

  /// What an element's update multiplies with.
  struct Factors {
    float mean_keep, square_keep, mean_scale, square_scale, rate, epsilon, shrink;

    /// Updates a weight w and its moments from the clipped gradient g.
    CADRE_HD void update(float g, float& w, float& m, float& v) const {
      m = mean_keep * m + (1 - mean_keep) * g;
      v = square_keep * v + (1 - square_keep) * g * g;
      const float direction = (m * mean_scale) / (std::sqrt(v * square_scale) + epsilon);
      w -= rate * direction + shrink * w;
    }
  };
  Factors factors(bool decays) const;

  /// The gradients' factor, from sum(grad^2) over all parameters.
  float clip(double squares) const;

  /// Updates values and moments on the CPU; returns the norm before clipping. Bits do not depend on
  /// threads.
  double update(std::span<const Weight>) const;
};

/// The learning rate of a step from 1 to s.steps: a straight rise over the warm-up, then half a
/// cosine down to a twentieth.
double learning_rate(const Settings&, int64_t step);

}  // namespace cadre::train
