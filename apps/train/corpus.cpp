#include "apps/train/corpus.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "apps/train/file.h"
#include "apps/train/random.h"
#include "apps/train/utf8.h"
#include "cadre/error.h"

namespace cadre::train {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kLeastBytes = 2048;
constexpr int64_t kMostBytes = int64_t{1} << 31;

bool is_control(uint8_t byte) {
  return (byte < 32 && byte != '\t' && byte != '\n' && byte != '\r' && byte != '\f') || byte == 127;
}

/// Why the bytes are no text; empty where they are. Text has no zero byte, and less than one byte
/// in ten that is a control character or breaks UTF-8 (so Latin-1 prose passes).
std::string no_text_because(const std::vector<uint8_t>& bytes) {
  const std::string_view words(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  size_t odd = 0;
  for (size_t at = 0; at < bytes.size();) {
    if (bytes[at] == 0) return text("byte ", at, " is zero");
    const size_t length = utf8_length(words, at);
    odd += length == 0 || is_control(bytes[at]);
    at += std::max<size_t>(length, 1);
  }
  if (10 * odd < bytes.size()) return "";
  return text(odd, " of its ", bytes.size(), " bytes are control characters or broken UTF-8");
}

bool holds_checkpoint(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().extension() == ".safetensors") return true;
  }
  return false;
}

/// Whether a run has written the file, into `out` or beside its checkpoints.
bool is_written(const fs::path& file, const fs::path& out) {
  std::error_code not_there;
  const fs::path name = file.filename(), folder = file.parent_path();
  return (name == "report.html" || name == "results.json") &&
         (fs::equivalent(folder, out, not_there) || holds_checkpoint(folder));
}

/// The files of a folder and below, by name; hidden ones, builds and results left out.
std::vector<fs::path> files_below(const fs::path& folder, const fs::path& out) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::recursive_directory_iterator walk(folder, error), end;
  for (; !error && walk != end; walk.increment(error)) {
    const std::string name = walk->path().filename().string();
    std::error_code ignored;
    const bool is_folder = walk->is_directory(ignored);
    if (name.starts_with('.') || (name == "build" && is_folder)) {
      if (is_folder) walk.disable_recursion_pending();
    } else if (walk->is_regular_file(ignored) && !is_written(walk->path(), out)) {
      files.push_back(walk->path());
    }
  }
  require(!error, "train: folder ", folder.string(), " cannot be read: ", error.message(),
          "; check its permissions");
  std::sort(files.begin(), files.end());
  return files;
}

/// Whether it is text.
bool add_document(Corpus& corpus, const fs::path& path, bool named) {
  const std::vector<uint8_t> bytes = read_file(path, kMostBytes);
  const std::string why = bytes.empty() ? "it is empty" : no_text_because(bytes);
  if (!why.empty()) {
    require(!named, "train: file ", path.string(), " is no text: ", why,
            "; name text files, or a folder to skip what is no text");
    corpus.skipped.push_back(path.string());
    return false;
  }
  corpus.bytes.push_back(0);
  const auto begin = static_cast<int64_t>(corpus.bytes.size());
  corpus.bytes.insert(corpus.bytes.end(), bytes.begin(), bytes.end());
  const auto end = static_cast<int64_t>(corpus.bytes.size());
  corpus.documents.push_back({path.string(), begin, end, end});
  require(end <= kMostBytes, "train: text is more than ", kMostBytes >> 20,
          " MB, must be less; name fewer files");
  return true;
}

/// Cuts every document and numbers the positions of both parts.
void split(Corpus& corpus, double held_out) {
  uint64_t print = 0;
  for (Document& document : corpus.documents) {
    const auto bytes = static_cast<double>(document.end - document.begin);
    document.held = document.end - static_cast<int64_t>(std::floor(bytes * held_out));
    corpus.train.add(document.begin, document.held);
    corpus.held.add(document.held, document.end);
    print = scatter(print ^ static_cast<uint64_t>(document.held));
  }
  for (const uint8_t byte : corpus.bytes) print = (print ^ byte) * 0x100000001B3u;
  corpus.fingerprint = scatter(print);
}

}  // namespace

void Positions::add(int64_t begin, int64_t end) {
  if (begin >= end) return;
  const int64_t first = count();
  begins_.push_back(begin);
  lengths_.push_back(end - begin);
  firsts_.push_back(first);
}

int64_t Positions::operator[](int64_t index) const {
  const auto after = std::upper_bound(firsts_.begin(), firsts_.end(), index);
  const auto stretch = static_cast<size_t>(after - firsts_.begin() - 1);
  return begins_[stretch] + (index - firsts_[stretch]);
}

Corpus read_corpus(const std::vector<std::string>& paths, double held_out, const fs::path& out) {
  Corpus corpus;
  std::set<fs::path> seen;
  const auto add = [&](const fs::path& file, bool named) {
    std::error_code unknown;
    const fs::path place = fs::canonical(file, unknown);
    if (!unknown && seen.contains(place)) return;
    if (add_document(corpus, file, named)) seen.insert(place);
  };
  for (const std::string& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    require(fs::exists(status), "train: path '", path,
            "' does not exist, must be a text file or a folder; check the spelling");
    if (fs::is_directory(status)) {
      for (const fs::path& file : files_below(path, out)) add(file, false);
    } else {
      add(path, true);
    }
  }
  const auto bytes = static_cast<int64_t>(corpus.bytes.size() - corpus.documents.size());
  require(bytes >= kLeastBytes, "train: text has ", bytes, " bytes, must be at least ", kLeastBytes,
          "; name more or larger text files");
  split(corpus, held_out);
  require(corpus.held.count() >= 2, "train: held-out text has ", corpus.held.count(),
          " bytes, must be at least 2; raise --held-out or name larger files");
  return corpus;
}

std::vector<std::string> default_paths() {
  std::error_code error;
  for (const fs::path& start :
       {fs::current_path(error), fs::read_symlink("/proc/self/exe", error)}) {
    for (fs::path at = start; !at.empty(); at = at.parent_path()) {
      if (fs::is_regular_file(at / "apps/train/corpus.cpp", error)) {
        std::vector<std::string> paths;
        for (const char* room : {"include", "src", "apps", "cli", "tests", "tools", "docs"}) {
          if (fs::is_directory(at / room, error)) paths.push_back((at / room).string());
        }
        return paths;
      }
      if (at == at.parent_path()) break;
    }
  }
  throw InvalidArgument(
      "train: no text is named and this is not cadre's repository; "
      "name text files or folders: cadre train PATH...");
}

void window_before(const Corpus& corpus, int64_t position, std::vector<uint8_t>& window) {
  bool inside = true;
  for (uint8_t& byte : window) {
    byte = inside ? corpus.bytes[static_cast<size_t>(--position)] : uint8_t{0};
    inside = inside && byte != 0;
  }
}

double bigram_entropy(const Corpus& corpus) {
  std::vector<int64_t> pairs(65536), firsts(256);
  for (int64_t i = 0; i < corpus.held.count(); ++i) {
    const auto at = static_cast<size_t>(corpus.held[i]);
    const size_t before = corpus.bytes[at - 1], byte = corpus.bytes[at];
    ++pairs[before * 256 + byte];
    ++firsts[before];
  }
  double bits = 0;
  for (size_t pair = 0; pair < pairs.size(); ++pair) {
    if (pairs[pair] == 0) continue;
    const auto both = static_cast<double>(pairs[pair]);
    bits -= both * std::log2(both / static_cast<double>(firsts[pair / 256]));
  }
  return bits / static_cast<double>(corpus.held.count());
}

}  // namespace cadre::train
