// What `--offsets` takes: a file of counts, or the words of a distribution. Counts that were
// accepted are those of the file, one an expert, of R rows or less; drawn ones are of all rows.
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/mman.h>
#include <unistd.h>

#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "bench/draw.h"
#include "tests/fuzz/fuzz.h"

using namespace cadre;
using fuzz::accepted;
using fuzz::expect;

namespace {

/// A file in memory, always the same one.
std::string file_of(const std::string& content) {
  static const int file = ::memfd_create("counts", 0);
  const bool written = ::ftruncate(file, 0) == 0 &&
                       ::pwrite(file, content.data(), content.size(), 0) == ssize_t(content.size());
  expect(written, "no file could be written");
  return text("/proc/self/fd/", file);
}

void look_at_file(const std::string& content, int64_t rows, int experts) {
  std::vector<int64_t> counts;
  const bench::Draw draw{.offsets = file_of(content)};
  if (!accepted([&] { counts = bench::draw_counts(draw, rows, experts); })) return;
  expect(counts.size() == size_t(experts), counts.size(), " counts for ", experts, " experts");
  std::istringstream words(content);
  std::string word;
  int64_t sum = 0;
  for (const int64_t count : counts) {
    words >> word;
    char* end = nullptr;
    const bool same = std::strtoll(word.c_str(), &end, 10) == count && *end == '\0';
    expect(same && count >= 0 && count <= rows, word, " is taken as ", count);
    sum += count;
  }
  expect(!(words >> word) && sum <= rows, sum, " rows of ", rows, ", and then ", word);
}

void look_at_words(const std::string& words, int64_t rows, int experts) {
  std::vector<int64_t> counts;
  const bench::Draw draw{.offsets = words};
  if (!accepted([&] { counts = bench::draw_counts(draw, rows, experts); })) return;
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t(0));
  expect(counts.size() == size_t(experts) && sum == rows, words, " gives ", sum, " of ", rows);
  std::vector<int64_t> choices = bench::draw_choices(draw, rows, 1, experts);
  for (const int64_t choice : choices)
    expect(choice >= -1 && choice < experts, words, " chooses expert ", choice);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  const bool is_file = input.ConsumeBool();
  const auto experts = input.ConsumeIntegralInRange<int>(1, 40);
  const auto rows = input.ConsumeIntegralInRange<int64_t>(0, is_file ? INT32_MAX : 200);
  const std::string words = input.ConsumeRemainingBytesAsString();
  // Words that name a file are not for this: nothing outside is read.
  if (is_file)
    look_at_file(words, rows, experts);
  else if (words.find('/') == words.npos && words.find('\0') == words.npos)
    look_at_words(words, rows, experts);
  return 0;
}
