#include "cadre/offsets.h"

#include "backend/walk.h"
#include "ops/checks.h"
#include "ops/problem_text.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  io.word("source", p.source);
  io.always("R", p.rows);
  io.always("E", p.experts);
  io.unless("T", p.tokens, int64_t(0));
  io.unless("top_k", p.top_k, 0);
  io.always("index", p.index);
}

std::string to_string(const OffsetsProblem& p) { return ops::write_problem("offsets", p); }

OffsetsProblem parse_offsets_problem(std::string_view words) {
  return ops::read_problem<OffsetsProblem>("offsets", words);
}

namespace {

void check(const OffsetsProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("offsets", p);
  checks.at_least("R", p.rows, 0);
  checks.fits_int32("R", p.rows);
  checks.experts(p.experts);
  checks.holds(p.index == DType::kI32 || p.index == DType::kI64, "index is ", name(p.index),
               ", must be i32 or i64");
  if (p.source == OffsetsSource::kRouting) {
    checks.at_least("T", p.tokens, 0);
    checks.fits_int32("T", p.tokens);
    checks.at_least("top_k", p.top_k, 1, "routing gives every token that many experts");
    checks.fits_int32("T * top_k", p.tokens * p.top_k);
  } else {
    checks.holds(p.tokens == 0 && p.top_k == 0, "T and top_k are ", p.tokens, " and ", p.top_k,
                 ", must be 0; only routing has tokens");
  }
}

void check(const OffsetsProblem& p, const OffsetsArgs& args) {
  const ops::Checks checks("offsets", p);
  const bool routing = p.source == OffsetsSource::kRouting;
  const int64_t sources = routing ? p.tokens * p.top_k : p.experts;
  checks.present("source", static_cast<const char*>(args.source), sources);
  checks.aligned("source", args.source, bits(p.index) / 8);
  checks.present("offsets", args.offsets, int64_t(p.experts) + 1);
  checks.aligned("map.row_of", args.map.row_of, alignof(int32_t));
  checks.aligned("map.slot_of", args.map.slot_of, alignof(int32_t));
  checks.aligned("status", args.status, alignof(int32_t));
  checks.aligned("row_prob", args.row_prob, alignof(float));
  if (routing) {
    if (args.row_prob != nullptr)
      return checks.present("prob", args.prob, sources, "row_prob is made of it");
    return checks.absent("prob", args.prob, "row_prob is not wanted");
  }
  checks.absent("map.row_of", args.map.row_of, "only routing makes a row map");
  checks.absent("map.slot_of", args.map.slot_of, "only routing makes a row map");
  checks.absent("prob", args.prob, "only routing makes a row map");
  checks.absent("row_prob", args.row_prob, "only routing makes a row map");
}

}  // namespace

OffsetsPlan plan(const OffsetsProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  return backend::choose(problem, device, only);
}

void run(const OffsetsPlan& plan, const OffsetsArgs& args, Workspace workspace, Stream stream) {
  check(plan.problem, args);
  backend::launch(plan, args, workspace, stream);
}

}  // namespace cadre
