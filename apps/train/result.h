#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "apps/train/checkpoint.h"
#include "apps/train/corpus.h"

namespace cadre::train {

/// What the report says of the text.
struct TextFacts {
  std::vector<std::string> names;
  std::vector<std::string> skipped;
  int64_t train_bytes = 0, held_bytes = 0;
  double bigram_bits = 0;  ///< see bigram_entropy
};

TextFacts facts_of(const Corpus&);

/// Where and when numbers were made, and by what.
struct Origin {
  std::string machine, date, commit;
};

/// What the report says of one finished run.
struct RunResult {
  std::string recipe;
  std::string device;  ///< by name
  std::string plans;   ///< the implementations that it ran in
  Settings settings;
  History history;
  int64_t model_parameters = 0;
  double seconds = 0;      ///< of training in this process, looks at held-out text included
  int64_t steps_here = 0;  ///< steps that those seconds took
  std::optional<bool> resumes_equal;  ///< outcome of --verify-resume, where it was given
  std::string sample;

  double bits() const { return history.held_bits.at(0); }
  /// Zero where all steps were taken by another process.
  double rows_per_second() const {
    return steps_here == 0 ? 0 : static_cast<double>(steps_here * settings.rows) / seconds;
  }
};

/// (a - b) / b of the held-out bits per byte: how far above `base` a run ends. No number where the
/// base is 0, as the bigram entropy of text that repeats itself is.
inline double above(double bits, double base) {
  return base > 0 ? (bits - base) / base : std::numeric_limits<double>::quiet_NaN();
}

/// A table for a terminal.
std::string summary_table(const TextFacts&, const std::vector<RunResult>&);

/// The same numbers for programs.
std::string results_json(const TextFacts&, const std::vector<RunResult>&, const Origin&);

/// Whether a file's content is a results.json that `cadre train` has written.
bool is_results(const std::string& words);

/// Whether a results.json is of a run with these settings and recipes.
bool is_result_of(const std::string& words, const Settings&,
                  const std::vector<std::string>& recipes);

/// One HTML page with all its styles and drawings inside.
std::string report_html(const TextFacts&, const std::vector<RunResult>&, const std::string& prompt,
                        const Origin&);

/// Whether a file's content is such a page.
bool is_report(const std::string& words);

}  // namespace cadre::train
