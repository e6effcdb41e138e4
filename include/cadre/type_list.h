#pragma once

#pragma GCC visibility push(default)
namespace cadre {

/// Types as a list, to expand and to loop over.
template <class... Types>
struct TypeList {};

/// Calls `fn.operator()<T>()` for every T of the list, in order.
template <class... Types, class Fn>
constexpr void for_each(TypeList<Types...>, Fn&& fn) {
  (fn.template operator()<Types>(), ...);
}

/// Calls `fn.operator()<T>()` for the first T of the list with `is.operator()<T>()`. True if there
/// is one.
template <class... Types, class Is, class Fn>
constexpr bool visit_first(TypeList<Types...>, Is&& is, Fn&& fn) {
  return ((is.template operator()<Types>() && (fn.template operator()<Types>(), true)) || ...);
}

}  // namespace cadre
#pragma GCC visibility pop
