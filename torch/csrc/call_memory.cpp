#include "call_memory.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <deque>
#include <set>

namespace cadre::door {
namespace {

/// What lies within is there `count` times, `step` bytes apart.
struct Copies {
  int64_t step, count;
};

/// The bytes of a tensor: `run` of them, copied, and all that copied again, by ever smaller steps.
struct Bytes {
  std::vector<Copies> copies;
  int64_t run;

  /// From `first` on.
  int64_t length(size_t first) const {
    int64_t all = run;
    for (size_t i = first; i < copies.size(); ++i) all += copies[i].step * (copies[i].count - 1);
    return all;
  }
};

Bytes bytes_of(const Tensor& t) {
  std::vector<Copies> found;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) > 0)
      found.push_back({t.stride(d) * int64_t(t.element_size()), t.size(d)});
  std::sort(found.begin(), found.end(),
            [](const Copies& a, const Copies& b) { return a.step > b.step; });
  Bytes bytes{{}, int64_t(t.element_size())};
  for (; !found.empty() && found.back().step == bytes.run; found.pop_back())
    bytes.run *= found.back().count;
  bytes.copies = std::move(found);
  return bytes;
}

/// A part of the bytes: what is left of the copies from `first` on.
struct Part {
  const Bytes& bytes;
  size_t first = 0;

  int64_t length() const { return bytes.length(first); }
  int64_t step() const { return first < bytes.copies.size() ? bytes.copies[first].step : 0; }
  /// How often what is within is there by that step, and what that is.
  int64_t count(int64_t by) const { return step() == by ? bytes.copies[first].count : 1; }
  Part within(int64_t by) const { return {bytes, first + (step() == by ? 1 : 0)}; }
};

/// Whether b, which begins `shift` bytes behind a, has a byte of it.
bool meet(const Part& a, const Part& b, int64_t shift) {
  if (shift >= a.length() || -shift >= b.length()) return false;
  const int64_t step = std::max(a.step(), b.step());
  if (step == 0) return true;
  const Part in_a = a.within(step), in_b = b.within(step);
  // Only how many steps a's copy is behind b's counts: those where the two could meet.
  const int64_t least = std::max(1 - b.count(step), (shift - in_a.length()) / step - 1);
  const int64_t most = std::min(a.count(step) - 1, (shift + in_b.length()) / step + 1);
  for (int64_t steps = least; steps <= most; ++steps)
    if (meet(in_a, in_b, shift - steps * step)) return true;
  return false;
}

bool lie_alike(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; a.sizes() == b.sizes() && d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return a.sizes() == b.sizes();
}

/// Errors    ValueError for tensors of which an operator would lose what is more than numbers.
void require_numbers(TensorList list, const char* name) {
  for (const Tensor& t : list) {
    if (!t.defined()) continue;
    TORCH_CHECK_VALUE(!c10::GradMode::is_enabled() || !t.requires_grad(), name,
                      " requires grad, must not; what is written into out has no gradient, so "
                      "call the operator in torch.no_grad()");
    TORCH_CHECK_VALUE(!t.is_neg() && !t.is_conj(), name,
                      " is a negated view, must be numbers as they lie; give resolve_neg()");
  }
}

}  // namespace

void CallMemory::add(TensorList list, const char* what, bool written, bool may_be_written) {
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor& t = list[i];
    const auto* begin = t.defined() ? static_cast<const char*>(t.const_data_ptr()) : nullptr;
    if (!begin || t.numel() == 0) continue;
    const bool has_gaps = !t.is_non_overlapping_and_dense();
    const size_t bytes = has_gaps ? t.element_size() : t.nbytes();
    const int64_t expert = list.size() > 1 ? int64_t(i) : -1;
    blocks_.push_back({begin, begin + bytes, what, expert, written, may_be_written, has_gaps, t});
  }
}

std::string CallMemory::name(const Block& b) {
  return b.expert < 0 ? b.what : b.what + (" of expert " + std::to_string(b.expert));
}

bool CallMemory::is_an_output(const Block& b) const {
  return b.may_be_written && std::any_of(blocks_.begin(), blocks_.end(), [&](const Block& out) {
           return out.written && out.begin == b.begin && lie_alike(out.tensor, b.tensor);
         });
}

void CallMemory::refuse(const Block& a, const Block& b) {
  const Block &written = a.written ? a : b, &other = a.written ? b : a;
  TORCH_CHECK_VALUE(false, name(written), " shares memory with ", name(other), ", must not; ",
                    other.written ? "both are written" : "it is written while that is read");
}

void CallMemory::require_apart_from_gaps() const {
  if (std::none_of(blocks_.begin(), blocks_.end(), [](const Block& b) { return b.has_gaps; }))
    return;
  std::vector<Bytes> bytes;
  for (const Block& b : blocks_) bytes.push_back(bytes_of(b.tensor));
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block& a = blocks_[i];
    for (size_t j = 0; a.has_gaps && j < blocks_.size(); ++j) {
      const Block& b = blocks_[j];
      if (i != j && (a.written || b.written) && meet({bytes[i]}, {bytes[j]}, b.begin - a.begin) &&
          !is_an_output(a) && !is_an_output(b))
        refuse(a, b);
    }
  }
}

void CallMemory::require_apart() {
  std::sort(blocks_.begin(), blocks_.end(), [](const Block& a, const Block& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.expert < b.expert;
  });
  const Block *last = nullptr, *last_written = nullptr;  // of those before, whose end comes last
  const auto reach = [](const Block*& last_of, const Block& b) {
    if (!last_of || b.end > last_of->end) last_of = &b;
  };
  for (const Block& b : blocks_) {
    if (is_an_output(b)) continue;
    const Block* before = b.written ? last : last_written;
    if (before && b.begin < before->end) refuse(b, *before);
    reach(last, b);
    if (b.written) reach(last_written, b);
  }
  require_apart_from_gaps();
}

void take_views(const std::string& overload) {
  static std::set<std::string> taken;
  static std::deque<torch::Library> libraries;
  if (!taken.insert(overload).second) return;  // the kernels of another device
  for (const auto key : {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate})
    libraries.emplace_back(torch::Library::IMPL, "cadre", key, __FILE__, __LINE__)
        .impl(overload.c_str(), torch::CppFunction::makeFallthrough());
}

void add_argument(CallMemory& memory, const c10::Argument& a, TensorList list) {
  const bool written = a.alias_info() && a.alias_info()->isWrite();
  const char* const name = a.name().c_str();
  require_numbers(list, name);
  if (a.name() == "c")  // of grouped_gemm
    memory.reads_in_place(list, name);
  else
    written ? memory.writes(list, name) : memory.reads(list, name);
}

}  // namespace cadre::door
