#include "cpu/gemm/panels.h"

#include <algorithm>

#include "cpu/gemm/arena.h"
#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/run_tiles.h"
#include "cpu/gemm/stage.h"
#include "cpu/gemm/tile_product.h"
#include "cpu/gemm/tile_walk.h"

namespace cadre::cpu::gemm {
namespace {

// A panel, as it is and staged, shares L2 with rows and sums.
constexpr int64_t kPanelBytes = 128 << 10;
// Rows of a task: many, so that the weight is read seldom, but staged ones stay in cache.
constexpr int64_t kMostRows = 384, kFewestRows = 48, kRowBytes = 2 << 20;
// Tasks a thread, at least, so that none waits long for the last.
constexpr int64_t kTasksOfThread = 16;

/// The sizes of one problem. Only `span` depends on threads; no sum does.
struct Sizes {
  int64_t depth, padded;  ///< of the contraction
  int64_t cols;           ///< of the output
  bool stage_rows;        ///< or read them where they lie
  bool along;             ///< the weight's lines run along the contraction
  int64_t chunk;          ///< depth of a panel
  int64_t rows, span;     ///< of a task

  Sizes(const GroupedGemmProblem& p, const Means& means) {
    const bool fprop = p.pass == Pass::kFprop, f32 = means.type == Multiplicand::kF32;
    const int64_t unit = bytes_of(means.type);
    depth = fprop ? p.k : p.n;
    padded = round_up(depth, depth_unit(means.type));
    cols = fprop ? p.n : p.k;
    const bool own = p.lhs.kind == (f32 ? FormatKind::kF32 : FormatKind::kBf16);
    stage_rows = !own || p.lhs_major == Major::kColumn || (!f32 && depth % 2 != 0);
    along = fprop == (p.rhs_major == Major::kRow);
    chunk = std::min(padded, kPanelBytes / (kTileWidth * unit));
    rows =
        std::clamp(kRowBytes / (padded * unit) / kFewestRows * kFewestRows, kFewestRows, kMostRows);
    const int64_t blocks = ceil_div(p.rows, rows) + std::min<int64_t>(p.experts, p.rows) / 2;
    const int64_t spans = ceil_div(kTasksOfThread * means.threads, std::max<int64_t>(blocks, 1));
    span = std::max(kTileWidth, round_up(ceil_div(cols, spans), kTileWidth));
  }
  TileSizes tasks() const { return {rows, span, 6, kTileWidth}; }
};

/// The scratch of one thread.
struct Scratch {
  char* rows;  ///< staged, [rows, padded]
  char* panel;
  float* sums;       ///< [rows, 64]
  float* transpose;  ///< of sixteen lines

  Scratch(Arena& arena, const Sizes& s, Multiplicand type)
      : rows(arena.take<char>(s.stage_rows ? s.rows * s.padded * bytes_of(type) : 0)),
        panel(arena.take<char>(kTileWidth * s.chunk * bytes_of(type))),
        sums(arena.take<float>(round_up(s.rows, 16) * kTileWidth)),
        transpose(arena.take<float>(16 * round_up(std::max(s.rows, kTileWidth), 16))) {}
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
};

/// Depths [depth, depth + count) of 64 columns, or fewer, of an expert's weight.
struct Panel {
  int expert;
  int64_t col, cols, depth, count;

  Part part(const Sizes& s) const {
    if (s.along) return {expert, 0, col, cols, depth, count};
    return {expert, 0, depth, count, col, cols};
  }
};

/// The panels of a task, one after the other.
class Panels {
 public:
  Panels(const Sizes& s, const OutTile& task) : s_(s), task_(task), col_(task.col) {}

  bool done() const { return col_ == task_.col + task_.cols; }
  Panel panel() const {
    return {task_.expert, col_, std::min(kTileWidth, task_.col + task_.cols - col_), depth_,
            std::min(s_.chunk, s_.depth - depth_)};
  }
  bool is_first() const { return depth_ == 0; }
  bool is_last() const { return depth_ + s_.chunk >= s_.depth; }
  void next() {
    depth_ += s_.chunk;
    if (depth_ < s_.depth) return;
    depth_ = 0;
    col_ += panel().cols;
  }

 private:
  const Sizes& s_;
  const OutTile& task_;
  int64_t col_, depth_ = 0;
};

Ahead ahead_of(const Work& work, const Panel& panel) {
  const Part part = panel.part(work.sizes);
  const DType dtype = work.weight.dtype();
  const char* first = work.weight.of(part.expert, 0).address(part.line);
  return {first + bytes_for(dtype, part.from), part.lines, bytes_for(dtype, part.count),
          bytes_for(dtype, work.weight.step())};
}

/// A block of rows as the first factor.
struct Rows {
  const char* data;
  int64_t step;  ///< in elements
};

Rows rows_of_task(const Work& work, const DrawnTile& task, char* scratch) {
  const Sizes& s = work.sizes;
  const OutTile& tile = task.tile;
  const int64_t first = task.rows.first;
  if (!s.stage_rows) return {work.rows.of(tile.expert, first).address(tile.row), work.rows.step()};
  const bool column = work.rows.is_column_major();
  Part part{tile.expert, first, tile.row, tile.rows, 0, s.depth};
  if (column) part = {tile.expert, first, 0, s.depth, tile.row, tile.rows};
  stage_a(work.rows, column ? Along::kOuter : Along::kDepth, part,
          {scratch, work.means.type, tile.rows, s.padded});
  return {scratch, s.padded};
}

void run_task(const Work& work, const DrawnTile& task, const DrawnTile* after,
              const Scratch& scratch) {
  const Sizes& s = work.sizes;
  const OutTile& tile = task.tile;
  const Multiplicand type = work.means.type;
  const Rows rows = rows_of_task(work, task, scratch.rows);
  for (Panels at(s, tile); !at.done();) {
    const Panel panel = at.panel();
    const bool first = at.is_first(), last = at.is_last();
    const int64_t deep = round_up(panel.count, 4 / bytes_of(type));
    stage_b(work.weight, s.along ? Along::kDepth : Along::kOuter, panel.part(s),
            {scratch.panel, type, kTileWidth, round_up(panel.count, depth_unit(type))});
    at.next();
    Ahead ahead;
    if (!at.done()) ahead = ahead_of(work, at.panel());
    if (at.done() && after != nullptr) ahead = ahead_of(work, Panels(s, after->tile).panel());
    tile_product(type, {tile.rows, deep, rows.step, !first},
                 {rows.data + panel.depth * bytes_of(type), scratch.panel},
                 TileTarget::sums(scratch.sums), ahead);
    if (last)
      work.epilogue.store({tile.expert, tile.row, tile.rows, panel.col, panel.cols},
                          {scratch.sums, kTileWidth, Major::kRow}, scratch.transpose);
  }
}

}  // namespace

int64_t panels_bytes(const GroupedGemmProblem& p, const Means& means) {
  const Sizes sizes(p, means);
  return scratch_bytes(means, [&](Arena& arena) { return Scratch(arena, sizes, means.type); });
}

void panels(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const Means& means,
            Workspace workspace) {
  const Work work(p, args, means);
  const TileWalk walk(p, args.offsets.data, work.sizes.tasks());
  const auto place = [&](Arena& arena) { return Scratch(arena, work.sizes, means.type); };
  run_tiles(walk, means, workspace, place, [&](const Scratch& scratch) {
    return [&](const DrawnTile& task, const DrawnTile* after) {
      run_task(work, task, after, scratch);
    };
  });
  work.epilogue.zero_tail(args.offsets.data);
}

}  // namespace cadre::cpu::gemm
