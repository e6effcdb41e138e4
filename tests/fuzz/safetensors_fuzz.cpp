// Any bytes as a safetensors file. What was accepted is all that the header says, and prints to a
// file that reads the same.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "apps/train/safetensors.h"
#include "tests/fuzz/fuzz.h"

using namespace cadre;
using namespace cadre::train;
using fuzz::accepted;
using fuzz::expect;
using nlohmann::json;

namespace {

std::vector<uint8_t> bytes_of(const SafeTensors& file) {
  std::string header;
  std::vector<uint8_t> bytes;
  for (const auto& part : safetensors_parts(file, header))
    bytes.insert(bytes.end(), part.begin(), part.end());
  return bytes;
}

/// The header without places in the file, which depend on the order of the tensors, and how many
/// names are in it, those that stand twice too.
struct Header {
  json words;
  int names = 0;

  explicit Header(const std::vector<uint8_t>& file) {
    size_t length = 0;
    for (size_t i = 0; i < 8; ++i) length |= size_t{file[i]} << 8 * i;
    const auto count = [this](int, json::parse_event_t event, json&) {
      names += event == json::parse_event_t::key;
      return true;
    };
    words = json::parse(file.data() + 8, file.data() + 8 + length, count);
    if (words.contains("__metadata__") && words["__metadata__"].empty())
      words.erase("__metadata__"), --names;
    for (auto& [name, entry] : words.items())
      if (name != "__metadata__") entry.erase("data_offsets");
  }
};

/// The input as a file. Words that begin as a header does get the eight bytes before them which say
/// how long it is, so that it may grow.
std::vector<uint8_t> file_of(std::span<const uint8_t> input) {
  std::vector<uint8_t> file(input.begin(), input.end());
  if (file.empty() || file[0] != '{') return file;
  const auto end = std::find(file.rbegin(), file.rend(), '}').base();
  const auto length = uint64_t(end - file.begin());
  uint8_t bytes[8];
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(length >> 8 * i);
  file.insert(file.begin(), std::begin(bytes), std::end(bytes));
  return file;
}

bool same(const SafeTensors& a, const SafeTensors& b) {
  bool equal = a.metadata == b.metadata && a.tensors.size() == b.tensors.size();
  for (auto i = a.tensors.begin(), j = b.tensors.begin(); equal && i != a.tensors.end(); ++i, ++j)
    equal = i->first == j->first && i->second.dtype == j->second.dtype &&
            i->second.shape == j->second.shape &&
            std::equal(i->second.data.begin(), i->second.data.end(), j->second.data.begin(),
                       j->second.data.end());
  return equal && checksum(a) == checksum(b);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> bytes = file_of({data, size});
  SafeTensors first;
  if (!accepted([&] { first = parse_safetensors(bytes, "x"); })) return 0;
  const std::vector<uint8_t> printed = bytes_of(first);
  const Header said(bytes), shown(printed);
  expect(said.words == shown.words && said.names == shown.names, said.words, "\nis read as\n",
         shown.words);
  SafeTensors second;
  expect(accepted([&] { second = parse_safetensors(printed, "x"); }), "a print is refused");
  expect(same(first, second) && bytes_of(second) == printed, "a print is another file");
  return 0;
}
