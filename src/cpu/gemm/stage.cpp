#include "cpu/gemm/stage.h"

#include <algorithm>
#include <cstring>

namespace cadre::cpu::gemm {
namespace {

constexpr int64_t kLanes = 16;   // lines that are transposed together
constexpr int64_t kPiece = 256;  // elements of a line at a time
constexpr int64_t kColumn = 64;  // width of a column of b

/// Words of 32 bits in lines, `step` words apart.
struct Words {
  const float* at = nullptr;
  int64_t step = 0;
};

struct CodePair {
  const uint16_t *even, *odd;
};

/// Some elements of a line.
struct Stretch {
  int64_t at, count;
};

/// The lines of a part as floats; zeros where a line or an element is beyond it.
class Reader {
 public:
  Reader(const OperandLines& lines, const Part& part)
      : lines_(lines.of(part.expert, part.first)),
        part_(part),
        unit_(bytes_for(lines.dtype(), 8) / 8),
        step_(bytes_for(lines.dtype(), lines.step())),
        dtype_(lines.dtype()),
        unscaled_(lines.is_unscaled()) {}

  /// Whether codes are numbers of that type, to be copied as they are.
  bool is(Multiplicand type) const {
    return unscaled_ && dtype_ == (type == Multiplicand::kF32 ? DType::kF32 : DType::kBf16);
  }
  /// The same elements as read() gives, as codes.
  void copy(int64_t i, int64_t at, int64_t padded, void* to) const {
    const int64_t count = i < part_.lines ? std::clamp<int64_t>(part_.count - at, 0, padded) : 0;
    if (count > 0) std::memcpy(to, codes(i, at), size_t(count * unit_));
    std::memset(static_cast<char*>(to) + count * unit_, 0, size_t((padded - count) * unit_));
  }
  /// bf16 codes of lines i and i + 1, where they lie or, if some are missing, in what is given.
  CodePair pair(int64_t i, Stretch s, uint16_t* even, uint16_t* odd) const {
    return {line(i, s, even), line(i + 1, s, odd)};
  }
  /// Where `count` codes of each of sixteen lines lie; null if some are missing or out of step.
  Words sixteen(int64_t i, int64_t at, int64_t count) const {
    const bool all = i + kLanes <= part_.lines && at + count <= part_.count;
    if (!all || step_ % int64_t(sizeof(float)) != 0) return {};
    return {reinterpret_cast<const float*>(codes(i, at)), step_ / int64_t(sizeof(float))};
  }
  /// Elements [at, at + padded) of line i, both counted from the start of the part.
  void read(int64_t i, int64_t at, int64_t padded, float* to) const {
    const int64_t count = i < part_.lines ? std::clamp<int64_t>(part_.count - at, 0, padded) : 0;
    if (count > 0) lines_.read(part_.line + i, part_.from + at, count, to);
    if (count < padded) std::fill(to + count, to + padded, 0.0f);
  }
  /// All of the part at once, in columns of b; false if nothing was done.
  bool read_columns(const Staged& to) const {
    if (part_.count != to.outer || to.outer % kColumn != 0) return false;
    const Columns all{part_.lines, to.outer / kColumn, 0, to.depth * kColumn};
    float* place = static_cast<float*>(to.data);
    if (!lines_.read_columns(part_.line, part_.from, all, place)) return false;
    for (int64_t c = 0; c < all.columns; ++c)
      std::fill(place + c * all.column_step + part_.lines * kColumn,
                place + (c + 1) * all.column_step, 0.0f);
    return true;
  }

 private:
  const uint16_t* line(int64_t i, Stretch s, uint16_t* spare) const {
    if (i < part_.lines && s.at + s.count <= part_.count)
      return reinterpret_cast<const uint16_t*>(codes(i, s.at));
    copy(i, s.at, s.count, spare);
    return spare;
  }
  const char* codes(int64_t i, int64_t at) const {
    return lines_.address(part_.line + i) + (part_.from + at) * unit_;
  }

  OperandLines::Expert lines_;
  const Part& part_;
  int64_t unit_, step_;  ///< bytes of a code, and from line to line
  DType dtype_;
  bool unscaled_;
};

/// Sixteen lines side by side, a piece at a time. The step keeps them out of each other's cache
/// sets.
struct Sixteen {
  static constexpr int64_t kStep = kPiece + kLanes;
  alignas(64) float at[kLanes * kStep];

