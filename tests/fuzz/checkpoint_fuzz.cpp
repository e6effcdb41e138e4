// A checkpoint under any header. With the checksum that it had, it is refused or says in each field
// what it said. With a checksum that fits, it is refused or prints to a checkpoint that reads the
// same, so that nothing of it was left out.
#include "tests/fuzz/checkpoint_state.h"
#include "tests/fuzz/fuzz.h"

using namespace cadre;
using namespace cadre::train;
using fuzz::accepted;
using fuzz::expect;

namespace {

RunState read(const SafeTensors& file) { return from_safetensors(file, "x"); }

void look_at_forged(SafeTensors& file) {
  const auto kind = file.metadata.find("kind");
  const bool first = kind != file.metadata.end() && kind->second == "cadre train 1";
  file.metadata["checksum"] = text(std::hex, first ? tensors_checksum(file) : checksum(file));
  std::vector<uint8_t> printed;
  if (!accepted([&] { printed = fuzz::file_of(read(file)); })) return;
  const SafeTensors shown = parse_safetensors(printed, "x");
  for (const auto& [key, words] : shown.metadata)
    expect(key == "checksum" || key == "kind" || file.metadata.at(key) == words, key, " is ",
           file.metadata.at(key), " and read as ", words);
  expect(shown.metadata.size() == file.metadata.size(), "metadata was left out");
  expect(fuzz::file_of(read(shown)) == printed, "a print is another checkpoint");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<uint8_t> whole = fuzz::file_of(fuzz::small_state());
  static const std::string sum = parse_safetensors(whole, "x").metadata.at("checksum");
  std::vector<uint8_t> bytes(8);
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(uint64_t{size} >> 8 * i);
  bytes.insert(bytes.end(), data, data + size);
  bytes.insert(bytes.end(), whole.begin() + fuzz::header_bytes(whole), whole.end());
  SafeTensors file;
  if (!accepted([&] { file = parse_safetensors(bytes, "x"); })) return 0;
  accepted([&] {
    const RunState state = read(file);
    expect(file.metadata.at("checksum") != sum || fuzz::file_of(state) == whole,
           "another state has the same checksum");
  });
  look_at_forged(file);
  return 0;
}
