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

constexpr int kMostRanks = 3, kMostBlocks = 2;

enum class Fault {
  kNone,
  kNoRelease,
  kListsAreLate,        // the release is of the own window alone
  kListsAreNotAwaited,  // though they come without a release
  kEarlyReuse,
  kOldEpoch,
  kNoAwait,
  kReadBeforeReady,
  kFirstToReadSaysSo,  // of two blocks
};

/// Who shares the work of a rank.
struct Sharing {
  int blocks = 1;
  bool by_peers = false;           ///< each peer is gone past by itself
  bool lists_have_epochs = false;  ///< and come without a release
};

/// A block's way through an exchange: of one walk past all peers, or one past each.
struct Way {
  std::array<Exchange, kMostRanks> walks{Exchange({0, 1}, {}), Exchange({0, 1}, {}),
                                         Exchange({0, 1}, {})};
  bool is_over = false;
};

/// Everything that the ranks share or remember.
struct World {
  struct Rank {
    uint64_t ready[kMostRanks] = {};
    uint32_t read[kMostRanks] = {};
    uint32_t epoch = 0;
    uint32_t written = 0;             ///< to its window, as the block that leads sees it
    uint32_t data = 0;                ///< the same, as everybody else does
    uint32_t sent[kMostRanks] = {};   ///< to the lists of each rank, as the one that leads sees it
    uint32_t lists[kMostRanks] = {};  ///< at home: of each rank, as everybody else sees them
    int done = 0;                     ///< exchanges
    int blocks_over = 0;              ///< of this one
    std::array<Way, kMostBlocks> ways;  ///< the first leads
  };
  std::array<Rank, kMostRanks> of;
};

struct Search {
  int ranks;
  Fault fault = Fault::kNone;
  Sharing sharing{};
  uint32_t first_epoch = 0;
  std::vector<uint32_t> calls = {1, 2, 1};  ///< of every rank, but for the last one
  std::vector<uint32_t> last_rank_calls = calls;
  std::string failure{};
  size_t states = 0;
  bool ended = false;  ///< some way leads to the end

  int exchanges() const { return int(calls.size()); }
  int walks() const { return sharing.by_peers ? ranks : 1; }
  uint32_t call(int rank, int exchange) const {
    return (rank == ranks - 1 ? last_rank_calls : calls)[size_t(exchange)];
  }
  std::string key_of(const World&) const;
  void begin(World& world, int rank) const;
  bool advance(World& world, int rank, int block, int walk);
  bool advance_together(World& world, int rank, int block);
  void visit_moves(const World& world, const auto& visit);
  void explore();
};

/// The memory of one rank in a world, as a block of it sees it, with the search's fault in it.
struct Memory {
  World& world;
  Search& search;
  int rank, block = 0;

  World::Rank& home() const { return world.of[size_t(rank)]; }
  uint32_t load_read(int peer) const {
    return search.fault == Fault::kEarlyReuse ? home().epoch : home().read[peer];
  }
  uint64_t load_ready(int peer) const {
    const uint64_t seen = home().ready[peer];
    if (search.fault == Fault::kNoAwait) return ReadyTag{home().epoch + 1, uint32_t(seen)}.word();
    if (search.fault == Fault::kOldEpoch)  // takes the flag of the exchange before for this one's
      return seen + (uint64_t(1) << 32);
    return seen;
  }
  void store_ready(int peer, uint64_t tag) const {
    for (int p = 0; p < search.ranks && search.fault != Fault::kNoRelease; ++p) {
      show_window();
      if (search.fault != Fault::kListsAreLate && !search.sharing.lists_have_epochs) show_list(p);
    }
    world.of[size_t(peer)].ready[rank] = tag;
  }
  void store_read(int peer, uint32_t epoch) const {
    world.of[size_t(peer)].read[rank] = epoch + (search.fault == Fault::kReadBeforeReady ? 1 : 0);
  }
  void write() const {
    home().written = home().epoch + 1;
    for (int p = 0; p < search.ranks; ++p) home().sent[p] = home().epoch + 1;
  }
  /// What was written becomes visible.
  void show_window() const { home().data = home().written; }
  void show_list(int p) const { world.of[size_t(p)].lists[rank] = home().sent[p]; }
  bool awaits_lists() const {
    bool any = false;
    for (int p = 0; p < search.ranks; ++p) any |= home().lists[p] != home().epoch + 1;
    return any && search.sharing.lists_have_epochs && search.fault != Fault::kListsAreNotAwaited;
  }
  bool hides_window() const { return home().data != home().written; }
  bool hides_list(int p) const { return world.of[size_t(p)].lists[rank] != home().sent[p]; }

