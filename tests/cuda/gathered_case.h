#pragma once
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "bench/case.h"
#include "bench/mirror.h"
#include "cadre/error.h"

// What tests of Hopper's kernels that gather rows from tokens have: cases, and their runs.
namespace cadre::test {

using bench::GroupedGemmCase;

class OnHopper : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
    if (cuda_devices()[0].sm != 90) GTEST_SKIP() << "no GPU of Hopper here";
  }
};

/// Words of a problem, rows of its experts, and elements between rows of its tensors.
struct Shape {
  const char* words;
  std::vector<int64_t> counts;
  int64_t gap = 0;
};

/// Behind the last token lies a row of NaN.
inline GroupedGemmCase gathered_case(std::string_view first_words, const Shape& shape) {
  bench::Draw draw;
  draw.counts = shape.counts;
  draw.row_gap = shape.gap;
  GroupedGemmCase c =
      bench::make_case(parse_grouped_gemm_problem(text(first_words, shape.words)), draw);
  TensorView& x = (c.problem.gather == Gather::kLhs ? c.args.lhs : c.args.rhs).codes;
  TensorView room = c.buffers->tensor(x.dtype, {x[0] + 1, x[1]});
  std::memcpy(room.data, x.data, size_t(bytes_for(x.dtype, x[0] * x.stride[0])));
  room.shape[0] = x[0];
  x = room;
  return c;
}

/// Runs the case on the GPU, its workspace full of that byte. Returns all bytes of its outputs,
/// those between rows too.
inline std::vector<uint8_t> outputs_of(GroupedGemmCase& c, std::string_view name,
                                       int workspace_byte = 0xff) {
  const Device device = cuda_devices()[0];
  const GroupedGemmPlan chosen = plan(c.problem, device, name);
  const auto accelerator = bench::open_accelerator(device);
  const Workspace workspace = c.buffers->workspace(chosen.workspace_bytes);
  std::memset(workspace.data, workspace_byte, size_t(workspace.bytes));
  const bench::Mirror mirror(*c.buffers, *accelerator);
  run(chosen, mirror.moved(c.args), mirror.moved(workspace), accelerator->stream());
  mirror.fetch();
  EXPECT_TRUE(c.buffers->canaries_live()) << name;
  std::vector<uint8_t> all;
  for (const bench::Output& o : c.outputs) {
    const auto* first = static_cast<const uint8_t*>(o.view.data);
    all.insert(all.end(), first, first + bytes_for(o.view.dtype, o.view[0] * o.view.stride[0]));
  }
  return all;
}

inline int32_t* slots_of(GroupedGemmCase& c) { return const_cast<int32_t*>(c.args.slot_of); }

/// Puts slots that are none among the rows of each expert and at its last, beside the last slot of
/// all, and garbage behind all rows.
inline void spoil_slots(GroupedGemmCase& c) {
  const auto slots = int32_t(c.problem.tokens * c.problem.top_k);
  const int32_t none[] = {-1, INT32_MIN, slots, INT32_MAX};
  int32_t* slot_of = slots_of(c);
  for (size_t e = 0; e + 1 < c.offsets.size(); ++e) {
    const int32_t first = c.offsets[e], end = c.offsets[e + 1];
    for (int i = 0; i < 4 && first + 20 + i < end; ++i) slot_of[first + 20 + i] = none[i];
    if (first + 24 < end) slot_of[first + 24] = slots - 1;
    if (first < end) slot_of[end - 1] = none[e % 4];
  }
  for (int64_t r = c.offsets.back(); r < c.problem.rows; ++r) slot_of[r] = 0x7abcdef1;
}

/// A copy behind which no memory is. The emulator reads memory of the host, so it stops where a
/// kernel reads too much.
class GuardedCopy {
 public:
  GuardedCopy(const void* from, size_t bytes) : room_((bytes + kPage - 1) / kPage * kPage) {
    start_ = static_cast<char*>(
        mmap(nullptr, room_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    data_ = start_ + room_ - bytes;
    std::memcpy(data_, from, bytes);
    mprotect(start_ + room_, kPage, PROT_NONE);
  }
  GuardedCopy(const GuardedCopy&) = delete;
  GuardedCopy& operator=(const GuardedCopy&) = delete;
  ~GuardedCopy() { munmap(start_, room_ + kPage); }

  void* data() const { return data_; }

 private:
  static constexpr size_t kPage = 4096;

  size_t room_;
  char *start_, *data_;
};

/// Of a case on the emulator, which becomes one whose first row is of the last token.
inline void reads_neither_slots_of_the_tail_nor_behind_the_last_token(GroupedGemmCase c,
                                                                      std::string_view name) {
  slots_of(c)[0] = int32_t(c.problem.tokens * c.problem.top_k - 1);
  TensorView& x = (c.problem.gather == Gather::kLhs ? c.args.lhs : c.args.rhs).codes;
  const GuardedCopy slots(c.args.slot_of, size_t(c.offsets.back()) * sizeof(int32_t));
  const GuardedCopy tokens(x.data, size_t(bytes_for(x.dtype, x[0] * x.stride[0])));
  c.args.slot_of = static_cast<const int32_t*>(slots.data());
  x.data = tokens.data();
  outputs_of(c, name);
}

/// Offsets that are none, of three experts and 300 rows.
inline const std::vector<std::vector<int32_t>>& broken_offsets() {
  static const std::vector<std::vector<int32_t>> all = {
      {0, 100, 200, 301},      {0, 250, 60, 300},    {-5, 100, 200, 280},
      {0, 1 << 30, 200, 250},  {500, 600, 700, 800}, {0, 100, 200, -1},
      {INT32_MIN, 5, 5, 1000}, {300, 200, 100, 10},  {0, 10, 10, 2}};
  return all;
}

/// Expects the bits of a kernel that reads a copy. Not of permute, which makes no rows at or beyond
/// offsets[E], where experts may have some.
inline void has_the_bits_of_a_copy(GroupedGemmCase got, GroupedGemmCase want,
                                   const std::vector<int32_t>& offsets, std::string_view name,
                                   std::string_view name_of_copy) {
  bench::permute_first(want);
  for (GroupedGemmCase* c : {&got, &want})
    std::memcpy(const_cast<int32_t*>(c->args.offsets.data), offsets.data(),
                offsets.size() * sizeof(int32_t));
  EXPECT_EQ(outputs_of(got, name) == outputs_of(want, name_of_copy), true)
      << to_string(got.problem) << testing::PrintToString(offsets);
}

/// Why the kernel of that name refuses the problem; empty where it takes it.
inline std::string refusal(std::string_view words, std::string_view device, std::string_view name) {
  const GroupedGemmPlan found = find(parse_grouped_gemm_problem(words), parse_device(device), name);
  return found.refusals.empty() ? std::string() : found.refusals.at(0).why;
}

/// What the check of a case whose tokens are so many elements apart says.
inline std::string message_of_steps(GroupedGemmCase& c, std::string_view name, int64_t step) {
  (c.problem.gather == Gather::kLhs ? c.args.lhs : c.args.rhs).codes.stride[0] = step;
  try {
    check(plan(c.problem, parse_device("sm_90"), name), c.args);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

}  // namespace cadre::test
