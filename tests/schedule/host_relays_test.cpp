// Who passes tokens on in a host: every rank has one relay there, itself at home, and each relay
// takes its ranks one after the other.
#include "schedule/host_relays.h"

#include <gtest/gtest.h>

#include <set>

using cadre::schedule::HostRelays;

namespace {

TEST(HostRelays, HaveThePlaceOfTheSender) {
  const HostRelays of{7, 3};  // hosts of 3, 3 and 1 ranks
  EXPECT_EQ(of.hosts(), 3);
  EXPECT_EQ(of.host_of(5), 1);
  EXPECT_EQ(of.begin(2), 6);
  EXPECT_EQ(of.end(2), 7);
  EXPECT_EQ(of.relay(1, 1), 4);
  EXPECT_EQ(of.relay(5, 0), 2);
  EXPECT_EQ(of.relay(6, 0), 0);
  EXPECT_EQ(of.relay(4, 2), 6);
  EXPECT_EQ(of.rounds(), 7);
  EXPECT_EQ((HostRelays{8, 2}).rounds(), 4);
  EXPECT_EQ((HostRelays{5, 5}).rounds(), 1);
}

TEST(HostRelays, TakeEachRankOnce) {
  for (int ranks = 1; ranks <= 13; ++ranks)
    for (int each = 1; each <= ranks; ++each) {
      const HostRelays of{ranks, each};
      int most = 0;
      for (int host = 0; host < of.hosts(); ++host) {
        std::set<std::pair<int, int>> turns;  // of a relay and a round
        for (int from = 0; from < ranks; ++from) {
          const int relay = of.relay(from, host), round = of.round_of(from, host);
          EXPECT_EQ(of.host_of(relay), host);
          EXPECT_TRUE(of.host_of(from) != host || relay == from);
          EXPECT_TRUE(turns.emplace(relay, round).second);
          EXPECT_TRUE(round == 0 || turns.contains({relay, round - 1}));
          most = std::max(most, round + 1);
        }
      }
      EXPECT_EQ(of.rounds(), most) << ranks << " ranks, hosts of " << each;
    }
}

}  // namespace
