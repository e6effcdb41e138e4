#include "cpu/gemm/ragged_contraction.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "cpu/gemm/arena.h"
#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/first_error.h"
#include "cpu/gemm/stage.h"
#include "cpu/gemm/tile_product.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu::gemm {
namespace {

constexpr int64_t kChunkRows = 256;
constexpr int64_t kHeight = 128, kWidth = 1024;  // of a tile of dw
constexpr int64_t kStripBytes = 1 << 20;         // of x, at most, to write straight into dw
constexpr int64_t kPieceWidth = 512;             // columns of an operand that one task stages
constexpr int64_t kMostChunks = 4096;            // of a wave

/// The sizes of one problem. None depends on threads or counts.
struct Sizes {
  int64_t n, k;          ///< of dw
  int64_t padded_k;      ///< of x as a second factor
  int64_t width;         ///< of a tile
  int64_t unit;          ///< bytes of an element
  bool own_product;      ///< tile_product() writes bf16
  int64_t deep, deeper;  ///< what depths are padded to, as a first and a second factor
  int64_t chunks;        ///< of a wave, at most
  int64_t staged_bytes;  ///< of a wave
  bool spans;            ///< an expert may go on in the next wave

  Sizes(const GroupedGemmProblem& p, const Means& means)
      : n(p.n),
        k(p.k),
        unit(bytes_of(means.type)),
        own_product(means.type == Multiplicand::kBf16 && p.out == DType::kBf16 &&
                    refuses_tile_product(means.type, processor()) == nullptr),
        deep(own_product ? 2 : 16 / unit),
        deeper(depth_unit(means.type)) {
    padded_k = padded_width(k);
    width = std::min(padded_k, processor().free_tiles ? kWidth : 64);
    const int64_t some = std::min<int64_t>(p.experts, p.rows);
    const int64_t rows = p.rows + some * (deeper + 15);
    chunks = std::min(kMostChunks, ceil_div(rows, kChunkRows) + some);
    const int64_t all = rows * (n + padded_k) * unit + chunks * 2 * kAlignment;
    staged_bytes = std::min(all, std::max(means.wave_bytes, bytes_of_chunk(kChunkRows)));
    spans = chunks == kMostChunks || staged_bytes < all;
  }
  int64_t a_bytes(int64_t depth) const { return round_up(n * depth * unit, kAlignment); }
  int64_t bytes_of_chunk(int64_t depth) const {
    return a_bytes(depth) + round_up(padded_k * round_up(depth, deeper) * unit, kAlignment);
  }
  int64_t tiles_down() const { return ceil_div(n, kHeight); }
  int64_t tiles_across() const { return ceil_div(padded_k, width); }
  int64_t tiles() const { return tiles_down() * tiles_across(); }

  static constexpr int64_t kAlignment = 64;
};

/// Up to 256 rows of codes of one expert.
struct Chunk {
  int expert;
  int64_t first;      ///< the expert's first row of codes
  int64_t row, rows;  ///< of this chunk
  int64_t depth;      ///< rows, padded as for dy
  int64_t deeper;     ///< padded as for x
  char* dy;           ///< staged, [n, depth]
  char* x;            ///< staged, [deeper, padded_k] in columns
};

/// Chunks [begin, end) of one expert.
struct Segment {
  int64_t begin, end;
  bool starts, ends;  ///< the expert begins here; it is complete then
};

struct Memory {
  Chunk* chunks;
  Segment* segments;
  char* staged;
  float* carried;  ///< sums of the expert that spans waves, [n, padded_k] by tiles
  float* sums;
  float* transposes;  ///< of sixteen lines
  int64_t sums_of_tile, lines_of_tile, bytes;

  Memory(const Sizes& s, const Means& means, void* workspace) {
    Arena arena(workspace);
    sums_of_tile = round_up(std::min(s.n, kHeight), 16) * s.width;
    lines_of_tile = 16 * round_up(std::max(std::min(s.n, kHeight), s.width), 16);
    chunks = arena.take<Chunk>(s.chunks);
    segments = arena.take<Segment>(s.chunks);
    staged = arena.take<char>(s.staged_bytes);
    carried = arena.take<float>(s.spans ? s.n * s.padded_k : 0);
    sums = arena.take<float>(means.threads * sums_of_tile);
    transposes = arena.take<float>(means.threads * lines_of_tile);
    bytes = arena.used();
  }
};

/// Deals out the rows of all experts in waves of chunks.
class Waves {
 public:
  Waves(const GroupedGemmProblem& p, const int32_t* offsets, const Sizes& sizes, Memory& memory)
      : shape_(lhs_shape(p)), walk_(offsets, p.experts, p.rows), sizes_(sizes), memory_(memory) {}

  /// False when no rows are left.
  bool next() {
    chunks_ = segments_ = used_ = 0;
    while (chunks_ < sizes_.chunks && find_rows() && add_chunk()) {
    }
    return chunks_ != 0;
  }
  int64_t chunks() const { return chunks_; }
  int64_t segments() const { return segments_; }

