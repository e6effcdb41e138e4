// That Machine::record() of a GPU takes a step that only launches kernels, and nothing else: faults
// are planted between the kernels of a step.
#include <cuda_runtime_api.h>

#include "tests/judge/errors.h"
#include "tests/judge/on_machine.h"
#include "tests/layers/layer_copy.h"
#include "tests/layers/linear_case.h"

using namespace cadre;
using test::LayerCopy;
using test::LinearCase;

namespace {

struct Capture : test::OnMachine {
  /// What record() says of a step with `fault(stream)` behind it; empty if it takes it.
  template <class Fault>
  std::string said_of(Fault&& fault) {
    GroupedLinearProblem p{.rows = 20, .n = 16, .k = 8, .experts = 3};
    p.options.deferred = true;
    LinearCase c(p, {.rows = 20, .of = {7, 0, 11}}, 1, {machine->device(), 8});
    LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream); });
    try {
      machine->record([&](Stream stream) {
        copy.step(stream);
        fault(static_cast<cudaStream_t>(stream.handle));
      });
    } catch (const std::exception& error) {
      cudaGetLastError();
      return error.what();
    }
    return {};
  }
};

TEST_F(Capture, TakesAStep) {
  EXPECT_EQ(said_of([](cudaStream_t) {}), "");
}

TEST_F(Capture, HasANumberWhileItLasts) {
  const Device& device = machine->device();
  uint64_t graphs[2] = {};
  machine->run([&](Stream stream) { EXPECT_EQ(recorded_graph(device, stream), 0u); });
  for (uint64_t& graph : graphs) {
    const auto ask = [&](cudaStream_t stream) {
      graph = recorded_graph(device, {stream});
      EXPECT_EQ(recorded_graph(device, {stream}), graph);
    };
    EXPECT_EQ(said_of(ask), "");
  }
  EXPECT_NE(graphs[0], 0u);
  EXPECT_NE(graphs[1], 0u);
  EXPECT_NE(graphs[0], graphs[1]);
  EXPECT_EQ(recorded_graph(this_cpu(), {}), 0u);
}

TEST_F(Capture, SeesAWait) {
  EXPECT_NE(said_of([](cudaStream_t stream) { cudaStreamSynchronize(stream); }), "");
  EXPECT_NE(said_of([](cudaStream_t) { cudaDeviceSynchronize(); }), "");
}

TEST_F(Capture, SeesAnAllocation) {
  void* data = nullptr;
  EXPECT_NE(said_of([&](cudaStream_t) { cudaMalloc(&data, 64); }), "");
  EXPECT_NE(said_of([&](cudaStream_t stream) {
              if (cudaMallocAsync(&data, 64, stream) == cudaSuccess) cudaFreeAsync(data, stream);
            }),
            "");
}

TEST_F(Capture, SeesACopy) {
  void* word = machine->take(sizeof(int32_t));
  int32_t there = 0;
  EXPECT_NE(said_of([&](cudaStream_t stream) {
              cudaMemcpyAsync(&there, word, sizeof(there), cudaMemcpyDeviceToHost, stream);
            }),
            "");
  EXPECT_NE(said_of([&](cudaStream_t) {
              cudaMemcpy(&there, word, sizeof(there), cudaMemcpyDeviceToHost);
            }),
            "");
  machine->give_back(word);
}

TEST_F(Capture, SeesWorkOfTheHost) {
  EXPECT_NE(said_of([](cudaStream_t stream) {
              cudaLaunchHostFunc(
                  stream, [](void*) {}, nullptr);
            }),
            "");
}

TEST_F(Capture, SeesAnEmptyStep) {
  try {
    machine->record([](Stream) {});
    FAIL() << "an empty graph was taken";
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "graph: no node is a kernel, must be one or more");
  }
}

}  // namespace
