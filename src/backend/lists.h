#pragma once
#include <tuple>

#include "backend/entry.h"
#include "cadre/operations.h"

// What a backend has: a list of implementations for each operation.
namespace cadre {
namespace backend {

template <class Operations>
struct ListsOf;
template <class... Each>
struct ListsOf<TypeList<Each...>> {
  using Tuple = std::tuple<Entries<typename Each::Problem>...>;

  template <template <class> class List>
  static constexpr Tuple collect() {
    return {Entries<typename Each::Problem>(List<typename Each::Problem>::kEntries)...};
  }
};

/// The implementations of every operation, best first.
using Lists = ListsOf<Operations>::Tuple;

/// What a backend declares as `List<Problem>::kEntries`, one specialisation an operation. One that
/// is missing does not compile.
template <template <class> class List>
constexpr Lists collect() {
  return ListsOf<Operations>::collect<List>();
}

}  // namespace backend

namespace cpu {
const backend::Lists& lists();
}
namespace cuda {
const backend::Lists& lists();
}

}  // namespace cadre
