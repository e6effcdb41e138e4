#include "cpu/gemm/ragged_rows.h"

#include <algorithm>
#include <bit>

#include "cpu/gemm/arena.h"
#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/run_tiles.h"
#include "cpu/gemm/stage.h"
#include "cpu/gemm/tile_walk.h"

namespace cadre::cpu::gemm {
namespace {

// Rows that are one factor of a product; fewer if a row is so long that they would not stay in
// cache.
constexpr int64_t kTileRows = 128, kFewerRows = 64, kTileBytes = 1 << 20;
// Tiles of an expert that read a panel of the weight from memory once.
constexpr int64_t kBlockTiles = 4;
// A weight that is the first factor: a panel of so many elements stays in L2.
constexpr int64_t kFirstPanel = 1 << 17;
// A weight that is the second factor: long lines, since memory is read faster along them, and few
// at a time, so that they and the sums of a block share L2.
constexpr int64_t kSecondWidth = 1024, kSecondDepth = 128, kSecondPanel = 1 << 18;
// Tasks a thread, at least, so that none waits long for the last.
constexpr int64_t kTasksOfThread = 16;

/// The sizes of one problem. Those of a product depend on neither threads nor counts.
struct Sizes {
  bool weight_first;      ///< the weight lies along the contraction and is the first factor
  int64_t depth, padded;  ///< of the contraction
  int64_t cols;           ///< of the output
  int64_t panel, chunk;   ///< columns and depth of a part of the weight
  int64_t tile, unit;     ///< rows of a tile: at most, and padded to a multiple of
  int64_t tiles;          ///< of a block, at most
  int64_t span;           ///< columns of a task

  Sizes(const GroupedGemmProblem& p, const Means& means) {
    const bool fprop = p.pass == Pass::kFprop, free = processor().free_tiles;
    depth = fprop ? p.k : p.n;
    cols = fprop ? p.n : p.k;
    padded = round_up(depth, depth_unit(means.type));
    weight_first = fprop == (p.rhs_major == Major::kRow);
    const int64_t row_bytes = padded * bytes_of(means.type);
    tile = free && kTileRows * row_bytes <= kTileBytes ? kTileRows : kFewerRows;
    unit = !free ? tile : weight_first ? 16 : 4;
    tiles = std::clamp<int64_t>(kTileBytes / (tile * row_bytes), 1, kBlockTiles);
    weight_first ? size_first() : size_second(free);
    if (processor().matrix_tiles && means.type == Multiplicand::kBf16) unit = unit_in_tiles();
    const int64_t blocks =
        ceil_div(p.rows, tile * tiles) + std::min<int64_t>(p.experts, p.rows) / 2;
    const int64_t spans = ceil_div(kTasksOfThread * means.threads, std::max<int64_t>(blocks, 1));
    span = std::max(panel, round_up(ceil_div(cols, spans), panel));
  }
  /// How blocks of rows and spans of columns make tasks.
  TileSizes tasks() const { return {tile * tiles, span, std::max<int64_t>(unit, 16), panel}; }
  /// Of so many rows of a block, those of the next tile: tiles of about the same height.
  int64_t tile_rows(int64_t rows) const {
    return std::min(rows, round_up(ceil_div(rows, ceil_div(rows, tile)), unit));
  }

 private:
  /// In matrix tiles oneDNN sums a product of 256 numbers or fewer in another order; so none may be
  /// as small because its rows are few.
  int64_t unit_in_tiles() const {
    constexpr int64_t kSmall = 256;
    const int64_t last = cols % panel == 0 ? panel : cols % panel;
    const int64_t other = weight_first ? last : padded_width(last);
    if (other * tile <= kSmall) return unit;  // all are
    return std::max(unit, int64_t(std::bit_ceil(uint64_t(kSmall / other + 1))));
  }
  void size_first() {
    panel = std::clamp<int64_t>(kFirstPanel / padded / 16 * 16, 32, 256);
    chunk = padded;
  }
  void size_second(bool free) {
    panel = padded_width(std::min(cols, free ? kSecondWidth : 64));
    chunk = std::clamp<int64_t>(kSecondPanel / panel / 32 * 32, 32, kSecondDepth);
    chunk = std::min(chunk, padded);
    tiles = std::clamp<int64_t>(kSecondPanel / (tile * panel), 1, tiles);
  }
};

/// The scratch of one thread.
struct Scratch {
  char* rows;        ///< a block, staged
  char* panel;       ///< a staged part of the weight
  float* sums;       ///< of every tile of a block
  float* transpose;  ///< of sixteen lines

  Scratch(Arena& arena, const Sizes& s, Multiplicand type)
      : rows(arena.take<char>(s.tiles * s.tile * s.padded * bytes_of(type))),
        panel(arena.take<char>(round_up(s.panel, 16) * s.chunk * bytes_of(type))),
        sums(arena.take<float>(s.tiles * s.tile * round_up(s.panel, 16))),
        transpose(arena.take<float>(16 * round_up(std::max(s.panel, s.tile), 16))) {}
};

/// Everything that the threads of one run share.
struct Work {
  const Means& means;
  Sizes sizes;
  OperandLines rows, weight;
  Epilogue epilogue;

  Work(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const Means& with)
      : means(with),
        sizes(p, with),
        rows(args.lhs, lhs_shape(p)),
        weight(args.rhs, rhs_shape(p)),
        epilogue(p, args) {}

  int64_t unit() const { return bytes_of(means.type); }
};

/// A tile of rows of a block.
struct Tile {
  int64_t row, rows;
  int64_t padded;  ///< its height as a first factor, or its width as a second one
  int64_t place;   ///< in the block
};

/// What one thread works on: rows of one expert and columns of the weight.
struct Block {
  const Work& work;
  const OutTile& whole;
  int64_t first;  ///< the expert's first row
  const Scratch& scratch;
  const Products& products;

