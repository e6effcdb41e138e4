// Exchanges in blocks by NCCL, recorded as a graph and replayed with other routing: the bytes of a
// run.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <random>

#include "cuda/check.h"
#include "tests/cuda/nccl_ranks.h"

using namespace cadre;
using cuda::check;
using Case = test::NcclCase;

namespace {

/// Of the thread's GPU.
struct OwnStream {
  cudaStream_t handle = nullptr;

  OwnStream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "make a stream"); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { cudaStreamDestroy(handle); }
};

/// What a thread launches on a stream, as a graph.
class Graph {
 public:
  Graph(cudaStream_t stream, auto&& work) : stream_(stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin a capture");
    work(Stream{stream});
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "end a capture");
    const cudaError_t code = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check(code, "instantiate a graph");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(executable_); }

  void launch() const { check(cudaGraphLaunch(executable_, stream_), "launch a graph"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

/// All four exchanges of a rank, whose experts leave rows as they are.
void launch(Collective& own, Case& r, const test::MachineCopy& on, const Workspace& memory,
            Stream stream) {
  const CollectiveCollectArgs sums{r.rows.view(), r.out.view(), r.collective_map()};
  const CollectiveCollectBackwardArgs back{r.dout.view(), r.dy.view(), r.collective_map()};
  CollectiveDispatchBackwardArgs to_tokens = r.collective_dispatch_backward_args();
  to_tokens.drows = r.dy.view(), to_tokens.drow_prob = r.row_prob.data<float>();
  dispatch(own, on.moved(r.collective_dispatch_args()), memory, stream);
  collect(own, on.moved(sums), memory, stream);
  collect_backward(own, on.moved(back), memory, stream);
  dispatch_backward(own, on.moved(to_tokens), memory, stream);
}

/// Runs each of a rank's cases, and replays a graph with it: the same bytes, and the same errors.
void replay(const ExpertParallelPlan& plan, int rank, ncclComm_t communicator,
            std::vector<Case>& cases) {
  const auto machine = test::open_machine(rank);
  Collective own(plan, rank, nccl_all_to_all(communicator)),
      recorded(plan, rank, nccl_all_to_all(communicator));
  const test::MachineWorkspace workspace(*machine, plan.workspace_bytes);
  const OwnStream stream;
  const auto wait = [&] { check(cudaStreamSynchronize(stream.handle), "wait"); };
  const auto error = [](Collective& of) { return test::on_ranks(1, [&](int) { of.check(); })[0]; };
  Case live_case = cases[0];
  test::MachineCopy live(*machine, live_case);
  std::unique_ptr<Graph> graph;
  for (Case& run : cases) {
    Case replayed = run;
    test::MachineCopy of_run(*machine, run), of_replayed(*machine, replayed);
    of_run.upload();
    check(cudaDeviceSynchronize(), "wait for uploads");
    launch(own, run, of_run, workspace.memory, {stream.handle});
    wait();
    of_run.fetch();
    live.upload_from(of_replayed);
    check(cudaDeviceSynchronize(), "wait for uploads");
    if (graph == nullptr)  // behind a run, in which NCCL has connected the ranks
      graph = std::make_unique<Graph>(stream.handle, [&](Stream on) {
        launch(recorded, live_case, live, workspace.memory, on);
      });
    graph->launch();
    wait();
    of_replayed.fetch_from(live);
    EXPECT_EQ(test::byte_difference(replayed, run) + of_replayed.damage(), "");
    const std::string words = error(own);
    EXPECT_EQ(error(recorded), words);
    EXPECT_EQ(words.empty(), run.verdict[0] == 0) << words;
  }
}

TEST(NcclBlocksOnDevice, AreReplayedWithOtherRouting) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  for (const int ranks : test::groups())
    for (const char* words : {"block=72", "block=50", "block=50 overflow=drop"}) {
      const ExpertParallelProblem p = parse_expert_parallel_problem(
          text("expert_parallel T=24 top_k=3 H=320 E=3 ranks=", ranks, " ", words));
      const test::Communicators communicators(ranks);
      std::mt19937 random(9);
      std::vector<std::vector<Case>> of_ranks(static_cast<size_t>(ranks));
      for (int i = 0; i < 6; ++i)
        for (int q = 0; q < ranks; ++q) {
          Case& r = of_ranks[size_t(q)].emplace_back(test::RankCase(p, 24));
          for (test::Tensor* t : {&r.x, &r.dout}) t->fill(random, -2, 2);
          r.prob.fill(random, 0, 1);
          const int experts = i % 2 == 0 ? p.experts * ranks : p.experts;  // all, or the first's
          for (int32_t& e : r.experts) e = int32_t(random() % unsigned(experts + 1)) - 1;
        }
      for (const std::string& error : test::on_ranks(ranks, [&](int q) {
             replay(plan(p, cuda_devices()[size_t(q)], "collective"), q, communicators.of(q),
                    of_ranks[size_t(q)]);
           }))
        EXPECT_EQ(error, "") << to_string(p);
    }
}

}  // namespace
