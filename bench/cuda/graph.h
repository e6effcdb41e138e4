#pragma once
#include "bench/cuda/check.h"

namespace cadre::bench {

/// Work of a stream, captured once.
class Graph {
 public:
  template <class Work>
  Graph(cudaStream_t stream, Work&& work) : stream_(stream) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    work();
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream, &graph), "end a capture");
    const cudaError_t code = cudaGraphInstantiate(&launchable_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(code, "instantiate a graph");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(launchable_); }

  void launch() const { check_cuda(cudaGraphLaunch(launchable_, stream_), "launch a graph"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t launchable_ = nullptr;
};

}  // namespace cadre::bench
