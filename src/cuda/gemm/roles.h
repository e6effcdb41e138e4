#pragma once

namespace cadre::cuda::gemm {

constexpr int kWarp = 32, kWarpgroup = 128;  // threads

/// Which warps of a block do what. Warpgroups that multiply come first (consumers), then as many as
/// hold the warps that load operands, those that store output, and, last, the one that schedules.
struct Roles {
  int consumers;           ///< warpgroups
  int load_warps;          ///< they start the loads of operands
  int store_warps;         ///< they start stores of output, and loads of old output
  int consumer_registers;  ///< of a thread (setmaxnreg)
  int producer_registers;  ///< of a thread of the other warpgroups
  int store_lanes = 1;     ///< of a store warp that have work

  constexpr int producer_warpgroups() const { return (load_warps + store_warps + 1 + 3) / 4; }
  constexpr int warpgroups() const { return consumers + producer_warpgroups(); }
  constexpr int threads() const { return warpgroups() * kWarpgroup; }
  /// Numbers of the producers' warps, from the first of them.
  constexpr int first_store_warp() const { return load_warps; }
  constexpr int schedule_warp() const { return 4 * producer_warpgroups() - 1; }

  /// Threads that read the records of tiles, one by one.
  constexpr int readers() const {
    return consumers * kWarpgroup + load_warps * kWarp + store_warps * store_lanes;
  }
  /// Of a thread when the block begins: what an SM has for so many threads, in steps of eight.
  constexpr int first_registers() const { return 65536 / threads() / 8 * 8; }
  /// Whether those suffice for all once they are shared out anew: setmaxnreg waits for ever for
  /// more. In steps of eight as well.
  constexpr bool fits() const {
    return consumer_registers % 8 == 0 && producer_registers % 8 == 0 &&
           consumers * consumer_registers + producer_warpgroups() * producer_registers <=
               warpgroups() * first_registers();
  }
};

}  // namespace cadre::cuda::gemm
