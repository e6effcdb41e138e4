#pragma once
#include <cstdint>
#include <span>
#include <string_view>

#pragma GCC visibility push(default)
namespace cadre {

/// The activations. One row of src/activations/list.h each.
enum class ActivationKind : uint8_t {
  kSwiGlu,
  kGeGlu,
  kGeGluTanh,
  kReGlu,
  kClampedSwiGlu,
  kSilu,
  kGelu,
  kGeluTanh,
  kRelu,
  kReluSquared
};

/// How gate and up share the 2F columns of z. The gate comes first.
enum class GluLayout : uint8_t {
  kConcat,        ///< [gate F | up F]
  kInterleave1,   ///< gate 0, up 0, gate 1, up 1, ...
  kInterleave32,  ///< blocks of 32: [gate 0..31 | up 0..31 | gate 32..63 | ...]; F a multiple of 32
};

/// Constants of clamped swiglu: g = min(gate, limit), u = clamp(up, -limit, limit) + offset,
/// h = g * sigmoid(alpha * g) * u. The defaults are those of gpt-oss.
struct ActivationConstants {
  float limit = 7.0f;
  float alpha = 1.702f;
  float offset = 1.0f;

  bool operator==(const ActivationConstants&) const = default;
};

struct ActivationInfo {
  ActivationKind kind;
  std::string_view name;     ///< "swiglu"
  bool gated;                ///< z has 2F columns, else F
  std::string_view formula;  ///< one line
};

/// All activations, in the order of ActivationKind.
std::span<const ActivationInfo> activation_list();
const ActivationInfo& info(ActivationKind);

/// Columns of z for F features: 2F of a gated activation, else F.
int64_t z_columns(ActivationKind, int64_t features);

ActivationKind parse_activation(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
