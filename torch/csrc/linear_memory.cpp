#include "linear_memory.h"

#include <ATen/ops/_foreach_add.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "arguments.h"

namespace cadre::door {
namespace {

std::optional<c10::Stream> stream_of(const Tensor& t) {
  if (t.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device());
}

std::vector<int64_t> versions_of(const PendingWgrad& w) {
  std::vector<int64_t> versions;
  for (const Tensor& t : w.parameters) versions.push_back(t._version());
  versions.push_back(w.dy._version());
  versions.push_back(w.x._version());
  return versions;
}

void require_unchanged(const PendingWgrad& w) {
  const std::vector<int64_t> now = versions_of(w);
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] == w.versions[i]) continue;
    const size_t weights = w.parameters.size();
    const std::string name = i < weights    ? "weight " + std::to_string(i)
                             : i == weights ? "dy"
                                            : "x";
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
    sums.push_back(grad);
    parts.push_back(dweight[e]);
  }
  if (!sums.empty()) at::_foreach_add_(sums, parts);
}

/// By number. Few layers are made, so those that are gone stay as empty pointers.
struct LiveMemories {
  std::mutex mutex;
  std::vector<c10::weak_intrusive_ptr<LinearMemory>> all;
};
LiveMemories& live_memories() {
  static LiveMemories one;
  return one;
}

}  // namespace

int64_t LinearMemory::id_of(const c10::intrusive_ptr<LinearMemory>& memory) {
  const std::lock_guard lock(live_memories().mutex);
  live_memories().all.emplace_back(memory);
  return int64_t(live_memories().all.size());
}

c10::intrusive_ptr<LinearMemory> LinearMemory::of(int64_t id) {
  c10::intrusive_ptr<LinearMemory> found;
  {
    const std::lock_guard lock(live_memories().mutex);
    if (id >= 1 && id <= int64_t(live_memories().all.size()))
      found = live_memories().all[size_t(id - 1)].lock();
  }
  TORCH_CHECK_VALUE(found, "memory is ", id, ", must be the id() of a LinearMemory that lives");
  return found;
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

void LinearMemory::push(PendingWgrad wgrad) {
  wgrad.versions = versions_of(wgrad);
  wgrad.stream = stream_of(wgrad.dy);
  const std::lock_guard lock(mutex_);
  wgrads_.push_back(std::move(wgrad));
}

void LinearMemory::run_next() {
  const at::NoGradGuard no_grad;
  PendingWgrad w;
  {
    const std::lock_guard lock(mutex_);
    if (wgrads_.empty()) return;
    require_unchanged(wgrads_.front());
    w = std::move(wgrads_.front());
    wgrads_.pop_front();
  }
  keep_for_this_stream(w);
  const std::vector<Tensor> dweight = w.into.empty() ? slices_like(w.parameters) : w.into;
  const std::optional<Tensor> none;
  translate_errors([&] {
    run_wgrad({w.dy, w.x, w.saved, w.pending, w.flags},
              {w.x, w.offsets, w.weight, {}, none, none, w.wants, w.recipe, w.save_input},
              w.accumulate, dweight);
  });
  if (w.into.empty()) return add_to_grad(w.parameters, dweight);
  bump_versions(w.into);
}

std::pair<Tensor, bool> LinearMemory::cache(const CacheKey& key, bool refresh, const Tensor& on) {
  const std::lock_guard lock(mutex_);
  if (key_ == key) return {cache_, refresh};
  cache_ = bytes(key.bytes, on);
  key_ = key;
  return {cache_, true};
}

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.class_<LinearMemory>("LinearMemory")
      .def(torch::init<>())
      .def("pending", &LinearMemory::pending)
      .def("run_next", &LinearMemory::run_next)
      .def("discard", &LinearMemory::discard)
      .def("id", &LinearMemory::id_of);
}

}  // namespace cadre::door
