#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/lines.h"

namespace cadre::cpu::gemm {

/// A rectangle of one expert's output: of y or dx, rows are those of the batch; of dw, those of the
/// weight.
struct OutTile {
  int expert = 0;
  int64_t row = 0, rows = 0, col = 0, cols = 0;
};

/// The sums of a rectangle: element [i, j] at i * step + j, or the other way round if column-major.
/// Readable up to multiples of 16 in both directions.
struct Sums {
  const float* data = nullptr;
  int64_t step = 0;
  Major major = Major::kRow;
};

/// A few floats on their way.
struct Floats {
  float* at;
  int64_t count;
};

/// The way from sums to the output: factor, addend, bias and old content in fp32, one rounding to
/// the output's type.
class Epilogue {
 public:
  Epilogue(const GroupedGemmProblem&, const GroupedGemmArgs&);

  /// True if the output takes sums of that expert as they are, but for its type.
  bool is_identity(int expert) const;
  /// Whether old content of dw is added to.
  bool accumulates(int expert) const;
  /// Whether the output is so large that it is written past the caches.
  bool streams() const { return streams_; }
  /// Where an element of the output lies.
  char* address(int expert, int64_t row, int64_t col) const;

  /// `scratch` holds sixteen lines of floats, as long as the tile's longer side, rounded up to 16.
  void store(const OutTile&, const Sums&, float* scratch) const;
  void zero(const OutTile&) const;
  /// Zeros beyond the last expert's rows, if the problem says so.
  void zero_tail(const int32_t* offsets) const;

 private:
  struct Target;
  Target target(const OutTile&) const;
  void store_lines(const OutTile&, const float* sums, int64_t step) const;
  void finish(const Target&, int64_t line, int64_t at, Floats x) const;
  void add_bias(const Target&, int64_t line, int64_t at, Floats x) const;
  float factor(int expert) const;

  const GroupedGemmProblem& p_;
  const GroupedGemmArgs& args_;
  bool column_, streams_;
  DecodeLine decode_, decode_bias_;
  EncodeLine encode_;
};

}  // namespace cadre::cpu::gemm
