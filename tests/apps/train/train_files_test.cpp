// Settings, text, files and checkpoints: what is read back is what was written, and whatever can be
// wrong with them is said and loses nothing.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <numeric>

#include "apps/train/checkpoint.h"
#include "apps/train/corpus.h"
#include "apps/train/file.h"
#include "apps/train/random.h"
#include "tests/apps/train/differences.h"
#include "tests/apps/train/folder.h"
#include "tests/judge/errors.h"

using namespace cadre;
using namespace cadre::train;
using cadre::test::Folder;
using cadre::test::invalid;
using cadre::test::prose;

namespace {

void expect_says(const std::string& what, std::string_view part) {
  EXPECT_NE(what.find(part), what.npos) << "got: " << what << "\nwant: " << part;
  EXPECT_EQ(what.find('\n'), what.npos) << "more than one line: " << what;
}

std::string content(const std::filesystem::path& path) {
  const auto bytes = read_file(path, 1 << 30);
  return {bytes.begin(), bytes.end()};
}

/// A small state in the middle of a run.
RunState some_state() {
  Settings s;
  s.window = 2;
  s.hidden = s.features = 16;
  s.experts = 2;
  s.blocks = 1;
  s.steps = 10;
  RunState state = initial_state(s, "mxfp8");
  state.recipes = {"bf16", "mxfp8"};
  state.paths = {"a \"b\" c", "caf\xE9", "d"};
  state.fingerprint = 0xDEADBEEFCAFE0123u;
  state.step = 4;
  state.history.loss = {5.5, 5.25, 5.125, 4.0 + 1e-15};
  state.history.eval_step = {2, 4};
  state.history.eval_bits = {7.5, 7.25};
  for (Parameter& p : state.parameters) {
    p.mean = cadre::test::normals<float>(p.value.size(), 1);
    p.square = cadre::test::normals<float>(p.value.size(), 2);
  }
  return state;
}

std::string bytes_of(const SafeTensors& file) {
  std::string header, bytes;
  for (const auto& part : safetensors_parts(file, header)) bytes.append(part.begin(), part.end());
  return bytes;
}

std::string bytes_of(const RunState& state) { return bytes_of(to_safetensors(state)); }

std::string load_error(const std::string& bytes) {
  return invalid([&] {
    from_safetensors(parse_safetensors({bytes.begin(), bytes.end()}, "x.safetensors"),
                     "x.safetensors");
  });
}

/// Bytes of the header, with the eight that say how long it is.
size_t header_bytes(const std::string& file) {
  size_t bytes = 8;
  for (size_t i = 0; i < 8; ++i) bytes += size_t{static_cast<uint8_t>(file[i])} << 8 * i;
  return bytes;
}

/// A file with this header and so many zero bytes of data.
std::string with_header(const std::string& header, size_t data) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> 8 * i & 0xFF);
  return bytes + header + std::string(data, '\0');
}

}  // namespace

TEST(Settings, PrintAndParseBackToTheSameBits) {
  Settings s;
  s.learning_rate = 0.1 + 0.2;
  s.seed = 123456789012345;
  EXPECT_EQ(parse_settings(to_string(s)), s);
  EXPECT_EQ(differences(s, Settings{}), (std::vector<std::string>{"lr", "seed"}));
}

