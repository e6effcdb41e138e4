// On the CPU the host is the device.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "parallel/host_link.h"

namespace cadre::parallel {
namespace {

class CpuHostLink final : public HostLink {
 public:
  explicit CpuHostLink(int64_t bytes) : memory_(size_t(bytes)) {}

  char* memory() const override { return const_cast<char*>(memory_.data()); }
  void copy(void* to, const void* from, int64_t bytes, Stream) override {
    if (bytes > 0) std::memcpy(to, from, size_t(bytes));
  }
  void mark(Stream) override {}
  void await() override {}
  void await_device() override {}
  void fill(const TensorView& rows, int byte, Stream) override {
    for (int64_t r = 0; r < rows[0]; ++r)
      std::memset(static_cast<char*>(rows.data) + bytes_for(rows.dtype, r * rows.stride[0]), byte,
                  size_t(bytes_for(rows.dtype, rows[1])));
  }
  void make_places(const schedule::RowBlocks& blocks, Stream) override {
    for (int64_t step = 0; step < blocks.steps(); ++step) blocks.make_places(step);
  }
  void judge(const schedule::RowBlocks& blocks, Stream) override {
    int other = blocks.ranks, fullest = 0;
    int64_t most = 0, rows = 0;
    for (int q = 0; q < blocks.ranks; ++q) {
      const schedule::RowBlocks::Rows here = blocks.rows_for(q);
      if (other == blocks.ranks && blocks.difference(q) != schedule::BlockNote::kNothing) other = q;
      if (here.all > rows) fullest = q, rows = here.all;
      most = std::max(most, here.most);
      if (blocks.routed != nullptr) blocks.routed[q] = int32_t(here.all);
    }
    const schedule::BlockNote note = blocks.judge(other, fullest, most);
    *blocks.verdict = note.what != schedule::BlockNote::kNothing;
    if (*blocks.verdict != 0) *blocks.note = note;
  }
  void spoil(const TensorView& rows, const int32_t* verdict, Stream on) override {
    if (*verdict != 0) fill(rows, 0xff, on);
  }
  void find_first_choices(const schedule::LeavingTokens& tokens, Stream) override {
    for (int64_t choice = 0; choice < tokens.choices; ++choice) tokens.find_first(choice);
  }
  void number_tokens(const schedule::LeavingTokens& tokens, Stream) override {
    for (int64_t step = 0; step < tokens.steps(); ++step) tokens.number(step);
  }
  void find_tokens(const schedule::ComingTokens& tokens, Stream) override {
    for (int64_t row = 0; row < tokens.steps(); ++row) tokens.find(row);
  }

 private:
  std::vector<char> memory_;
};

}  // namespace

std::unique_ptr<HostLink> host_link(const Device& device, int64_t bytes) {
  if (device.kind == DeviceKind::kCuda) return cuda::host_link(device, bytes);
  return std::make_unique<CpuHostLink>(bytes);
}

}  // namespace cadre::parallel
