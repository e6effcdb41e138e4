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

constexpr int kMostRanks = 1 << 15;
constexpr const char* kNotScattered = ", must be 1; nothing is scattered";

}  // namespace

void check_gather(const GroupedGemmProblem& p, const Checks<GroupedGemmProblem>& checks) {
  if (p.gather == Gather::kNo && !p.scatter) {
    checks.holds(p.tokens == 0, "T is ", p.tokens, ", must be 0; nothing is gathered or scattered");
    checks.holds(p.top_k == 1, "top_k is ", p.top_k,
                 ", must be 1; nothing is gathered or scattered");
  }
  if (p.gather == Gather::kNo) return;
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

void check_scatter(const GroupedGemmProblem& p, const Checks<GroupedGemmProblem>& checks) {
  checks.at_least("ranks", p.ranks, 1);
  if (!p.scatter) return checks.holds(p.ranks == 1, "ranks is ", p.ranks, kNotScattered);
  const auto lacks = [&](bool has, const char* what, const char* why) {
    checks.holds(!has, what, " is given, must not be; ", why);
  };
  checks.holds(p.pass != Pass::kWgrad, "scatter is yes, must be no; dw has no rows of tokens");
  lacks(p.gather != Gather::kNo, "gather", "what is gathered is not scattered too");
  lacks(p.activation.has_value(), "act", "what is scattered leaves as it is multiplied");
  lacks(p.beta, "beta", "c has no places");
  checks.holds(p.tail == Tail::kKeep, "tail is zero, must be keep; places without a row stay");
  checks.holds(p.out_major == Major::kRow, "out_major is column, must be row; rows are scattered");
  checks.at_least("T", p.tokens, 0);
  checks.fits_int32("T", p.tokens);
  checks.at_least("top_k", p.top_k, 1);
  checks.fits_int32("T * top_k", p.tokens * p.top_k);
  checks.holds(p.ranks < kMostRanks, "ranks is ", p.ranks, ", must be below ", kMostRanks);
  checks.fits_int32("ranks * T * top_k", p.ranks * p.tokens * p.top_k);
  checks.countable("ranks * T * top_k * columns", {p.ranks * p.tokens * p.top_k, out_columns(p)});
}

}  // namespace cadre::ops