TEST(Settings, SayWhatIsWrong) {
  const auto error = [](auto change) {
    Settings s;
    change(s);
    return invalid([&] { require_legal(s); });
  };
  expect_says(error([](Settings& s) { s.steps = 0; }), "--steps is 0, must be 1 to 10000000");
  expect_says(error([](Settings& s) { s.learning_rate = -1; }), "--lr is -1, must be");
  expect_says(error([](Settings& s) { s.learning_rate = std::nan(""); }), "--lr is nan, must be");
  expect_says(error([](Settings& s) { s.experts = 0; }), "--experts is 0, must be 1 to 1024");
  expect_says(error([](Settings& s) { s.top_k = 9; }), "--top-k is 9, must be at most --experts");
  expect_says(error([](Settings& s) { s.hidden = 100; }), "--hidden is 100, must be a multiple");
  expect_says(error([](Settings& s) { s.features = 17; }), "--features is 17, must be a multiple");
  expect_says(error([](Settings& s) { s.held_out = 0.9; }), "--held-out is 0.9, must be");
  expect_says(error([](Settings& s) { s.hidden = 8192, s.features = 32768; }),
              "parameters, must be at most 1000000000; lower --hidden");
  expect_says(invalid([] { parse_settings("steps=4"); }), "is missing");
  expect_says(invalid([] { parse_settings("steps"); }), "has no value");
  expect_says(invalid([] { parse_settings(to_string(Settings{}) + " x=1"); }), "x is unknown");
  expect_says(invalid([] { parse_settings("window=1x " + to_string(Settings{})); }),
              "window is '1x', must be a number");
}

TEST(Corpus, CutsEveryDocumentAndLooksBackNoFurtherThanItsStart) {
  const Folder folder;
  const std::string a = folder.write("t/a.txt", prose(3000));
  folder.write("t/b/c.md", prose(1000));
  folder.write("t/empty", "");
  folder.write("t/junk", std::string(100, '\0'));
  folder.write("t/.hidden", prose(500));
  folder.write("t/build/x.txt", prose(500));
  const Corpus corpus = read_corpus({folder / "t"}, 0.1);
  ASSERT_EQ(corpus.documents.size(), 2u);
  EXPECT_EQ(corpus.skipped.size(), 2u);
  EXPECT_EQ(corpus.train.count(), 3600);
  EXPECT_EQ(corpus.held.count(), 400);
  std::vector<int> seen(corpus.bytes.size());
  for (int64_t i = 0; i < 3600; ++i) ++seen[corpus.train[i]];
  for (int64_t i = 0; i < 400; ++i) ++seen[corpus.held[i]];
  for (size_t at = 0; at < seen.size(); ++at) EXPECT_EQ(seen[at], corpus.bytes[at] == 0 ? 0 : 1);

  std::vector<uint8_t> window(4);
  window_before(corpus, corpus.documents[1].begin + 2, window);
  EXPECT_EQ(window[0], corpus.bytes[corpus.documents[1].begin + 1]);
  EXPECT_EQ(window[1], corpus.bytes[corpus.documents[1].begin]);
  EXPECT_EQ(window[2], 0);
  EXPECT_EQ(window[3], 0);
}

TEST(Corpus, HasNoResultsOfARun) {
  const Folder folder;
  folder.write("t/a.txt", prose(3000));
  folder.write("t/out/report.html", prose(500));
  folder.write("t/out/results.json", prose(500));
  folder.write("t/out/notes.txt", prose(500));
  folder.write("t/other/report.html", prose(500));
  EXPECT_EQ(read_corpus({folder / "t"}, 0.1).documents.size(), 5u);
  EXPECT_EQ(read_corpus({folder / "t"}, 0.1, folder / "t/out").documents.size(), 3u);
  EXPECT_EQ(read_corpus({folder / "t"}, 0.1, folder / "none").documents.size(), 5u);
  folder.write("t/other/results.json", prose(500));
  folder.write("t/other/mxfp8.safetensors", std::string(100, '\0'));  // of a run in another folder
  EXPECT_EQ(read_corpus({folder / "t"}, 0.1, folder / "t/out").documents.size(), 2u);
  EXPECT_EQ(read_corpus({folder / "t/other/report.html", folder / "t"}, 0.1).documents.size(), 5u);
}

