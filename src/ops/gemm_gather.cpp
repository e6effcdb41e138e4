#include "ops/gemm_gather.h"

#include "ops/problem_text.h"

namespace cadre::ops {
namespace {

/// The operand that is gathered, and what it is called.
struct Gathered {
  std::string_view name, major_name, size_name;
  const Format& format;
  Major major;
  int64_t columns;
};

Gathered gathered(const GroupedGemmProblem& p) {
  const bool x = p.pass == Pass::kFprop || p.gather == Gather::kRhs;
  const bool lhs = p.gather == Gather::kLhs;
  return {.name = x ? "x" : "dy",
          .major_name = lhs ? "lhs_major" : "rhs_major",
          .size_name = x ? "T * K" : "T * N",
          .format = lhs ? p.lhs : p.rhs,
          .major = lhs ? p.lhs_major : p.rhs_major,
          .columns = x ? p.k : p.n};
}

}  // namespace

void check_gather(const GroupedGemmProblem& p, const Checks<GroupedGemmProblem>& checks) {
  if (p.gather == Gather::kNo) {
    checks.holds(p.tokens == 0, "T is ", p.tokens, ", must be 0; nothing is gathered");
    checks.holds(p.top_k == 1, "top_k is ", p.top_k, ", must be 1; nothing is gathered");
    return;
  }
  checks.holds(p.gather == Gather::kLhs || p.pass == Pass::kWgrad,
               "gather is rhs, must be no or lhs; only wgrad has rows on that side");
  checks.at_least("T", p.tokens, 1);
  checks.fits_int32("T", p.tokens);
  checks.at_least("top_k", p.top_k, 1);
  checks.fits_int32("T * top_k", p.tokens * p.top_k);
  const Gathered operand = gathered(p);
  checks.countable(operand.size_name, {p.tokens, operand.columns});
  checks.holds(is_plain(operand.format), operand.name, " is ", word_of(operand.format),
               ", must be f32, bf16 or f16; codes are not gathered");
  checks.holds(operand.major == Major::kRow, operand.major_name,
               " is column, must be row; whole rows are gathered");
}

}  // namespace cadre::ops
