#pragma once
#include <nccl.h>

#include <vector>

#include "cadre/nccl.h"
#include "tests/judge/machine_copy.h"
#include "tests/parallel/collective_case.h"

// Ranks that are threads, each with a GPU and a communicator of NCCL.
namespace cadre::test {

/// A communicator a GPU, of this process.
class Communicators {
 public:
  explicit Communicators(int ranks) : all_(size_t(ranks)) {
    if (const ncclResult_t code = ncclCommInitAll(all_.data(), ranks, nullptr); code != ncclSuccess)
      throw DeviceError(text("cannot make communicators: ", ncclGetErrorString(code)));
  }
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;
  ~Communicators() {
    for (const ncclComm_t one : all_) ncclCommDestroy(one);
  }
  ncclComm_t of(int rank) const { return all_[size_t(rank)]; }

 private:
  std::vector<ncclComm_t> all_;
};

/// Ranks for a problem that leaves them to the machine: two, or with four GPUs four too.
inline std::vector<int> groups() {
  const int gpus = int(cuda_devices().size());
  std::vector<int> ranks = {1};
  for (const int some : {2, 4})
    if (gpus >= some) ranks.push_back(some);
  return ranks;
}

/// A rank's tensors as pieces of memory. Counts stay on the host, of which blocks have none.
struct NcclCase : CollectiveCase {
  using CollectiveCase::CollectiveCase;

  void for_pieces(auto&& visit) const {
    for (const Tensor* t : {&x, &prob, &dout}) visit(piece("input", *t, Holds::kInput));
    visit(list_piece("experts", experts));
    for (const Tensor* t : {&rows, &row_prob, &y, &out, &dy, &drows, &drow_prob, &dx, &dprob})
      visit(piece("output", *t, Holds::kOutput));
    for (const std::vector<int32_t>* list :
         {&row_of, &slot_of, &leaving, &came_at, &row_at, &offsets})
      visit(list_piece("map", *list, Holds::kOutput));
    if (p.block == 0) return;
    for (const std::vector<int32_t>* list : {&verdict, &routed})
      visit(list_piece("map of blocks", *list, Holds::kOutput));
  }
};

/// Memory of a machine for a workspace.
struct MachineWorkspace {
  Machine& machine;
  Workspace memory;

  MachineWorkspace(Machine& on, int64_t bytes) : machine(on), memory{on.take(bytes), bytes} {}
  MachineWorkspace(const MachineWorkspace&) = delete;
  MachineWorkspace& operator=(const MachineWorkspace&) = delete;
  ~MachineWorkspace() { machine.give_back(memory.data); }
};

}  // namespace cadre::test
