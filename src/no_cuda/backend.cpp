// The symbols of src/cuda/backend.cpp in a build without CUDA: every operation has one entry, and
// it refuses with the reason.
#include "backend/lists.h"

namespace cadre::cuda {
namespace {

template <class Problem>
std::string refuses(const Problem&, const Device&) {
  return "this build has no CUDA backend; configure with the preset cuda";
}

template <class Problem>
struct List {
  static constexpr backend::Entry<Problem> kEntries[] = {
      {.name = "cuda", .refuses = refuses<Problem>, .workspace_bytes = nullptr, .run = nullptr}};
};

}  // namespace

const backend::Lists& lists() {
  static constexpr backend::Lists kLists = backend::collect<List>();
  return kLists;
}

}  // namespace cadre::cuda
