#include "cpu/gemm/epilogue.h"

#include <algorithm>
#include <cstring>

#include "cpu/accumulate.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu::gemm {
namespace {

constexpr int64_t kPiece = 256;  // elements at a time, in registers and L1

/// Element [row, col] of one expert's matrix: the last two dimensions of a view.
char* element(const TensorView& v, int64_t expert, int64_t row, int64_t col) {
  const int64_t first = v.rank == 3 ? expert * v.stride[0] : 0;
  const int64_t at = first + row * v.stride[v.rank - 2] + col * v.stride[v.rank - 1];
  return static_cast<char*>(v.data) + bytes_for(v.dtype, at);
}

/// An output that outgrows the caches; only dw is never read before much else has been.
bool is_large(const GroupedGemmProblem& p) {
  constexpr int64_t kLarge = int64_t(32) << 20;
  return p.pass == Pass::kWgrad && bytes_for(p.out, p.n * p.k) >= kLarge / p.experts;
}

}  // namespace

/// What is the same for all lines of a rectangle. A line is a row, or a column where the output is
/// column-major.
struct Epilogue::Target {
  const OutTile& tile;
  char *out, *addend;               ///< of the first line
  int64_t out_bytes, addend_bytes;  ///< from line to line
  int64_t unit;                     ///< bytes of an element
  float factor, beta;
  bool accumulate;

  bool as_it_is(bool bias) const { return factor == 1 && beta == 0 && !accumulate && !bias; }
};

Epilogue::Epilogue(const GroupedGemmProblem& p, const GroupedGemmArgs& args)
    : p_(p),
      args_(args),
      column_(p.out_major == Major::kColumn),
      streams_(is_large(p)),
      decode_(decode_line(p.out)),
      decode_bias_(decode_line(p.bias_dtype)),
      encode_(streams_ ? stream_line(p.out) : encode_line(p.out)) {}

bool Epilogue::accumulates(int expert) const {
  return cpu::accumulates(p_.accumulate, args_.accumulate, expert);
}

/// alpha and the experts' scales.
float Epilogue::factor(int expert) const {
  float f = p_.alpha ? args_.alpha[expert] : 1.0f;
  if (args_.lhs.expert_scale != nullptr) f *= args_.lhs.expert_scale[expert];
  if (args_.rhs.expert_scale != nullptr) f *= args_.rhs.expert_scale[expert];
  return f;
}

bool Epilogue::is_identity(int expert) const { return factor(expert) == 1 && !p_.beta && !p_.bias; }

char* Epilogue::address(int expert, int64_t row, int64_t col) const {
  if (args_.discrete_out == nullptr) return element(args_.out, expert, row, col);
  TensorView one = args_.out;
  one.data = args_.discrete_out[expert];
  return element(one, 0, row, col);
}

void Epilogue::store(const OutTile& tile, const Sums& sums, float* scratch) const {
  if ((sums.major == Major::kColumn) == column_) return store_lines(tile, sums.data, sums.step);
  // Sixteen lines of the output at a time, so that they stay in L1.
  const int64_t lines = column_ ? tile.cols : tile.rows, length = column_ ? tile.rows : tile.cols;
  const int64_t step = (length + 15) / 16 * 16;
  for (int64_t i = 0; i < lines; i += 16) {
    for (int64_t j = 0; j < length; j += 16)
      transpose_16(sums.data + j * sums.step + i, sums.step, scratch + j, step);
    OutTile some = tile;
    (column_ ? some.col : some.row) += i;
    (column_ ? some.cols : some.rows) = std::min<int64_t>(16, lines - i);
    store_lines(some, scratch, step);
  }
}

