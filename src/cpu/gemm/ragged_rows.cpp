#include "cpu/gemm/ragged_rows.h"

#include <omp.h>

#include <algorithm>
#include <bit>

#include "cpu/gemm/arena.h"
#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/first_error.h"
#include "cpu/gemm/stage.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu::gemm {
namespace {

constexpr int64_t kTileRows = 64;
// A weight that is the first factor: a panel of so many elements stays in the second cache for
// eight tiles of rows.
constexpr int64_t kFirstPanel = 1 << 17, kFirstGroup = 8;
// A weight that is the second factor: long lines, since memory is read faster along them, and few
// at a time, so that they and the sums of a group share the second cache.
constexpr int64_t kSecondWidth = 1024, kSecondDepth = 128, kSecondGroup = 4;
constexpr int64_t kSecondPanel = 1 << 18;

/// The sizes of one problem. None depends on threads or counts.
struct Sizes {
  bool weight_first;      ///< the weight lies along the contraction and is the first factor
  bool whole_lines;       ///< as the second factor it may be used where it lies
  int64_t depth, padded;  ///< of the contraction
  int64_t cols;           ///< of the output
  int64_t panel, chunk;   ///< columns and depth of a part of the weight
  int64_t tile_unit;      ///< rows of a tile are padded to a multiple of it
  int64_t group;          ///< tiles of an expert that share a panel
  int64_t slots;          ///< tiles of a wave

  Sizes(const GroupedGemmProblem& p, const Means& means) {
    const bool fprop = p.pass == Pass::kFprop, free = processor().free_tiles;
    depth = fprop ? p.k : p.n;
    cols = fprop ? p.n : p.k;
    padded = round_up(depth, depth_unit(means.type));
    weight_first = fprop == (p.rhs_major == Major::kRow);
    const bool f32 = means.type == Multiplicand::kF32 && p.rhs.kind == FormatKind::kF32;
    // oneDNN copies a second factor whose width is a large power of two, for every tile anew.
    const bool copied = std::has_single_bit(uint64_t(cols)) && cols > 256;
    const bool whole = depth == padded && cols == padded_width(cols);
    whole_lines = !weight_first && free && f32 && whole && !copied;
    tile_unit = !free ? kTileRows : weight_first ? 16 : 4;
    weight_first ? size_first() : size_second(free);
    const int64_t tiles = ceil_div(p.rows, kTileRows) + std::min<int64_t>(p.experts, p.rows);
    const int64_t fitting = means.wave_bytes / (kTileRows * padded * bytes_of(means.type));
    slots = std::min(tiles, std::max<int64_t>(fitting, group));
  }
  /// Of so many rows, those of the next tile: tiles of about the same height.
  int64_t tile_rows(int64_t rows) const {
    const int64_t tiles = ceil_div(rows, kTileRows);
    return std::min(rows, round_up(ceil_div(rows, tiles), tile_unit));
  }
  int64_t panels() const { return ceil_div(cols, panel); }

 private:
  void size_first() {
    panel = std::clamp<int64_t>(kFirstPanel / padded / 16 * 16, 32, 256);
    chunk = padded;
    group = kFirstGroup;
  }
  void size_second(bool free) {
    panel = whole_lines ? cols : padded_width(std::min(cols, free ? kSecondWidth : 64));
    chunk = std::clamp<int64_t>(kSecondPanel / panel / 32 * 32, 32, kSecondDepth);
    chunk = std::min(chunk, padded);
    group = std::clamp<int64_t>(kSecondPanel / (kTileRows * panel), 1, kSecondGroup);
  }
};

/// Up to 64 rows of one expert.
struct Tile {
  int expert;
  int64_t first;      ///< the expert's first row
  int64_t row, rows;  ///< of this tile
};

/// Tiles [begin, end) of one expert.
struct Group {
  int64_t begin, end;
};

/// The scratch of one thread.
struct Scratch {
  char* panel;       ///< a staged part of the weight
  float* sums;       ///< of every tile of a group
  float* transpose;  ///< of one tile
};

struct Memory {
  Tile* tiles;
  Group* groups;
  char* staged;
  char* panels;
  float* sums;
  float* transposes;
  int64_t panel_bytes, sums_of_tile, sums_of_thread, bytes;

