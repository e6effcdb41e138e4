// How the ranks of a window find each other's memory.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <random>
#include <sstream>
#include <utility>

#include "cadre/error.h"
#include "parallel/rank_device.h"
#include "parallel/shared_memory.h"
#include "parallel/window.h"

namespace cadre {
namespace {

using std::chrono::steady_clock;

/// What a rank tells the others when a window is made, a line each.
struct WindowOffer {
  std::string error, memory, problem, bytes, limit, host, device, address;

  std::string text() const {
    std::string all;
    for (std::string line : {error, memory, problem, bytes, limit, host, device, address}) {
      std::replace(line.begin(), line.end(), '\n', ' ');
      all += line + '\n';
    }
    return all;
  }
  static WindowOffer of(const std::string& text) {
    WindowOffer offer;
    std::istringstream in(text);
    for (std::string* line : {&offer.error, &offer.memory, &offer.problem, &offer.bytes,
                              &offer.limit, &offer.host, &offer.device, &offer.address})
      std::getline(in, *line);
    return offer;
  }
};

/// The first rank's error, thrown by all.
void check_errors(const std::vector<std::string>& errors) {
  for (size_t p = 0; p < errors.size(); ++p)
    if (!errors[p].empty()) throw DeviceError(text("window: rank ", p, " failed: ", errors[p]));
}

std::vector<std::string> gathered(const std::string& own, int ranks, const AllGather& all_gather) {
  std::vector<std::string> all = all_gather(own);
  require(int(all.size()) == ranks, "window: all_gather returned ", all.size(),
          " strings, must be ", ranks, "; one a rank");
  return all;
}

std::vector<WindowOffer> gather_offers(const WindowOffer& own, int ranks,
                                       const AllGather& all_gather) {
  std::vector<WindowOffer> offers;
  std::vector<std::string> errors;
  for (const std::string& words : gathered(own.text(), ranks, all_gather)) {
    offers.push_back(WindowOffer::of(words));
    errors.push_back(offers.back().error);
  }
  check_errors(errors);
  const WindowOffer& first = offers.front();
  for (int p = 1; p < ranks; ++p) {
    const WindowOffer& offer = offers[size_t(p)];
    require(offer.memory == first.memory, "window: the memory of rank ", p, " is ", offer.memory,
            ", must be ", first.memory, " as that of rank 0; all ranks call create, or adopt");
    require(offer.problem == first.problem, "window: the problem of rank ", p, " is ",
            offer.problem, ", must be that of rank 0: ", first.problem);
    require(offer.bytes == first.bytes, "window: rank ", p, " makes ", offer.bytes,
            " bytes, must make those of rank 0: ", first.bytes, "; build all ranks alike");
    require(offer.limit == first.limit, "window: the limit of rank ", p, " is ", offer.limit,
            " ms, must be that of rank 0: ", first.limit);
    if (offer.host != first.host)
      throw Unsupported(text("window: rank ", p, " is on another host than rank 0 (", offer.host,
                             ", ", first.host, "); windows are memory that all ranks can map"));
  }
  return offers;
}

/// How many ranks are where this one is.
int ranks_beside(const WindowOffer& own, const std::vector<WindowOffer>& offers) {
  return int(std::count_if(offers.begin(), offers.end(),
                           [&](const WindowOffer& of) { return of.device == own.device; }));
}

/// What `work` throws, as the other ranks are told; empty if nothing.
template <class Work>
std::string error_of(Work&& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

/// Does `work` on each rank; what one throws all do.
template <class Work>
void on_all_ranks(int ranks, const AllGather& all_gather, Work&& work) {
  check_errors(gathered(error_of(work), ranks, all_gather));
}

/// A rank's window without device and memory yet.
std::unique_ptr<Window::State> new_state(const ExpertParallelPlan& plan, int rank,
                                         const AllGather& all_gather,
                                         const WindowOptions& options) {
  parallel::check_is_of_window("window", plan);
  require(all_gather != nullptr,
          "window: all_gather is empty, must be a function; by it ranks find each other");
  auto state = std::make_unique<Window::State>();
  state->rank = rank;
  state->ranks = plan.problem.ranks;
  state->planned = plan.device;
  state->limit = options.limit;
  return state;
}

void check_options(const Window::State& state) {
  require(state.rank >= 0 && state.rank < state.ranks, "rank is ", state.rank, ", must be 0 to ",
          state.ranks - 1);
  parallel::check_limit(state.limit);
}

/// But for an error, bytes, a host, a device and an address.
WindowOffer offer_of(const Window::State& state, const ExpertParallelPlan& plan,
                     std::string_view memory) {
  WindowOffer offer;
  offer.memory = memory;
  offer.problem = to_string(plan.problem);
  offer.limit = text(state.limit.count());
  return offer;
}

void check_addresses(const std::vector<void*>& addresses, const Window::State& state) {
  require(int(addresses.size()) == state.ranks, "there are ", addresses.size(),
          " addresses, must be ", state.ranks, "; one a rank");
  for (size_t p = 0; p < addresses.size(); ++p)
    for (size_t q = 0; q < p; ++q) {
      const auto [first, last] = std::minmax(
          {std::bit_cast<uint64_t>(addresses[p]), std::bit_cast<uint64_t>(addresses[q])});
      const auto apart = int64_t(std::min(last - first, uint64_t(INT64_MAX)));
      require(apart >= state.bytes, "the memory of ranks ", q, " and ", p, " is ", apart,
              " bytes apart, must be at least ", state.bytes, ", the bytes of a window");
    }
}

/// A number that no other rank has, nor whatever lies in memory.
uint64_t new_mark() {
  std::random_device random;
  return uint64_t(random()) << 32 | random();
}

}  // namespace

Window Window::create(const ExpertParallelPlan& plan, int rank, const AllGather& all_gather,
                      const WindowOptions& options) {
  auto state = new_state(plan, rank, all_gather, options);
  const auto limit = state->limit;
  std::unique_ptr<parallel::FileSharing> sharing;
  parallel::File own;
  WindowOffer offer = offer_of(*state, plan, "its own");
  offer.error = error_of([&] {
    check_options(*state);
    state->device = parallel::rank_device(plan.device);
    offer.device = state->device->place();
    state->bytes = state->bytes_each = state->device->whole_bytes(plan.window.bytes);
    offer.bytes = text(state->bytes);
    own = state->device->make_memory(state->bytes_each);
    sharing = std::make_unique<parallel::FileSharing>(rank);
    offer.address = sharing->address();
  });
  offer.host = options.host.empty() ? parallel::host_name() : options.host;
  const std::vector<WindowOffer> offers = gather_offers(offer, state->ranks, all_gather);
  state->ranks_here = ranks_beside(offer, offers);
  std::vector<std::string> addresses(offers.size());
  std::transform(offers.begin(), offers.end(), addresses.begin(),
                 [](const WindowOffer& of) { return of.address; });
  const auto until =
      limit.count() == 0 ? steady_clock::time_point::max() : steady_clock::now() + limit;
  on_all_ranks(state->ranks, all_gather, [&] {
    std::vector<parallel::File> files = sharing->share(own, addresses, until);
    files[size_t(rank)] = std::move(own);
    state->memory = state->device->map(files, state->bytes_each, rank);
  });
  return Window(std::move(state));
}

Window Window::adopt(const ExpertParallelPlan& plan, const std::vector<void*>& addresses, int rank,
                     const AllGather& all_gather, const WindowOptions& options) {
  auto state = new_state(plan, rank, all_gather, options);
  state->bytes = plan.window.bytes;
  WindowOffer offer = offer_of(*state, plan, "adopted");
  offer.bytes = text(state->bytes);
  // Marked by the caller's address, and looked for where it is mapped again.
  offer.error = error_of([&] {
    check_options(*state);
    check_addresses(addresses, *state);
    state->device = parallel::rank_device(plan.device);
    offer.device = state->device->place();
    const parallel::SideBySide mapped = state->device->map_again(addresses, state->bytes);
    state->memory = mapped.first;
    state->bytes_each = mapped.step;
    const uint64_t mark = new_mark();
    state->device->write_word(addresses[size_t(rank)], mark);
    offer.address = text(mark);
  });
  const std::vector<WindowOffer> offers = gather_offers(offer, state->ranks, all_gather);
  state->ranks_here = ranks_beside(offer, offers);
  parallel::RankDevice& device = *state->device;
  on_all_ranks(state->ranks, all_gather, [&] {
    for (int p = 0; p < state->ranks; ++p)
      if (text(device.word(state->of(p))) != offers[size_t(p)].address)
        throw DeviceError(text("the memory at the address of rank ", p, " is not that which rank ",
                               p, " has there, or does not begin there"));
  });
  on_all_ranks(state->ranks, all_gather, [&] { device.clear_flags(state->of(rank)); });
  return Window(std::move(state));
}

}  // namespace cadre
