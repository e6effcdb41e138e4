#include "linear_memory.h"

#include <ATen/ops/_foreach_add.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "arguments.h"

namespace cadre::door {
namespace {

std::optional<c10::Stream> stream_of(const Tensor& t) {
  if (t.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device());
}

std::vector<int64_t> versions_of(const PendingWgrad& w, TensorList parameters) {
  std::vector<int64_t> versions;
  for (const Tensor& t : parameters) versions.push_back(t._version());
  versions.push_back(w.dy._version());
  versions.push_back(w.x._version());
  versions.push_back(w.offsets._version());
  return versions;
}

/// Errors    RuntimeError for one that was destroyed.
std::vector<Tensor> living_parameters(const PendingWgrad& w) {
  std::vector<Tensor> parameters;
  for (const auto& weak : w.parameters) {
    const auto strong = weak.lock();
    TORCH_CHECK(strong, "backward_dw: weight ", parameters.size(),
                " is gone, must be the tensor of forward; it was replaced while the gradient was "
                "pending, so call backward_dw before, or discard_wgrad to drop it");
    parameters.emplace_back(strong);
  }
  return parameters;
}

void require_unchanged(const PendingWgrad& w, TensorList parameters) {
  const std::vector<int64_t> now = versions_of(w, parameters);
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] == w.versions[i]) continue;
    const size_t weights = parameters.size();
    constexpr std::array<const char*, 3> kBesides = {"dy", "x", "offsets"};
    const std::string name = i < weights ? "weight " + std::to_string(i) : kBesides[i - weights];
    TORCH_CHECK(false, "backward_dw: version of ", name, " is ", now[i], ", must be ",
                w.versions[i],
                " as in backward; it was changed while the gradient was pending, so call "
                "backward_dw before (the optimizer steps, a buffer is used again), or "
                "discard_wgrad to drop it");
  }
}

/// Memory that another stream read last is not given away before the current one has read it.
void keep_for_this_stream(const PendingWgrad& w) {
  const std::optional<c10::Stream> here = stream_of(w.dy);
  if (here == w.stream) return;
  for (const Tensor& t : {w.dy, w.x, w.saved, w.pending, w.offsets, w.flags.value_or(Tensor())})
    if (t.defined()) t.record_stream(*here);
}

/// As autograd adds to .grad.
void add_to_grad(const std::vector<Tensor>& parameters, const std::vector<Tensor>& dweight) {
  std::vector<Tensor> sums, parts;
  for (size_t e = 0; e < parameters.size(); ++e) {
    if (!parameters[e].requires_grad()) continue;
    Tensor& grad = parameters[e].mutable_grad();
    if (!grad.defined()) {
      grad = dweight[e];
      continue;
    }
    // A weight of several experts has one gradient: all at once would race for it.
    const auto same = [&](const Tensor& sum) { return sum.is_same(grad); };
    if (std::any_of(sums.begin(), sums.end(), same)) {
      grad.add_(dweight[e]);
      continue;
    }
    sums.push_back(grad);
    parts.push_back(dweight[e]);
  }
  if (!sums.empty()) at::_foreach_add_(sums, parts);
}

/// Mixes the bytes into `hash`, eight at a time, in four chains that the processor runs at once.
/// Each step is invertible, so one changed word always shows. What a product does to the highest
/// bit hangs on no other, so it is brought down and multiplied once more: words that change
/// together must not meet.
uint64_t mixed(uint64_t hash, const void* data, size_t bytes) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  const auto step = [](uint64_t chain) {
    chain *= kOdd;
    return std::rotl((chain ^ chain >> 32) * kOdd, 31);
  };
  constexpr size_t kChains = 4, kStep = kChains * sizeof(uint64_t);
  std::array<uint64_t, kChains> chains{hash, 1, 2, 3}, words{};
  const auto* from = static_cast<const char*>(data);
  for (size_t at = 0; at < bytes; at += kStep) {
    if (bytes - at < kStep) words = {};
    std::memcpy(words.data(), from + at, std::min(kStep, bytes - at));
    for (size_t c = 0; c < kChains; ++c) chains[c] = step(chains[c] ^ words[c]);
  }
  hash = bytes;
  for (const uint64_t chain : chains) hash = step(hash ^ chain);
  return hash;
}

/// Drops the reference that a handle holds.
void release(void* memory) {
  c10::intrusive_ptr<LinearMemory>::reclaim(static_cast<LinearMemory*>(memory));
}

}  // namespace