  Memory(const Sizes& s, const Means& means, void* workspace) {
    Arena arena(workspace);
    const int64_t threads = means.threads, unit = bytes_of(means.type);
    panel_bytes = round_up(s.panel, 16) * s.chunk * unit;
    sums_of_tile = kTileRows * round_up(s.panel, 16);
    sums_of_thread = sums_of_tile * (s.weight_first ? 1 : s.group);
    tiles = arena.take<Tile>(s.slots);
    groups = arena.take<Group>(s.slots);
    staged = arena.take<char>(s.slots * kTileRows * s.padded * unit);
    panels = arena.take<char>(threads * panel_bytes);
    sums = arena.take<float>(threads * sums_of_thread);
    transposes = arena.take<float>(threads * sums_of_tile);
    bytes = arena.used();
  }
  Scratch of_thread(int64_t t) const {
    return {panels + t * panel_bytes, sums + t * sums_of_thread, transposes + t * sums_of_tile};
  }
};

/// Deals out the rows of all experts in waves of tiles.
class Waves {
 public:
  Waves(const GroupedGemmProblem& p, const int32_t* offsets, const Sizes& sizes, Memory& memory)
      : walk_(offsets, p.experts, p.rows), sizes_(sizes), memory_(memory) {}

  /// False when no rows are left.
  bool next() {
    tiles_ = groups_ = 0;
    while (tiles_ < sizes_.slots && find_rows()) add_tile();
    return tiles_ != 0;
  }
  int64_t tiles() const { return tiles_; }
  int64_t groups() const { return groups_; }

 private:
  bool find_rows() {
    while (row_ == walk_.rows().last) {
      if (!walk_.next()) return false;
      row_ = walk_.rows().first;
    }
    return true;
  }
  void add_tile() {
    const schedule::ExpertRows& rows = walk_.rows();
    const Tile tile{walk_.expert(), rows.first, row_, sizes_.tile_rows(rows.last - row_)};
    Group* last = groups_ == 0 ? nullptr : &memory_.groups[groups_ - 1];
    const bool same = last != nullptr && last->end - last->begin < sizes_.group &&
                      memory_.tiles[last->begin].expert == tile.expert;
    if (!same) memory_.groups[groups_++] = {tiles_, tiles_};
    memory_.tiles[tiles_++] = tile;
    memory_.groups[groups_ - 1].end = tiles_;
    row_ += tile.rows;
  }

  schedule::ExpertWalk walk_;
  const Sizes& sizes_;
  Memory& memory_;
  int64_t row_ = 0, tiles_ = 0, groups_ = 0;
};

/// Everything that the threads of one run share.
struct Work {
  const Means& means;
  Sizes sizes;
  Memory memory;
  OperandLines rows, weight;
  Epilogue epilogue;

  Work(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const Means& with,
       Workspace workspace)
      : means(with),
        sizes(p, with),
        memory(sizes, with, workspace.data),
        rows(args.lhs, lhs_shape(p), p.lhs_major),
        weight(args.rhs, rhs_shape(p), p.rhs_major),
        epilogue(p, args) {}

  int64_t unit() const { return bytes_of(means.type); }
  char* staged(int64_t tile) const {
    return memory.staged + tile * kTileRows * sizes.padded * unit();
  }
  /// The height of a tile of rows as a first factor, its width as a second one.
  int64_t height(const Tile& tile) const { return round_up(tile.rows, sizes.tile_unit); }
  int64_t width(const Tile& tile) const { return padded_width(tile.rows); }
};

/// Part of a tile of rows: depths [depth, depth + count) of each.
Part part_of(const Tile& tile, bool column, int64_t depth, int64_t count) {
  if (column) return {tile.expert, tile.first, depth, count, tile.row, tile.rows};
  return {tile.expert, tile.first, tile.row, tile.rows, depth, count};
}

void stage_tile(const Work& work, int64_t t) {
  const Tile& tile = work.memory.tiles[t];
  const Sizes& s = work.sizes;
  const bool column = work.rows.is_column_major();
  const Along run = column ? Along::kOuter : Along::kDepth;
  if (s.weight_first) {
    const Staged to{work.staged(t), work.means.type, work.width(tile), s.padded};
    return stage_b(work.rows, run, part_of(tile, column, 0, s.depth), to);
  }
  for (int64_t d = 0; d < s.padded; d += s.chunk) {
    char* place = work.staged(t) + d * kTileRows * work.unit();
    const Staged to{place, work.means.type, work.height(tile), std::min(s.chunk, s.padded - d)};
    const int64_t count = std::min(s.chunk, s.depth - d);
    stage_a(work.rows, run, part_of(tile, column, d, count), to);
  }
}

/// Columns [col, col + cols) of the output for one group.
struct Task {
  Group group;
  int64_t col, cols;