TEST(Corpus, HasEveryFileOnce) {
  const Folder folder;
  const std::string a = folder.write("t/a.txt", prose(3000));
  folder.write("t/b.txt", prose(1000));
  const uint64_t print = read_corpus({folder / "t"}, 0.1).fingerprint;
  std::filesystem::create_symlink("a.txt", folder / "t/c.txt");
  for (const std::vector<std::string>& paths :
       std::vector<std::vector<std::string>>{{folder / "t"},
                                             {folder / "t", folder / "t"},
                                             {folder / "t", a},
                                             {a, folder / "t/../t/a.txt", folder / "t"}}) {
    const Corpus corpus = read_corpus(paths, 0.1);
    EXPECT_EQ(corpus.documents.size(), 2u);
    EXPECT_EQ(corpus.fingerprint, print);
  }
  const std::string zeros = folder.write("t/zeros", std::string(100, '\0'));
  expect_says(invalid([&] { read_corpus({folder / "t", zeros}, 0.1); }), " is no text");
  folder.write("t/build", prose(500));  // no folder
  EXPECT_EQ(read_corpus({folder / "t"}, 0.1).documents.size(), 3u);
}

TEST(Corpus, FingerprintSeesTextAndSplit) {
  const Folder folder;
  const std::string path = folder.write("a", prose(3000));
  const uint64_t print = read_corpus({path}, 0.1).fingerprint;
  EXPECT_EQ(read_corpus({path}, 0.1).fingerprint, print);
  EXPECT_NE(read_corpus({path}, 0.2).fingerprint, print);
  std::string other = prose(3000);
  other[1500] ^= 1;
  folder.write("a", other);
  EXPECT_NE(read_corpus({path}, 0.1).fingerprint, print);
}

TEST(Corpus, SaysWhatIsWrong) {
  const Folder folder;
  const auto error = [&](const std::string& path) {
    return invalid([&] { read_corpus({path}, 0.1); });
  };
  expect_says(error(folder / "none"), "does not exist, must be a text file or a folder");
  expect_says(error(folder.write("empty", "")), "is no text: it is empty");
  expect_says(error(folder.write("zero", prose(3000) + '\0')), "is no text: byte 3000 is zero");
  std::string junk;
  for (uint64_t i = 0; i < 5000; ++i) junk += static_cast<char>(random_word({1, 1, i}) % 255 + 1);
  expect_says(error(folder.write("junk", junk)), "bytes are control characters or broken UTF-8");
  expect_says(error(folder.write("short", "hello")), "text has 5 bytes, must be at least 2048");
  expect_says(error(folder.path().string()), "text has 5 bytes");  // the rest was skipped
  expect_says(error("/dev/null"), "/dev/null is no regular file");
  expect_says(error("/proc/self/mem"), "cannot be read: Input/output error");
  for (int i = 0; i < 300; ++i) folder.write("many/" + std::to_string(i), prose(9));
  expect_says(error(folder / "many"), "held-out text has 0 bytes, must be at least 2");
}

TEST(Corpus, TakesLatin1) {
  const Folder folder;
  EXPECT_EQ(read_corpus({folder.write("a", prose(3000) + "caf\xE9")}, 0.1).documents.size(), 1u);
}

TEST(Bigram, IsTheEntropyOfAByteGivenTheOneBefore) {
  const Folder folder;
  // Held out: "abacabac...": after a comes b or c with equal chance, after b and c always a.
  std::string words;
  for (int i = 0; i < 1000; ++i) words += "abac";
  const Corpus corpus = read_corpus({folder.write("a", words)}, 0.1);
  EXPECT_EQ(corpus.held.count(), 400);
  EXPECT_NEAR(bigram_entropy(corpus), 0.5, 1e-12);
}

TEST(ReplaceFile, LeavesTheOldFileWhereTheDiskIsFull) {
  const Folder folder;
  const std::string path = folder.write("x", "old");
  std::filesystem::create_symlink("/dev/full", path + ".partial");
  expect_says(invalid([&] { replace_file(path, std::string(1 << 20, 'n')); }),
              "cannot be written: No space left on device; free space there or choose another "
              "folder with --out (the old file is untouched)");
  EXPECT_EQ(content(path), "old");
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));
  replace_file(path, "new");
  EXPECT_EQ(content(path), "new");
}

