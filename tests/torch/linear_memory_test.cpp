// What a layer of the door owns, from C++, so that sanitizers see it: Python does not start with
// their runtime. Numbers are compared by the tests in Python.
#include "torch/csrc/linear_memory.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <thread>

#include "torch/csrc/autograd.h"

namespace cadre::door {
namespace {

using c10::intrusive_ptr;
using c10::make_intrusive;

constexpr int64_t kExperts = 3, kRows = 11, kN = 64, kK = 32;

/// A layer as the module has it: parameters, a memory and its handle.
struct Layer {
  explicit Layer(bool packed, at::ScalarType type = at::kBFloat16) {
    const auto options = at::TensorOptions(type);
    const auto parameter = [&](at::IntArrayRef shape) {
      return at::randn(shape, options).set_requires_grad(true);
    };
    for (int64_t e = 0; e < (packed ? 1 : kExperts); ++e) {
      weight.push_back(packed ? parameter({kExperts, kN, kK}) : parameter({kN, kK}));
      bias.push_back(packed ? parameter({kExperts, kN}) : parameter({kN}));
    }
  }

  std::vector<Tensor> weight, bias;
  intrusive_ptr<LinearMemory> memory = make_intrusive<LinearMemory>();
  Tensor handle = LinearMemory::handle_of(memory);
};

struct Options {
  const char* recipe = "";
  std::optional<bool> first_microbatch{};
  bool deferred = false;
};

Tensor rows(at::ScalarType type = at::kBFloat16) {
  return at::randn({kRows, kK}, at::TensorOptions(type)).set_requires_grad(true);
}

Tensor offsets_tensor() { return at::tensor({0, 3, 3, 9}, at::kInt); }

Tensor step(const Layer& layer, const Tensor& x, const Options& o) {
  using Signature = Tensor(const Tensor&, const Tensor&, bool, TensorList, TensorList, const Maybe&,
                           Text, bool, std::optional<bool>, bool, bool, const Maybe&, const Maybe&,
                           const Maybe&, const Maybe&);
  static const auto call = op<Signature>("cadre::_linear_step");
  return call.call(x, offsets_tensor(), false, layer.weight, layer.bias, {}, o.recipe, false,
                   o.first_microbatch, false, o.deferred, {}, {}, {}, layer.handle);
}

void backward(const Tensor& y) { torch::autograd::backward({y}, {at::ones_like(y)}); }

class EveryLayout : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Packed, EveryLayout, testing::Bool());

TEST(LinearMemory, EitherNameKeepsIt) {
  Tensor handle;
  c10::weak_intrusive_ptr<LinearMemory> alive = [&] {
    const auto memory = make_intrusive<LinearMemory>();
    handle = LinearMemory::handle_of(memory);
    return c10::weak_intrusive_ptr<LinearMemory>(memory);
  }();
  ASSERT_FALSE(alive.expired());
  auto again = LinearMemory::of(handle);
  handle.reset();
  EXPECT_EQ(again->pending(), 0);
  again.reset();
  EXPECT_TRUE(alive.expired());
}

TEST(LinearMemory, OtherTensorsAreNoHandles) {
  EXPECT_THROW(LinearMemory::of(std::nullopt), c10::ValueError);
  EXPECT_THROW(LinearMemory::of(Tensor()), c10::ValueError);
  EXPECT_THROW(LinearMemory::of(at::zeros({3})), c10::ValueError);
  EXPECT_THROW(LinearMemory::of(at::zeros({0})), c10::ValueError);
  EXPECT_THROW(LinearMemory::of(at::empty({3}, at::kMeta)), c10::ValueError);
  // Copies hold nothing; views are the same memory.
  const auto memory = make_intrusive<LinearMemory>();
  const Tensor handle = LinearMemory::handle_of(memory);
  EXPECT_THROW(LinearMemory::of(handle.clone()), c10::ValueError);
  EXPECT_EQ(LinearMemory::of(handle.detach()), memory);
}

TEST_P(EveryLayout, EverythingKeptDiesWithTheLayer) {
  for (const char* recipe : {"", "mxfp8", "nvfp4", "fp8_block"}) {
    c10::weak_intrusive_ptr<LinearMemory> alive = [&] {
      const Layer layer(GetParam());
      for (const bool first : {true, false}) backward(step(layer, rows(), {recipe, first, true}));
      EXPECT_EQ(layer.memory->pending(), 2);
      return c10::weak_intrusive_ptr<LinearMemory>(layer.memory);
    }();
    EXPECT_TRUE(alive.expired());
  }
}

TEST_P(EveryLayout, AGraphOutlivesItsLayer) {
  Tensor y, weight;
  {
    const Layer layer(GetParam());
    y = step(layer, rows(), {"mxfp8", true, true});
    weight = layer.weight[0];
  }
  backward(y);
  EXPECT_FALSE(weight.grad().defined());
}

TEST_P(EveryLayout, PendingGradientsAreComputedOnce) {
  const Layer layer(GetParam());
  for (int i = 0; i < 3; ++i) backward(step(layer, rows(), {"mxfp8", true, true}));
  layer.memory->run_next();
  ASSERT_TRUE(layer.weight[0].grad().defined());
  layer.memory->discard();
  layer.memory->run_next();
  EXPECT_EQ(layer.memory->pending(), 0);
}

TEST_P(EveryLayout, WeightsThatAreGoneOrChangedAreRefused) {
  Layer layer(GetParam());
  backward(step(layer, rows(), {"", std::nullopt, true}));
  {
    const at::NoGradGuard no_grad;
    layer.weight[0].add_(1);
  }
  EXPECT_THROW(layer.memory->run_next(), c10::Error);
  layer.weight.clear();
  EXPECT_THROW(layer.memory->run_next(), c10::Error);
  EXPECT_EQ(layer.memory->pending(), 1);
}

TEST_P(EveryLayout, AutocastsCopiesLiveAsLongAsTheyArePending) {
  const Layer layer(GetParam(), at::kFloat);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const Tensor y = step(layer, rows(at::kFloat), {"", std::nullopt, true});
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  backward(y);
  layer.memory->run_next();
  EXPECT_EQ(layer.weight[0].grad().scalar_type(), at::kFloat);
}

TEST(LinearMemory, ThreadsShareIt) {
  const Layer layer(true);
  constexpr int kRounds = 20;  // copies are made once or twice, and never again where they lie
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) backward(step(layer, rows(), {"mxfp8", false, true}));
    });
  for (int done = 0; done < kRounds;) {
    if (layer.memory->pending() == 0) continue;
    layer.memory->run_next();
    ++done;
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(layer.memory->pending(), kRounds);
}

