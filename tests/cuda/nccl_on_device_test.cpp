// Ranks that are threads, each with a GPU and a communicator of NCCL, against one rank on the CPU
// that has all tokens and experts: the same bits. And how long exchanges take beside ones by hand.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstdio>
#include <random>

#include "cadre/nccl.h"
#include "cuda/check.h"
#include "tests/cuda/nccl_ranks.h"
#include "tests/parallel/rank_difference.h"

using namespace cadre;
using cuda::check;
using test::Machine;
using Case = test::NcclCase;

namespace {

/// All four exchanges of a rank, what its experts make being made on the host.
void step(Machine& machine, Collective& own, Case& r, const Workspace& memory) {
  const int first = own.rank() * r.p.experts;
  test::MachineCopy on(machine, r);
  const auto run = [&](auto&& exchange) {
    on.upload();
    machine.run(exchange);
    on.fetch();
  };
  run([&](Stream stream) {
    dispatch(own, on.moved(r.collective_dispatch_args()), memory, stream);
  });
  if (r.p.block == 0) r.verdict[0] = int32_t(r.counts.back());
  test::make_y(r, first);
  run([&](Stream stream) {
    const CollectiveCollectArgs args{r.y.view(), r.out.view(), r.collective_map()};
    collect(own, on.moved(args), memory, stream);
    const CollectiveCollectBackwardArgs back{r.dout.view(), r.dy.view(), r.collective_map()};
    collect_backward(own, on.moved(back), memory, stream);
  });
  test::make_drows(r, first);
  run([&](Stream stream) {
    dispatch_backward(own, on.moved(r.collective_dispatch_backward_args()), memory, stream);
  });
  require(on.damage().empty(), on.damage());
}

class NcclOnDevice : public testing::TestWithParam<const char*> {};

TEST_P(NcclOnDevice, HasTheBitsOfOneRankOnTheCpu) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  for (const int ranks : test::groups()) {
    const ExpertParallelProblem p =
        parse_expert_parallel_problem(text(GetParam(), " ranks=", ranks));
    const test::Communicators communicators(ranks);
    std::mt19937 random(5);
    std::vector<std::vector<Case>> routings;
    std::vector<test::RankCase> wanted;
    for (int i = 0; i < 6; ++i) {
      std::vector<test::RankCase> drawn = test::random_ranks(p, random);
      routings.emplace_back(drawn.begin(), drawn.end());
      if (p.overflow == Overflow::kDrop) test::drop(p, drawn);
      wanted.push_back(test::on_one(p, drawn));
    }
    const auto errors = test::on_ranks(ranks, [&](int q) {
      const auto machine = test::open_machine(q);
      Collective own(plan(p, machine->device(), "collective"), q,
                     nccl_all_to_all(communicators.of(q)));
      const test::MachineWorkspace workspace(*machine, own.plan().workspace_bytes);
      for (std::vector<Case>& cases : routings)
        step(*machine, own, cases[size_t(q)], workspace.memory);
    });
    for (int q = 0; q < ranks; ++q) {
      ASSERT_EQ(errors[size_t(q)], "") << ranks << " ranks";
      for (size_t i = 0; i < routings.size(); ++i)
        ASSERT_EQ(difference(p, q, routings[i][size_t(q)], wanted[i]), "") << to_string(p);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Problems, NcclOnDevice,
    testing::Values("expert_parallel T=64 top_k=2 H=64 E=3 R=512",
                    "expert_parallel T=500 top_k=3 H=321 E=5 R=6000 dtype=f32",
                    "expert_parallel T=40 top_k=4 H=4 E=5 R=640 dtype=f16 prob=no",
                    "expert_parallel T=64 top_k=2 H=256 E=4 R=90 overflow=drop",
                    "expert_parallel T=500 top_k=3 H=321 E=5 R=6000 dtype=f32 cross=token",
                    "expert_parallel T=64 top_k=4 H=256 E=4 R=90 overflow=drop cross=token",
                    "expert_parallel T=500 top_k=3 H=321 E=5 block=1500 dtype=f32",
                    "expert_parallel T=64 top_k=2 H=256 E=4 block=128 R=90 overflow=drop"));

/// A stream, and events on it, of the thread's GPU.
struct Clock {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;

  Clock() {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
    for (cudaEvent_t* event : {&begin, &end}) check(cudaEventCreate(event), "make an event");
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  ~Clock() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
  }
  /// Microseconds of one of many calls that follow each other.
  double time_us(std::barrier<>& barrier, auto&& call) const {
    constexpr int kWarm = 5, kCalls = 30;
    for (int i = 0; i < kWarm; ++i) call(Stream{stream});
    check(cudaStreamSynchronize(stream), "wait");
    barrier.arrive_and_wait();
    check(cudaEventRecord(begin, stream), "record");
    for (int i = 0; i < kCalls; ++i) call(Stream{stream});
    check(cudaEventRecord(end, stream), "record");
    check(cudaStreamSynchronize(stream), "wait");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "read the time");
    return 1000.0 * double(ms) / kCalls;
  }
};

/// Memory of the thread's GPU, of zeros.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    check(cudaMalloc(&data_, size_t(bytes)), "take memory");
    check(cudaMemset(data_, 0, size_t(bytes)), "clear memory");
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  template <class Word>
  Word* as() const {
    return static_cast<Word*>(data_);
  }

