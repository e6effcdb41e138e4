#include "cpu/activation.h"

#include <algorithm>

#include "activations/glu_layout.h"
#include "activations/list.h"
#include "cpu/clones.h"
#include "cpu/lanes.h"
#include "cpu/load_store.h"
#include "cpu/threads.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu {
namespace {

constexpr int kBlock = 32;  // features at a time; divides the blocks of interleave32
using Block = Lanes<kBlock>;

/// Where the features [first, first + count) of one row stand in z and in h.
struct Place {
  Run gate, up, h;
};

/// What is the same for all rows.
struct Work {
  const ActivationProblem& p;
  const ActivationArgs& args;
  bool gated = info(p.kind).gated;
  LoadRun load_z = load_run(p.z), load_h = load_run(p.h);
  StoreRun store_z = store_run(p.z), store_h = store_run(p.h);

  Place place(int64_t first) const {
    const int count = int(std::min<int64_t>(kBlock, p.features - first));
    const Run h{first, 1, count};
    if (!gated) return {h, {}, h};
    const auto columns = activations::glu_columns(p.layout, first, p.features);
    const int64_t step = activations::glu_step(p.layout);
    return {{columns.gate, step, count}, {columns.up, step, count}, h};
  }
  float prob(int64_t r) const { return p.prob ? args.prob[r] : 1.0f; }
};

/// What is read of one block, and what is written of it. Blocks at the end of a row are filled up
/// with zeros, so that every loop runs over all of a block.
struct BlockIn {
  Block gate{}, up{}, dh{};
};
struct BlockOut {
  Block h, dgate, dup, dprob;  ///< dprob[i] = dh[i] * act[i]
};

template <class Activation>
CADRE_CLONES void forward_block(const ActivationConstants& constants, float prob, const BlockIn& in,
                                BlockOut& out) {
  for (int i = 0; i < kBlock; ++i)
    out.h.at[i] = Activation::forward(in.gate.at[i], in.up.at[i], constants) * prob;
}

template <class Activation>
CADRE_CLONES void backward_block(const ActivationConstants& constants, float prob,
                                 const BlockIn& in, BlockOut& out) {
  for (int i = 0; i < kBlock; ++i) {
    const auto gradient =
        Activation::backward(in.gate.at[i], in.up.at[i], in.dh.at[i] * prob, constants);
    out.dgate.at[i] = gradient.dgate;
    out.dup.at[i] = gradient.dup;
    out.h.at[i] = gradient.value * prob;
    out.dprob.at[i] = in.dh.at[i] * gradient.value;
  }
}

template <class Activation>
void forward_row(const Work& work, int64_t r) {
  const void* z = row_address(work.args.z, r);
  for (int64_t first = 0; first < work.p.features; first += kBlock) {
    const Place place = work.place(first);
    BlockIn in;
    BlockOut out;
    work.load_z(z, place.gate, in.gate.at);
    if (work.gated) work.load_z(z, place.up, in.up.at);
    forward_block<Activation>(work.p.constants, work.prob(r), in, out);
    work.store_h(row_address(work.args.h, r), place.h, out.h.at);
  }
}

/// Gradients of one row. The 32 sums of dprob are added up in a fixed order at the end.
template <class Activation>
void backward_row(const Work& work, int64_t r) {
  const void* z = row_address(work.args.z, r);
  void* dz = row_address(work.args.dz, r);
  Block sums{};
  for (int64_t first = 0; first < work.p.features; first += kBlock) {
    const Place place = work.place(first);
    BlockIn in;
    BlockOut out;
    work.load_z(z, place.gate, in.gate.at);
    if (work.gated) work.load_z(z, place.up, in.up.at);
    work.load_h(row_address(work.args.dh, r), place.h, in.dh.at);
    backward_block<Activation>(work.p.constants, work.prob(r), in, out);
    work.store_z(dz, place.gate, out.dgate.at);
    if (work.gated) work.store_z(dz, place.up, out.dup.at);
    if (work.args.h) work.store_h(row_address(work.args.h, r), place.h, out.h.at);
    for (int i = 0; i < kBlock; ++i) sums.at[i] += out.dprob.at[i];
  }
  if (work.args.dprob != nullptr) work.args.dprob[r] = total(sums);
}

}  // namespace

void activation(const ActivationPlan& plan, const ActivationArgs& args, Workspace, Stream) {
  const ActivationProblem& p = plan.problem;
  const Work work{.p = p, .args = args};
  const int64_t used = schedule::rows_used(args.offsets.data, p.experts, p.rows);
  activations::All::visit(p.kind, [&]<class Activation>(Activation) {
#pragma omp parallel for schedule(static) if (worth_threads(used * p.features))
    for (int64_t r = 0; r < used; ++r)
      p.backward ? backward_row<Activation>(work, r) : forward_row<Activation>(work, r);
  });
  if (p.tail == Tail::kKeep) return;
  if (args.h) zero_rows(args.h, used, p.rows);
  if (args.dz) zero_rows(args.dz, used, p.rows);
  if (args.dprob != nullptr) std::fill(args.dprob + used, args.dprob + p.rows, 0.0f);
}

}  // namespace cadre::cpu