 private:
  bool find_rows() {
    while (row_ == codes_.first + codes_.count) {
      if (!walk_.next()) return false;
      const CodeRows rows{walk_.rows().first, walk_.rows().count()};
      codes_ = code_rows(shape_.format, shape_.axis, rows, walk_.expert());
      row_ = codes_.first;
    }
    return true;
  }
  /// False if the wave has no room left for it.
  bool add_chunk() {
    const int64_t end = codes_.first + codes_.count, rows = std::min(kChunkRows, end - row_);
    const int64_t depth = round_up(rows, sizes_.deep), bytes = sizes_.bytes_of_chunk(depth);
    if (used_ + bytes > sizes_.staged_bytes) return false;
    char* place = memory_.staged + used_;
    used_ += bytes;
    const Chunk chunk{walk_.expert(), codes_.first,
                      row_,           rows,
                      depth,          round_up(rows, sizes_.deeper),
                      place,          place + sizes_.a_bytes(depth)};
    const bool starts = row_ == codes_.first;
    if (starts || segments_ == 0) memory_.segments[segments_++] = {chunks_, chunks_, starts, false};
    memory_.chunks[chunks_++] = chunk;
    row_ += rows;
    Segment& segment = memory_.segments[segments_ - 1];
    segment.end = chunks_;
    segment.ends = row_ == end;
    return true;
  }

  QuantizedShape shape_;
  schedule::ExpertWalk walk_;
  const Sizes& sizes_;
  Memory& memory_;
  CodeRows codes_;
  int64_t row_ = 0, chunks_ = 0, segments_ = 0, used_ = 0;
};

/// Everything that the threads of one run share.
struct Work {
  const GroupedGemmProblem& p;
  const GroupedGemmArgs& args;
  const Means& means;
  Sizes sizes;
  Memory memory;
  OperandLines dy, x;
  Epilogue epilogue;

  Work(const GroupedGemmProblem& problem, const GroupedGemmArgs& given, const Means& with,
       Workspace workspace)
      : p(problem),
        args(given),
        means(with),
        sizes(problem, with),
        memory(sizes, with, workspace.data),
        dy(given.lhs, lhs_shape(problem)),
        x(given.rhs, rhs_shape(problem)),
        epilogue(problem, given) {}

  int64_t pieces_of_dy() const { return ceil_div(sizes.n, kPieceWidth); }
  int64_t pieces() const { return pieces_of_dy() + ceil_div(sizes.padded_k, kPieceWidth); }
};

/// Columns [col, col + cols) of a chunk of an operand.
Part part_of(const Chunk& chunk, bool column, int64_t col, int64_t cols) {
  if (column) return {chunk.expert, chunk.first, col, cols, chunk.row, chunk.rows};
  return {chunk.expert, chunk.first, chunk.row, chunk.rows, col, cols};
}

void stage_piece(const Work& work, int64_t index) {
  const Chunk& chunk = work.memory.chunks[index / work.pieces()];
  const int64_t piece = index % work.pieces(), pieces_of_dy = work.pieces_of_dy();
  const Multiplicand type = work.means.type;
  const auto run = [](bool column) { return column ? Along::kDepth : Along::kOuter; };
  if (piece < pieces_of_dy) {
    const int64_t col = piece * kPieceWidth, cols = std::min(kPieceWidth, work.sizes.n - col);
    const bool column = work.dy.is_column_major();
    char* place = chunk.dy + col * chunk.depth * work.sizes.unit;
    stage_a(work.dy, run(column), part_of(chunk, column, col, cols),
            {place, type, cols, chunk.depth});
  } else {
    const int64_t col = (piece - pieces_of_dy) * kPieceWidth;
    const int64_t width = std::min(kPieceWidth, work.sizes.padded_k - col);
    const bool column = work.x.is_column_major();
    char* place = chunk.x + col * chunk.deeper * work.sizes.unit;
    stage_b(work.x, run(column), part_of(chunk, column, col, std::min(width, work.sizes.k - col)),
            {place, type, width, chunk.deeper});
  }
}

/// One tile of dw of one segment.
struct Task {
  Segment segment;
  int expert;
  int64_t row, rows, col, width;

