#pragma once
#include <cstdint>

#include "cadre/dtype.h"

// What was chosen by timing on an H200, and why. "+3 %" is how much longer products take without
// the choice: the geometric mean over the layers of bench/shapes/h200_grouped_gemm.txt, uniform
// routing, 2026-11-22 (bench/results/nvidia-h200-tuning.json). What has no figure was chosen when
// the kernels were written and not timed since. What else was tried:
// docs/decisions/0005-hopper-grouped-gemm.md.
namespace cadre::cuda::sm90 {

/// Blocks of a cluster, which have an operand in common. Four would ask less of L2, but no
/// more than thirty clusters of four find room on 132 SMs.
constexpr int kCluster = 2;

/// Warpgroups that multiply, and the rows of A, and of accumulators, of each: the M of a wgmma.
/// Three consumers leave no registers for products of 256 columns.
constexpr int kConsumers = 2, kConsumerRows = 64;
constexpr int kTileRows = kConsumers * kConsumerRows, kClusterRows = kCluster * kTileRows;

/// Columns of a tile, at most: what one wgmma takes. Wider tiles, as two instructions, gained for
/// experts of just over 256 rows and lost for all others, whose output they left no buffer.
constexpr int kMostCols = 256;

/// Stages of operands. Three lose wherever experts are many, since their weights come from memory
/// and not from L2: +6 %, gpt-oss +17 %. Five do not fit.
constexpr int kDepth = 64, kStages = 4;

/// Where experts have few rows, tiles of 16-bit operands that are neither gathered nor scattered
/// have kColsOfFewRows columns, and so more stages: with four of any width products took longer.
constexpr int kStagesOfFewRows = 8;

/// Buffers for the output, with which consumers take turns: one stores while the other multiplies.
/// With two: +1.5 % (fprop, dgrad), +5.5 % (wgrad). Of fp32 rows each consumer has its own.
constexpr int kBuffers = 4, kBuffersOfFloatRows = 2;

/// Buffers of 16-bit rows that consumers hold, for each of them, and records of tiles there, since
/// the store warps read the next one only when what is held of the last tile has left: two records
/// are slower with short tiles. Tiles of so few rows, times their contraction, are over before what
/// is held has left, and are not held.
constexpr int kBuffersOfHeldRows = 2, kRecordsOfHeldRows = 3;
constexpr int64_t kMostUnheld = int64_t{128} * 256;

/// Buffers of gated rows, for each consumer: of 16 columns, of which h leaves with gate and up.
constexpr int kBuffersOfGatedRows = 4;
/// Widths of their tiles: each is a loop of its own with the activations in it.
constexpr int kGatedColStep = 32;

/// The same where rows are gathered: of 32 columns, and 64 rows. Their widths are of rows of w, of
/// which only an expert's last tile has fewer.
constexpr int kBuffersOfGatheredRows = 2, kGatheredColStep = 64;

/// Stages of wgrad: as many bytes in more stages are freed and loaded sooner. Four of 64: +0.7 %.
constexpr int kDepthOfGradients = 32, kStagesOfGradients = 8;

/// Products of 8-bit codes, whose stage of 128 has the bytes of 64 of 16 bits: a thread has two
/// sets of accumulators, a stage's and those of all, so tiles are narrower, and there is room for a
/// fifth stage. Of floats each consumer has its own buffers, whose addresses take the registers of
/// wider tiles. What was slower: docs/decisions/0011-fp8-rows.md.
constexpr int kColsOfCodes = 192, kColsOfCodesToFloats = 128;
constexpr int kDepthOfCodes = 128, kStagesOfCodes = 5, kBuffersOfCodes = 3;

/// Where experts have few rows: tiles of 16-bit operands with so few columns.
constexpr int kColsOfFewRows = 64;
constexpr int64_t kFewRows = 48;  ///< of an expert, in the mean
constexpr bool are_few_rows(int64_t rows, int experts) { return rows <= kFewRows * experts; }

/// Weights of 8- or 4-bit codes that the consumers decode.
constexpr int kColsOfPacked = 256, kDepthOfPacked = 64;
constexpr int kStagesOfFourBits = 5, kStagesOfEightBits = 4;

/// The same where experts have some rows, few, and fewest of all, in the mean: decoding waits for
/// its own instructions, so that four consumers do more than two, of as many columns as there are
/// registers for. A narrowest tile has rows of whole lines of 128 bytes: TMA takes six cycles for a
/// row of a box, however short. With 8-bit codes there is room for five such stages: mxfp8 with 64
/// tokens, by hand, in four of 64 columns +2.6 %.
constexpr int kConsumersOfNarrow = 4;
constexpr int kColsOfMiddle = 96, kStagesOfMiddle = 3;
constexpr int kColsOfNarrow = 64, kDepthOfNarrow = 128, kStagesOfNarrow = 4;
constexpr int kColsOfNarrowest = 32, kDepthOfNarrowest = 256, kStagesOfNarrowest = 3;
constexpr int kStagesOfNarrowestEightBits = 5;
constexpr int64_t kRowsOfNarrowest = 20, kRowsOfMiddle = 80;

/// Beside 8-bit codes x is copied with its columns split where rows are few, and for products with
/// so many columns: with fewer the copy costs more than it spares. How many blocks of an SM copy.
constexpr int64_t kSplitCols = 4096, kSplitBlocks = 8;

/// fp32 outputs of wgrad: each consumer has buffers of 32 columns, the first of which take a tile's
/// old output while it is multiplied. h200_accumulate.txt, by hand: a buffer less +0.3 %, a stage
/// less and six +5 %; tiles of 128 columns, all loaded ahead, five stages of 64 +4 %, Qwen3 none.
constexpr int kStagesOfFloats = 6, kBuffersOfFloats = 5;

/// Rows of an expert up to which old fp32 outputs are loaded and added to. With more rows TMA adds
/// (reduce-add): slower, but hidden behind the products.
constexpr int kMostLoadedRows = 1536;

/// Stages a cluster has to work on, at least, for clusters to take tiles as they go: the counter
/// that they share must be zero first, which takes two microseconds of the host and two of the
/// device (timed when a memset did it). Tiles that are dealt out in advance: fprop +3 %, dgrad +5
/// %, wgrad +0.6 %, gpt-oss +20 %.
constexpr int64_t kCountedStages = 64;

/// Columns of tiles that are worked on together: as many as keep both operands of the tiles in
/// flight in L2. One column: no difference on these layers.
constexpr int kBand = 8;

/// Tiles that a cluster has taken ahead of its slowest role, at most, and how much of a tile's
/// contraction is still to be loaded when it takes the next. The more, the longer some clusters
/// have tiles left when others have none; the less, the more often load warps wait for a tile.
constexpr int kRecords = 2, kAhead = 1024, kAheadOfGradients = 256;

/// Of a thread (setmaxnreg). Consumers hold 128 accumulators; the others need little, and the sum
/// is what an SM has.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
/// The same where consumers compute activations of a tile beside the products of the next: with
/// fewer registers the two halves of a part do not fit, and fc1 of 24 stages takes 7 % longer.
constexpr int kProducerRegistersOfGated = 40, kConsumerRegistersOfGated = 232;
/// The same where a block has four consumers.
constexpr int kRegistersBesideManyConsumers = 48, kRegistersOfManyConsumers = 104;

/// Dynamic shared memory of an SM on Hopper, and what its block needs beside it.
constexpr int kMostSharedBytes = 228 << 10, kSharedBytesOfBlock = 1 << 10;

}  // namespace cadre::cuda::sm90
