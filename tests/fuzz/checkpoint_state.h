#pragma once
#include "apps/train/checkpoint.h"

namespace cadre::fuzz {

/// The state of a small run, after two of its steps.
inline train::RunState small_state() {
  train::Settings s;
  s.window = s.experts = s.top_k = s.blocks = 1;
  s.hidden = s.features = 16;
  s.steps = 3;
  train::RunState state = train::initial_state(s, "mxfp8");
  state.recipes = {"bf16", "mxfp8"};
  state.paths = {"a \"b\"", "caf\xE9"};
  state.fingerprint = 0xDEADBEEF;
  state.step = 2;
  state.history.loss = {5.5, 5.25};
  state.history.eval_step = {2};
  state.history.eval_bits = {7.25};
  for (train::Parameter& p : state.parameters) {
    p.mean = p.value;
    p.square.assign(p.value.size(), 0.5f);
  }
  return state;
}

/// The file of a state, as it is written.
inline std::vector<uint8_t> file_of(const train::RunState& state) {
  const train::SafeTensors file = to_safetensors(state);
  std::string header;
  std::vector<uint8_t> bytes;
  for (const auto& part : safetensors_parts(file, header))
    bytes.insert(bytes.end(), part.begin(), part.end());
  return bytes;
}

/// Bytes of the header and of its length.
inline size_t header_bytes(const std::vector<uint8_t>& file) {
  size_t length = 8;
  for (size_t i = 0; i < 8; ++i) length += size_t{file[i]} << 8 * i;
  return length;
}

}  // namespace cadre::fuzz