CopiesKey key_of(const Tensor& weight) {
  return {weight.device(), weight.scalar_type(), "mxfp8", true, 100, *content_of(weight)};
}

TEST(LinearMemory, CopiesAreThoseOfTheContent) {
  const auto memory = make_intrusive<LinearMemory>();
  const Tensor weight = at::randn({2, 5, 7});
  const auto [first, written] = memory->copies(key_of(weight), false, weight);
  EXPECT_TRUE(written);
  EXPECT_TRUE(memory->copies(key_of(weight), false, weight).second) << "not written yet";
  memory->keep(key_of(weight), first);
  const auto [same, again] = memory->copies(key_of(weight), false, weight);
  EXPECT_TRUE(same.is_same(first) && !again);
  weight.data().view({-1})[69].neg_();
  const auto [other, changed] = memory->copies(key_of(weight), false, weight);
  EXPECT_TRUE(!other.is_same(first) && changed);
}

TEST(LinearMemory, MemoryOfCopiesIsUsedAgainWhenTheyAreMadeAnew) {
  const auto memory = make_intrusive<LinearMemory>();
  const Tensor weight = at::randn({2, 5, 7});
  memory->keep(key_of(weight), memory->copies(key_of(weight), true, weight).first);
  const void* first = memory->copies(key_of(weight), false, weight).first.const_data_ptr();
  weight.add_(1);
  const auto [again, written] = memory->copies(key_of(weight), true, weight);
  EXPECT_TRUE(again.const_data_ptr() == first && written);
  EXPECT_TRUE(memory->copies(key_of(weight), false, weight).second) << "being written";
}

