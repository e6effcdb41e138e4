#include "cpu/gemm/in_place.h"

#include <algorithm>
#include <cstring>

#include "cpu/gemm/arena.h"
#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/onednn/plain_products.h"
#include "cpu/gemm/operand_lines.h"
#include "cpu/gemm/processor.h"
#include "cpu/gemm/run_tiles.h"
#include "cpu/gemm/tile_walk.h"

namespace cadre::cpu::gemm {
namespace {

// The sums of a tile stay in L2.
constexpr TileSizes kTile{.height = 128, .width = 512, .height_unit = 16, .width_unit = 16};

/// The scratch of one thread.
struct Scratch {
  float* sums;
  float* transpose;  ///< of sixteen lines
  char* pair;        ///< two rows of a

  Scratch(Arena& arena, const Means& means)
      : sums(arena.take<float>(kTile.height * kTile.width)),
        transpose(arena.take<float>(16 * round_up(std::max(kTile.height, kTile.width), 16))),
        pair(arena.take<char>(2 * PlainProducts::kDepth * bytes_of(means.type))) {}
};

/// What the threads of one run share.
struct Work {
  const GroupedGemmProblem& p;
  const GroupedGemmArgs& args;
  const Means& means;
  OperandLines a, b;
  Epilogue epilogue;

  Work(const GroupedGemmProblem& problem, const GroupedGemmArgs& given, const Means& with)
      : p(problem),
        args(given),
        means(with),
        a(given.lhs, lhs_shape(problem)),
        b(given.rhs, rhs_shape(problem)),
        epilogue(problem, given) {}

  bool is_wgrad() const { return p.pass == Pass::kWgrad; }
  int64_t depth_of_rows() const { return p.pass == Pass::kFprop ? p.k : p.n; }
  /// The stride of the rows of a row-major output, in elements.
  int64_t out_step() const { return line_step(args.out, Major::kRow); }
};

/// A tile of the output, and the expert's rows, over which wgrad contracts.
struct Task {
  OutTile tile;
  schedule::ExpertRows rows;

  int64_t depth(const Work& work) const {
    return work.is_wgrad() ? rows.count() : work.depth_of_rows();
  }
  /// oneDNN sums a single row in another order, so a row of zeros is added to it.
  bool is_lonely(const Work& work) const { return tile.rows == 1 && !work.is_wgrad(); }
  /// Whether sums may be written straight into the output. Where they are added to it only those of
  /// f32 that one product makes: bf16's instructions take its subnormal numbers for zeros.
  bool is_direct(const Work& work) const {
    const bool plain = work.p.out == DType::kF32 && work.p.out_major == Major::kRow &&
                       work.epilogue.is_identity(tile.expert);
    const bool may_add =
        depth(work) <= PlainProducts::kDepth && work.means.type == Multiplicand::kF32;
    const bool added = work.epilogue.accumulates(tile.expert);
    return plain && (may_add || !added) && !is_lonely(work);
  }
};

/// Where sums go. `adds`: to what is there.
struct Target {
  float* data;
  int64_t step;
  bool adds;
};

/// `row` and a row of zeros.
const char* pair_up(const char* row, int64_t bytes, char* pair) {
  std::memcpy(pair, row, size_t(bytes));
  std::memset(pair + bytes, 0, size_t(bytes));
  return pair;
}

void multiply(const Work& work, const Task& task, const Target& to, char* pair,
              PlainProducts& products) {
  const OutTile& tile = task.tile;
  const int64_t unit = bytes_of(work.means.type), depth = task.depth(work);
  const OperandLines::Expert a = work.a.of(tile.expert, 0), b = work.b.of(tile.expert, 0);
  const int64_t first = work.is_wgrad() ? task.rows.first : 0;
  for (int64_t d = 0; d < depth; d += PlainProducts::kDepth) {
    const int64_t some = std::min(PlainProducts::kDepth, depth - d);
    PlainShape shape{tile.rows,     some,    tile.cols,       work.a.step(),
                     work.b.step(), to.step, work.is_wgrad(), d != 0 || to.adds};
    const char* part =
        work.is_wgrad() ? a.address(first + d) + tile.row * unit : a.address(tile.row) + d * unit;
    if (task.is_lonely(work)) {
      part = pair_up(part, some * unit, pair);
      shape.height = 2, shape.a_step = some;
    }
    products.multiply(shape, part, b.address(first + d) + tile.col * unit, to.data);
  }
}

void run_task(const Work& work, const Task& task, const Scratch& scratch, PlainProducts& products) {
  const OutTile& tile = task.tile;
  if (task.depth(work) == 0) {
    if (!work.epilogue.accumulates(tile.expert)) work.epilogue.zero(tile);
    return;
  }
  if (task.is_direct(work)) {
    char* out = work.epilogue.address(tile.expert, tile.row, tile.col);
    const bool adds = work.is_wgrad() && work.epilogue.accumulates(tile.expert);
    return multiply(work, task, {reinterpret_cast<float*>(out), work.out_step(), adds},
                    scratch.pair, products);
  }
  const int64_t step = round_up(tile.cols, 16);
  multiply(work, task, {scratch.sums, step, false}, scratch.pair, products);
  work.epilogue.store(tile, {scratch.sums, step, Major::kRow}, scratch.transpose);
}

}  // namespace

bool is_for_in_place(const GroupedGemmProblem& p, const Means& means) {
  const bool f32 = means.type == Multiplicand::kF32;
  const FormatKind kind = f32 ? FormatKind::kF32 : FormatKind::kBf16;
  const bool plain = p.lhs.kind == kind && p.rhs.kind == kind && p.lhs_major == Major::kRow;
  const bool across = (p.pass == Pass::kFprop) == (p.rhs_major == Major::kColumn);
  // In bf16 the product copies its operands and has fp32 results.
  const bool good = f32 || (p.pass == Pass::kWgrad && p.out == DType::kF32);
  return processor().free_tiles && plain && across && good;
}

int64_t in_place_bytes(const GroupedGemmProblem&, const Means& means) {
  return scratch_bytes(means, [&](Arena& arena) { return Scratch(arena, means); });
}

void in_place(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const Means& means,
              Workspace workspace) {
  const Work work(p, args, means);
  const TileWalk walk(p, args.offsets.data, kTile);
  const auto place = [&](Arena& arena) { return Scratch(arena, means); };
  run_tiles(walk, means, workspace, place, [&](const Scratch& scratch) {
    return [&, products = PlainProducts(means.type)](const DrawnTile& drawn,
                                                     const DrawnTile*) mutable {
      run_task(work, {drawn.tile, drawn.rows}, scratch, products);
    };
  });
  work.epilogue.zero_tail(args.offsets.data);
}

}  // namespace cadre::cpu::gemm