  Task(const Work& work, int64_t index) {
    const Sizes& s = work.sizes;
    segment = work.memory.segments[index / s.tiles()];
    expert = work.memory.chunks[segment.begin].expert;
    row = index % s.tiles() / s.tiles_across() * kHeight;
    rows = std::min(kHeight, s.n - row);
    col = index % s.tiles_across() * s.width;
    width = std::min(s.width, s.padded_k - col);
  }
};

/// Rows [row, row + rows) of dy^T of a chunk, and columns of x from `col` on.
const char* dy_of(const Work& work, const Chunk& chunk, int64_t row) {
  return chunk.dy + row * chunk.depth * work.sizes.unit;
}
const char* x_of(const Work& work, const Chunk& chunk, int64_t col) {
  return chunk.x + col * chunk.deeper * work.sizes.unit;
}

/// Whether sums may be written straight into dw: all of an expert in one chunk, and dw as the
/// product writes it. Saves a trip through the cache, which few rows do not hide.
bool is_direct(const Work& work, const Segment& segment) {
  const Chunk& chunk = work.memory.chunks[segment.begin];
  const TensorView& dw = work.args.out;
  const bool whole = segment.starts && segment.ends && segment.end - segment.begin == 1;
  const bool plain = work.p.out_major == Major::kRow && work.sizes.padded_k == work.sizes.k &&
                     work.epilogue.is_identity(chunk.expert);
  if (!whole || !plain) return false;
  if (work.sizes.own_product) return work.sizes.k % kTileWidth == 0;
  return work.p.out == DType::kF32 && dw.stride[1] == work.sizes.k && processor().free_tiles &&
         work.sizes.padded_k * chunk.depth * work.sizes.unit <= kStripBytes;
}

/// A tile of fp32.
void write_floats(const Work& work, const Task& task, const Products& products) {
  if (task.col != 0) return;  // whole rows of dw; the first task across does them all
  const Chunk& chunk = work.memory.chunks[task.segment.begin];
  products.multiply(
      {task.rows, chunk.depth, work.sizes.padded_k, work.epilogue.accumulates(task.expert)},
      dy_of(work, chunk, task.row), chunk.x, work.epilogue.address(task.expert, task.row, 0));
}

/// A tile of bf16, column by column.
void write_bf16(const Work& work, const Task& task) {
  const Chunk& chunk = work.memory.chunks[task.segment.begin];
  const TileShape shape{task.rows, chunk.depth, chunk.depth,
                        work.epilogue.accumulates(task.expert)};
  const char* dy = dy_of(work, chunk, task.row);
  for (int64_t col = task.col; col < task.col + task.width; col += kTileWidth) {
    const char* x = x_of(work, chunk, col);
    tile_product(work.means.type, shape, {dy, x},
                 {work.epilogue.address(task.expert, task.row, col), work.args.out.stride[1], true,
                  work.epilogue.streams()},
                 {});
  }
}

void write_directly(const Work& work, const Task& task, const Products& products) {
  work.sizes.own_product ? write_bf16(work, task) : write_floats(work, task, products);
}

void add_up(const Work& work, const Task& task, const Products& products) {
  const Sizes& s = work.sizes;
  const int64_t thread = omp_get_thread_num();
  float* sums = work.memory.sums + thread * work.memory.sums_of_tile;
  float* carried = work.memory.carried + task.row * s.padded_k + task.col * task.rows;
  const size_t bytes = size_t(task.rows * task.width) * sizeof(float);
  if (!task.segment.starts) std::memcpy(sums, carried, bytes);
  for (int64_t c = task.segment.begin; c < task.segment.end; ++c) {
    const Chunk& chunk = work.memory.chunks[c];
    const bool accumulate = !task.segment.starts || c != task.segment.begin;
    products.multiply({task.rows, chunk.depth, task.width, accumulate},
                      dy_of(work, chunk, task.row), x_of(work, chunk, task.col), sums);
  }
  if (!task.segment.ends) return void(std::memcpy(carried, sums, bytes));
  work.epilogue.store(
      {task.expert, task.row, task.rows, task.col, std::min(task.width, s.k - task.col)},
      {sums, task.width, Major::kRow}, work.memory.transposes + thread * work.memory.lines_of_tile);
}

/// dw of experts without rows; they are dealt to the threads in turn.
void zero_empty(const Work& work) {
  const int threads = omp_get_num_threads(), mine = omp_get_thread_num();
  for (schedule::ExpertWalk walk(work.args.offsets.data, work.p.experts, work.p.rows);
       walk.next();) {
    const int e = walk.expert();
    const bool empty = walk.rows().count() == 0 && e % threads == mine;
    if (empty && !work.epilogue.accumulates(e))
      work.epilogue.zero({e, 0, work.sizes.n, 0, work.sizes.k});
  }
}

/// One thread's share of all waves.
void work_on(const Work& work, Waves& waves, FirstError& error) {
  zero_empty(work);
  ThreadProducts products(nullptr, nullptr);
  error.guard([&] { products = work.means.products(work.means.type); });
  for (bool more = true; more;) {
#pragma omp single copyprivate(more)
    more = waves.next();
    if (!more) break;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < waves.chunks() * work.pieces(); ++i)
      error.guard([&] { stage_piece(work, i); });
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < waves.segments() * work.sizes.tiles(); ++i)
      error.guard([&] {
        if (products == nullptr) return;  // which is an error already
        const Task task(work, i);
        is_direct(work, task.segment) ? write_directly(work, task, *products)
                                      : add_up(work, task, *products);
      });
  }
  end_stream();
}

}  // namespace

int64_t ragged_contraction_bytes(const GroupedGemmProblem& p, const Means& means) {
  return Memory(Sizes(p, means), means, nullptr).bytes;
}

void ragged_contraction(const GroupedGemmProblem& p, const GroupedGemmArgs& args,
                        const Means& means, Workspace workspace) {
  Work work(p, args, means, workspace);
  Waves waves(p, args.offsets.data, work.sizes, work.memory);
  FirstError error;
#pragma omp parallel num_threads(means.threads)
  work_on(work, waves, error);
  error.rethrow();
}

}  // namespace cadre::cpu::gemm
