#pragma once
#include <atomic>
#include <cstdlib>
#include <new>

// For the one source of a test that counts what the program allocates.

static std::atomic<int> allocations{0};

[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
