// A communicator of NCCL for each rank of a check or a benchmark.
#include "bench/nccl_engine.h"

#include <nccl.h>

#include <cstring>

#include "cadre/error.h"
#include "cadre/nccl.h"

namespace cadre::bench {
namespace {

void check_nccl(ncclResult_t code, std::string_view call) {
  if (code == ncclSuccess) return;
  const char* more = ncclGetLastError(nullptr);
  const bool is_more = more != nullptr && *more != '\0';
  throw DeviceError(text("nccl: ", call, " failed: ", ncclGetErrorString(code), is_more ? "; " : "",
                         is_more ? more : ""));
}

}  // namespace

void require_nccl(const ExpertParallelPlan&) {}

AllToAll nccl_engine(Rank& rank, int ranks) {
  ncclUniqueId id{};
  if (rank.number() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  const std::string of_first = rank.all_gather()(std::string(id.internal, sizeof id.internal))[0];
  std::memcpy(id.internal, of_first.data(), sizeof id.internal);
  ncclComm_t made = nullptr;
  check_nccl(ncclCommInitRank(&made, ranks, id, rank.number()), "ncclCommInitRank");
  const std::shared_ptr<ncclComm> communicator(made, ncclCommDestroy);
  return [communicator, engine = nccl_all_to_all(made)](
             std::span<const RankMessage> messages, Stream stream) { engine(messages, stream); };
}

}  // namespace cadre::bench
