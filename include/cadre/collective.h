#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "cadre/expert_parallel.h"

#pragma GCC visibility push(default)
namespace cadre {

/// What a rank sends to one rank, and what it has from it, in memory of the plan's device.
struct RankMessage {
  const void* send = nullptr;
  int64_t send_bytes = 0;  ///< as many as the other rank receives; may be 0
  void* receive = nullptr;
  int64_t receive_bytes = 0;
};

/// An exchange among all ranks, of the caller's: NCCL's (nccl.h), MPI's, or any other. There are P
/// messages for each tensor that travels: messages[i] is for rank i % P and from it, this one too,
/// and those between two ranks come in the same order on both. On a GPU it enqueues the exchange
/// on the stream; on the CPU it is over when the call returns. What it throws, the exchange throws.
using AllToAll = std::function<void(std::span<const RankMessage>, Stream)>;

/// One rank of a group whose rows travel by the caller's engine, between any hosts: the route
/// "collective". Every rank makes one for each layer, of plan(problem, device, "collective") with
/// the same problem. It has memory of the host for the numbers of rows, and none of the device. It
/// outlives graphs that have its exchanges.
class Collective {
 public:
  /// Errors    InvalidArgument for a plan of another route, a rank that is none, or no engine.
  Collective(const ExpertParallelPlan&, int rank, AllToAll);
  Collective(Collective&&) noexcept;
  Collective& operator=(Collective&&) noexcept;
  ~Collective();

  int rank() const;
  const ExpertParallelPlan& plan() const;

  /// Throws DeviceError, once, if rows overflowed in the last dispatch, on all ranks alike. With
  /// block it waits for that dispatch; where one was recorded, for all that the device has to do,
  /// and it throws if rows overflowed since it was last asked.
  void check();

  struct [[gnu::visibility("hidden")]] State;
  /// Errors    InvalidArgument if it was moved from; so in all that is called of it.
  State& state() const;

 private:
  std::unique_ptr<State> state_;
};

/// Where rows go: dispatch writes it, the others read it. Rows of choices are in the order of
/// (expert of all, token, choice), so those for a rank are one segment; a rank has them by rank,
/// each in its order. Where the plan is by_token, tokens that leave for a rank are in the order of
/// the first rows that they have there, and have come where the first rows of their rank would. By
/// host those that leave are for a host in the place of a rank.
struct CollectiveMap {
  int32_t* row_of = nullptr;  ///< [t, top_k]: the row of a choice among those that are summed; -1:
                              ///< of no expert. What is dropped has its row, which does not travel.
                              ///< With block the place in the blocks, -1 also beyond one
  int32_t* slot_of = nullptr;  ///< [T * top_k]: the inverse, token * top_k + choice; by token the
                               ///< slot of each token that leaves, which is that of its first row
                               ///< there; with block [P * N], -1 at places without a row
  int32_t* leaving = nullptr;  ///< [P * E + 1]: offsets of these, of all experts
  int32_t* came_at = nullptr;  ///< [R]: the number of a row here among those that come; by token
                               ///< that of its token
  int32_t* row_at = nullptr;   ///< [R]: the row here of each that goes back, in the order of ranks;
                               ///< with block [P * N], -1 without a row
  int32_t* offsets = nullptr;  ///< [E + 1]: rows of this rank's experts
  int64_t* counts = nullptr;   ///< [6 * P + 3] in memory of the host: rows from each rank; rows to
                               ///< each; the first of these [P + 1]; the same of what crosses to
                               ///< experts, by token of tokens; 1 where rows overflowed and that is
                               ///< an error. By host [plan().counts]: then tokens from each rank
                               ///< for this host, and what is passed on. With block there are none
  int32_t* verdict = nullptr;  ///< [3] with block: 1 where rows overflowed and that is an error, or
                               ///< where ranks differ; 0 and P * N, offsets of the places
  int32_t* passing = nullptr;  ///< [plan().passing] by host: which of the tokens that came for this
                               ///< host are for each of its ranks
};

struct CollectiveDispatchArgs {
  TensorView x{};                    ///< [t, H], 0 <= t <= T
  const int32_t* experts = nullptr;  ///< [t, top_k] in [0, P * E); a choice of any other is dropped
  const float* prob = nullptr;       ///< [t, top_k], with prob
  TensorView rows{};                 ///< [R, H], written
  float* row_prob = nullptr;         ///< [R], written, with prob
  int32_t* routed = nullptr;         ///< [P] in memory of the host, with block of the device,
                                     ///< optional: rows routed to each rank, those beyond R too
  CollectiveMap map{};               ///< written
};

struct CollectiveCollectArgs {
  TensorView y{};    ///< [R, H]
  TensorView out{};  ///< [t, H], written
  CollectiveMap map{};
};

struct CollectiveCollectBackwardArgs {
  TensorView dout{};  ///< [t, H]
  TensorView dy{};    ///< [R, H], written
  CollectiveMap map{};
};

struct CollectiveDispatchBackwardArgs {
  TensorView drows{};                ///< [R, H]
  const float* drow_prob = nullptr;  ///< [R], with prob
  TensorView dx{};                   ///< [t, H], written
  float* dprob = nullptr;            ///< [t, top_k], written, with prob
  CollectiveMap map{};
};

/// The four exchanges of expert_parallel.h, with its formulas and bits. Each needs a workspace of
/// plan().workspace_bytes. All ranks call the same ones in the same order.
///
/// Rows      as there, and `overflow` too; codes, push and sum=rank are of windows.
/// Stream    dispatch waits, once, until the counts of all ranks are in memory of the host. So none
///           of them may be recorded into a graph. With block the host reads no counts, and all may
///           be recorded if the engine may; a dispatch that is not waits for the verdict of the one
///           before, and, where one was recorded, for what its stream had to do.
/// Engine    without block it is called twice by dispatch and once by the others; where rows
///           overflowed, for counts alone. By host dispatch and collect_backward call it as often
///           more as explain() says.
/// Errors    InvalidArgument before anything is moved. DeviceError where ranks have different
///           problems or numbers, on all of them, with block in the next dispatch, as where rows
///           overflowed; and what the engine throws. Whether a rank that does not come is waited
///           for is the engine's matter.
/// Exact     the bits of one rank that has all tokens and experts.
void dispatch(Collective&, const CollectiveDispatchArgs&, Workspace, Stream);
void collect(Collective&, const CollectiveCollectArgs&, Workspace, Stream);
void collect_backward(Collective&, const CollectiveCollectBackwardArgs&, Workspace, Stream);
void dispatch_backward(Collective&, const CollectiveDispatchBackwardArgs&, Workspace, Stream);

}  // namespace cadre
#pragma GCC visibility pop