std::optional<uint64_t> content_of(TensorList weight) {
  uint64_t hash = 0;
  for (const Tensor& w : weight) {
    if (!w.is_cpu()) return std::nullopt;
    const Tensor dense = w.is_non_overlapping_and_dense() ? w : w.contiguous();
    hash = mixed(hash, dense.const_data_ptr(), dense.nbytes());
    hash = mixed(hash, dense.strides().data(), dense.strides().size() * sizeof(int64_t));
  }
  return hash;
}

Tensor LinearMemory::handle_of(const c10::intrusive_ptr<LinearMemory>& memory) {
  c10::intrusive_ptr<LinearMemory> reference = memory;
  LinearMemory* const owned = reference.release();
  c10::Storage storage({}, 0, c10::DataPtr(owned, owned, release, c10::kCPU));
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                  c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                  caffe2::TypeMeta::Make<uint8_t>());
}

c10::intrusive_ptr<LinearMemory> LinearMemory::of(const Maybe& handle) {
  LinearMemory* const found = handle && handle->defined() && handle->has_storage()
                                  ? handle->storage().data_ptr().cast_context<LinearMemory>(release)
                                  : nullptr;
  TORCH_CHECK_VALUE(found, "memory is ", handle ? "another tensor" : "None",
                    ", must be the handle() of a LinearMemory");
  return c10::intrusive_ptr<LinearMemory>::reclaim_copy(found);
}

int64_t LinearMemory::pending() {
  const std::lock_guard lock(mutex_);
  return int64_t(wgrads_.size());
}

void LinearMemory::discard() {
  std::deque<PendingWgrad> gone;  // freed behind the lock
  const std::lock_guard lock(mutex_);
  gone.swap(wgrads_);
}

void LinearMemory::push(PendingWgrad wgrad, TensorList parameters) {
  wgrad.versions = versions_of(wgrad, parameters);
  wgrad.stream = stream_of(wgrad.dy);
  for (size_t e = 0; e < parameters.size(); ++e) {
    wgrad.parameters.emplace_back(parameters[e].getIntrusivePtr());
    if (wgrad.weight[e].is_same(parameters[e])) wgrad.weight[e].reset();
  }
  const std::lock_guard lock(mutex_);
  wgrads_.push_back(std::move(wgrad));
}

void LinearMemory::run_next() {
  const at::NoGradGuard no_grad;
  PendingWgrad w;
  std::vector<Tensor> parameters;
  {
    const std::lock_guard lock(mutex_);
    if (wgrads_.empty()) return;
    parameters = living_parameters(wgrads_.front());
    require_unchanged(wgrads_.front(), parameters);
    w = std::move(wgrads_.front());
    wgrads_.pop_front();
  }
  for (size_t e = 0; e < parameters.size(); ++e)
    if (!w.weight[e].defined()) w.weight[e] = parameters[e];
  keep_for_this_stream(w);
  const std::vector<Tensor> dweight = w.into.empty() ? slices_like(parameters) : w.into;
  const std::optional<Tensor> none;
  translate_errors([&] {
    run_wgrad({w.dy, w.x, w.saved, w.pending, w.flags},
              {w.x, w.offsets, w.weight, {}, none, none, w.wants, w.recipe, w.save_input},
              w.accumulate, dweight);
  });
  if (w.into.empty()) return add_to_grad(parameters, dweight);
  bump_versions(w.into);
}

std::pair<Tensor, bool> LinearMemory::copies(const CopiesKey& key, bool anew, const Tensor& on) {
  const std::lock_guard lock(mutex_);
  if (!anew && key_ == key) return {copies_, false};
  // Nobody may see copies that are being written. Those of weights that changed without a word are
  // left alone: an earlier forward may have kept them for its backward.
  const Tensor kept = std::exchange(copies_, {});
  // So are those that a forward still needs for its backward, or another thread has just taken.
  const bool fits = anew && key_ && key_->device == key.device && key_->bytes == key.bytes &&
                    kept.use_count() == 1 && kept.storage().use_count() == 1;
  key_.reset();
  const c10::InferenceMode lasting(false);  // training calls may use them later
  return {fits ? kept : bytes(key.bytes, on), true};
}

void LinearMemory::keep(const CopiesKey& key, const Tensor& copies) {
  const std::lock_guard lock(mutex_);
  key_ = key;
  copies_ = copies;
}

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.class_<LinearMemory>("LinearMemory")
      .def(torch::init<>())
      .def("pending", &LinearMemory::pending)
      .def("run_next", &LinearMemory::run_next)
      .def("discard", &LinearMemory::discard)
      .def("handle", &LinearMemory::handle_of);
}

}  // namespace cadre::door
