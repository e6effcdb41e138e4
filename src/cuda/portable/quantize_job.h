#pragma once
#include "cuda/portable/expert_matrices.h"
#include "cuda/portable/quantized_tile.cuh"
#include "formats/philox.h"
#include "formats/scale.h"
#include "schedule/row_tokens.h"
#include "schedule/strips.h"

// What the host tells the kernels that quantise and dequantise.
namespace cadre::cuda::portable {

/// One wanted copy.
struct QuantizeCopy {
  QuantizedMatrix to;
  formats::ScaleOptions options;
  formats::StochasticBits random;  ///< but for seed and offset
  bool stochastic = false;
  uint32_t* amax = nullptr;       ///< [E], for formats with expert scales
  uint32_t* line_amax = nullptr;  ///< of all lines, for formats with a scale a line
  int64_t expert_lines = 0;       ///< from an expert's to the next one's; 0: rows of a batch

  /// The amaxes of the lines in a tile.
  __device__ uint32_t* lines_of(const ExpertTile& tile) const {
    return line_amax + tile.expert * expert_lines + (to.down ? tile.col : tile.first + tile.row);
  }
};

/// Copies from one read of the source. The one along rows comes last: it may be transformed, in
/// place.
struct QuantizeJob {
  ExpertsRows of;
  ExpertMatrices source;
  QuantizeCopy copies[2];
  int count = 0;
  schedule::RowTokens tokens{};   ///< where the source's rows are gathered
  const uint64_t* rng = nullptr;  ///< [2] seed and offset

  QuantizeJob with_one(const QuantizeCopy& copy) const {
    QuantizeJob job = *this;
    job.copies[0] = copy;
    job.count = 1;
    return job;
  }
  /// Whether all blocks are square.
  __device__ bool is_square() const {
    const QuantizedMatrix &first = copies[0].to, &last = copies[count - 1].to;
    return first.across && first.down && last.across && last.down;
  }
};

struct DequantizeJob {
  ExpertsRows of;
  QuantizedMatrix from;
  ExpertMatrices to;
  const int32_t* block_offsets = nullptr;  ///< of `to`: see QuantizedMatrix
};

inline schedule::RowTokens tokens_of(const QuantizeProblem& p, const QuantizeArgs& args) {
  return {args.slot_of, uint32_t(p.tokens * p.top_k), uint32_t(p.top_k)};
}

/// Where a kernel runs.
struct QuantizeStream {
  int units = 1;  ///< SMs, of a device made by hand maybe none
  cudaStream_t stream = nullptr;

  /// What a kernel over strips of tiles takes of an SM.
  struct OfUnit {
    int blocks, shared_bytes;        ///< shared_bytes: of a block
    int threads = kQuantizeThreads;  ///< of a block
    bool dependent = false;          ///< the kernel waits for its predecessors
  };
  /// Persistent blocks, so many to an SM, but not more than there are strips of tiles; which get
  /// wider where every block has many, since looking for one takes time. All are about as wide:
  /// blocks take them in turn, so that some would have all wide ones and others all narrow ones.
  template <class Job, class... More>
  void launch_strips(void (*kernel)(Job, More...), const OfUnit& unit, Job job,
                     const More&... more) const {
    constexpr int64_t kStripsOfBlock = 8, kMostTiles = 8;
    const int64_t most = int64_t(std::max(units, 1)) * unit.blocks;
    const int64_t strips = most * kStripsOfBlock * unit.threads / kQuantizeThreads;
    const int64_t tiles = std::clamp<int64_t>(job.of.most_tiles() / strips, 1, kMostTiles);
    job.of.strip = int(schedule::even_strip(job.of.across(), tiles)) * kTileSide;
    const auto blocks = unsigned(std::clamp<int64_t>(job.of.most_tiles(), 1, most));
    launch(kernel,
           {.blocks = blocks,
            .threads = unsigned(unit.threads),
            .shared_bytes = unit.shared_bytes,
            .stream = stream,
            .dependent = unit.dependent},
           job, more...);
  }
};

/// Calls `work.operator()<kDType>()` for f32, bf16 or f16.
template <class Work>
void visit_plain(DType dtype, Work&& work) {
  if (dtype == DType::kF32) return work.template operator()<DType::kF32>();
  if (dtype == DType::kBf16) return work.template operator()<DType::kBf16>();
  work.template operator()<DType::kF16>();
}

/// Codes and scales of copies that have this format. A format's instances have a source of their
/// own.
template <class Row, class Element>
void launch_quantize(const QuantizeJob&, const QuantizeStream&);
template <class Row, class Element>
void launch_dequantize(const DequantizeJob&, const QuantizeStream&);

/// Where each expert's transformed blocks begin if they lie without gaps.
void launch_block_offsets(const ExpertsRows&, int32_t* block_offsets, const QuantizeStream&);

/// The amaxes of all experts, of all copies that have room for them.
void launch_expert_amax(const QuantizeJob&, const QuantizeStream&);

/// The amaxes of all lines of a copy that has a scale a line.
void launch_line_amax(const QuantizeJob&, const QuantizeCopy&, const QuantizeStream&);

}  // namespace cadre::cuda::portable