Epilogue::Target Epilogue::target(const OutTile& tile) const {
  const auto step = [&](const TensorView& v) {
    return bytes_for(v.dtype, v.stride[size_t(v.rank - (column_ ? 1 : 2))]);
  };
  Target t{.tile = tile,
           .out = address(tile.expert, tile.row, tile.col),
           .addend = nullptr,
           .out_bytes = step(args_.out),
           .addend_bytes = 0,
           .unit = bits(p_.out) / 8,
           .factor = factor(tile.expert),
           .beta = p_.beta ? args_.beta[tile.expert] : 0.0f,
           .accumulate = accumulates(tile.expert)};
  if (t.beta == 0) return t;
  t.addend = element(args_.c, 0, tile.row, tile.col);
  t.addend_bytes = step(args_.c);
  return t;
}

void Epilogue::store_lines(const OutTile& tile, const float* sums, int64_t step) const {
  const Target to = target(tile);
  const int64_t lines = column_ ? tile.cols : tile.rows, length = column_ ? tile.rows : tile.cols;
  if (to.as_it_is(p_.bias)) {
    for (int64_t i = 0; i < lines; ++i) encode_(sums + i * step, length, to.out + i * to.out_bytes);
    return;
  }
  alignas(64) float x[kPiece];
  for (int64_t i = 0; i < lines; ++i) {
    for (int64_t j = 0; j < length; j += kPiece) {
      const int64_t count = std::min(kPiece, length - j);
      std::memcpy(x, sums + i * step + j, size_t(count) * sizeof(float));
      finish(to, i, j, {x, count});
      encode_(x, count, to.out + i * to.out_bytes + j * to.unit);
    }
  }
}

/// Elements of a line from `at` on: factor, then old content, addend and bias.
void Epilogue::finish(const Target& to, int64_t line, int64_t at, Floats x) const {
  alignas(64) float other[kPiece];
  if (to.factor != 1) scale_line(x.at, x.count, to.factor);
  if (to.accumulate) {
    decode_(to.out + line * to.out_bytes, at, x.count, other);
    add_line(x.at, other, x.count, 1);
  }
  if (to.beta != 0) {
    decode_(to.addend + line * to.addend_bytes, at, x.count, other);
    add_line(x.at, other, x.count, to.beta);
  }
  if (p_.bias) add_bias(to, line, at, x);
}

void Epilogue::add_bias(const Target& to, int64_t line, int64_t at, Floats x) const {
  alignas(64) float bias[kPiece];
  const OutTile& tile = to.tile;
  const char* from = args_.discrete_bias != nullptr
                         ? static_cast<const char*>(args_.discrete_bias[tile.expert])
                         : element(args_.bias, 0, tile.expert, 0);
  const float* scale = p_.bias_scale ? args_.bias_scale + tile.row : nullptr;
  if (!column_) {
    decode_bias_(from, tile.col + at, x.count, bias);
    return add_line(x.at, bias, x.count, scale ? scale[line] : 1.0f);
  }
  decode_bias_(from, tile.col + line, 1, bias);
  const float one = bias[0];
  if (scale != nullptr) return add_line(x.at, scale + at, x.count, one);
  for (int64_t i = 0; i < x.count; ++i) x.at[i] += one;
}

void Epilogue::zero(const OutTile& tile) const {
  const int64_t lines = column_ ? tile.cols : tile.rows, length = column_ ? tile.rows : tile.cols;
  for (int64_t i = 0; i < lines; ++i) {
    char* out = address(tile.expert, tile.row + (column_ ? 0 : i), tile.col + (column_ ? i : 0));
    std::memset(out, 0, size_t(bytes_for(p_.out, length)));
  }
}

void Epilogue::zero_tail(const int32_t* offsets) const {
  const int64_t used = schedule::rows_used(offsets, p_.experts, p_.rows);
  if (p_.pass == Pass::kWgrad || p_.tail != Tail::kZero || used == p_.rows) return;
  zero({0, used, p_.rows - used, 0, p_.pass == Pass::kFprop ? p_.n : p_.k});
}

}  // namespace cadre::cpu::gemm
