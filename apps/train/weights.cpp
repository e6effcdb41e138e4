#include "apps/train/weights.h"

namespace cadre::train {

Weights::Weights(Engine& engine, std::vector<Parameter>& parameters) {
  const auto reach = [&](std::vector<float>& values) {
    return mirrors_.emplace_back(engine, std::span(values)).data();
  };
  for (Parameter& p : parameters) {
    Weight weight;
    weight.value = reach(p.value);
    weight.mean = reach(p.mean);
    weight.square = reach(p.square);
    weight.count = elements(p);
    weight.decays = p.decays;
    weight.grad = grads_.emplace_back(engine, weight.count).data();
    list_.push_back(weight);
  }
}

Weights::Weights(Engine& engine, const std::vector<Parameter>& parameters) {
  for (const Parameter& p : parameters) {
    auto* values = const_cast<float*>(p.value.data());  // read only: see the header
    mirrors_.emplace_back(engine, std::span(values, p.value.size()));
    list_.push_back({mirrors_.back().data(), nullptr, nullptr, nullptr, elements(p), p.decays});
  }
}

void Weights::fetch() const {
  for (const Mirror<float>& mirror : mirrors_) mirror.fetch();
}

}  // namespace cadre::train