TEST(ReplaceFile, LeavesTheOldFileWhereAFileMayNotGrow) {
  const Folder folder;
  const std::string path = folder.write("x", "old");
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small{4096, limit.rlim_max};
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string what = invalid([&] { replace_file(path, std::string(1 << 20, 'n')); });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, before);
  expect_says(what, "cannot be written: File too large");
  EXPECT_EQ(content(path), "old");
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));
}

TEST(ReplaceFile, SaysThatTheFolderIsMissing) {
  expect_says(invalid([] { replace_file("/proc/none/x", "new"); }),
              "cannot be written: No such file");
}

TEST(ReadFile, SaysThatItIsTooLarge) {
  const Folder folder;
  const std::string path = folder.write("x", "12345");
  expect_says(invalid([&] { read_file(path, 4); }), "has 5 bytes, must be at most 4");
}

TEST(PrepareFolder, SaysWhatIsWrong) {
  const Folder folder;
  const std::string file = folder.write("file", "x");
  expect_says(invalid([&] { prepare_folder(file, 1); }), "cannot be made");
  expect_says(invalid([&] { prepare_folder(file + "/sub", 1); }), "cannot be made");
  expect_says(invalid([&] { prepare_folder(folder / "new", int64_t{1} << 62); }),
              "MB free, must be");
  prepare_folder(folder / "new/deep", 1);
  std::filesystem::permissions(
      folder / "new/deep", std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const auto unprivileged = [&] {  // root may write everywhere
    if (::geteuid() == 0 && ::setuid(65534) != 0) return;
    errno = ENOTTY;
    std::cerr << invalid([&] { prepare_folder(folder / "new/deep", 1); });
    std::exit(0);
  };
  EXPECT_EXIT(unprivileged(), testing::ExitedWithCode(0), "cannot be written: Permission denied");
  EXPECT_TRUE(std::filesystem::is_directory(folder / "new/deep"));
}

TEST(Checkpoint, ComesBackWithEqualBits) {
  const Folder folder;
  const RunState want = some_state();
  save_checkpoint(want, folder / "x.safetensors");
  const RunState got = load_checkpoint(folder / "x.safetensors");
  EXPECT_EQ(bytes_of(got), bytes_of(want));
  EXPECT_EQ(content(folder / "x.safetensors"), bytes_of(want));
  EXPECT_EQ(got.paths, want.paths);
  EXPECT_EQ(got.recipes, want.recipes);
  EXPECT_EQ(got.fingerprint, want.fingerprint);
  EXPECT_EQ(got.step, 4);
  EXPECT_FALSE(got.finished());
}

TEST(Checkpoint, SeesEveryTruncationAndWhatIsAppended) {
  const std::string whole = bytes_of(some_state());
  const size_t header = header_bytes(whole);
  for (size_t length = 0; length < whole.size(); length += length < header ? 1 : length / 16) {
    expect_says(load_error(whole.substr(0, length)), "train: checkpoint x.safetensors: ");
  }
  expect_says(load_error(whole.substr(0, whole.size() - 1)), "x.safetensors: tensor ");
  for (const size_t more : {size_t{1}, size_t{8}, header, whole.size()}) {
    expect_says(load_error(whole + whole.substr(0, more)),
                text(more, " bytes at the end belong to no tensor"));
  }
}

/// That a file with one bit flipped is refused, or is the state that `want` is the file of.
void expect_no_harm(const std::string& whole, size_t bit, const std::string& want) {
  std::string flipped = whole;
  flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
  try {
    const RunState state =
        from_safetensors(parse_safetensors({flipped.begin(), flipped.end()}, "x"), "x");
    EXPECT_EQ(bytes_of(state), want) << "bit " << bit << " is another state";
  } catch (const InvalidArgument&) {
  }
}

TEST(Checkpoint, SeesEveryFlippedBit) {
  const std::string whole = bytes_of(some_state());
  const size_t header = header_bytes(whole);
  for (size_t bit = 0; bit < 8 * header; bit += CADRE_FLIP_EVERY) expect_no_harm(whole, bit, whole);
  const size_t others = 8 * (whole.size() - header);
  for (uint64_t i = 0; i < 2000; i += CADRE_FLIP_EVERY) {
    expect_no_harm(whole, 8 * header + random_word({1, 2, i}) % others, whole);
  }
  std::string flipped = whole;
  flipped[header + 5] ^= 4;
  expect_says(load_error(flipped), "its content does not match its checksum; the file is damaged");
}

/// As it was written when the checksum left out the metadata.
SafeTensors of_first_kind(const RunState& state) {
  SafeTensors file = to_safetensors(state);
  file.metadata["kind"] = "cadre train 1";
  file.metadata["checksum"] = text(std::hex, tensors_checksum(file));
  return file;
}

TEST(Checkpoint, ReadsThoseOfTheFirstKind) {
  const RunState want = some_state();
  SafeTensors file = of_first_kind(want);
  EXPECT_EQ(bytes_of(from_safetensors(file, "x")), bytes_of(want));
  file.metadata["checksum"] = text(std::hex, checksum(file));
  EXPECT_THROW(from_safetensors(file, "x"), InvalidArgument);
}

TEST(Checkpoint, OfTheFirstKindSeesFlippedBitsBehindItsMetadata) {
  const RunState state = some_state();
  const std::string whole = bytes_of(of_first_kind(state)), want = bytes_of(state);
  for (size_t bit = 0; bit < 64; ++bit) expect_no_harm(whole, bit, want);
  for (size_t bit = 8 * whole.find('}'); bit < 8 * header_bytes(whole); bit += 13)
    expect_no_harm(whole, bit, want);
}

TEST(Checkpoint, SaysWhatIsWrongWithAHeader) {
  const auto error = [](const std::string& header, size_t data = 8) {
    return load_error(with_header(header, data));
  };
  expect_says(load_error("abc"), "file has 3 bytes, fewer than 8; it is cut short");
  expect_says(load_error("<html><body>what is this</body></html>"), "header has");
  expect_says(error("[]"), "header is no JSON object");
  expect_says(error("{"), "header is no JSON object");
  expect_says(error(R"({"a":1})"), "tensor a lacks a dtype");
  expect_says(error(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})"), "lacks a dtype");
  expect_says(error(R"({"a":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}})"),
              "unknown dtype Q7");
  expect_says(error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}})"), "lies at bytes");
  expect_says(error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})"), "lies at bytes");
  expect_says(error(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})"), "its shape");
  expect_says(
      error(R"({"a":{"dtype":"F32","shape":[4611686018427387903,4],"data_offsets":[0,8]}})"),
      "its shape");
  const std::string part = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  expect_says(error("{\"a\":" + part + ",\"b\":" + part + "}"), "overlap or leave a gap at byte 0");
  expect_says(error("{\"a\":" + part + ",\"a\":" + part + "}"), "name a stands twice");
  expect_says(error("{\"\":" + part + ",\"\":" + part + "}"), "name  stands twice");
  expect_says(error(R"({"__metadata__":{"b":"1","b":"2"}})", 0), "name b stands twice");
  expect_says(error(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})"),
              "name dtype stands twice");
  expect_says(error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"c":1}})"),
              "or has more");
  expect_says(error(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"), "gap at byte 0");
  expect_says(error(R"({"__metadata__":{"a":1}})", 0), "metadata a is no string");
  expect_says(error(R"({"__metadata__":[]})", 0), "__metadata__ is no JSON object");
}

TEST(Checkpoint, SaysThatAFileIsForeign) {
  expect_says(
      load_error(with_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8)),
      "was not written by this version of cadre train");
  const auto changed = [](auto change) {
    const RunState state = some_state();
    SafeTensors file = to_safetensors(state);
    change(file);
    file.metadata["checksum"] = text(std::hex, checksum(file));
    return invalid([&] { from_safetensors(file, "x.safetensors"); });
  };
  expect_says(changed([](SafeTensors& f) { f.metadata["step"] = "11"; }), "step is 11, must be");
  expect_says(changed([](SafeTensors& f) { f.metadata["step"] = "x"; }), "must be a number");
  expect_says(changed([](SafeTensors& f) { f.metadata["step"] = "3"; }),
              "tensor history.loss is F64[4], must be F64[3]");
  expect_says(changed([](SafeTensors& f) { f.metadata.erase("paths"); }), "paths is missing");
  expect_says(changed([](SafeTensors& f) { f.metadata["paths"] = "[1]"; }), "is no list of names");
  expect_says(changed([](SafeTensors& f) { f.metadata["recipe"] = "f32"; }), "is none of its run");
  expect_says(changed([](SafeTensors& f) { f.metadata["settings"] = "steps=1"; }), "is missing");
  expect_says(changed([](SafeTensors& f) { f.metadata["recipes"] = R"([[255],"fp32"])"; }),
              "recipes is no list of names");
  expect_says(changed([](SafeTensors& f) { f.metadata["note"] = "mine"; }), "note is unknown");
  expect_says(changed([](SafeTensors& f) { f.metadata["text"] = "00ab"; }),
              "text is '00ab', must be 'ab' as cadre train writes it");
  expect_says(changed([](SafeTensors& f) { f.metadata["paths"] += ' '; }), "must be '[");
  expect_says(changed([](SafeTensors& f) { f.metadata["settings"] += " steps=9"; }), "must be '");
  expect_says(changed([](SafeTensors& f) { f.tensors.erase("model.norm"); }),
              "tensor model.norm is missing");
  expect_says(changed([](SafeTensors& f) { f.tensors["surplus"] = f.tensors["model.norm"]; }),
              "has 27 tensors, must have 26");
  expect_says(changed([](SafeTensors& f) { f.tensors["model.norm"].dtype = "I32"; }),
              "tensor model.norm is I32[16], must be F32[16]");
}

