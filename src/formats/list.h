#pragma once
#include "cadre/type_list.h"
#include "formats/e8m0.h"
#include "formats/fp8_block.h"
#include "formats/fp8_row.h"
#include "formats/fp8_tensor.h"
#include "formats/mxfp4.h"
#include "formats/mxfp8.h"
#include "formats/nvfp4.h"
#include "formats/plain.h"

namespace cadre::formats {

/// Every format, in the order of FormatKind. Checks, the CPU backend, the tests, `cadre info` and
/// docs/formats.md loop over this list: a new format is its header and one word here.
using All = TypeList<Plain<Fp32>, Plain<Bf16>, Plain<Fp16>, Fp8Tensor, Fp8Row, Fp8Block, Mxfp8,
                     Nvfp4, Mxfp4>;

template <class... Rows>
constexpr bool in_order_of_kinds(TypeList<Rows...>) {
  int next = 0;
  return ((int(Rows::kInfo.kind) == next++) && ...);
}
static_assert(in_order_of_kinds(All{}));

/// Every type of a stored element that decodes without a scale.
using Elements = TypeList<Fp32, Bf16, Fp16, E4m3, E5m2, E2m1>;

/// The types that a tensor may have before it is quantised.
using Sources = TypeList<Fp32, Bf16, Fp16>;

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

/// The largest finite number of a type of Sources.
constexpr float largest_value(DType source) {
  float largest = 0;
  visit(Sources{}, source, [&]<class Float>() { largest = Float::kLargest; });
  return largest;
}

/// Calls `fn.operator()<Row, Element>()` for the row of a format and the type of its codes.
template <class Fn>
constexpr void visit(const Format& format, Fn&& fn) {
  visit(format.kind, [&]<class Row>() {
    visit(typename Row::Elements{}, format.element,
          [&]<class Element>() { fn.template operator()<Row, Element>(); });
  });
}

}  // namespace cadre::formats
