#include "cuda/portable/source_patch.cuh"

// The largest magnitude of an expert's rows, as bits: of the values, or of the transformed ones. A
// maximum comes out the same in any order, so blocks raise it by atomics.
namespace cadre::cuda::portable {
namespace {

/// A thread takes one patch of a tile, or two below each other, which are all sixteen rows of a
/// transform. There are fewer threads then, in more blocks of an SM.
template <bool kTransforms>
constexpr int kPatches = kTransforms ? 2 : 1;
template <bool kTransforms>
constexpr int kAmaxThreads = kQuantizeThreads / kPatches<kTransforms>;
template <DType kSource, bool kTransforms>
constexpr int kAmaxBlocks = kSource == DType::kF32 ? 2
                            : kTransforms          ? 4
                                                   : 3;
constexpr int kAmaxAcross = kAcross / 2;

__global__ void clear_amax_kernel(const __grid_constant__ QuantizeJob job) {
  launch_dependents();
  const int64_t expert = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x;
  for (const QuantizeCopy& copy : job.copies)
    if (copy.amax != nullptr && expert < job.of.experts) copy.amax[expert] = 0;
}

/// The largest sum of all columns that the transform multiplies by 1/4 and rounds, signs aside, as
/// bits. Of a last pair of sums, a + b and a - b, the larger is |a| + |b|, rounded as they are; but
/// NaN where both are infinite. An expert with either of them has the same scale.
template <DType kSource>
__device__ uint32_t largest_sum(const SourcePatch (&patches)[2]) {
  using formats::Hadamard16;
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    float v[Hadamard16::kPoints];
#pragma unroll
    for (int i = 0; i < Hadamard16::kPoints; ++i)
      v[i] = element_of(patches[i / kPatchRows].rows[i % kPatchRows], kSource, k);
    Hadamard16::sign(v);
    Hadamard16::add_pairs<kPatchRows>(v);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i)
      largest = max(largest, __float_as_uint(formats::add(fabsf(v[i]), fabsf(v[i + kPatchRows]))));
  }
  return largest;
}

/// Those of one expert, of each copy, kept in registers while tiles are of that expert.
template <DType kSource, bool kTransforms>
struct ThreadAmax {
  uint32_t of_copy[2] = {};  ///< of a transformed one the largest sum
  int expert = -1;

  __device__ static bool is_transformed(const QuantizeCopy& copy) {
    return kTransforms && copy.to.transformed;
  }
  __device__ void start(const QuantizeJob& job, int of_expert) {
    if (of_expert == expert) return;
    if (expert >= 0) wait_for_predecessors();  // amaxes are zero from then on
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= job.count || expert < 0) continue;
      const QuantizeCopy& copy = job.copies[i];
      uint32_t largest = __reduce_max_sync(~0u, of_copy[i]);
      // Rounding keeps the order, so one number of all is rounded.
      if (is_transformed(copy))
        largest = formats::magnitude(formats::Hadamard16::finish(__uint_as_float(largest)));
      if (threadIdx.x % kLanes == 0 && largest != 0) atomicMax(&copy.amax[expert], largest);
    }
    of_copy[0] = of_copy[1] = 0;
    expert = of_expert;
  }
  __device__ void add(const QuantizeJob& job, const SourcePatch (&patches)[kPatches<kTransforms>]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const QuantizeCopy& copy = job.copies[i];
      if (i >= job.count || copy.amax == nullptr) continue;
      if constexpr (kTransforms)
        if (copy.to.transformed) {
          of_copy[i] = max(of_copy[i], largest_sum<kSource>(patches));
          continue;
        }
      for (const SourcePatch& patch : patches)
        of_copy[i] = max(of_copy[i], largest_of<kSource>(patch));
    }
  }
};

/// Reads while amaxes are cleared: what it reads was there before that kernel began, which depends
/// on nothing.
template <DType kSource, bool kTransforms>
__global__ void __launch_bounds__(kAmaxThreads<kTransforms>, kAmaxBlocks<kSource, kTransforms>)
    expert_amax_kernel(const __grid_constant__ QuantizeJob job) {
  launch_dependents();
  auto& queue = *reinterpret_cast<StripQueue*>(dynamic_shared());
  ThreadAmax<kSource, kTransforms> amax;
  walk_tiles(job.of, queue, [&](const ExpertTile& tile, int column) {
    auto place = Patch<kAmaxAcross>::of_thread(column);
    place.row *= kPatches<kTransforms>;
    SourcePatch patches[kPatches<kTransforms>];
#pragma unroll
    for (SourcePatch& patch : patches) {
      patch = load_patch<kSource>(job, tile, PatchPlace(place, tile.rows, tile.cols));
      place.row += kPatchRows;
    }
    amax.start(job, tile.expert);
    amax.add(job, patches);
  });
  wait_for_predecessors();  // even without rows: who waits for this kernel waits for that one, too
  amax.start(job, -1);
}

}  // namespace

void launch_expert_amax(const QuantizeJob& job, const QuantizeStream& on) {
  const int64_t blocks = (job.of.experts + kQuantizeThreads - 1) / kQuantizeThreads;
  launch(clear_amax_kernel, {unsigned(blocks), kQuantizeThreads, 0, on.stream}, job);
  const auto find = [&]<DType kSource, bool kTransforms>() {
    on.launch_strips(expert_amax_kernel<kSource, kTransforms>,
                     {.blocks = kAmaxBlocks<kSource, kTransforms>,
                      .shared_bytes = sizeof(StripQueue),
                      .threads = kAmaxThreads<kTransforms>,
                      .dependent = true},
                     job);
  };
  const bool transforms = job.copies[job.count - 1].to.transformed;
  visit_plain(job.source.first.dtype, [&]<DType kSource>() {
    transforms ? find.template operator()<kSource, true>()
               : find.template operator()<kSource, false>();
  });
}

}  // namespace cadre::cuda::portable
