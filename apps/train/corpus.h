#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "apps/train/settings.h"

namespace cadre::train {

/// One file of the text. Its last bytes, from `held` on, are kept for testing.
struct Document {
  std::string name;
  int64_t begin = 0;  ///< its first byte in the text
  int64_t held = 0;   ///< its first held-out byte
  int64_t end = 0;
};

/// Positions of bytes that may be predicted: stretches of the text, numbered through.
class Positions {
 public:
  void add(int64_t begin, int64_t end);
  int64_t count() const { return firsts_.empty() ? 0 : firsts_.back() + lengths_.back(); }
  /// The place in the text of the `index`-th position.
  int64_t operator[](int64_t index) const;

 private:
  std::vector<int64_t> begins_, lengths_, firsts_;
};

/// Documents one behind the other, each behind a zero byte, which no document holds. A window of
/// previous bytes ends at that zero: it never looks into another document.
struct Corpus {
  std::vector<uint8_t> bytes;
  std::vector<Document> documents;
  std::vector<std::string> skipped;  ///< files of folders that are empty or no text
  Positions train, held;
  uint64_t fingerprint = 0;  ///< of the bytes and the split
};

/// Reads files, and folders with everything below them (hidden names, `build` folders and symbolic
/// links to folders excepted) in the order of their names, each file once however often it is
/// named. A file named by itself must be text; in a folder a file that is empty or no text is
/// skipped, and the report and results of a run: those in `out` and those beside a checkpoint.
/// Errors    InvalidArgument for a path that is missing, unreadable, empty or no text, and for a
///           text that is too short to split.
Corpus read_corpus(const std::vector<std::string>& paths, double held_out,
                   const std::filesystem::path& out = {});

/// The sources and documents of this repository, found upwards from the current folder and then
/// from the folder of the program.
/// Errors    InvalidArgument where neither lies inside the repository.
std::vector<std::string> default_paths();

/// The `window` bytes before `position`, nearest first; zero before the start of the document.
void window_before(const Corpus&, int64_t position, std::vector<uint8_t>& window);

/// What a model would score that knows the held-out text's own pair counts and nothing else: the
/// empirical entropy of a byte given the byte before it (zero at the start of a document),
///
///   - sum_{a, b} n(a, b) / n * log2(n(a, b) / n(a)),  counts over the held-out positions.
///
/// No bigram model, however trained, does better on that text.
double bigram_entropy(const Corpus&);

}  // namespace cadre::train
