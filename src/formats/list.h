#pragma once
#include "formats/e8m0.h"
#include "formats/fp8_block.h"
#include "formats/fp8_tensor.h"
#include "formats/mxfp4.h"
#include "formats/mxfp8.h"
#include "formats/nvfp4.h"
#include "formats/plain.h"

namespace cadre::formats {

template <class... Types>
struct TypeList {};

/// Every format, in the order of FormatKind. Checks, the CPU backend, the tests, `cadre info` and
/// docs/formats.md loop over this list: a new format is its header and one word here.
using All =
    TypeList<Plain<Fp32>, Plain<Bf16>, Plain<Fp16>, Fp8Tensor, Fp8Block, Mxfp8, Nvfp4, Mxfp4>;

/// Every type of a stored element that decodes without a scale.
using Elements = TypeList<Fp32, Bf16, Fp16, E4m3, E5m2, E2m1>;

/// The types that a tensor may have before it is quantised.
using Sources = TypeList<Fp32, Bf16, Fp16>;

/// Calls `fn.operator()<T>()` for every T of the list, in order.
template <class... Types, class Fn>
constexpr void for_each(TypeList<Types...>, Fn&& fn) {
  (fn.template operator()<Types>(), ...);
}

/// Calls `fn.operator()<T>()` for the first T of the list that `is(T)` holds for. True if there is
/// one.
template <class... Types, class Is, class Fn>
constexpr bool visit_first(TypeList<Types...>, Is&& is, Fn&& fn) {
  return ((is.template operator()<Types>() && (fn.template operator()<Types>(), true)) || ...);
}

/// Calls `fn.operator()<F>()` for the format of that kind.
template <class Fn>
constexpr void visit(FormatKind kind, Fn&& fn) {
  visit_first(
      All{}, [&]<class F>() { return F::kInfo.kind == kind; }, fn);
}

/// Calls `fn.operator()<T>()` for the type of the list with that dtype; false if there is none.
template <class... Types, class Fn>
constexpr bool visit(TypeList<Types...> list, DType dtype, Fn&& fn) {
  return visit_first(
      list, [&]<class T>() { return T::kDType == dtype; }, fn);
}

}  // namespace cadre::formats