 private:
  void* data_ = nullptr;
};

/// A rank of a layer of real size, with tokens of zeros and experts that are drawn evenly.
struct Layer {
  ExpertParallelPlan plan;
  ExpertParallelProblem p = plan.problem;
  int64_t choices = p.tokens * p.top_k;
  Memory x{bytes_for(p.dtype, p.tokens*p.hidden)}, rows{bytes_for(p.dtype, p.rows*p.hidden)},
      out{bytes_for(p.dtype, p.tokens*p.hidden)}, prob{choices * 4}, row_prob{p.rows * 4},
      experts{choices * 4}, row_of{choices * 4}, slot_of{choices * 4},
      leaving{(int64_t(p.ranks) * p.experts + 1) * 4}, came_at{p.rows * 4}, row_at{p.rows * 4},
      offsets{(p.experts + 1) * 4}, workspace{plan.workspace_bytes};
  std::vector<int64_t> counts = std::vector<int64_t>(6 * size_t(p.ranks) + 3);

  Layer(const ExpertParallelProblem& problem, const Device& device, int rank)
      : plan(cadre::plan(problem, device, "collective")) {
    std::mt19937 random{unsigned(rank)};
    std::vector<int32_t> chosen(static_cast<size_t>(choices));
    for (int32_t& e : chosen) e = int32_t(random() % unsigned(p.ranks * p.experts));
    check(cudaMemcpy(experts.as<void>(), chosen.data(), size_t(choices) * 4, cudaMemcpyDefault),
          "upload");
  }

  CollectiveMap map() {
    return {row_of.as<int32_t>(),  slot_of.as<int32_t>(), leaving.as<int32_t>(),
            came_at.as<int32_t>(), row_at.as<int32_t>(),  offsets.as<int32_t>(),
            counts.data()};
  }
  Workspace memory() const { return {workspace.as<void>(), plan.workspace_bytes}; }
  TensorView tokens(const Memory& of) const {
    return view(of.as<void>(), p.dtype, {p.tokens, p.hidden});
  }
  TensorView in_order() const { return view(rows.as<void>(), p.dtype, {p.rows, p.hidden}); }
  CollectiveDispatchArgs dispatched() {
    return {.x = tokens(x),
            .experts = experts.as<int32_t>(),
            .prob = prob.as<float>(),
            .rows = in_order(),
            .row_prob = row_prob.as<float>(),
            .map = map()};
  }
};

/// The rows of a dispatch, or of a collect, by hand: one group of NCCL, whose sizes are known. A
/// row crosses for each choice.
class ByHand {
 public:
  ByHand(Layer& layer, ncclComm_t communicator)
      : layer_(layer),
        communicator_(communicator),
        gathered_(layer.p.ranks * count_bytes()),
        came_at_(layer.p.rows * 4) {
    invert_row_at();
    check(cudaMallocHost(&on_host_, size_t(layer.p.ranks * count_bytes())), "take memory");
    const ExpertParallelProblem& p = layer.p;
    PermuteProblem m{.pass = PermutePass::kPermute, .tokens = p.tokens, .top_k = p.top_k};
    m.rows = layer.choices, m.hidden = p.hidden, m.experts = p.ranks * p.experts, m.dtype = p.dtype;
    leave_ = plan(m, layer.plan.device);
    m.tokens = m.rows = p.rows, m.top_k = 1, m.experts = p.experts;
    go_back_ = plan(m, layer.plan.device);
    m.prob = true;
    place_ = plan(m, layer.plan.device);
    PermuteProblem s{.pass = PermutePass::kCombine, .tokens = p.tokens, .top_k = p.top_k};
    s.rows = layer.choices, s.hidden = p.hidden, s.experts = 0, s.dtype = p.dtype;
    sum_ = plan(s, layer.plan.device);
  }
  ByHand(const ByHand&) = delete;
  ByHand& operator=(const ByHand&) = delete;
  ~ByHand() { cudaFreeHost(on_host_); }

