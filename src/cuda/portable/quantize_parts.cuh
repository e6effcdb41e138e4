#pragma once
#include "cuda/portable/expert_parts.cuh"
#include "cuda/portable/patch_codes.cuh"

// Codes and scales along rows, or both ways, of bf16, in formats whose blocks lie within what a
// warp has in registers. A warp takes 32 rows of one expert and 64 columns at a time, and finds
// them by itself: nothing waits for a block. A kernel is compiled for what becomes of each way, and
// for wide chunks and whole words alone, so that it is short; quantize.cuh has one for all else.
namespace cadre::cuda::portable {

constexpr PartShape kPatchesPart{4, false};
// Of an SM, at most; many of codes both ways, in parts of a warp, and of squares: timed on an H200.
constexpr int kPartsBlocks = 12, kManyPartsBlocks = 48;

/// Whether a format's blocks are those of a warp, and need no amax from before.
template <class Row>
constexpr bool kHasParts = Row::kInfo.block == kPatchesPart.rows() && !Row::kInfo.has_expert_scale;

/// What becomes of one way, and of both.
enum class CopyKind { kNone, kCodes, kNumbers };
struct CopyKinds {
  CopyKind along_k, along_rows;

  constexpr bool numbers() const {
    return along_k == CopyKind::kNumbers || along_rows == CopyKind::kNumbers;
  }
};

/// What a kernel is compiled for.
template <class RowOfList, class ElementOfIt, CopyKinds kCopiesOfIt>
struct PartsOf {
  using Row = RowOfList;
  using Element = ElementOfIt;
  static constexpr CopyKinds kCopies = kCopiesOfIt;
};

/// Where codes and scales of one way go. Steps are bytes.
struct CopyLines {
  uint8_t *codes = nullptr, *scales = nullptr;
  int64_t pitch = 0, expert = 0;  ///< of codes
  int64_t scales_down = 0, scales_across = 0, scales_expert = 0;
  bool ragged = false;
  formats::ScaleOptions options;

  CopyLines() = default;
  explicit CopyLines(const QuantizeCopy& copy)
      : codes(copy.to.codes.data),
        scales(copy.to.scales.data),
        pitch(copy.to.codes.pitch),
        expert(copy.to.codes.expert),
        scales_expert(copy.to.scales.expert),
        ragged(copy.to.ragged),
        options(copy.options) {
    const Lines& of = copy.to.scales;
    const int64_t element = of.bits / 8;
    scales_down = of.columns ? element : of.pitch;
    scales_across = of.columns ? of.pitch : element;
  }
};

/// The parameters of the kernel.
struct PartsJob {
  ExpertsRows of;
  ExpertMatrices source;
  CopyLines along_k, along_rows;
  schedule::RowTokens tokens{};
};

/// Bytes to that line; of numbers that are none below zero, which take fewer instructions.
__device__ inline uint64_t bytes_to(int line, int64_t step) {
  return uint64_t(uint32_t(line)) * uint64_t(step);
}
/// With a step of 32 bits, which takes one instruction, with an address added to it.
__device__ inline uint64_t short_way_to(int line, uint32_t step) {
  return formats::wide_product(uint32_t(line), step);
}

/// Where the scale lies of a block of codes in a part: of its row, or of its column.
template <int kBlock, bool kByRow>
__device__ uint8_t* scale_of_part(const CopyLines& copy, const Part& part, int row, int col) {
  const int before = copy.ragged ? int(first_block(part.first, part.expert, kBlock)) : 0;
  const int scale_row = kByRow ? part.first + part.row + row : before + part.row / kBlock;
  const int scale_col = kByRow ? (part.col + col) / kBlock : part.col + col;
  return copy.scales + bytes_to(part.expert, copy.scales_expert) +
         bytes_to(scale_row, copy.scales_down) + bytes_to(scale_col, copy.scales_across);
}

/// The patch of this lane. What is not there is the last row or chunk that is: no amax of a block
/// that is there sees another number, and no load has a condition. Each lane finds out which row of
/// the source one of the part is; rows of a token that is none become zero behind all loads.
__device__ inline SourcePatch load_part(const PartsJob& job, const Part& part, PatchPlace at) {
  const Matrix& from = job.source.first;
  const int col = min(part.col + at.col, int(job.of.cols) - kChunk);
  const int of_lane = at.row / kLanes * kLanes + int(threadIdx.x) % kLanes;
  int mine = part.first + part.row + min(of_lane, part.rows - 1);
  if (job.tokens.gather()) mine = job.tokens.token_of(mine);
  const char* chunk = from.data + bytes_to(part.expert, job.source.pitch) + bytes_to(col, 2);
  const auto pitch = uint32_t(from.pitch);
  SourcePatch patch = {};
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i)
    load_wide<DType::kBf16>(
        patch.rows[i], chunk + short_way_to(max(__shfl_sync(~0u, mine, at.row + i), 0), pitch));
  if (__any_sync(~0u, mine < 0))
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i)
      if (__shfl_sync(~0u, mine, at.row + i) < 0) patch.rows[i] = {};
  return patch;
}

