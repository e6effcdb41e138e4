// A row of operations as text, and what must hold of neighbours.
#include "cadre/error.h"
#include "layers/sequential.h"
#include "ops/problem_text.h"

namespace cadre {

std::string to_string(const SequentialProblem& p) {
  std::string words = p.fuse ? "sequential" : "sequential fuse=no";
  for (const RowOp& op : p.ops)
    words += " | " + std::visit([](const auto& problem) { return to_string(problem); }, op);
  return words;
}

static RowOp parse_op(std::string_view words) {
  const size_t start = std::min(words.find_first_not_of(" \t"), words.size());
  const std::string_view kind = words.substr(start, words.find_first_of(" \t", start) - start);
  if (kind == "grouped_linear") return parse_grouped_linear_problem(words);
  if (kind == "activation") return parse_activation_problem(words);
  throw InvalidArgument(
      text("sequential: op is '", kind, "', must be grouped_linear or activation"));
}

SequentialProblem parse_sequential_problem(std::string_view words) {
  SequentialProblem p;
  const size_t first = std::min(words.find('|'), words.size());
  ops::ProblemReader head("sequential", words.substr(0, first));
  head.unless("fuse", p.fuse, true);
  head.finish();
  for (size_t at = first; at < words.size();) {
    const size_t end = std::min(words.find('|', at + 1), words.size());
    p.ops.push_back(parse_op(words.substr(at + 1, end - at - 1)));
    at = end;
  }
  return p;
}

namespace layers::row {
namespace {

using RowChecks = ops::Checks<SequentialProblem>;

Port input(const GroupedLinearProblem& p) { return {p.dtype, p.k}; }
Port output(const GroupedLinearProblem& p) { return {p.dtype, p.n}; }
Port input(const ActivationProblem& p) { return {p.z, z_columns(p.kind, p.features)}; }
Port output(const ActivationProblem& p) { return {p.h, p.features}; }

}  // namespace

Port input_of(const RowOp& op) {
  return std::visit([](const auto& p) { return input(p); }, op);
}
Port output_of(const RowOp& op) {
  return std::visit([](const auto& p) { return output(p); }, op);
}

namespace {

bool learns(const RowOp& op) {
  const auto* linear = std::get_if<GroupedLinearProblem>(&op);
  return linear && (linear->wgrad || (linear->bias && linear->dbias && !linear->return_bias));
}

void check_neighbours(const RowChecks& checks, const SequentialProblem& p, size_t i) {
  const auto rows = [](const RowOp& op) {
    return std::visit([](const auto& q) { return q.rows; }, op);
  };
  const auto experts = [](const RowOp& op) {
    return std::visit([](const auto& q) { return q.experts; }, op);
  };
  const RowOp &before = p.ops[i - 1], &op = p.ops[i];
  checks.holds(rows(op) == rows(before), "R of op ", i, " is ", rows(op), ", must be ",
               rows(before), "; all ops see the same rows");
  checks.holds(experts(op) == experts(before), "E of op ", i, " is ", experts(op), ", must be ",
               experts(before), "; all ops see the same experts");
  const Port out = output_of(before), in = input_of(op);
  checks.holds(out.columns == in.columns, "input of op ", i, " has ", in.columns,
               " columns, must be ", out.columns, "; op ", i - 1, " writes as many");
  checks.holds(out.dtype == in.dtype, "input of op ", i, " is ", name(in.dtype), ", must be ",
               name(out.dtype), "; op ", i - 1, " writes that");
}

}  // namespace

bool stops_backward(const RowOp& op) {
  const auto* linear = std::get_if<GroupedLinearProblem>(&op);
  return linear && !linear->dgrad;
}

void check(const SequentialProblem& p) {
  const RowChecks checks("sequential", p);
  checks.holds(!p.ops.empty(), "the row has 0 ops, must be 1 or more");
  bool before_learns = false;
  for (size_t i = 0; i < p.ops.size(); ++i) {
    const auto* activation = std::get_if<ActivationProblem>(&p.ops[i]);
    if (activation) checks.countable("F of an op", {activation->features});
    checks.holds(activation == nullptr || !activation->along_k, "along_k of op ", i,
                 " is given, must be absent; a row passes values");
    if (i > 0) check_neighbours(checks, p, i);
    checks.holds(!before_learns || !stops_backward(p.ops[i]), "dgrad of op ", i,
                 " is no, must be yes; an op before it learns");
    const auto* linear = std::get_if<GroupedLinearProblem>(&p.ops[i]);
    checks.holds(linear == nullptr || !linear->options.quantized_x, "quantized_x of op ", i,
                 " is yes, must be no; a row passes values");
    checks.holds(linear == nullptr || !linear->given_x_along_k, "given_x_along_k of op ", i,
                 " is yes, must be no; a row passes values");
    checks.holds(linear == nullptr || !linear->given_dy_along_k, "given_dy_along_k of op ", i,
                 " is yes, must be no; a row passes values");
    checks.holds(linear == nullptr || !linear->gather, "gather of op ", i,
                 " is yes, must be no; a row has its rows in expert order");
    checks.holds(linear == nullptr || !linear->gather_dy, "gather_dy of op ", i,
                 " is yes, must be no; a row has its rows in expert order");
    checks.holds(linear == nullptr || !(linear->scatter || linear->scatter_dx), "scatter of op ", i,
                 " is yes, must be no; a row has its rows in expert order");
    checks.holds(linear == nullptr || !linear->activation, "act of op ", i,
                 " is given, must be absent; an activation is an op of a row");
    before_learns = before_learns || learns(p.ops[i]);
  }
}

}  // namespace layers::row
}  // namespace cadre