  template <class Do>
  void for_each_tile(Do&& act) const {
    const Sizes& s = work.sizes;
    const int64_t end = whole.row + whole.rows;
    Tile tile{whole.row, 0, 0, 0};
    for (; tile.row < end; tile.row += tile.rows, ++tile.place) {
      tile.rows = s.tile_rows(end - tile.row);
      tile.padded = round_up(tile.rows, s.unit);
      act(tile);
    }
  }
  /// Where a tile's elements of depths [depth, ...) are staged.
  char* staged(const Tile& tile, int64_t depth) const {
    const Sizes& s = work.sizes;
    return scratch.rows + (tile.place * s.padded + depth) * s.tile * work.unit();
  }
  float* sums(const Tile& tile) const {
    return scratch.sums + tile.place * work.sizes.tile * round_up(work.sizes.panel, 16);
  }
  void store(const Tile& tile, int64_t col, int64_t cols, const Sums& from) const {
    work.epilogue.store({whole.expert, tile.row, tile.rows, col, cols}, from, scratch.transpose);
  }
};

/// Depths [depth, depth + count) of a tile.
Part part_of(const Block& block, const Tile& tile, int64_t depth, int64_t count) {
  const int expert = block.whole.expert;
  if (block.work.rows.is_column_major())
    return {expert, block.first, depth, count, tile.row, tile.rows};
  return {expert, block.first, tile.row, tile.rows, depth, count};
}

void stage_rows(const Block& block, const Tile& tile) {
  const OperandLines& rows = block.work.rows;
  const Sizes& s = block.work.sizes;
  const Along run = rows.is_column_major() ? Along::kOuter : Along::kDepth;
  for (int64_t d = 0; d < s.padded; d += s.chunk) {
    const Part part = part_of(block, tile, d, std::min(s.chunk, s.depth - d));
    const Staged to{block.staged(tile, d), block.work.means.type, tile.padded,
                    std::min(s.chunk, s.padded - d)};
    s.weight_first ? stage_b(rows, run, part, to) : stage_a(rows, run, part, to);
  }
}

/// The panel's lines of the weight as a first factor: where they lie, or decoded.
const void* panel_of_weight(const Block& block, int64_t col, int64_t cols) {
  const Work& work = block.work;
  const Sizes& s = work.sizes;
  const DType own = work.means.type == Multiplicand::kF32 ? DType::kF32 : DType::kBf16;
  const int expert = block.whole.expert;
  if (work.weight.dtype() == own && s.depth == s.padded && work.weight.is_dense(s.depth))
    return work.weight.of(expert, 0).address(col);
  stage_a(work.weight, Along::kDepth, {expert, 0, col, cols, 0, s.depth},
          {block.scratch.panel, work.means.type, cols, s.padded});
  return block.scratch.panel;
}

void multiply_weight_first(const Block& block, int64_t col, int64_t cols) {
  const void* panel = panel_of_weight(block, col, cols);
  float* sums = block.scratch.sums;
  block.for_each_tile([&](const Tile& tile) {
    block.products.multiply({cols, block.work.sizes.padded, tile.padded}, panel,
                            block.staged(tile, 0), sums);
    block.store(tile, col, cols, {sums, tile.padded, Major::kColumn});
  });
}

void multiply_rows_first(const Block& block, int64_t col, int64_t cols) {
  const Work& work = block.work;
  const Sizes& s = work.sizes;
  const int64_t width = padded_width(cols);
  for (int64_t d = 0; d < s.padded; d += s.chunk) {
    const int64_t deep = std::min(s.chunk, s.padded - d), lines = std::min(deep, s.depth - d);
    stage_b(work.weight, Along::kOuter, {block.whole.expert, 0, d, lines, col, cols},
            {block.scratch.panel, work.means.type, width, deep});
    block.for_each_tile([&](const Tile& tile) {
      block.products.multiply({tile.padded, deep, width, d != 0}, block.staged(tile, d),
                              block.scratch.panel, block.sums(tile));
    });
  }
  block.for_each_tile([&](const Tile& tile) {
    block.store(tile, col, cols, {block.sums(tile), width, Major::kRow});
  });
}

void multiply_block(const Block& block) {
  block.for_each_tile([&](const Tile& tile) { stage_rows(block, tile); });
  const int64_t panel = block.work.sizes.panel, end = block.whole.col + block.whole.cols;
  for (int64_t col = block.whole.col; col < end; col += panel) {
    const int64_t cols = std::min(panel, end - col);
    block.work.sizes.weight_first ? multiply_weight_first(block, col, cols)
                                  : multiply_rows_first(block, col, cols);
  }
}

}  // namespace

int64_t ragged_rows_bytes(const GroupedGemmProblem& p, const Means& means) {
  const Sizes sizes(p, means);
  return scratch_bytes(means, [&](Arena& arena) { return Scratch(arena, sizes, means.type); });
}

void ragged_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const Means& means,
                 Workspace workspace) {
  const Work work(p, args, means);
  const TileWalk walk(p, args.offsets.data, work.sizes.tasks());
  const auto place = [&](Arena& arena) { return Scratch(arena, work.sizes, means.type); };
  run_tiles(walk, means, workspace, place, [&](const Scratch& scratch) {
    return [&, products = means.products(means.type)](const DrawnTile& drawn, const DrawnTile*) {
      multiply_block({work, drawn.tile, drawn.rows.first, scratch, *products});
    };
  });
  work.epilogue.zero_tail(args.offsets.data);
}

}  // namespace cadre::cpu::gemm
