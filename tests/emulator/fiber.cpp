#include "tests/emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <stdexcept>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
static void __asan_unpoison_memory_region(const volatile void*, size_t) {}
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

// Keeps what a call must keep on the present stack, notes where that is in `from`, and goes on with
// the stack `to`. The C library's way asks the kernel each time.
extern "C" void cadre_emulator_switch(void** from, void* to);
extern "C" void cadre_emulator_begin();
#if defined(__x86_64__)
asm(R"(
.text
.globl cadre_emulator_switch
cadre_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.globl cadre_emulator_begin
cadre_emulator_begin:
  movq %r12, %rdi
  callq *%r13
  ud2
.section .note.GNU-stack,"",@progbits
.text
)");
#else
#error "the emulator switches stacks on x86-64 only"
#endif

namespace cadre::emulator {
namespace {

// Touched pages only become real. Were the ends of stacks a power of two apart, they would share a
// few places of the caches: they lie a page more apart, and begin at one of `kSkews` within it.
constexpr size_t kPage = 4 << 10, kStackBytes = (256 << 10) + kPage;
constexpr size_t kSkews = 16;
thread_local size_t stacks = 0;

}  // namespace

Fiber::Fiber()
    : stack_(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
      skew_(stacks++ % kSkews * (kPage / kSkews)) {
  if (stack_ == MAP_FAILED) throw std::runtime_error("emulator: no memory for a stack");
  // What a fiber that never ended has left of this address is no longer forbidden.
  __asan_unpoison_memory_region(stack_, kStackBytes);
}

Fiber::~Fiber() { munmap(stack_, kStackBytes); }

void Fiber::start(std::function<void()> work) {
  work_ = std::move(work);
  inside_fake_ = nullptr;
  // What the first switch takes from the stack: r15, r14, r13, r12, rbx, rbp, and where to go on.
  auto* top = reinterpret_cast<void**>(static_cast<char*>(stack_) + kStackBytes - skew_);
  void** at = top - 9;  // a call then finds the stack aligned
  void* const first[7] = {nullptr, nullptr, reinterpret_cast<void*>(&Fiber::enter),        this,
                          nullptr, nullptr, reinterpret_cast<void*>(&cadre_emulator_begin)};
  for (int i = 0; i < 7; ++i) at[i] = first[i];
  inside_ = at;
}

void Fiber::enter(Fiber* self) {
  __sanitizer_finish_switch_fiber(nullptr, &self->outside_stack_, &self->outside_bytes_);
  self->work_();
  __sanitizer_start_switch_fiber(nullptr, self->outside_stack_, self->outside_bytes_);
  cadre_emulator_switch(&self->inside_, self->outside_);
}

void Fiber::resume() {
  __sanitizer_start_switch_fiber(&outside_fake_, stack_, kStackBytes);
  cadre_emulator_switch(&outside_, inside_);
  __sanitizer_finish_switch_fiber(outside_fake_, nullptr, nullptr);
}

void Fiber::leave() {
  __sanitizer_start_switch_fiber(&inside_fake_, outside_stack_, outside_bytes_);
  cadre_emulator_switch(&inside_, outside_);
  __sanitizer_finish_switch_fiber(inside_fake_, &outside_stack_, &outside_bytes_);
}

}  // namespace cadre::emulator
