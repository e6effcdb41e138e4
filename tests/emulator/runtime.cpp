#include "tests/emulator/runtime.h"

#include <cuda.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "tests/emulator/tensor_map.h"
#include "tests/emulator/virtual_memory.h"

struct CUgraphNode_st {
  cudaGraphNodeType type;
  std::function<void()> work;
};
struct CUgraph_st {
  std::vector<std::shared_ptr<CUgraphNode_st>> nodes;
  unsigned long long id = 0;
};
struct CUgraphExec_st {
  CUgraph_st graph;
};
struct CUstream_st {
  CUgraph_st* capture = nullptr;  // owned by the stream that began it
  bool is_origin = false;
};
struct CUevent_st {
  CUgraph_st* capture = nullptr;
  std::chrono::steady_clock::time_point time;
};

namespace cadre::emulator {
namespace {

constexpr size_t kAlign = 256, kMemoryBytes = size_t(4) << 30;
constexpr uint8_t kPoison = 0xff;  // NaN in every float format

CUstream_st default_stream;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int strict_captures = 0;  // of this thread, that forbid what is unsafe
thread_local bool capture_broken = false;
thread_local bool has_context = false;  // the runtime binds one when a thread first needs it

CUstream_st& stream_of(cudaStream_t stream) { return stream == nullptr ? default_stream : *stream; }

cudaError_t answer(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

// For what must not happen while work is captured.
cudaError_t unsafe() {
  if (strict_captures == 0) return cudaSuccess;
  capture_broken = true;
  return answer(cudaErrorStreamCaptureUnsupported);
}

cudaGraphNodeType node_of_copy() { return cudaGraphNodeTypeMemcpy; }

}  // namespace

cudaError_t check_shape(const GridShape& s) {
  const int64_t threads = int64_t(s.threads.x) * s.threads.y * s.threads.z;
  const bool good = s.blocks.x > 0 && s.blocks.y > 0 && s.blocks.y <= 65535 && s.blocks.z > 0 &&
                    s.blocks.z <= 65535 && threads > 0 && threads <= 1024 &&
                    s.shared_bytes <= kSharedBytes && s.cluster > 0 &&
                    s.blocks.x % unsigned(s.cluster) == 0;
  return answer(good ? cudaSuccess : cudaErrorInvalidConfiguration);
}

void enqueue(cudaStream_t stream, cudaGraphNodeType type, std::function<void()> work) {
  has_context = true;
  CUstream_st& s = stream_of(stream);
  if (s.capture == nullptr) return work();
  s.capture->nodes.push_back(
      std::make_shared<CUgraphNode_st>(CUgraphNode_st{type, std::move(work)}));
}

}  // namespace cadre::emulator

using namespace cadre::emulator;

extern "C" {

const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaSuccess ? "cudaSuccess" : "cudaErrorEmulated";
}
const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorStreamCaptureUnsupported
             ? "operation not permitted when stream is capturing"
         : code == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                                 : "an error of the emulator";
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  has_context = has_context || device == 0;
  return answer(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int) {
  std::memset(all, 0, sizeof(*all));
  std::strcpy(all->name, "emulated GPU");
  all->major = kSm / 10, all->minor = kSm % 10, all->multiProcessorCount = kUnits;
  all->sharedMemPerBlockOptin = kSharedBytes;
  all->totalGlobalMem = kMemoryBytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrComputeCapabilityMajor         ? kSm / 10
           : which == cudaDevAttrComputeCapabilityMinor       ? kSm % 10
           : which == cudaDevAttrMultiProcessorCount          ? kUnits
           : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? kSharedBytes
                                                              : 0;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return *free = *total = kMemoryBytes, cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaMalloc(void** data, size_t bytes) {
  has_context = true;
  if (const cudaError_t code = unsafe(); code != cudaSuccess) return code;
  if (bytes > kMemoryBytes) return answer(cudaErrorMemoryAllocation);
  const size_t whole = (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  *data = std::aligned_alloc(kAlign, whole);
  if (*data == nullptr) return answer(cudaErrorMemoryAllocation);
  std::memset(*data, kPoison, whole);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (const cudaError_t code = unsafe(); code != cudaSuccess) return code;
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** data, size_t bytes) { return cudaMalloc(data, bytes); }
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) { return cudaMalloc(data, bytes); }
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  const int strict = std::exchange(strict_captures, 0);
  const cudaError_t code = cudaMalloc(data, bytes);
  strict_captures = strict;
  // What a graph allocates is the graph's.
  if (code == cudaSuccess && stream_of(stream).capture != nullptr)
    enqueue(stream, cudaGraphNodeTypeMemAlloc, [kept = std::shared_ptr<void>(*data, std::free)] {});
  return code;
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  if (stream_of(stream).capture != nullptr)
    enqueue(stream, cudaGraphNodeTypeMemFree, [] {});
  else
    std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  enqueue(stream, node_of_copy(), [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (const cudaError_t code = unsafe(); code != cudaSuccess) return code;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  enqueue(stream, cudaGraphNodeTypeMemset, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset2DAsync(void* to, size_t step, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  enqueue(stream, cudaGraphNodeTypeMemset, [=] {
    for (size_t row = 0; row < height; ++row)
      std::memset(static_cast<char*>(to) + row * step, value, width);
  });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return enqueue(stream, cudaGraphNodeTypeHost, [=] { function(data); }), cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return unsafe(); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return *stream = new CUstream_st, cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream->is_origin) {  // a capture that nobody ended
    delete stream->capture;
    if (strict_captures > 0) --strict_captures;
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream_of(stream).capture != nullptr) {
    capture_broken = true;
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  return unsafe();
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (event->capture != nullptr) stream_of(stream).capture = event->capture;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  CUstream_st& s = stream_of(stream);
  if (s.capture != nullptr) return answer(cudaErrorIllegalState);
  static std::atomic<unsigned long long> graphs = 0;
  s.capture = new CUgraph_st;
  s.capture->id = ++graphs;
  s.is_origin = true;
  capture_broken = false;
  if (mode != cudaStreamCaptureModeRelaxed) ++strict_captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  CUstream_st& s = stream_of(stream);
  if (s.capture == nullptr || !s.is_origin) return answer(cudaErrorIllegalState);
  *graph = std::exchange(s.capture, nullptr);
  s.is_origin = false;
  if (strict_captures > 0) --strict_captures;
  if (!capture_broken) return cudaSuccess;
  delete std::exchange(*graph, nullptr);
  return answer(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream_of(stream).capture != nullptr ? cudaStreamCaptureStatusActive
                                                 : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  if (const CUgraph_st* graph = stream_of(stream).capture) *id = graph->id;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  for (size_t i = 0; nodes != nullptr && i < std::min(*count, graph->nodes.size()); ++i)
    nodes[i] = graph->nodes[i].get();
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  return *type = node->type, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = new CUgraphExec_st{*graph}, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const auto& node : exec->graph.nodes) enqueue(stream, node->type, node->work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = new CUevent_st, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->capture = stream_of(stream).capture;
  event->time = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return unsafe(); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = std::max(1e-6f, std::chrono::duration<float, std::milli>(to->time - from->time).count());
  return cudaSuccess;
}

// What the driver encodes, and what it refuses.
static constexpr auto encode_tiled =
    +[](CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
        const cuuint64_t* extent, const cuuint64_t* steps, const cuuint32_t* box, const cuuint32_t*,
        CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
        CUtensorMapFloatOOBfill) -> CUresult {
  MapData m;
  m.base = reinterpret_cast<uintptr_t>(base);
  m.is_float = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  m.element_bytes = m.is_float ? 4 : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  m.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
              : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
              : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                     : 0;
  bool good = m.base % 16 == 0 && rank >= 1 && rank <= 5 && m.swizzle != 0;
  for (cuuint32_t d = 0; d < rank && good; ++d) {
    m.extent[d] = extent[d], m.box[d] = box[d];
    good = extent[d] > 0 && extent[d] <= uint64_t(1) << 32 && box[d] > 0 && box[d] <= 256;
    if (d > 0) m.step[d - 1] = steps[d - 1], good = good && steps[d - 1] % 16 == 0;
    if (d > 0) good = good && steps[d - 1] < uint64_t(1) << 40;
  }
  *map = map_of(m);
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
};
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool encodes = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *entry = encodes ? reinterpret_cast<void*>(encode_tiled) : virtual_memory_entry(name);
  *found = *entry != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
