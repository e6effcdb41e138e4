#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/format.h"
#include "cadre/offsets.h"
#include "cadre/permute.h"

#pragma GCC visibility push(default)
namespace cadre {

/// What becomes of rows beyond those that a rank has room for. All ranks see all counts and come to
/// one verdict.
enum class Overflow : uint8_t {
  kError,  ///< rows, sums and gradients of that step are NaN on every rank; the next dispatch, or
           ///< Window::check(), throws
  kDrop,   ///< choices whose row would be R or more are dropped, as offsets.h drops them
};

/// How the rows of a token become one.
enum class RowSum : uint8_t {
  kChoice,  ///< in the order of top_k, rounded once: the bits of one rank
  kRank,    ///< each rank first sums its own, in the order of top_k, and rounds; these sums travel,
  ///< are added in the order of ranks, and rounded: fewer bytes, and bits that depend on P
};

/// What crosses to a rank by the route collective, in dispatch and in the backward of collect. Rows
/// that are summed cross for each choice.
enum class Crossing : uint8_t {
  kAuto,    ///< kToken if that saves enough, as far as the problem says; else kChoice
  kToken,   ///< each token once, for all the rows that it has there
  kHost,    ///< each token once to each host that has rows of it, and there, from the rank with the
            ///< place of the token's in its host, once to each rank: see host_ranks
  kChoice,  ///< a row for each choice
};

/// One rank's share of experts that are spread over P ranks:
/// `expert_parallel T=8192 top_k=8 H=7168 E=128 ranks=2 R=131072 dtype=bf16`.
/// The problem is the same on every rank. Expert e of all P * E belongs to rank e / E.
struct ExpertParallelProblem {
  int64_t tokens = 0;  ///< T: of a rank, at most
  int top_k = 1;       ///< experts of each token
  int64_t hidden = 0;  ///< H
  int experts = 1;     ///< E of each rank
  int ranks = 1;       ///< P
  int64_t rows =
      0;  ///< R: routed rows for which each rank has room; P * T * top_k is always enough
  int64_t block = 0;  ///< N: by the route collective, rows that a rank sends to another at most, in
                      ///< messages of N rows each; 0: as many travel as there are
  DType dtype = DType::kBf16;  ///< of tokens and rows: f32, bf16 or f16
  std::optional<Format> x{};   ///< dispatch moves codes of x and scales, which the owner has made
  Major scales_major = Major::kRow;  ///< of row_scales; column: only fp32 scales
  bool prob = true;                  ///< probabilities travel with the rows, their gradients back
  Overflow overflow = Overflow::kError;
  Tail tail = Tail::kKeep;  ///< of rows, row_prob and dy
  bool push = false;  ///< who makes rows of y and drows writes them into Window::places() of a plan
  RowSum sum = RowSum::kChoice;  ///< of rows of y, and of drows; kRank: not with push
  /// kToken, kHost: not with block; kHost, kChoice: of the route collective.
  Crossing cross = Crossing::kAuto;
  /// With kHost: ranks of a host, which are neighbours; the last may have fewer. Of 1 or P it is
  /// kToken.
  int host_ranks = 0;
  int layer = 0;  ///< the caller's number; ranks at layers of other numbers are out of step

  bool operator==(const ExpertParallelProblem&) const = default;
};

/// Where the parts of a rank's window lie, in bytes from its start.
struct WindowLayout {
  int64_t experts = 0;    ///< [P, T, top_k] int32, written by all ranks
  int64_t prob = 0;       ///< [P, T, top_k] fp32, likewise
  int64_t tokens = 0;     ///< [T, H]: x or dout
  int64_t scales = 0;     ///< [T, H / block]: of x in codes, which lie where tokens do
  int64_t drow_prob = 0;  ///< [P, R] fp32, written by all ranks; with push [T * top_k]
  int64_t rows = 0;       ///< [R, H]: y or dx of rows; with push [T * top_k, H], by all ranks; with
                          ///< sum=rank [P, T, H], this rank's sums for the tokens of all
  int64_t bytes = 0;      ///< of the whole window

