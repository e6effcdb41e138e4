#include "bench/mailboxes.h"

#include <algorithm>

#include "cadre/error.h"

namespace cadre::bench {
namespace {

constexpr int kMostTensors = 4;  // of an exchange: rows, probabilities, experts and what ranks say

}  // namespace

Mailboxes::Mailboxes(int ranks, int64_t bytes) : bytes_(bytes) {
  for (int q = 0; q < ranks; ++q)
    boxes_.push_back(
        {memory_.array<int64_t>(kMostTensors * ranks + 1), memory_.array<char>(bytes)});
}

AllToAll Mailboxes::of(Rank& rank) {
  return [this, &rank](std::span<const RankMessage> messages, Stream) {
    put(rank, messages);
    rank.meet();
    take(rank, messages);
    rank.meet();  // nobody's mailbox is filled again while others read it
  };
}

void Mailboxes::put(Rank& rank, std::span<const RankMessage> messages) const {
  const auto [ends, data] = boxes_[size_t(rank.number())];
  ends[0] = 0;
  for (size_t i = 0; i < messages.size(); ++i) ends[i + 1] = ends[i] + messages[i].send_bytes;
  const int64_t all = ends[messages.size()];
  if (all > bytes_)
    throw DeviceError(text("mailbox: messages of rank ", rank.number(), " have ", all,
                           " bytes, must have at most ", bytes_));
  for (size_t i = 0; i < messages.size(); ++i)
    std::copy_n(static_cast<const char*>(messages[i].send), messages[i].send_bytes, data + ends[i]);
}

void Mailboxes::take(Rank& rank, std::span<const RankMessage> messages) const {
  const size_t ranks = boxes_.size();
  for (size_t i = 0; i < messages.size(); ++i) {
    const size_t peer = i % ranks, at = i - peer + size_t(rank.number());
    const auto [ends, data] = boxes_[peer];
    const int64_t sent = ends[at + 1] - ends[at];
    if (sent != messages[i].receive_bytes)
      throw DeviceError(text("mailbox: rank ", peer, " sends ", sent, " bytes, must send ",
                             messages[i].receive_bytes, ", which rank ", rank.number(),
                             " receives"));
    std::copy_n(data + ends[at], sent, static_cast<char*>(messages[i].receive));
  }
}

}  // namespace cadre::bench
