#pragma once
#include <tuple>
#include <vector>

#include "exchange.h"

// The operators torch.ops.cadre._window_*: what they give, and their signatures.
namespace cadre::door {

using Name = c10::string_view;

/// Where rows came from and go to: ExchangeMap as tensors.
struct ExchangeTensors {
  Tensor offsets, row_of, slot_of, row_here, verdict, place_of, sum_of;

  std::vector<Tensor> list() const {
    return {offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
  }
  ExchangeMap map() const {
    return {ints(row_of, "row_of"),
            ints(slot_of, "slot_of"),
            ints(row_here, "row_here"),
            ints(offsets, "offsets"),
            ints(verdict, "verdict"),
            place_of.numel() > 0 ? ints(place_of, "place_of") : nullptr,
            sum_of.numel() > 0 ? ints(sum_of, "sum_of") : nullptr};
  }
};

/// rows, row_prob, routed, then the map.
using Dispatched =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
/// rows, row_scales, then as above from row_prob on, and the numbers of the rows.
using DispatchedCodes = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                   Tensor, Tensor, Tensor, Tensor>;
using TensorPair = std::tuple<Tensor, Tensor>;

using DispatchOp = Dispatched(Name, const Tensor&, const Tensor&, const Maybe&);
using DispatchCodesOp = DispatchedCodes(Name, const Tensor&, const Tensor&, const Tensor&,
                                        const Maybe&, const Maybe&, bool);
using DispatchBackwardOp = TensorPair(Name, const Tensor&, const Maybe&, const Tensor&,
                                      const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                      const Tensor&, const Tensor&, bool, bool);
/// Of y, and of dout.
using RowsOp = Tensor(Name, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&, const Tensor&, const Tensor&);

}  // namespace cadre::door
