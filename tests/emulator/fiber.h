#pragma once
#include <cstddef>
#include <functional>

// A function with a stack of its own, which can be left in the middle and gone on with.
namespace cadre::emulator {

class Fiber {
 public:
  Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  /// What the next resume() begins; whatever was under way is forgotten. It must not throw.
  void start(std::function<void()> work);
  /// Runs until the work leaves or ends; from outside of all fibers.
  void resume();
  /// Goes back to whoever resumed; from within the work.
  void leave();

 private:
  static void enter(Fiber* self);

  void *stack_ = nullptr, *inside_ = nullptr, *outside_ = nullptr;  // stack pointers
  size_t skew_ = 0;                                                 // bytes that are left free
  std::function<void()> work_;
  const void* outside_stack_ = nullptr;  // what the address sanitizer wants to know
  size_t outside_bytes_ = 0;
  void *outside_fake_ = nullptr, *inside_fake_ = nullptr;
};

}  // namespace cadre::emulator