  /// The sort of choices, and counts of all ranks, for which the host waits.
  void count(Stream stream) const {
    const CollectiveMap map = layer_.map();
    auto* on = static_cast<cudaStream_t>(stream.handle);
    run(layer_.plan.offsets,
        {.source = layer_.experts.as<void>(),
         .offsets = map.leaving,
         .map = {.row_of = map.row_of, .slot_of = map.slot_of}},
        layer_.memory(), stream);
    check_nccl(ncclAllGather(map.leaving, gathered_.as<void>(), size_t(count_bytes()), ncclInt8,
                             communicator_, on));
    check(cudaMemcpyAsync(on_host_, gathered_.as<void>(), size_t(layer_.p.ranks * count_bytes()),
                          cudaMemcpyDefault, on),
          "copy counts");
    check(cudaStreamSynchronize(on), "wait for counts");
  }
  /// Rows and probabilities alone.
  void travel(bool to_experts, bool with_prob, Stream stream) const {
    const ExpertParallelProblem& p = layer_.p;
    ncclGroupStart();
    for (const int64_t bytes : {bytes_for(p.dtype, p.hidden), int64_t(4)})
      if (bytes != 4 || with_prob) travel_of(bytes, to_experts, stream);
    check_nccl(ncclGroupEnd());
  }
  /// With the permutes before and behind.
  void dispatch(Stream stream) const {
    const CollectiveMap map = layer_.map();
    run(leave_,
        {.tokens = layer_.tokens(layer_.x),
         .rows = left(),
         .map = {.row_of = map.row_of, .slot_of = map.slot_of},
         .offsets = {map.leaving, layer_.p.ranks * layer_.p.experts}},
        {}, stream);
    travel(true, true, stream);
    run(place_,
        {.tokens = came(),
         .rows = layer_.in_order(),
         .map = {.slot_of = came_at_.as<int32_t>()},
         .offsets = {map.offsets, layer_.p.experts},
         .prob = layer_.row_prob.as<float>(),
         .row_prob = layer_.row_prob.as<float>()},
        {}, stream);
  }
  void collect(Stream stream) const {
    const CollectiveMap map = layer_.map();
    run(go_back_,
        {.tokens = layer_.in_order(),
         .rows = came(),
         .map = {.slot_of = map.row_at},
         .offsets = {map.offsets, layer_.p.experts}},
        {}, stream);
    travel(false, false, stream);
    run(sum_, {.tokens = layer_.tokens(layer_.out), .rows = left(), .map = {.row_of = map.row_of}},
        {}, stream);
  }

 private:
  int64_t count_bytes() const {
    return (int64_t(layer_.p.ranks) * layer_.p.experts + 1) * int64_t(sizeof(int32_t));
  }
  static void check_nccl(ncclResult_t code) {
    if (code != ncclSuccess) throw DeviceError(ncclGetErrorString(code));
  }
  /// Which of the rows that come each row here is; the map of ours may say which token.
  void invert_row_at() const {
    int64_t rows = 0;
    for (int q = 0; q < layer_.p.ranks; ++q) rows += layer_.counts[size_t(q)];
    std::vector<int32_t> row_at(static_cast<size_t>(rows)), came_at = row_at;
    const auto bytes = size_t(rows) * sizeof(int32_t);
    check(cudaMemcpy(row_at.data(), layer_.row_at.as<void>(), bytes, cudaMemcpyDefault), "fetch");
    for (size_t i = 0; i < row_at.size(); ++i) came_at[size_t(row_at[i])] = int32_t(i);
    check(cudaMemcpy(came_at_.as<void>(), came_at.data(), bytes, cudaMemcpyDefault), "upload");
  }
  TensorView left() const {
    return view(layer_.workspace.as<void>(), layer_.p.dtype, {layer_.choices, layer_.p.hidden});
  }
  TensorView came() const {
    const TensorView first = left();
    return view(static_cast<char*>(first.data) + bytes_for(first.dtype, elements(first)),
                layer_.p.dtype, {layer_.p.rows, layer_.p.hidden});
  }
  void travel_of(int64_t row_bytes, bool to_experts, Stream stream) const {
    const int ranks = layer_.p.ranks;
    const int64_t *received = layer_.counts.data(), *sent = received + ranks, *first = sent + ranks;
    auto* on = static_cast<cudaStream_t>(stream.handle);
    auto *from = static_cast<char*>(left().data), *to = static_cast<char*>(came().data);
    for (int q = 0; q < ranks; ++q) {
      char* leaves = from + first[q] * row_bytes;
      const auto out = size_t(sent[q] * row_bytes), in = size_t(received[q] * row_bytes);
      ncclSend(to_experts ? leaves : to, to_experts ? out : in, ncclInt8, q, communicator_, on);
      ncclRecv(to_experts ? to : leaves, to_experts ? in : out, ncclInt8, q, communicator_, on);
      to += in;
    }
  }