  void read(const Reader& reader, int64_t line, int64_t from, int64_t padded) {
    for (int64_t i = 0; i < kLanes; ++i) reader.read(line + i, from, padded, at + i * kStep);
  }
};

void copy_codes(const Reader& reader, const Staged& to) {
  for (int64_t i = 0; i < to.outer; ++i)
    reader.copy(i, 0, to.depth, static_cast<char*>(to.data) + i * to.depth * bytes_of(to.type));
}

void a_along_depth(const Reader& reader, const Staged& to) {
  if (reader.is(to.type)) return copy_codes(reader, to);
  float piece[kPiece];
  for (int64_t i = 0; i < to.outer; ++i) {
    for (int64_t d = 0; d < to.depth; d += kPiece) {
      const int64_t some = std::min(kPiece, to.depth - d), place = i * to.depth + d;
      if (to.type == Multiplicand::kF32) {
        reader.read(i, d, some, static_cast<float*>(to.data) + place);
      } else {
        reader.read(i, d, some, piece);
        narrow_line(piece, some, static_cast<uint16_t*>(to.data) + place);
      }
    }
  }
}

/// Sixteen rows of a from a block of sixteen lines; `o` is the first row, `d` the depth. As much as
/// a has.
void put_a(const float* block, int64_t o, int64_t d, const Staged& to) {
  const int64_t place = o * to.depth + d;
  const int64_t rows = std::min(kLanes, to.outer - o), depth = std::min(kLanes, to.depth - d);
  alignas(64) float rows_of_a[kLanes * kLanes];
  transpose_16(block, Sixteen::kStep, rows_of_a, kLanes);
  for (int64_t i = 0; i < rows; ++i) {
    if (to.type == Multiplicand::kF32)
      std::memcpy(static_cast<float*>(to.data) + place + i * to.depth, rows_of_a + i * kLanes,
                  size_t(depth) * sizeof(float));
    else
      narrow_line(rows_of_a + i * kLanes, depth,
                  static_cast<uint16_t*>(to.data) + place + i * to.depth);
  }
}

/// bf16 codes: two lines side by side are a line of words, transposed like floats.
void transpose_codes(const Reader& reader, const Staged& to) {
  Sixteen words;
  uint16_t even[kPiece], odd[kPiece];
  alignas(64) float rows[kLanes * kLanes];
  for (int64_t o = 0; o < to.outer; o += kPiece) {
    const int64_t some = std::min(kPiece, to.outer - o);
    for (int64_t d = 0; d < to.depth; d += 2 * kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) {
        const CodePair pair = reader.pair(d + 2 * i, {o, some}, even, odd);
        pair_codes(pair.even, pair.odd, some,
                   reinterpret_cast<uint16_t*>(words.at + i * Sixteen::kStep));
      }
      const int64_t depth = std::min(2 * kLanes, to.depth - d);
      for (int64_t i = 0; i < some; i += kLanes) {
        transpose_16(words.at + i, Sixteen::kStep, rows, kLanes);
        for (int64_t j = 0; j < std::min(kLanes, some - i); ++j)
          std::memcpy(static_cast<uint16_t*>(to.data) + (o + i + j) * to.depth + d,
                      rows + j * kLanes, size_t(depth) * sizeof(uint16_t));
      }
    }
  }
}

void a_along_outer(const Reader& reader, const Staged& to) {
  if (to.type == Multiplicand::kBf16 && reader.is(to.type)) return transpose_codes(reader, to);
  Sixteen lines;
  for (int64_t o = 0; o < to.outer; o += kPiece) {
    const int64_t some = (std::min(kPiece, to.outer - o) + kLanes - 1) / kLanes * kLanes;
    for (int64_t d = 0; d < to.depth; d += kLanes) {
      lines.read(reader, d, o, some);
      for (int64_t i = 0; i < some; i += kLanes) put_a(lines.at + i, o + i, d, to);
    }
  }
}

/// The width of b's columns, and where depth d of the column that holds `outer` begins.
int64_t column_width(const Staged& to) { return std::min(to.outer, kColumn); }
int64_t place_in_b(const Staged& to, int64_t outer, int64_t d) {
  const int64_t width = column_width(to), column = outer / width;
  return column * to.depth * width + d * width;
}

void b_along_outer_f32(const Reader& reader, const Staged& to) {
  if (reader.read_columns(to)) return;
  const int64_t width = column_width(to);
  for (int64_t d = 0; d < to.depth; ++d)
    for (int64_t o = 0; o < to.outer; o += width)
      reader.read(d, o, width, static_cast<float*>(to.data) + place_in_b(to, o, d));
}

/// Two lines of codes side by side, as they lie in a column of b.
void pair_up(const Reader& reader, const Staged& to) {
  const int64_t width = column_width(to);
  uint16_t even[kColumn], odd[kColumn];
  for (int64_t d = 0; d < to.depth; d += 2) {
    for (int64_t o = 0; o < to.outer; o += width) {
      const CodePair pair = reader.pair(d, {o, width}, even, odd);
      pair_codes(pair.even, pair.odd, width,
                 static_cast<uint16_t*>(to.data) + place_in_b(to, o, d));
    }
  }
}

void b_along_outer_bf16(const Reader& reader, const Staged& to) {
  if (reader.is(Multiplicand::kBf16)) return pair_up(reader, to);
  const int64_t width = column_width(to);
  float even[kColumn], odd[kColumn];
  for (int64_t d = 0; d < to.depth; d += 2) {
    for (int64_t o = 0; o < to.outer; o += width) {
      reader.read(d, o, width, even);
      reader.read(d + 1, o, width, odd);
      pair_lines(even, odd, width, static_cast<uint16_t*>(to.data) + place_in_b(to, o, d));
    }
  }
}

/// Sixteen depths of sixteen columns of b from a block of sixteen lines.
void put_b(const float* block, int64_t o, int64_t d, const Staged& to) {
  const int64_t width = column_width(to), lane = o % width;
  if (to.type == Multiplicand::kF32) {
    float* place = static_cast<float*>(to.data) + place_in_b(to, o, d) + lane;
    return transpose_16(block, Sixteen::kStep, place, width);
  }
  alignas(64) float depths[kLanes * kLanes];
  transpose_16(block, Sixteen::kStep, depths, kLanes);
  for (int64_t i = 0; i < kLanes; i += 2)
    pair_lines(depths + i * kLanes, depths + (i + 1) * kLanes, kLanes,
               static_cast<uint16_t*>(to.data) + place_in_b(to, o, d + i) + 2 * lane);
}

/// Words of 32 bits of lines that are copied as they are: floats, or pairs of bf16, which follow
/// each other in a line and so are transposed like floats.
void transpose_words(const Reader& reader, const Staged& to) {
  const int64_t width = column_width(to), in_word = 4 / bytes_of(to.type);
  Sixteen copied;
  for (int64_t o = 0; o < to.outer; o += kLanes) {
    float* column = static_cast<float*>(to.data) + place_in_b(to, o, 0) / in_word + o % width;
    for (int64_t d = 0; d < to.depth / in_word; d += kPiece) {
      const int64_t some = std::min(kPiece, to.depth / in_word - d);
      Words words = reader.sixteen(o, d * in_word, some * in_word);
      if (words.at == nullptr) {
        for (int64_t i = 0; i < kLanes; ++i)
          reader.copy(o + i, d * in_word, some * in_word, copied.at + i * Sixteen::kStep);
        words = {copied.at, Sixteen::kStep};
      }
      for (int64_t i = 0; i < some; i += kLanes)
        transpose_16(words.at + i, words.step, column + (d + i) * width, width);
    }
  }
}

void b_along_depth(const Reader& reader, const Staged& to) {
  if (reader.is(to.type)) return transpose_words(reader, to);
  Sixteen lines;
  for (int64_t o = 0; o < to.outer; o += kLanes) {
    for (int64_t d = 0; d < to.depth; d += kPiece) {
      const int64_t some = std::min(kPiece, to.depth - d);
      lines.read(reader, o, d, some);
      for (int64_t i = 0; i < some; i += kLanes) put_b(lines.at + i, o, d + i, to);
    }
  }
}

}  // namespace

void stage_a(const OperandLines& lines, Along run, const Part& part, const Staged& to) {
  const Reader reader(lines, part);
  run == Along::kDepth ? a_along_depth(reader, to) : a_along_outer(reader, to);
}

void stage_b(const OperandLines& lines, Along run, const Part& part, const Staged& to) {
  const Reader reader(lines, part);
  if (run == Along::kDepth) return b_along_depth(reader, to);
  to.type == Multiplicand::kF32 ? b_along_outer_f32(reader, to) : b_along_outer_bf16(reader, to);
}

}  // namespace cadre::cpu::gemm