TEST(Checkpoint, SurvivesAFullDisk) {
  const Folder folder;
  const auto path = folder / "x.safetensors";
  RunState state = some_state();
  save_checkpoint(state, path);
  const std::string old = content(path);
  state.step = 5;
  state.history.loss.push_back(3.5);
  std::filesystem::create_symlink("/dev/full", path.string() + ".partial");
  expect_says(invalid([&] { save_checkpoint(state, path); }), "No space left on device");
  EXPECT_EQ(content(path), old);
  EXPECT_EQ(load_checkpoint(path).step, 4);
}

TEST(Parameters, AreAFunctionOfTheSeed) {
  const Settings s = some_state().settings;
  Settings other = s;
  other.seed = 2;
  const auto a = initial_parameters(s), b = initial_parameters(s), c = initial_parameters(other);
  EXPECT_EQ(a[kEmbedding].value, b[kEmbedding].value);
  EXPECT_NE(a[kEmbedding].value, c[kEmbedding].value);
  EXPECT_NE(a[block_parameter(0, kW1)].value[0], a[block_parameter(0, kW2)].value[0]);
  double squares = 0;
  const auto& w1 = a[block_parameter(0, kW1)].value;
  for (const float w : w1) squares += double(w) * double(w);
  const double mean = squares / double(w1.size());  // of 1024 draws: deviation sqrt(2 / 1024)
  EXPECT_NEAR(mean * 16, 1, 5 * std::sqrt(2.0 / double(w1.size())));
}
