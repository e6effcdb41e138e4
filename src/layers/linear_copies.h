#pragma once
#include <string_view>

#include "cadre/grouped_linear.h"

// Which tensors of a linear layer are copied, into which format, and in which form its products
// read the copies.
namespace cadre::layers::linear {

/// The products that no implementation takes codes for: their operands are decoded.
struct DecodedPasses {
  bool fprop = false, dgrad = false, wgrad = false;
  bool wgrad_waits = false;  ///< for another run, so that what it reads stays codes

  /// The implementations of products that read codes in an order of their own.
  std::string_view fprop_by{}, dgrad_by{};

  std::string_view by(Pass pass) const {
    return pass == Pass::kFprop ? fprop_by : pass == Pass::kDgrad ? dgrad_by : std::string_view();
  }
  bool any() const { return fprop || dgrad || wgrad; }
  bool of(Pass pass) const {
    return pass == Pass::kFprop ? fprop : pass == Pass::kDgrad ? dgrad : wgrad;
  }
};

/// A copy of a tensor along one axis.
struct Copy {
  int id;                 ///< the tensor that quantising writes
  int numbers;            ///< the tensor that decoding writes
  bool is_there = false;  ///< else the tensor itself is read
  bool decoded = false;   ///< quantising writes numbers at once
  bool decodes = false;   ///< codes that outlive their step are decoded where they are read
  Major codes_major = Major::kRow, scales_major = Major::kRow;
};

/// A tensor with its two copies, and which of them a product reads.
struct Copied {
  int itself;
  Copy along_k, along_rows;
  bool shared = false;         ///< the copy along K serves both products
  bool given = false;          ///< the copies are the caller's
  bool given_along_k = false;  ///< that along K is, in the order that a product wants

  bool copies() const { return along_k.is_there || along_rows.is_there; }
  bool copies_rows() const { return along_rows.is_there && !shared; }
  int written_rows() const { return shared ? along_k.id : along_rows.id; }
  int read_along_k() const {
    return !along_k.is_there ? itself : along_k.decodes ? along_k.numbers : along_k.id;
  }
  int read_along_rows() const {
    if (!along_rows.is_there) return itself;
    return along_rows.decodes ? along_rows.numbers : written_rows();
  }
};

/// Which tensors the recipe copies.
struct Copies {
  Copied x, w, dy;

  Copies(const GroupedLinearProblem&, const DecodedPasses&);
};

/// True if a product can read a tensor of this type as it is.
bool as_is(const Format&, DType);

/// A product of the layer, without what its epilogue adds.
GroupedGemmProblem product(const GroupedLinearProblem&, Pass, const DecodedPasses&);

/// The products of the problem that nobody here takes codes for, but for kFp8Rows.
DecodedPasses passes_to_decode(const GroupedLinearProblem&, const Device&);

/// The implementation of products that reads codes, some in an order of its own, and the route that
/// writes them so.
inline constexpr std::string_view kFp8Rows = "sm90_fp8_rows";

/// The implementation that multiplies a plain batch and codes of weights, and its route.
inline constexpr std::string_view kPackedRows = "sm90_packed_rows";

/// True if the routes have products on the device.
bool is_hopper(const Device&);

/// The same, but for those that kFp8Rows takes.
DecodedPasses passes_with_fp8_rows(const GroupedLinearProblem&, const Device&);

/// The same for kPackedRows, which takes fprop.
DecodedPasses passes_with_packed_rows(const GroupedLinearProblem&, const Device&);

}  // namespace cadre::layers::linear