  bool operator==(const WindowLayout&) const = default;
};

/// How rows will travel: by the route `name`, "window" or, with few tokens on GPUs, "few_tokens",
/// or "window_sum_rank", through memory that all ranks have mapped; or, where it is asked for by
/// name, "collective", by an engine of the caller's (collective.h).
struct ExpertParallelPlan {
  ExpertParallelProblem problem{};
  Device device{};
  std::string_view name{};
  bool exact = true;      ///< the bits of one rank that has all tokens and experts
  bool by_token = true;   ///< what is dispatched crosses once a token, not once a choice
  bool by_host = false;   ///< by collective: a token crosses to hosts, and from there to ranks
  WindowLayout window{};  ///< what each rank gives
  uint32_t tag = 0;       ///< of the problem, in flags
  int64_t workspace_bytes = 0;  ///< of dispatch and its backward; by collective of all four
  int64_t counts = 0;           ///< by collective: elements of CollectiveMap::counts
  int64_t passing = 0;          ///< by host: elements of CollectiveMap::passing
  OffsetsPlan offsets{};        ///< of all ranks' choices among all experts; by collective of own
  PermutePlan dispatch{}, collect{}, collect_backward{}, dispatch_backward{};
  PermutePlan sum_here{}, dprob{};  ///< of sum=rank: a rank's own sums; gradients of probabilities
};

/// An all-gather among the ranks, of the caller's: it returns every rank's bytes, in their order.
using AllGather = std::function<std::vector<std::string>(const std::string&)>;

/// One through files in a folder that all ranks see, and that is new for each group of ranks.
/// Errors    InvalidArgument for a rank that is none of `ranks`, a limit that is no wait's, or no
///           folder; its call DeviceError if a rank has not come within the limit (0: none), or for
///           a folder that another group has used or that cannot be written.
AllGather all_gather_in(const std::string& folder, int rank, int ranks,
                        std::chrono::milliseconds limit = std::chrono::seconds(60));

struct WindowOptions {
  /// Of each wait, at most ten years; 0: none.
  std::chrono::milliseconds limit = std::chrono::seconds(60);
  std::string host{};  ///< where this rank runs, in any words; empty: found out; not of adopt
};

/// A rank's window and those of its peers, mapped side by side, so that all ranks' tokens are one
/// tensor [P, T, H]. Processes of one host share it; threads of one process may each have their own
/// of a group. Made once; it serves every layer whose plan needs no larger window.
class Window {
 public:
  /// Makes this rank's window, shares it, and maps those of its peers. Every rank calls it, with an
  /// `all_gather` that calls the others'. A wait that outlasts the limit fails on every rank.
  /// Errors    InvalidArgument if the ranks' problems or limits differ; Unsupported for ranks of
  ///           several hosts; DeviceError if a rank fails, as by a number that the plan lacks, or
  ///           has not come within the limit. Every rank throws if one does.
  static Window create(const ExpertParallelPlan&, int rank, const AllGather& all_gather,
                       const WindowOptions& options = {});

  /// The same in memory that the caller has made, shared and mapped: that of every rank, by its
  /// address in this process, in the order of ranks, `plan.window.bytes` of each. It is mapped once
  /// more, side by side, and kept as long as this; its owners leave it alone meanwhile. Its first
  /// bytes are written even if this fails. On the CPU an address is the first of a page of a shared
  /// mapping (MAP_SHARED); on GPUs it lies in an allocation of CUDA's virtual memory, as symmetric
  /// memory of torch does, equally far from the beginning for all ranks, a multiple of 256 bytes.
  /// Errors    as create, but for hosts; DeviceError also where a rank has not an address for each,
  ///           or two overlap, or memory cannot be mapped again, or is not that of the rank where
  ///           its address stands.
  static Window adopt(const ExpertParallelPlan&, const std::vector<void*>& addresses, int rank,
                      const AllGather& all_gather, const WindowOptions& options = {});

  Window(Window&&) noexcept;
  Window& operator=(Window&&) noexcept;
  ~Window();

  int rank() const;
  int64_t bytes() const;  ///< of a rank's window, for plans

  /// Waits until every other rank has read what this one brought to the last exchange. Before it
  /// nothing may be written into the window; the exchanges themselves wait for it.
  /// Errors    as those of an exchange.
  void await_readers(Stream = {});

  /// This rank's [T, H] and [R, H] of a plan, to be written after await_readers(). What is given to
  /// an exchange from there is not copied again.
  TensorView tokens(const ExpertParallelPlan&) const;
  /// Not of sum=rank or push=yes: sums or places lie there, and rows elsewhere.
  TensorView rows(const ExpertParallelPlan&) const;
  /// The same of x that is codes [T, H], beside scales [T, H / block].
  QuantizedView codes(const ExpertParallelPlan&) const;

  /// All ranks' [T * top_k, H] of a plan with push, [P, T * top_k, H] of several: row r of y and of
  /// drows belongs at place_of[r], numbered through the ranks. A product with scatter writes there,
  /// behind await_readers(); collect and dispatch backward, which are not given these rows, see to
  /// the rest.
  TensorView places(const ExpertParallelPlan&) const;

  /// Throws what has gone wrong: DeviceError if a rank failed, or if rows overflowed since it was
  /// last asked. All ranks ask, or none, as all would throw in the next dispatch.
  void check();

  struct [[gnu::visibility("hidden")]] State;
  /// Errors    InvalidArgument if it was moved from; so in all that is called of it.
  State& state() const;