/// Amaxes and scales of one copy.
template <class Codes, bool kByRow>
__device__ LineScales<Codes::kDecoded> scales_of_part(const CopyLines& copy, const Part& part,
                                                      PatchPlace at, const SourcePatch& patch) {
  using Row = typename Codes::Row;
  constexpr int kBlock = Row::kInfo.block, kSharing = kBlock / kChunk;
  constexpr int kStride = kByRow ? 1 : kLanesAcross<Row>;
  LineMagnitudes<DType::kBf16> amax;
  if constexpr (kByRow)
    amax = LineMagnitudes<DType::kBf16>(patch.rows);
  else
    amax = columns_of<DType::kBf16>(patch);
  reduce_lanes<DType::kBf16, kStride, kSharing>(amax);
  // Lanes of a block that are beyond the last column, or row, have scales to store all the same.
  uint8_t* to = scale_of_part<kBlock, kByRow>(copy, part, at.row, at.col);
  const int rows = at.col / kBlock * kBlock < part.cols ? part.rows - at.row : 0;
  return ScaleMaker<Row, typename Codes::Element, Codes::kDecoded>{{}, copy.options}
      .template of_blocks<kSharing, kStride>(
          amax,
          {to, kByRow ? copy.scales_down : copy.scales_across, kByRow ? rows : part.cols - at.col});
}

/// The codes of one copy, or its numbers.
template <class Codes, bool kByRow>
__device__ void encode_copy(const CopyLines& copy, const Part& part, PatchPlace at,
                            const SourcePatch& patch, const LineScales<Codes::kDecoded>& scales) {
  using Element = typename Codes::Element;
  using Word = typename EightCodes<Element>::Word;
  constexpr int kBits = Codes::kDecoded ? 16 : EightCodes<Element>::kBits;
  uint8_t* to = copy.codes + bytes_to(part.expert, copy.expert) +
                bytes_to(part.first + part.row + at.row, copy.pitch) +
                bytes_to(part.col + at.col, kBits) / 8;
  encode_rows<DType::kBf16, typename Codes::Row::Scale, Element>(
      patch, scales.multipliers, kByRow, [&](int i, const EightCodes<Element>& codes) {
        if (i < at.rows) {
          if constexpr (Codes::kDecoded)
            *reinterpret_cast<uint4*>(to) =
                numbers_of(codes, scales.numbers, kByRow, i, DType::kBf16).low;
          else
            *reinterpret_cast<Word*>(to) = codes.word;
        }
        to += copy.pitch;
      });
}

/// One copy, whose scales are those of lanes of a warp.
template <class Codes, bool kByRow>
__device__ void quantize_copy(const CopyLines& copy, const Part& part, PatchPlace at,
                              const SourcePatch& patch) {
  encode_copy<Codes, kByRow>(copy, part, at, patch,
                             scales_of_part<Codes, kByRow>(copy, part, at, patch));
}

/// Blocks that an SM has at once, as many as registers allow.
template <class Of>
constexpr int kPartsAtOnce = 3 - int(Of::kCopies.numbers()) -
                             int(EightCodes<typename Of::Element>::kNibbles);

template <class Of, class Parts>
__global__ void __launch_bounds__(kGridWarps* kLanes, kPartsAtOnce<Of>)
    quantize_parts_kernel(const __grid_constant__ PartsJob job) {
  begin_dependent();
  using Row = typename Of::Row;
  const auto one_copy = [&]<CopyKind kKind, bool kByRow>(const CopyLines& copy,
                                                         const auto&... about) {
    using Codes = CodesOf<Row, typename Of::Element, CodesKind{kKind == CopyKind::kNumbers, false}>;
    // A condition that is always true: without a branch both ways would be computed at once, which
    // takes too many registers.
    if constexpr (kKind != CopyKind::kNone)
      if (copy.codes != nullptr) quantize_copy<Codes, kByRow>(copy, about...);
  };
  const auto mine = PatchOf<Row>::of_thread(0);  // threadIdx.x is the lane
  Part part;
  for (Parts parts(job.of); parts.next(part);) {
    if (part.cols <= 0) return;
    const PatchPlace at(mine, part.rows, part.cols);
    const SourcePatch patch = load_part(job, part, at);
    one_copy.template operator()<Of::kCopies.along_k, true>(job.along_k, part, at, patch);
    one_copy.template operator()<Of::kCopies.along_rows, false>(job.along_rows, part, at, patch);
  }
}

