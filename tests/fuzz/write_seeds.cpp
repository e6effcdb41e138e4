// Writes what the fuzz targets start from below a folder: `write_seeds FOLDER PROBLEMS`. PROBLEMS
// is a shape file, one problem a line.
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "cadre/layers.h"
#include "cadre/operations.h"
#include "cli/problem.h"
#include "tests/fuzz/checkpoint_state.h"

using namespace cadre;
namespace fs = std::filesystem;

namespace {

std::set<std::string> problems_of(const char* path) {
  std::set<std::string> problems;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line = line.substr(0, line.find('#')); !line.empty()) problems.insert(line);
  for (const OperationInfo& operation : operation_list()) problems.emplace(operation.example);
  for (const LayerInfo& layer : layer_list()) problems.emplace(layer.example);
  problems.emplace(cli::kExpertParallel.example);
  return problems;
}

/// Writes seeds, and the words in them, which libFuzzer puts together anew.
class Writer {
 public:
  explicit Writer(fs::path folder) : folder_(std::move(folder)) {}
  ~Writer() {
    for (const auto& [target, words] : words_) {
      std::ofstream file(folder_ / (target + ".dict"));
      for (const std::string& word : words) file << '"' << word << "\"\n";
    }
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void seed(const std::string& target, std::string_view content) {
    fs::create_directories(folder_ / target);
    std::ofstream(folder_ / target / std::to_string(count_++), std::ios::binary) << content;
    std::set<std::string>& words = words_[target];
    words.insert({"2147483648", "4294967297", "9223372036854775807"});
    std::string word;
    for (const char c : std::string(content) + ' ') {
      if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.') {
        word += c;
      } else if (!word.empty()) {
        words.insert(std::exchange(word, {}));
      }
    }
  }

 private:
  fs::path folder_;
  int count_ = 0;
  std::map<std::string, std::set<std::string>> words_;
};

std::string_view text_of(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  Writer writer(words[1]);
  const std::set<std::string> problems = problems_of(words[2]);
  for (const std::string& problem : problems) {
    writer.seed("problem", problem);
    writer.seed("explain", problem);
  }
  const std::string of_four("\x64\0\0\0\x03", 5);  // R, E and the kind are taken from the end
  writer.seed("offsets", "1 2\n3 4\n" + of_four + '\1');
  for (const char* distribution : {"uniform", "onehot", "zipf:1.2", "gamma:0.5"})
    writer.seed("offsets", distribution + of_four + '\0');
  const std::vector<uint8_t> file = fuzz::file_of(fuzz::small_state());
  const size_t header = fuzz::header_bytes(file);
  writer.seed("checkpoint", text_of(file).substr(8, header - 8));
  train::SafeTensors small;
  const std::vector<uint8_t> data(12);
  small.metadata = {{"a", "b"}};
  small.tensors["x"] = {"F32", {2, 1}, std::span(data).first(8)};
  small.tensors["y"] = {"BF16", {2}, std::span(data).last(4)};
  std::string words_of_header, bytes;
  for (const auto& part : safetensors_parts(small, words_of_header))
    bytes.append(part.begin(), part.end());
  writer.seed("safetensors", bytes);
  for (const char* header :
       {R"({"__metadata__":{"a":"b"},"x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}}1234)",
        R"({"x":{"data_offsets":[0,4],"dtype":"F32","dtype":"F32","shape":[1]}}1234)",
        R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":[1],"more":1}}1234)"})
    writer.seed("safetensors", header);
}
