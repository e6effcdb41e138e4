#include "ops/gemm_activation.h"

#include "ops/activation_checks.h"

namespace cadre {
namespace ops {
namespace {

template <class Io, class Activation>
void fields(Io& io, Activation& a) {
  const GemmActivation usual;
  io.unless("layout", a.layout, usual.layout);
  constant_fields(io, a.kind, a.constants, "act_alpha");
  io.unless("prob", a.prob, usual.prob);
  io.unless("z", a.keep_z, usual.keep_z);
}

}  // namespace

void activation_fields(ProblemWriter& io, const std::optional<GemmActivation>& a) {
  if (!a) return;
  io.always("act", a->kind);
  fields(io, *a);
}

void activation_fields(ProblemReader& io, std::optional<GemmActivation>& a) {
  const std::string* kind = io.find("act");
  if (kind == nullptr) return;
  read_word("act", *kind, a.emplace().kind);
  fields(io, *a);
}

void activation_fields(WordsLook& io, const std::optional<GemmActivation>& a) {
  if (!a) return;
  io.always("act", a->kind);
  fields(io, *a);
}

void check_activation(const GroupedGemmProblem& p, const Checks<GroupedGemmProblem>& checks) {
  if (!p.activation) return;
  const GemmActivation& a = *p.activation;
  const std::string act = word_of(a.kind);
  checks.holds(p.pass == Pass::kFprop, "act is ", act, ", must be absent; only fprop has one");
  checks.holds(p.out_major == Major::kRow, "out_major is column, must be row; act is ", act);
  checks.holds(!info(a.kind).gated || p.n % 2 == 0, "N is ", p.n,
               ", must be even; gate and up of every feature");
  check_activation(checks, {a.kind, a.constants, a.layout, out_columns(p)});
}

}  // namespace ops

int64_t activated_columns(int64_t columns, const std::optional<GemmActivation>& a) {
  return a && info(a->kind).gated ? columns / 2 : columns;
}

int64_t out_columns(const GroupedGemmProblem& p) {
  return p.pass == Pass::kFprop ? activated_columns(p.n, p.activation) : p.k;
}

}  // namespace cadre
