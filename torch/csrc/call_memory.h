#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "door.h"

// What a call writes lies apart from all else that it writes or reads: experts and operands are
// worked on at the same time, so what shares memory would come out wrong in silence.
namespace cadre::door {

/// The memory of a call's tensors.
class CallMemory {
 public:
  CallMemory() { blocks_.reserve(32); }

  void reads(TensorList list, const char* what) { add(list, what, false); }
  void writes(TensorList list, const char* what) { add(list, what, true); }
  void reads_in_place(TensorList list, const char* what) { add(list, what, false, true); }

  /// Errors    ValueError where what is written shares memory with what else the call uses. What
  ///           lies in another's gaps does not.
  void require_apart();

 private:
  struct Block {
    const char *begin, *end;
    const char* what;
    int64_t expert;  ///< -1: of all
    bool written;
    bool may_be_written;  ///< read, but may be an output itself
    bool has_gaps;        ///< to `end` the first element alone
    Tensor tensor;
  };
  void add(TensorList list, const char* what, bool written, bool may_be_written = false);
  static std::string name(const Block&);
  [[noreturn]] static void refuse(const Block&, const Block&);
  bool is_an_output(const Block&) const;
  void require_apart_from_gaps() const;

  std::vector<Block> blocks_;
};

/// Adds tensors as the schema of an operator names and marks them. Errors    ValueError for what
///           requires grad, where gradients are wanted, and for negated views.
void add_argument(CallMemory&, const c10::Argument&, TensorList);

/// Adds whatever is given to an operator; what is no tensor has no memory.
template <class Given>
void add_given(CallMemory& memory, const c10::Argument& argument, const Given& given) {
  if constexpr (std::is_same_v<Given, Maybe>)
    add_argument(memory, argument, given ? TensorList(*given) : TensorList());
  else if constexpr (std::is_convertible_v<const Given&, TensorList>)
    add_argument(memory, argument, given);
}

/// Hands negated views to the kernel, which refuses them: what torch does by itself resolves them
/// for operators alone that return what they write, and ends in broken memory for others.
void take_views(const std::string& overload);

/// Registers the kernel of the overload `.out` of an operator, whose outputs lie apart.
template <class... Args>
void implement_out(torch::Library& m, const char* op, void (*kernel)(Args...)) {
  const auto checked = [op = std::string("cadre::") + op, kernel](Args... args) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), "out");
    auto argument = handle.schema().arguments().begin();
    CallMemory memory;
    (add_given(memory, *argument++, args), ...);
    memory.require_apart();
    kernel(args...);
  };
  const std::string overload = std::string(op) + ".out";
  m.impl(overload.c_str(), checked);
  take_views(overload);
}

}  // namespace cadre::door