TEST(LinearMemory, CopiesThatACallHoldsAreNotOverwritten) {
  const auto memory = make_intrusive<LinearMemory>();
  const Tensor weight = at::randn({2, 5, 7});
  const Tensor held = memory->copies(key_of(weight), true, weight).first;
  memory->keep(key_of(weight), held);
  EXPECT_NE(memory->copies(key_of(weight), true, weight).first.const_data_ptr(),
            held.const_data_ptr());
}

TEST(ContentOf, EveryByteCounts) {
  for (const int64_t count : {1, 7, 8, 31, 32, 33, 64, 100}) {
    const Tensor bytes = at::arange(count, at::kByte);
    const auto before = content_of(bytes);
    for (int64_t i = 0; i < count; ++i) {
      bytes[i].bitwise_xor_(128);
      EXPECT_NE(content_of(bytes), before) << i << " of " << count;
      bytes[i].bitwise_xor_(128);
    }
    EXPECT_EQ(content_of(bytes), before);
  }
}

TEST(ContentOf, TensorsAndTheirOrderCount) {
  const Tensor a = at::randn({4, 8}), b = at::randn({4, 8});
  EXPECT_NE(content_of({a, b}), content_of({b, a}));
  EXPECT_NE(content_of({a, a}), content_of({a}));
  EXPECT_NE(content_of({at::zeros({2})}), content_of({at::zeros({3})}));
  EXPECT_NE(content_of({a.t()}), content_of({a})) << "the same bytes by other strides";
  EXPECT_EQ(content_of({a.t()}), content_of({a.clone().t()}));
  EXPECT_NE(content_of({a.slice(1, 0, 4)}), content_of({a.slice(1, 1, 5)}));
  EXPECT_FALSE(content_of({at::empty({2}, at::kMeta)}).has_value());
}

TEST(Parameters, WhatDoesNotFitIsRefused) {
  const Tensor offsets = offsets_tensor(), w = at::zeros({kN, kK});
  const auto refused = [&](std::vector<Tensor> list) {
    EXPECT_THROW(Parameters(list, "weight", offsets, 2), c10::Error);
  };
  refused({});
  refused({w});
  refused({w, w, w, w});
  refused({w, w, w.to(at::kBFloat16)});
  refused({w, w, at::zeros({kN, kK + 1})});
  refused({w, w, at::zeros({kK, kN}).t()});
  refused({at::zeros({kExperts + 1, kN, kK})});
  refused({at::zeros({kK})});
  refused({w.slice(1, 0, 8), w.slice(1, 0, 8), w.slice(1, 0, 8)});
  EXPECT_TRUE(Parameters(std::vector<Tensor>{w, w, w}, "weight", offsets, 2).discrete);
}

TEST(Device, OthersAreRefused) {
  try {
    device(at::empty({1}, at::kMeta));
    FAIL() << "no error";
  } catch (const c10::NotImplementedError& error) {
    const std::string_view start =
        "device is meta, must be cpu or a CUDA device; this build of Cadre sees ";
    EXPECT_EQ(error.msg().substr(0, start.size()), start);
  }
}

TEST(Parameters, SlicesAreTensorsOfTheirOwn) {
  const std::vector<Tensor> like{at::zeros({3, 5}), at::zeros({3, 5}), at::zeros({3, 5})};
  std::vector<Tensor> made = slices_like(like);
  for (size_t e = 0; e < made.size(); ++e) made[e].fill_(double(e));
  const Tensor last = made.back();
  made.clear();
  EXPECT_EQ(last.sum().item<float>(), 30);
  EXPECT_EQ(empty_like(like).size(), 3);
}

}  // namespace
}  // namespace cadre::door
