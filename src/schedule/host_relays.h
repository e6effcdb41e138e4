#pragma once
#include <algorithm>

// Ranks that share hosts, and who passes on there what comes from others. Ranks of a host are
// neighbours, and the last host may have fewer. What a rank sends to a host goes to its relay: the
// rank there with the sender's place in its own host, counted round where there are fewer.
namespace cadre::schedule {

struct HostRelays {
  int ranks = 1, each = 1;  ///< P; ranks of a host

  int hosts() const { return (ranks + each - 1) / each; }
  int host_of(int rank) const { return rank / each; }
  /// The first rank of a host; of the one behind the last, P.
  int begin(int host) const { return std::min(host * each, ranks); }
  int end(int host) const { return begin(host + 1); }
  int relay(int from, int host) const {
    return begin(host) + from % each % (end(host) - begin(host));
  }
  /// A relay passes on what comes from one rank after the other: how many come before this one.
  int round_of(int from, int host) const { return senders(relay(from, host), host, from); }
  /// Of the relay that has most of them, which is the first rank of some host.
  int rounds() const {
    const int last = hosts() - 1;
    return std::max(senders(begin(0), 0, ranks), senders(begin(last), last, ranks));
  }

 private:
  /// Of the ranks before that one, those whose relay at a host it is.
  int senders(int relay_there, int host, int before) const {
    int count = 0;
    for (int from = 0; from < before; ++from) count += relay(from, host) == relay_there;
    return count;
  }
};

}  // namespace cadre::schedule