/// Whether all lines of codes are whole words, or numbers wide chunks of bf16.
template <class Element>
bool is_whole(const QuantizeCopy& copy) {
  const Lines& to = copy.to.codes;
  const auto bits = reinterpret_cast<uintptr_t>(to.data) | uint64_t(to.pitch | to.expert);
  if (copy.to.decoded) return bits % 16 == 0 && to.bits == 16;
  return !to.columns && bits % sizeof(typename EightCodes<Element>::Word) == 0;
}

/// Whether the source is of bf16 in wide chunks, whose rows and experts lie at equal distances.
inline bool has_wide_rows(const QuantizeJob& job) {
  const ExpertMatrices& from = job.source;
  return from.discrete == nullptr && from.first.dtype == DType::kBf16 && from.first.is_wide() &&
         from.first.pitch <= UINT32_MAX && from.pitch % 16 == 0;
}

/// Whether the kernels take both copies, of which the last is along rows.
template <class Row, class Element>
bool takes_parts(const QuantizeJob& job) {
  const bool has_rows = !job.tokens.gather() || job.tokens.slots > 0;
  return has_wide_rows(job) && has_rows &&
         std::all_of(job.copies, job.copies + job.count, [&](const QuantizeCopy& copy) {
           const bool last = &copy == &job.copies[job.count - 1];
           return copy.to.down == last && copy.to.across != last && is_whole<Element>(copy) &&
                  !copy.stochastic;
         });
}

/// Of both copies, or of the one along rows.
inline PartsJob parts_job(const QuantizeJob& all) {
  PartsJob job{all.of, all.source, {}, CopyLines(all.copies[all.count - 1]), all.tokens};
  if (all.count == 2) job.along_k = CopyLines(all.copies[0]);
  return job;
}

/// Calls work.operator()<Of>() with what the kernel of a job is compiled for.
template <class Row, class Element>
void visit_parts(const QuantizeJob& job, auto&& work) {
  const auto along_rows = [&]<CopyKind kAlongK>() {
    job.copies[job.count - 1].to.decoded
        ? work.template operator()<PartsOf<Row, Element, CopyKinds{kAlongK, CopyKind::kNumbers}>>()
        : work.template operator()<PartsOf<Row, Element, CopyKinds{kAlongK, CopyKind::kCodes}>>();
  };
  if (job.count == 1)
    along_rows.template operator()<CopyKind::kNone>();
  else if (job.copies[0].to.decoded)
    along_rows.template operator()<CopyKind::kNumbers>();
  else
    along_rows.template operator()<CopyKind::kCodes>();
}

template <class Parts>
void launch_parts(void (*kernel)(PartsJob), const PartsJob& job, const QuantizeStream& on,
                  int blocks = kPartsBlocks) {
  const int most = std::max(on.units, 1) * blocks;
  launch(kernel, Parts::grid(job.of, most).on(on.stream), job);
}

template <class Row, class Element>
void launch_quantize_parts(const QuantizeJob& all, const QuantizeStream& on) {
  const PartsJob job = parts_job(all);
  if (job.of.rows == 0 || job.of.cols == 0) return;
  visit_parts<Row, Element>(all, [&]<class Of>() {
    constexpr CopyKinds kOf = Of::kCopies;
    constexpr bool kCodes = kOf.along_k == CopyKind::kCodes && kOf.along_rows == CopyKind::kCodes;
    const auto with = [&]<class Parts>() {
      launch_parts<Parts>(quantize_parts_kernel<Of, Parts>, job, on,
                          kCodes ? kManyPartsBlocks : kPartsBlocks);
    };
    job.of.offsets != nullptr ? with.template operator()<BatchParts<kPatchesPart>>()
                              : with.template operator()<WeightParts<kPatchesPart>>();
  });
}

}  // namespace cadre::cuda::portable