  Task(const Work& work, int64_t index) {
    const Sizes& s = work.sizes;
    group = work.memory.groups[index / s.panels()];
    col = index % s.panels() * s.panel;
    cols = std::min(s.panel, s.cols - col);
  }
};

/// The panel's lines of the weight as a first factor: where they lie, or decoded.
const void* panel_of_weight(const Work& work, const Task& task, int expert, char* scratch) {
  const Sizes& s = work.sizes;
  const DType own = work.means.type == Multiplicand::kF32 ? DType::kF32 : DType::kBf16;
  if (work.weight.dtype() == own && s.depth == s.padded && work.weight.is_dense(s.depth))
    return work.weight.of(expert, 0).address(task.col);
  stage_a(work.weight, Along::kDepth, {expert, 0, task.col, task.cols, 0, s.depth},
          {scratch, work.means.type, task.cols, s.padded});
  return scratch;
}

void multiply_weight_first(const Work& work, const Task& task, const Scratch& scratch,
                           Products& products) {
  const int expert = work.memory.tiles[task.group.begin].expert;
  const void* panel = panel_of_weight(work, task, expert, scratch.panel);
  for (int64_t t = task.group.begin; t < task.group.end; ++t) {
    const Tile& tile = work.memory.tiles[t];
    const int64_t width = work.width(tile);
    products.multiply({task.cols, work.sizes.padded, width}, panel, work.staged(t), scratch.sums);
    work.epilogue.store({expert, tile.row, tile.rows, task.col, task.cols},
                        {scratch.sums, width, Major::kColumn}, scratch.transpose);
  }
}

/// Lines [depth, depth + lines) of the weight in the columns of a task, as a second factor.
struct SecondFactor {
  const void* data;
  bool by_rows;
};
SecondFactor second_factor(const Work& work, const Task& task, const Part& part, char* scratch) {
  const Sizes& s = work.sizes;
  if (s.whole_lines && work.weight.is_dense(s.cols))
    return {work.weight.of(part.expert, 0).address(part.line), true};
  const int64_t deep = round_up(part.lines, depth_unit(work.means.type));
  stage_b(work.weight, Along::kOuter, part,
          {scratch, work.means.type, padded_width(task.cols), deep});
  return {scratch, false};
}

void multiply_rows_first(const Work& work, const Task& task, const Scratch& scratch,
                         Products& products) {
  const Sizes& s = work.sizes;
  const int expert = work.memory.tiles[task.group.begin].expert;
  const int64_t width = padded_width(task.cols), step = work.memory.sums_of_tile;
  const auto sums = [&](int64_t t) { return scratch.sums + (t - task.group.begin) * step; };
  for (int64_t d = 0; d < s.padded; d += s.chunk) {
    const int64_t deep = std::min(s.chunk, s.padded - d), lines = std::min(deep, s.depth - d);
    const Part part{expert, 0, d, lines, task.col, task.cols};
    const SecondFactor weight = second_factor(work, task, part, scratch.panel);
    for (int64_t t = task.group.begin; t < task.group.end; ++t)
      products.multiply({work.height(work.memory.tiles[t]), deep, width, d != 0, weight.by_rows},
                        work.staged(t) + d * kTileRows * work.unit(), weight.data, sums(t));
  }
  for (int64_t t = task.group.begin; t < task.group.end; ++t) {
    const Tile& tile = work.memory.tiles[t];
    work.epilogue.store({expert, tile.row, tile.rows, task.col, task.cols},
                        {sums(t), width, Major::kRow}, scratch.transpose);
  }
}

/// One thread's share of all waves.
void work_on(const Work& work, Waves& waves, FirstError& error) {
  Products products(work.means.type);
  const Scratch scratch = work.memory.of_thread(omp_get_thread_num());
  for (bool more = true; more;) {
#pragma omp single copyprivate(more)
    more = waves.next();
    if (!more) return;
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < waves.tiles(); ++t) error.guard([&] { stage_tile(work, t); });
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < waves.groups() * work.sizes.panels(); ++i)
      error.guard([&] {
        const Task task(work, i);
        work.sizes.weight_first ? multiply_weight_first(work, task, scratch, products)
                                : multiply_rows_first(work, task, scratch, products);
      });
  }
}

void zero_tail(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const Work& work) {
  const int64_t used = schedule::rows_used(args.offsets.data, p.experts, p.rows);
  if (p.tail == Tail::kZero && used < p.rows)
    work.epilogue.zero({0, used, p.rows - used, 0, work.sizes.cols});
}

}  // namespace

int64_t ragged_rows_bytes(const GroupedGemmProblem& p, const Means& means) {
  return Memory(Sizes(p, means), means, nullptr).bytes;
}

void ragged_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const Means& means,
                 Workspace workspace) {
  Work work(p, args, means, workspace);
  Waves waves(p, args.offsets.data, work.sizes, work.memory);
  FirstError error;
#pragma omp parallel num_threads(means.threads)
  work_on(work, waves, error);
  error.rethrow();
  zero_tail(p, args, work);
}

}  // namespace cadre::cpu::gemm