  void read() const {
    for (int p = 0; p < search.ranks; ++p) {
      const World::Rank& peer = world.of[size_t(p)];
      const bool is_own = p == rank && block == 0;
      expect(is_own ? peer.written : peer.data, p, "the window");
      expect(is_own ? home().sent[rank] : home().lists[p], p, "the list");
    }
  }
  void expect(uint32_t seen, int p, const char* what) const {
    if (seen != home().epoch + 1)
      search.failure = "rank " + std::to_string(rank) + " reads " + std::to_string(seen) + " in " +
                       what + " of rank " + std::to_string(p) + " in " +
                       std::to_string(home().epoch + 1);
  }
};

/// A world as bytes.
std::string Search::key_of(const World& world) const {
  std::string key;
  const auto add = [&key](auto value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  for (int p = 0; p < ranks; ++p) {
    const World::Rank& r = world.of[size_t(p)];
    for (int q = 0; q < ranks; ++q)
      add(r.ready[q]), add(r.read[q]), add(r.sent[q]), add(r.lists[q]);
    add(r.epoch), add(r.data), add(r.written), add(uint8_t(r.done)), add(uint8_t(r.blocks_over));
    for (int b = 0; b < sharing.blocks; ++b) {
      const Way& way = r.ways[size_t(b)];
      add(way.is_over);
      for (int w = 0; w < walks(); ++w)
        add(way.walks[size_t(w)].step()), add(uint8_t(way.walks[size_t(w)].peer()));
    }
  }
  return key;
}

void Search::begin(World& world, int rank) const {
  World::Rank& r = world.of[size_t(rank)];
  r.blocks_over = 0;
  if (r.done == exchanges()) return;
  const ReadyTag tag{r.epoch + 1, call(rank, r.done)};
  for (int b = 0; b < sharing.blocks; ++b) {
    Way& way = r.ways[size_t(b)];
    way.is_over = false;
    for (int w = 0; w < walks(); ++w)
      way.walks[size_t(w)] =
          Exchange(sharing.by_peers ? Exchange::Peers{w, 1} : Exchange::Peers{0, ranks}, tag,
                   b == 0 ? Exchange::Step::kAwaitReaders : Exchange::Step::kAwaitReady);
  }
}

/// A step of one walk; those that all walks of a block come to together are advance_together's.
bool Search::advance(World& world, int rank, int block, int walk) {
  Way& way = world.of[size_t(rank)].ways[size_t(block)];
  Exchange& at = way.walks[size_t(walk)];
  const bool is_for_all = at.step() == Exchange::Step::kWrite || at.step() == Exchange::Step::kRead;
  return !way.is_over && !is_for_all && at.advance(Memory{world, *this, rank, block});
}

/// Writes, reads, or ends an exchange, once all walks of the block have come there.
bool Search::advance_together(World& world, int rank, int block) {
  using Step = Exchange::Step;
  World::Rank& r = world.of[size_t(rank)];
  Way& way = r.ways[size_t(block)];
  const Step step = way.walks[0].step();
  for (int w = 0; w < walks(); ++w)
    if (way.is_over || way.walks[size_t(w)].step() != step) return false;
  if (step == Step::kDone) {
    way.is_over = true;
    ++r.done, ++r.epoch;
    begin(world, rank);
    return true;
  }
  if (step != Step::kWrite && step != Step::kRead) return false;
  if (step == Step::kRead && Memory{world, *this, rank, block}.awaits_lists()) return false;
  for (int w = 0; w < walks(); ++w) way.walks[size_t(w)].advance(Memory{world, *this, rank, block});
  if (step != Step::kRead) return true;
  ++r.blocks_over;
  way.is_over = r.blocks_over != (fault == Fault::kFirstToReadSaysSo ? 1 : sharing.blocks);
  return true;
}

/// Calls visit(world) with every world that one step leads to.
void Search::visit_moves(const World& world, const auto& visit) {
  const auto visit_if = [&](auto&& move) {
    World next = world;
    if (move(next)) visit(next);
  };
  for (int p = 0; p < ranks; ++p) {
    const bool is_done = world.of[size_t(p)].done == exchanges();
    for (int b = 0; b < sharing.blocks && !is_done; ++b) {
      for (int w = 0; w < walks(); ++w)
        visit_if([&](World& next) { return advance(next, p, b, w); });
      visit_if([&](World& next) { return advance_together(next, p, b); });
    }
    // What was written becomes visible by itself, at any later time.
    visit_if([&](World& next) {
      const Memory memory{next, *this, p};
      return memory.hides_window() && (memory.show_window(), true);
    });
    for (int q = 0; q < ranks; ++q)
      visit_if([&](World& next) {
        const Memory memory{next, *this, p};
        return memory.hides_list(q) && (memory.show_list(q), true);
      });
  }
}

void Search::explore() {
  World start{};
  for (int p = 0; p < ranks; ++p) {
    World::Rank& r = start.of[size_t(p)];
    r.epoch = r.data = r.written = first_epoch;
    for (int q = 0; q < ranks; ++q) {
      r.read[q] = r.sent[q] = r.lists[q] = first_epoch;
      r.ready[q] = ReadyTag{first_epoch, 0}.word();
    }
    begin(start, p);
  }
  std::unordered_set<std::string> seen = {key_of(start)};
  std::vector<World> open = {start};
  while (!open.empty() && failure.empty()) {
    const World world = open.back();
    open.pop_back();
    bool moved = false;
    visit_moves(world, [&](const World& next) {
      moved = true;
      if (seen.insert(key_of(next)).second) open.push_back(next);
    });
    bool all_done = true, out_of_step = false;
    for (int p = 0; p < ranks; ++p) {
      const World::Rank& r = world.of[size_t(p)];
      all_done = all_done && r.done == exchanges();
      for (int b = 0; b < sharing.blocks; ++b)
        for (int w = 0; w < walks(); ++w)
          out_of_step |= r.ways[size_t(b)].walks[size_t(w)].step() == Exchange::Step::kOutOfStep;
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

// As the blocks of a GPU go through it.
TEST(Exchange, MayBeShared) {
  for (const bool by_peers : {false, true})
    for (const int blocks : {1, 2})
      for (const int ranks : {1, 2, 3}) {
        if (ranks == 3 && by_peers && blocks == 2) continue;  // millions of states
        const Search search =
            explored({.ranks = ranks, .sharing = {.blocks = blocks, .by_peers = by_peers}});
        EXPECT_EQ(search.failure, "") << search.states << " states";
        EXPECT_TRUE(search.ended);
      }
}

TEST(Exchange, MayHaveListsWithEpochs) {
  for (const int blocks : {1, 2})
    for (const int ranks : {1, 2, 3}) {
      if (ranks == 3 && blocks == 2) continue;
      Search wanted{.ranks = ranks, .sharing = {.blocks = blocks, .lists_have_epochs = true}};
      if (ranks == 3) wanted.calls = wanted.last_rank_calls = {1, 2};
      const Search search = explored(wanted);
      EXPECT_EQ(search.failure, "") << search.states << " states";
      EXPECT_TRUE(search.ended);
    }
}

TEST(Exchange, WhoseListsHaveEpochsWithAFaultIsFoundWrong) {
  for (const Fault fault : {Fault::kNoRelease, Fault::kListsAreNotAwaited, Fault::kEarlyReuse,
                            Fault::kReadBeforeReady, Fault::kFirstToReadSaysSo})
    EXPECT_NE(
        explored({.ranks = 2, .fault = fault, .sharing = {.blocks = 2, .lists_have_epochs = true}})
            .failure,
        "")
        << int(fault);
}

TEST(Exchange, WithAFaultIsFoundWrong) {
  for (const Fault fault : {Fault::kNoRelease, Fault::kListsAreLate, Fault::kEarlyReuse,
                            Fault::kOldEpoch, Fault::kNoAwait, Fault::kReadBeforeReady})
    EXPECT_NE(explored({.ranks = 2, .fault = fault}).failure, "") << int(fault);
}

TEST(Exchange, ThatIsSharedWithAFaultIsFoundWrong) {
  for (const Fault fault :
       {Fault::kNoRelease, Fault::kListsAreLate, Fault::kEarlyReuse, Fault::kOldEpoch,
        Fault::kNoAwait, Fault::kReadBeforeReady, Fault::kFirstToReadSaysSo})
    EXPECT_NE(
        explored({.ranks = 2, .fault = fault, .sharing = {.blocks = 2, .by_peers = true}}).failure,
        "")
        << int(fault);
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
