#include "cpu/gemm/epilogue.h"

#include <algorithm>
#include <cstring>

namespace cadre::cpu::gemm {
namespace {

constexpr int64_t kPiece = 256;  // elements at a time, in registers and the first cache

/// Element [row, col] of one expert's matrix: the last two dimensions of a view.
char* element(const TensorView& v, int64_t expert, int64_t row, int64_t col) {
  const int64_t first = v.rank == 3 ? expert * v.stride[0] : 0;
  const int64_t at = first + row * v.stride[v.rank - 2] + col * v.stride[v.rank - 1];
  return static_cast<char*>(v.data) + bytes_for(v.dtype, at);
}

/// The same rectangle the other way round.
void transpose(const OutTile& tile, const Sums& sums, float* to, int64_t to_step) {
  const int64_t lines = sums.major == Major::kRow ? tile.rows : tile.cols;
  const int64_t count = sums.major == Major::kRow ? tile.cols : tile.rows;
  for (int64_t i = 0; i < lines; i += 16)
    for (int64_t j = 0; j < count; j += 16)
      transpose_16(sums.data + i * sums.step + j, sums.step, to + j * to_step + i, to_step);
}

}  // namespace

/// A contiguous piece of the output that begins at [row, col].
struct Epilogue::Line {
  int expert;
  int64_t row, col;
};

Epilogue::Epilogue(const GroupedGemmProblem& p, const GroupedGemmArgs& args)
    : p_(p),
      args_(args),
      column_(p.out_major == Major::kColumn),
      decode_(decode_line(p.out)),
      decode_bias_(decode_line(p.bias_dtype)),
      encode_(encode_line(p.out)) {}

bool Epilogue::accumulates(int expert) const {
  if (p_.accumulate == Accumulate::kDevice) return args_.accumulate[0] != 0;
  if (p_.accumulate == Accumulate::kPerExpert) return args_.accumulate[expert] != 0;
  return p_.accumulate == Accumulate::kYes;
}

/// alpha and the experts' scales.
float Epilogue::factor(int expert) const {
  float f = p_.alpha ? args_.alpha[expert] : 1.0f;
  if (args_.lhs.expert_scale != nullptr) f *= args_.lhs.expert_scale[expert];
  if (args_.rhs.expert_scale != nullptr) f *= args_.rhs.expert_scale[expert];
  return f;
}

bool Epilogue::is_identity(int expert) const {
  return p_.out == DType::kF32 && factor(expert) == 1 && !p_.beta && !p_.bias;
}

char* Epilogue::address(int expert, int64_t row, int64_t col) const {
  if (args_.discrete_out == nullptr) return element(args_.out, expert, row, col);
  TensorView one = args_.out;
  one.data = args_.discrete_out[expert];
  return element(one, 0, row, col);
}

void Epilogue::store(const OutTile& tile, const Sums& sums, float* scratch) const {
  if ((sums.major == Major::kColumn) == column_) return store_lines(tile, sums.data, sums.step);
  const int64_t step = ((column_ ? tile.rows : tile.cols) + 15) / 16 * 16;
  transpose(tile, sums, scratch, step);
  store_lines(tile, scratch, step);
}

void Epilogue::store_lines(const OutTile& tile, const float* sums, int64_t step) const {
  const int64_t lines = column_ ? tile.cols : tile.rows, length = column_ ? tile.rows : tile.cols;
  for (int64_t i = 0; i < lines; ++i) {
    for (int64_t j = 0; j < length; j += kPiece) {
      const Line line{tile.expert, tile.row + (column_ ? j : i), tile.col + (column_ ? i : j)};
      store_piece(line, sums + i * step + j, std::min(kPiece, length - j));
    }
  }
}

void Epilogue::store_piece(const Line& line, const float* sums, int64_t count) const {
  char* out = address(line.expert, line.row, line.col);
  const float by = factor(line.expert);
  const bool accumulate = accumulates(line.expert);
  if (by == 1 && !accumulate && !p_.beta && !p_.bias) return encode_(sums, count, out);
  alignas(64) float x[kPiece], other[kPiece];
  std::memcpy(x, sums, size_t(count) * sizeof(float));
  if (by != 1) scale_line(x, count, by);
  if (accumulate) {
    decode_(out, 0, count, other);
    add_line(x, other, count, 1);
  }
  const float beta = p_.beta ? args_.beta[line.expert] : 0.0f;
  if (beta != 0) {
    decode_(element(args_.c, 0, line.row, line.col), 0, count, other);
    add_line(x, other, count, beta);
  }
  if (p_.bias) add_bias(line, count, x);
  encode_(x, count, out);
}

void Epilogue::add_bias(const Line& line, int64_t count, float* x) const {
  alignas(64) float bias[kPiece];
  const char* from = args_.discrete_bias != nullptr
                         ? static_cast<const char*>(args_.discrete_bias[line.expert])
                         : element(args_.bias, 0, line.expert, 0);
  const float* scale = p_.bias_scale ? args_.bias_scale + line.row : nullptr;
  if (!column_) {
    decode_bias_(from, line.col, count, bias);
    return add_line(x, bias, count, scale ? *scale : 1.0f);
  }
  decode_bias_(from, line.col, 1, bias);
  const float one = bias[0];
  if (scale != nullptr) return add_line(x, scale, count, one);
  for (int64_t i = 0; i < count; ++i) x[i] += one;
}

void Epilogue::zero(const OutTile& tile) const {
  const int64_t lines = column_ ? tile.cols : tile.rows, length = column_ ? tile.rows : tile.cols;
  for (int64_t i = 0; i < lines; ++i) {
    char* out = address(tile.expert, tile.row + (column_ ? 0 : i), tile.col + (column_ ? i : 0));
    std::memset(out, 0, size_t(bytes_for(p_.out, length)));
  }
}

}  // namespace cadre::cpu::gemm