 private:
  explicit Window(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

/// Where routed rows come from and go to among the ranks: dispatch writes it, the others read it.
/// The place of a choice is its number among those of its rank's tokens that are of some expert, in
/// the order of (expert, token, choice): rows of an expert that are of one rank lie together there.
struct ExchangeMap {
  int32_t* row_of = nullptr;    ///< [t, top_k]: rank * R + row, with push the place; -1: dropped
  int32_t* slot_of = nullptr;   ///< [R]: (rank * T + token) * top_k + choice; tail not written
  int32_t* row_here = nullptr;  ///< [P, T, top_k]: this rank's row of a choice of any, or -1
  int32_t* offsets = nullptr;   ///< [E + 1]: rows of this rank's experts
  int32_t* verdict = nullptr;   ///< one word: 0, or 1 if rows overflowed and that is an error
  int32_t* place_of = nullptr;  ///< [R] with push: rank * T * top_k + place there; tail not written
  int32_t* sum_of = nullptr;    ///< [t, P] with sum=rank: where the sum of each rank lies among
                                ///< those of all, [P, P, T]; -1: it has no row of the token
};

struct DispatchArgs {
  TensorView x{};                    ///< [t, H], 0 <= t <= T; codes where the problem says so
  TensorView x_scales{};             ///< [t, H / block] of codes, row-major
  const int32_t* experts = nullptr;  ///< [t, top_k] in [0, P * E); a choice of any other is dropped
  const float* prob = nullptr;       ///< [t, top_k], with prob
  TensorView rows{};                 ///< [R, H], written
  TensorView row_scales{};           ///< [R, H / block] of codes, written
  float* row_prob = nullptr;         ///< [R], written, with prob
  int32_t* routed = nullptr;  ///< [P], optional: rows routed to each rank, those beyond R too
  ExchangeMap map{};          ///< written
};

struct CollectArgs {
  TensorView y{};    ///< [R, H]; with push none
  TensorView out{};  ///< [t, H], written
  ExchangeMap map{};
};

struct CollectBackwardArgs {
  TensorView dout{};  ///< [t, H]
  TensorView dy{};    ///< [R, H], written
  ExchangeMap map{};
};

struct DispatchBackwardArgs {
  TensorView drows{};                ///< [R, H]; with push none
  const float* drow_prob = nullptr;  ///< [R], with prob
  TensorView dx{};                   ///< [t, H], written
  float* dprob = nullptr;            ///< [t, top_k], written, with prob
  ExchangeMap map{};
  /// Which of both the rank wants, though both are written: one that wants none of x makes none of
  /// its rows. Ranks of which one wants what another does not are out of step.
  bool wants_dx = true, wants_dprob = true;
};

/// Moves tokens to the ranks of their experts and back. With the tokens of all ranks one after
/// another, slot s = (rank * T + token) * top_k + choice:
///
///   dispatch             rows[r] = x[token of slot_of[r]]        row_prob[r] = prob[slot_of[r]]
///   collect              out[t] = sum_j y[row_of[t, j]]
///   collect backward     dy[r] = dout[token of slot_of[r]]
///   dispatch backward    dx[t] = sum_j drows[row_of[t, j]]
///                        dprob[t, j] = drow_prob[row_of[t, j]]
///
/// With push, rows of y and drows travel while they are computed, and what is left are the sums.
/// With sum=rank the two sums are over ranks, of what each has summed of its own rows.
/// Every rank calls the same exchanges in the same order, each on one stream. A rank's rows of an
/// expert stand in (rank, token, choice) order, as in one process that has all tokens.
///
/// Types     sums in fp32, over j in its order, one rounding; probabilities are fp32. x of a format
///           is its codes and scales along K, as quantise of x [t, H] makes them: fp8_row,
///           fp8_block or mxfp8, whose scales are of one row each (permute.h). rows and row_scales
///           are then what quantise of rows would have made, and x of grouped_gemm. All else is of
///           dtype.
/// Rows      t may differ between ranks and calls. Dropped choices add nothing and have dprob 0.
/// Errors    InvalidArgument before anything is moved. DeviceError where a rank is out of step, or
///           has not come within the window's limit: it names rank, exchange and epoch, outputs are
///           NaN, and the window is of no more use; a rank that was through throws at its next
///           exchange. Overflow: see there; codes and scales are 0xff in all bytes, which is NaN.
/// Exact     the bits of permute and combine in one process that has the tokens of all ranks; with
///           sum=rank of several ranks all but out and dx have them (dprob but for the sign of
///           zero), and these two have the same at every run.
ExpertParallelPlan plan(const ExpertParallelProblem&, const Device&, std::string_view only = {});
void dispatch(const ExpertParallelPlan&, Window&, const DispatchArgs&, Workspace, Stream);
void collect(const ExpertParallelPlan&, Window&, const CollectArgs&, Stream);
void collect_backward(const ExpertParallelPlan&, Window&, const CollectBackwardArgs&, Stream);
void dispatch_backward(const ExpertParallelPlan&, Window&, const DispatchBackwardArgs&, Workspace,
                       Stream);

/// The route and every byte of the window; many lines, for people.
std::string explain(const ExpertParallelPlan&);

/// Of a text without R it is P * block, or min(P, 2) * T * top_k, with which two ranks cannot
/// overflow.
std::string to_string(const ExpertParallelProblem&);
ExpertParallelProblem parse_expert_parallel_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
