#include "apps/train/result.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/train/number_text.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

std::string left(std::string words, size_t width) {
  words.resize(std::max(words.size() + 2, width), ' ');
  return words;
}

std::string right(const std::string& words, size_t width) {
  return std::string(width - std::min(width, words.size()), ' ') + words;
}

}  // namespace

TextFacts facts_of(const Corpus& corpus) {
  TextFacts facts;
  for (const Document& document : corpus.documents) facts.names.push_back(document.name);
  facts.skipped = corpus.skipped;
  facts.train_bytes = corpus.train.count();
  facts.held_bytes = corpus.held.count();
  facts.bigram_bits = bigram_entropy(corpus);
  return facts;
}

std::string summary_table(const TextFacts& facts, const std::vector<RunResult>& runs) {
  std::string out =
      text("held-out bits per byte; bigram entropy of the same text: ", fixed(facts.bigram_bits, 3),
           "\n\n", left("recipe", 14), right("bits", 7), right("vs bigram", 12),
           right("vs " + runs[0].recipe, 15), right("rows/s", 10), right("time", 8), "\n");
  for (const RunResult& run : runs) {
    const bool timed = run.steps_here > 0;
    out += left(run.recipe, 14) + right(fixed(run.bits(), 3), 7) +
           right(signed_percent(above(run.bits(), facts.bigram_bits)), 12) +
           right(signed_percent(above(run.bits(), runs[0].bits())), 15) +
           right(timed ? thousands(static_cast<int64_t>(run.rows_per_second())) : "-", 10) +
           right(timed ? duration(run.seconds) : "-", 8) + "\n";
  }
  return out;
}

std::string results_json(const TextFacts& facts, const std::vector<RunResult>& runs,
                         const Origin& origin) {
  nlohmann::ordered_json out = {
      {"machine", origin.machine}, {"date", origin.date}, {"commit", origin.commit}};
  out["text"] = {{"documents", facts.names.size()},
                 {"train_bytes", facts.train_bytes},
                 {"held_out_bytes", facts.held_bytes},
                 {"bigram_bits_per_byte", facts.bigram_bits}};
  out["settings"] = to_string(runs[0].settings);
  out["runs"] = nlohmann::ordered_json::array();
  for (const RunResult& run : runs) {
    nlohmann::ordered_json entry = {
        {"recipe", run.recipe},
        {"device", run.device},
        {"plans", run.plans},
        {"held_out_bits_per_byte", run.bits()},
        {"above_bigram", above(run.bits(), facts.bigram_bits)},
        {"above_first_recipe", above(run.bits(), runs[0].bits())},
        {"steps_here", run.steps_here},
        {"seconds", run.seconds},
        {"rows_per_second", run.rows_per_second()},
    };
    if (run.resumes_equal) entry["resumes_equal"] = *run.resumes_equal;
    out["runs"].push_back(entry);
  }
  return out.dump(2) + "\n";
}

bool is_results(const std::string& words) {
  const nlohmann::json all = nlohmann::json::parse(words, nullptr, false);
  return all.is_object() && all.contains("settings") && all.contains("runs");
}

bool is_result_of(const std::string& words, const Settings& settings,
                  const std::vector<std::string>& recipes) {
  using nlohmann::json;
  if (!is_results(words)) return false;
  const json all = json::parse(words);
  json found = json::array();
  for (const json& run : all["runs"])
    found.push_back(run.is_object() ? run.value("recipe", json()) : run);
  return all["settings"] == to_string(settings) && found == json(recipes);
}

}  // namespace cadre::train
