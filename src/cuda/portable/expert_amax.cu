#include "cuda/portable/source_patch.cuh"

// The largest magnitude of an expert's rows, as bits: of the values, or of the transformed ones. A
// maximum comes out the same in any order, so blocks raise it by atomics.
namespace cadre::cuda::portable {
namespace {

/// Blocks of an SM at once, as many as registers allow.
template <DType kSource, bool kTransforms>
constexpr int kAmaxBlocks = kTransforms              ? 1
                            : kSource == DType::kF32 ? 2
                                                     : 3;
constexpr int kAmaxAcross = kAcross / 2;

__global__ void clear_amax_kernel(const __grid_constant__ QuantizeJob job) {
  const int64_t expert = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x;
  for (const QuantizeCopy& copy : job.copies)
    if (copy.amax != nullptr && expert < job.of.experts) copy.amax[expert] = 0;
}

/// Those of one expert, of each copy, kept in registers while tiles are of that expert.
struct ThreadAmax {
  uint32_t of_copy[2] = {};
  int expert = -1;

  __device__ void start(const QuantizeJob& job, int of_expert) {
    if (of_expert == expert) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= job.count || expert < 0) continue;
      const uint32_t largest = __reduce_max_sync(~0u, of_copy[i]);
      if (threadIdx.x % kLanes == 0 && largest != 0)
        atomicMax(&job.copies[i].amax[expert], largest);
    }
    of_copy[0] = of_copy[1] = 0;
    expert = of_expert;
  }
  /// The last copy may be transformed.
  template <DType kSource, bool kTransforms>
  __device__ void add(const QuantizeJob& job, SourcePatch& patch) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const QuantizeCopy& copy = job.copies[i];
      if (i >= job.count || copy.amax == nullptr) continue;
      const bool transformed = kTransforms && copy.to.transformed;
      if (transformed) transform<kSource, kAmaxAcross>(patch);
      const uint32_t largest =
          transformed ? largest_of<DType::kBf16>(patch) : largest_of<kSource>(patch);
      of_copy[i] = max(of_copy[i], largest);
    }
  }
};

template <DType kSource, bool kTransforms>
__global__ void __launch_bounds__(kQuantizeThreads, kAmaxBlocks<kSource, kTransforms>)
    expert_amax_kernel(const __grid_constant__ QuantizeJob job) {
  auto& queue = *reinterpret_cast<TileQueue*>(dynamic_shared());
  ThreadAmax amax;
  walk_tiles(job.of, queue, [&](const ExpertTile& tile, int column) {
    const PatchPlace at(Patch<kAmaxAcross>::of_thread(column), tile.rows, tile.cols);
    SourcePatch patch = load_patch<kSource>(job, tile, at);
    amax.start(job, tile.expert);
    amax.add<kSource, kTransforms>(job, patch);
  });
  amax.start(job, -1);
}

}  // namespace

void launch_expert_amax(const QuantizeJob& job, const QuantizeStream& on) {
  const int64_t blocks = (job.of.experts + kQuantizeThreads - 1) / kQuantizeThreads;
  launch(clear_amax_kernel, {unsigned(blocks), kQuantizeThreads, 0, on.stream}, job);
  const auto find = [&]<DType kSource, bool kTransforms>() {
    on.launch_strips(expert_amax_kernel<kSource, kTransforms>,
                     {kAmaxBlocks<kSource, kTransforms>, sizeof(TileQueue)}, job);
  };
  const bool transforms = job.copies[job.count - 1].to.transformed;
  visit_plain(job.source.first.dtype, [&]<DType kSource>() {
    transforms ? find.template operator()<kSource, true>()
               : find.template operator()<kSource, false>();
  });
}

}  // namespace cadre::cuda::portable
