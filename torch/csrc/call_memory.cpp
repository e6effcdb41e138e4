#include "call_memory.h"

#include <algorithm>

namespace cadre::door {

void CallMemory::add(TensorList list, const char* what, bool written, bool may_be_written) {
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor& t = list[i];
    const auto* begin = t.defined() ? static_cast<const char*>(t.const_data_ptr()) : nullptr;
    if (!begin || t.numel() == 0) continue;
    const size_t bytes = t.is_non_overlapping_and_dense() ? t.nbytes() : t.element_size();
    const int64_t expert = list.size() > 1 ? int64_t(i) : -1;
    blocks_.push_back({begin, begin + bytes, what, expert, written, may_be_written});
  }
}

std::string CallMemory::name(const Block& b) {
  return b.expert < 0 ? b.what : b.what + (" of expert " + std::to_string(b.expert));
}

bool CallMemory::is_an_output(const Block& b) const {
  return b.may_be_written && std::any_of(blocks_.begin(), blocks_.end(), [&](const Block& out) {
           return out.written && out.begin == b.begin && out.end == b.end;
         });
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
    if (before && b.begin < before->end) {
      const Block &written = b.written ? b : *before, &other = b.written ? *before : b;
      TORCH_CHECK_VALUE(false, name(written), " shares memory with ", name(other), ", must not; ",
                        other.written ? "both are written" : "it is written while that is read");
    }
    reach(last, b);
    if (b.written) reach(last_written, b);
  }
}

void add_argument(CallMemory& memory, const c10::Argument& a, TensorList list) {
  const bool written = a.alias_info() && a.alias_info()->isWrite();
  const char* const name = a.name().c_str();
  if (a.name() == "c")  // of grouped_gemm
    memory.reads_in_place(list, name);
  else
    written ? memory.writes(list, name) : memory.reads(list, name);
}

}  // namespace cadre::door