  Layer& layer_;
  ncclComm_t communicator_;
  Memory gathered_, came_at_;
  void* on_host_ = nullptr;
  PermutePlan leave_, place_, go_back_, sum_;
};

/// Of a rank: dispatch and collect; the same by hand, with counts and where these are known; and
/// rows alone.
struct Times {
  double dispatch = 0, dispatch_counted = 0, dispatch_known = 0, dispatch_rows = 0;
  double collect = 0, collect_known = 0, collect_rows = 0;
};

Times measured(const ExpertParallelProblem& p, int rank, ncclComm_t communicator,
               std::barrier<>& barrier) {
  const auto machine = test::open_machine(rank);
  Layer layer(p, machine->device(), rank);
  Collective own(layer.plan, rank, nccl_all_to_all(communicator));
  const Clock clock;
  const CollectiveCollectArgs back{layer.in_order(), layer.tokens(layer.out), layer.map()};
  Times t;
  t.dispatch = clock.time_us(
      barrier, [&](Stream on) { dispatch(own, layer.dispatched(), layer.memory(), on); });
  t.collect = clock.time_us(barrier, [&](Stream on) { collect(own, back, layer.memory(), on); });
  const ByHand by_hand(layer, communicator);
  t.dispatch_counted = clock.time_us(barrier, [&](Stream on) {
    by_hand.count(on);
    by_hand.dispatch(on);
  });
  t.dispatch_known = clock.time_us(barrier, [&](Stream on) { by_hand.dispatch(on); });
  t.collect_known = clock.time_us(barrier, [&](Stream on) { by_hand.collect(on); });
  t.dispatch_rows = clock.time_us(barrier, [&](Stream on) { by_hand.travel(true, true, on); });
  t.collect_rows = clock.time_us(barrier, [&](Stream on) { by_hand.travel(false, false, on); });
  return t;
}

// Of two ranks, or of as many as there are GPUs.
TEST(NcclOnDevice, IsTimedBesideExchangesByHand) {
  const int ranks = int(cuda_devices().size());
  if (ranks < 2) GTEST_SKIP() << "fewer than 2 GPUs here";
  const test::Communicators communicators(ranks);
  std::printf("us of %d ranks; by hand, with counts, and where counts and maps are known\n", ranks);
  std::printf("%-12s %-9s %10s %10s %10s %10s\n", "layer", "", "collective", "by hand", "known",
              "rows alone");
  for (const auto& [name, words] : {std::pair("mixtral8x7b", "T=8192 top_k=2 H=4096 E=4"),
                                    {"dsv3_ep8", "T=8192 top_k=8 H=7168 E=16"},
                                    {"qwen3_30b", "T=8192 top_k=8 H=2048 E=64"},
                                    {"128 tokens", "T=128 top_k=8 H=7168 E=128"}}) {
    ExpertParallelProblem p =
        parse_expert_parallel_problem(text("expert_parallel ", words, " ranks=", ranks));
    std::barrier barrier(ranks);
    std::vector<Times> times(static_cast<size_t>(ranks));
    const auto errors = test::on_ranks(
        ranks, [&](int q) { times[size_t(q)] = measured(p, q, communicators.of(q), barrier); });
    ASSERT_EQ(errors[0], "");
    const Times& t = times[0];
    std::printf("%-12s dispatch  %10.1f %10.1f %10.1f %10.1f\n", name, t.dispatch,
                t.dispatch_counted, t.dispatch_known, t.dispatch_rows);
    std::printf("%-12s collect   %10.1f %10s %10.1f %10.1f\n", name, t.collect, "", t.collect_known,
                t.collect_rows);
  }
}

}  // namespace
