#pragma once
#include <exception>

namespace cadre::cpu::gemm {

/// Carries the first exception of a parallel region out of it. Work behind it is skipped.
class FirstError {
 public:
  template <class Work>
  void guard(Work&& work) {
    try {
      work();
    } catch (...) {
#pragma omp critical(cadre_first_error)
      if (!first_) first_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

}  // namespace cadre::cpu::gemm
