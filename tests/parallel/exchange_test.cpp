// All interleavings of the exchange between two and three ranks, with writes that become visible as
// late as they may, and of exchanges with a planted fault each, which must be found.
#include "schedule/exchange.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <unordered_set>
#include <vector>

using namespace cadre::schedule;

namespace {

constexpr int kMostRanks = 3, kExchanges = 3;

enum class Fault { kNone, kNoRelease, kEarlyReuse, kOldEpoch, kNoAwait, kReadBeforeReady };

/// Everything that the ranks share or remember.
struct World {
  struct Rank {
    uint64_t ready[kMostRanks] = {};
    uint32_t read[kMostRanks] = {};
    uint32_t epoch = 0;
    uint32_t data = 0;     ///< of the window, as peers see it
    uint32_t written = 0;  ///< as the rank itself sees it
    int done = 0;          ///< exchanges
    Exchange at{0, 1, 0};
  };
  std::array<Rank, kMostRanks> of;
};

/// A world as bytes.
std::string key_of(const World& world, int ranks) {
  std::string key;
  const auto add = [&key](auto value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  for (int p = 0; p < ranks; ++p) {
    const World::Rank& r = world.of[size_t(p)];
    for (int q = 0; q < ranks; ++q) add(r.ready[q]), add(r.read[q]);
    add(r.epoch), add(r.data), add(r.written), add(r.done), add(r.at.step()), add(r.at.peer());
  }
  return key;
}

struct Search {
  int ranks;
  Fault fault = Fault::kNone;
  uint32_t first_epoch = 0;
  std::vector<uint32_t> calls = {1, 2, 1};  ///< of every rank, but for the last one
  std::vector<uint32_t> last_rank_calls = calls;
  std::string failure{};
  size_t states = 0;
  bool ended = false;  ///< some way leads to the end

  uint32_t call(int rank, int exchange) const {
    return (rank == ranks - 1 ? last_rank_calls : calls)[size_t(exchange)];
  }
  Exchange begin(int rank, int exchange) const { return {rank, ranks, call(rank, exchange)}; }
  void explore();
  bool advance(World& world, int rank);
};

/// The memory of one rank in a world, with the search's fault in it.
struct Memory {
  World& world;
  Search& search;
  int rank;

  World::Rank& home() const { return world.of[size_t(rank)]; }
  uint32_t epoch() const { return home().epoch; }
  void set_epoch(uint32_t epoch) const { home().epoch = epoch; }
  uint32_t load_read(int peer) const {
    return search.fault == Fault::kEarlyReuse ? home().epoch : home().read[peer];
  }
  uint64_t load_ready(int peer) const {
    const uint64_t seen = home().ready[peer];
    if (search.fault == Fault::kNoAwait) return ReadyTag{home().epoch, uint32_t(seen)}.word();
    if (search.fault == Fault::kOldEpoch)  // takes the flag of the exchange before for this one's
      return seen + (uint64_t(1) << 32);
    return seen;
  }
  void store_ready(int peer, uint64_t tag) const {
    if (search.fault != Fault::kNoRelease) flush();
    world.of[size_t(peer)].ready[rank] = tag;
  }
  void store_read(int peer, uint32_t epoch) const {
    world.of[size_t(peer)].read[rank] = epoch + (search.fault == Fault::kReadBeforeReady ? 1 : 0);
  }
  void write() const { home().written = home().epoch + 1; }
  void flush() const { home().data = home().written; }
  void read() const {
    for (int p = 0; p < search.ranks; ++p) {
      const World::Rank& peer = world.of[size_t(p)];
      const uint32_t seen = p == rank ? peer.written : peer.data;
      if (seen != home().epoch)
        search.failure = "rank " + std::to_string(rank) + " reads " + std::to_string(seen) +
                         " of rank " + std::to_string(p) + " in " + std::to_string(home().epoch);
    }
  }
};

bool Search::advance(World& world, int rank) {
  World::Rank& r = world.of[size_t(rank)];
  if (r.done == kExchanges || !r.at.advance(Memory{world, *this, rank})) return false;
  if (r.at.step() == Exchange::Step::kDone && ++r.done < kExchanges) r.at = begin(rank, r.done);
  return true;
}

void Search::explore() {
  World start{};
  for (int p = 0; p < ranks; ++p) {
    World::Rank& r = start.of[size_t(p)];
    r.at = begin(p, 0);
    r.epoch = r.data = r.written = first_epoch;
    for (int q = 0; q < ranks; ++q)
      r.read[q] = first_epoch, r.ready[q] = ReadyTag{first_epoch, 0}.word();
  }
  const auto key = [&](const World& w) { return key_of(w, ranks); };
  std::unordered_set<std::string> seen = {key(start)};
  std::vector<World> open = {start};
  while (!open.empty() && failure.empty()) {
    const World world = open.back();
    open.pop_back();
    bool moved = false;
    const auto visit = [&](const World& next) {
      moved = true;
      if (seen.insert(key(next)).second) open.push_back(next);
    };
    for (int p = 0; p < ranks; ++p) {
      World next = world;
      if (advance(next, p)) visit(next);
      if (world.of[size_t(p)].written == world.of[size_t(p)].data) continue;
      next = world;  // what was written becomes visible by itself
      Memory{next, *this, p}.flush();
      visit(next);
    }
    bool all_done = true, out_of_step = false;
    for (int p = 0; p < ranks; ++p) {
      all_done = all_done && world.of[size_t(p)].done == kExchanges;
      out_of_step = out_of_step || world.of[size_t(p)].at.step() == Exchange::Step::kOutOfStep;
    }
    ended = ended || all_done;
    if (!moved && out_of_step) failure = "out of step";
    if (!moved && !all_done && !out_of_step) failure = "all wait";
  }
  states = seen.size();
}

Search explored(Search search) {
  search.explore();
  return search;
}

class Exchanges : public testing::TestWithParam<int> {};

TEST_P(Exchanges, BringEveryRankWhatTheOthersWrote) {
  const Search search = explored({.ranks = GetParam()});
  EXPECT_EQ(search.failure, "") << search.states << " states";
  EXPECT_TRUE(search.ended);

  EXPECT_GT(search.states, GetParam() == 1 ? 10u : 100u);
}

TEST_P(Exchanges, GoOnWhereEpochsWrapAround) {
  const Search search = explored({.ranks = GetParam(), .first_epoch = 0xfffffffeu});
  EXPECT_EQ(search.failure, "") << search.states << " states";
  EXPECT_TRUE(search.ended);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Exchanges, testing::Values(1, 2, 3));

TEST(Exchange, WithAFaultIsFoundWrong) {
  for (const Fault fault : {Fault::kNoRelease, Fault::kEarlyReuse, Fault::kOldEpoch,
                            Fault::kNoAwait, Fault::kReadBeforeReady})
    EXPECT_NE(explored({.ranks = 2, .fault = fault}).failure, "") << int(fault);
}

TEST(Exchange, OutOfStepIsNamedAndDoesNotHang) {
  const Search search = explored({.ranks = 3, .calls = {1, 2, 1}, .last_rank_calls = {1, 3, 1}});
  EXPECT_EQ(search.failure, "out of step");
}

TEST(Readiness, OfFlags) {
  EXPECT_EQ(readiness({4, 1}, {5, 1}), Readiness::kNotYet);
  EXPECT_EQ(readiness({5, 1}, {5, 1}), Readiness::kReady);
  EXPECT_EQ(readiness({5, 2}, {5, 1}), Readiness::kOutOfStep);
  EXPECT_EQ(readiness({6, 2}, {5, 1}), Readiness::kReady);
  EXPECT_EQ(readiness({0, 1}, {0xffffffffu, 1}), Readiness::kReady);
  EXPECT_EQ(readiness({0xffffffffu, 1}, {0, 1}), Readiness::kNotYet);
}

}  // namespace
