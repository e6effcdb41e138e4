// Gated fprop of rows that Hopper's kernel gathers from tokens: the bits of a copy of them and the
// kernel that reads it, whatever slots and offsets say; what it refuses.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "bench/case.h"
#include "bench/mirror.h"
#include "cadre/error.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;

constexpr std::string_view kName = "sm90_gathered_rows";

class GatheredRows : public testing::Test {
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
GroupedGemmCase make(const Shape& shape) {
  bench::Draw draw;
  draw.counts = shape.counts;
  draw.row_gap = shape.gap;
  GroupedGemmCase c = bench::make_case(
      parse_grouped_gemm_problem(text("grouped_gemm fprop gather=lhs ", shape.words)), draw);
  TensorView& x = c.args.lhs.codes;
  TensorView room = c.buffers->tensor(x.dtype, {x[0] + 1, x[1]});
  std::memcpy(room.data, x.data, size_t(bytes_for(x.dtype, x[0] * x.stride[0])));
  room.shape[0] = x[0];
  x = room;
  return c;
}

int32_t* slots_of(GroupedGemmCase& c) { return const_cast<int32_t*>(c.args.slot_of); }

/// Runs the case on the GPU. Returns all bytes of h and z, those between rows too.
std::vector<uint8_t> outputs_of(GroupedGemmCase& c, std::string_view name) {
  const Device device = cuda_devices()[0];
  const GroupedGemmPlan chosen = plan(c.problem, device, name);
  const auto accelerator = bench::open_accelerator(device);
  const Workspace workspace = c.buffers->workspace(chosen.workspace_bytes);
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

/// Puts slots that are none among the rows of each expert and at its last, beside the last slot of
/// all, and garbage behind all rows.
void spoil_slots(GroupedGemmCase& c) {
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

// One warp's rows of a tile lack some and the other's do not; an expert's only row is none.
TEST_F(GatheredRows, OfSlotsThatAreNoneAreZero) {
  for (const Shape& shape :
       {Shape{"R=450 N=272 K=136 E=6 T=150 top_k=3 act=swiglu prob=yes z=yes bias=yes",
              {0, 201, 1, 0, 203, 0}},
        Shape{"R=450 N=112 K=128 E=4 T=225 top_k=2 act=geglu format=f16 out=f16 prob=yes "
              "layout=interleave1 z=yes discrete_rhs=yes tail=zero",
              {129, 0, 190, 64}},
        Shape{"R=300 N=320 K=64 E=3 T=300 act=clamped_swiglu layout=interleave32 bias=yes z=yes",
              {65, 130, 90}},
        Shape{"R=150 N=80 K=24 E=3 T=75 top_k=2 act=reglu prob=yes", {70, 0, 61}}}) {
    GroupedGemmCase got = make(shape), want = make(shape);
    spoil_slots(got), spoil_slots(want);
    EXPECT_EQ(outputs_of(got, kName) == outputs_of(want, "composed"), true) << shape.words;
  }
}

// NaN lies in the gaps.
TEST_F(GatheredRows, ReadNothingBetweenTokens) {
  const char* words = "R=150 N=112 K=136 E=2 T=75 top_k=2 act=swiglu z=yes prob=yes bias=yes";
  for (const Shape& shape : {Shape{words, {81, 60}, 8}, Shape{words, {81, 60}, 56},
                             Shape{"R=150 N=112 K=64 E=2 T=150 act=reglu", {81, 60}, 72}}) {
    GroupedGemmCase got = make(shape), want = make(shape);
    EXPECT_EQ(got.args.lhs.codes.stride[0], got.problem.k + shape.gap);
    EXPECT_EQ(outputs_of(got, kName) == outputs_of(want, "composed"), true) << shape.words;
  }
}

// Not by permute, which makes no rows at or beyond offsets[E], where experts may have some.
TEST_F(GatheredRows, OfBrokenOffsetsAreThoseOfACopy) {
  const std::vector<int32_t> kBroken[] = {
      {0, 100, 200, 301},      {0, 250, 60, 300},    {-5, 100, 200, 280},
      {0, 1 << 30, 200, 250},  {500, 600, 700, 800}, {0, 100, 200, -1},
      {INT32_MIN, 5, 5, 1000}, {300, 200, 100, 10},  {0, 10, 10, 2}};
  for (const std::vector<int32_t>& offsets : kBroken) {
    const Shape shape{"R=300 N=112 K=72 E=3 T=100 top_k=3 act=swiglu z=yes prob=yes",
                      {100, 100, 100}};
    GroupedGemmCase got = make(shape), want = make(shape);
    bench::permute_first(want);
    for (GroupedGemmCase* c : {&got, &want})
      std::memcpy(const_cast<int32_t*>(c->args.offsets.data), offsets.data(), 4 * sizeof(int32_t));
    EXPECT_EQ(outputs_of(got, kName) == outputs_of(want, "sm90_gated_rows"), true)
        << testing::PrintToString(offsets);
  }
}

#ifdef CADRE_EMULATED
// The emulator reads memory of the host, so it stops where a kernel reads too much.
TEST_F(GatheredRows, ReadNoSlotsOfTheTail) {
  constexpr size_t kPage = 4096;
  auto* memory = static_cast<char*>(
      mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  GroupedGemmCase c = make({"R=300 N=64 K=72 E=3 T=100 top_k=3 act=swiglu", {60, 129, 0}});
  const size_t bytes = size_t(c.offsets.back()) * sizeof(int32_t);
  std::memcpy(memory + kPage - bytes, c.args.slot_of, bytes);
  mprotect(memory + kPage, kPage, PROT_NONE);
  c.args.slot_of = reinterpret_cast<int32_t*>(memory + kPage - bytes);
  outputs_of(c, kName);
  munmap(memory, 2 * kPage);
}
#endif

Device hopper() { return parse_device("sm_90"); }

// Views are looked at before anything is launched.
TEST(GatheredRowsPlan, TakesTokensThatLieIn36Bits) {
  GroupedGemmCase c = make({"R=9 N=64 K=64 E=3 T=2 act=swiglu", {3, 0, 5}});
  const auto message = [&](int64_t step) {
    c.args.lhs.codes.stride[0] = step;
    try {
      check(plan(c.problem, hopper(), kName), c.args);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  constexpr int64_t kMost = int64_t(1) << 34;
  EXPECT_EQ(message(72), "");
  EXPECT_EQ(message(kMost), "");
  EXPECT_EQ(message(kMost + 8),
            text("grouped_gemm: x is bf16[2, 64] strides (17179869192, 1), must lie in 68719476736 "
                 "bytes or fewer; copy it [",
                 c.problem, "]"));
  EXPECT_NE(message(68).find("must begin and step by multiples of 16 bytes"), std::string::npos);
}

TEST(GatheredRowsPlan, SaysWhyTheKernelDoesNotTakeIt) {
  const auto why = [](std::string_view words, const Device& device) {
    const GroupedGemmPlan found = find(parse_grouped_gemm_problem(words), device, kName);
    return found.refusals.empty() ? std::string() : found.refusals.at(0).why;
  };
  const struct {
    const char *words, *why;
  } cases[] = {
      {"N=64 K=16 act=swiglu gather=lhs T=5 top_k=2 bias=yes tail=zero discrete_rhs=yes", ""},
      {"N=64 K=16 act=swiglu", "takes rows that it gathers"},
      {"N=64 K=16 gather=lhs T=5", "takes fprop with a gated activation"},
      {"N=64 K=16 act=relu gather=lhs T=5", "takes fprop with a gated activation"},
      {"N=64 K=16 act=swiglu gather=lhs T=5 alpha=yes", "takes no alpha, beta or bias_scale"},
      {"N=64 K=16 act=swiglu gather=lhs T=5 rhs_major=column", "takes a row-major w"},
      {"N=64 K=16 act=swiglu gather=lhs T=5 out=f32", "writes the type of its operands"},
      {"N=48 K=16 act=swiglu gather=lhs T=5", "takes F that are multiples of 8, from 32 on"},
      {"N=64 K=12 act=swiglu gather=lhs T=5", "takes N and K that are multiples of 8, as TMA does"},
  };
  for (const auto& c : cases)
    EXPECT_EQ(why(text("grouped_gemm fprop format=bf16 R=9 E=3 ", c.words), hopper()), c.why)
        << c.words;
  EXPECT_EQ(why("grouped_gemm wgrad R=9 N=64 K=16 E=3 gather=rhs T=5", hopper()),
            "takes rows that it gathers");
  EXPECT_EQ(
      why(text("grouped_gemm fprop R=9 E=3 format=bf16 ", cases[0].words), parse_device("sm_100")),
      "is for sm_90, not sm_100");
}

}  // namespace
}  // namespace cadre
