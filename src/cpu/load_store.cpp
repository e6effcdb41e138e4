#include "cpu/load_store.h"

#include "cpu/clones.h"

namespace cadre::cpu {
namespace {

template <class Float>
CADRE_CLONES void load(const void* data, Run run, float* to) {
  const auto* from = static_cast<const typename Float::Code*>(data) + run.at;
  if (run.step == 1)
    for (int i = 0; i < run.count; ++i) to[i] = Float::decode(from[i]);
  else
    for (int i = 0; i < run.count; ++i) to[i] = Float::decode(from[i * run.step]);
}

template <class Float>
CADRE_CLONES void store(void* data, Run run, const float* from) {
  auto* to = static_cast<typename Float::Code*>(data) + run.at;
  if (run.step == 1)
    for (int i = 0; i < run.count; ++i) to[i] = Float::encode(from[i]);
  else
    for (int i = 0; i < run.count; ++i) to[i * run.step] = Float::encode(from[i]);
}

}  // namespace

LoadRun load_run(DType dtype) {
  LoadRun chosen = nullptr;
  visit_float(dtype, [&]<class Float>(Float) { chosen = load<Float>; });
  return chosen;
}

StoreRun store_run(DType dtype) {
  StoreRun chosen = nullptr;
  visit_float(dtype, [&]<class Float>(Float) { chosen = store<Float>; });
  return chosen;
}

}  // namespace cadre::cpu
