#pragma once
#include <cstdint>
#include <string>

#include "apps/train/checkpoint.h"
#include "apps/train/engine.h"

namespace cadre::train {

/// How text is drawn from a model.
struct SampleOptions {
  std::string prompt;        ///< continued; empty: the start of a document
  int64_t bytes = 400;       ///< at most; a document that ends stops the sample
  double temperature = 0.7;  ///< divides the scores; 0: the likeliest byte
};

/// Draws bytes one by one until a signal comes. The same state and options give the same text on
/// one engine.
std::string sample_text(Engine&, const RunState&, const SampleOptions&);

}  // namespace cadre::train
