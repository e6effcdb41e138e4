#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "cadre/error.h"
#include "tests/judge/machine.h"
#include "tests/judge/tensor.h"
#include "tests/judge/workspace.h"

// Cases are made, filled and judged on the host. To run elsewhere, they are copied piece by piece.
namespace cadre::test {

/// What lies in a piece of a case's memory.
enum class Holds {
  kInput,     ///< numbers that a run reads
  kOutput,    ///< numbers that it may write, with canaries
  kDiscrete,  ///< numbers that it finds by a table of pointers only
  kPointers,  ///< a table of pointers into other pieces
  kScratch,   ///< whatever it likes
};

/// One piece of a case's memory.
struct Piece {
  const char* name;
  char* host;
  int64_t bytes;
  Holds holds;
};

inline Piece piece(const char* name, const Tensor& t, Holds holds) {
  return {name, const_cast<char*>(t.bytes().data()), int64_t(t.bytes().size()), holds};
}
inline Piece piece(const char* name, const OwnedWorkspace& w) {
  return {name, static_cast<char*>(w.get().data), w.get().bytes, Holds::kScratch};
}
template <class List>
Piece list_piece(const char* name, const List& list, Holds holds = Holds::kInput) {
  const auto bytes = int64_t(list.size() * sizeof(list[0]));
  return {name, reinterpret_cast<char*>(const_cast<void*>(static_cast<const void*>(list.data()))),
          bytes, holds};
}

/// A copy of a case's memory on a machine. `Case` has for_pieces(visit), which calls visit(Piece)
/// with the same pieces in the same order for every case of its problem.
class MachineCopy {
 public:
  template <class Case>
  MachineCopy(Machine& machine, const Case& c) : machine_(machine) {
    c.for_pieces([&](const Piece& p) { add(p); });
  }
  MachineCopy(const MachineCopy&) = delete;
  MachineCopy& operator=(const MachineCopy&) = delete;
  ~MachineCopy() {
    for (const Region& r : regions_) machine_.give_back(r.memory);
  }

  /// All pieces are known: a constructor's tables may point into pieces that came later.
  void upload() { upload_from(*this); }

  /// What `other` has on its host into this memory; a run over it is then one of `other`. Discrete
  /// tensors stay in `other`'s memory: the tables here point there.
  void upload_from(const MachineCopy& other) {
    for (size_t i = 0; i < regions_.size(); ++i) {
      const Piece& from = other.regions_[i].piece;
      require(from.bytes == regions_[i].piece.bytes, "copy: ", from.name, " has ", from.bytes,
              " bytes, must be ", regions_[i].piece.bytes);
      if (from.holds == Holds::kDiscrete) {
        other.put(other.regions_[i], from.host);
      } else if (from.holds == Holds::kPointers) {
        std::vector<char> table(from.host, from.host + from.bytes);
        other.move_words(table.data(), table.size() / sizeof(void*));
        put(regions_[i], table.data());
      } else {
        put(regions_[i], from.host);
      }
    }
  }

  /// What a run made of this memory, onto the host.
  void fetch() { fetch_from(*this); }
  /// The same of a run over memory that had upload_from(*this).
  void fetch_from(const MachineCopy& live) {
    for (size_t i = 0; i < regions_.size(); ++i) {
      const bool own = regions_[i].piece.holds == Holds::kDiscrete;
      const Region& from = own ? regions_[i] : live.regions_[i];
      const bool numbers =
          from.piece.holds != Holds::kPointers && from.piece.holds != Holds::kScratch;
      if (numbers && from.piece.bytes > 0)
        machine_.download(regions_[i].piece.host, from.memory, from.piece.bytes);
      std::array<char, kGuard> guard{};
      machine_.download(guard.data(), from.memory + from.piece.bytes, kGuard);
      if (guard != kGuards) damage_ += text("bytes behind ", from.piece.name, " were written; ");
    }
  }
  /// Empty if nothing was written behind any piece.
  const std::string& damage() const { return damage_; }

  /// The same arguments, with every pointer into a piece moved. No other word of a struct of
  /// pointers, sizes and strides has the value of a host address.
  template <class Args>
  Args moved(Args args) const {
    static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) % sizeof(void*) == 0);
    move_words(reinterpret_cast<char*>(&args), sizeof(Args) / sizeof(void*));
    return args;
  }
  Workspace moved(const OwnedWorkspace& w) const { return moved(w.get()); }

 private:
  struct Region {
    Piece piece;
    char* memory;
  };
  static constexpr int64_t kGuard = 256;
  static constexpr std::array<char, kGuard> kGuards = [] {
    std::array<char, kGuard> all{};
    all.fill('\x5a');
    return all;
  }();

  void add(const Piece& p) {
    regions_.push_back({p, static_cast<char*>(machine_.take(p.bytes + kGuard))});
  }
  void put(const Region& r, const void* from) const {
    if (r.piece.bytes > 0) machine_.upload(r.memory, from, r.piece.bytes);
    machine_.upload(r.memory + r.piece.bytes, kGuards.data(), kGuard);
  }
  void move_words(char* words, size_t count) const {
    for (size_t i = 0; i < count; ++i, words += sizeof(void*)) {
      char* word = nullptr;
      std::memcpy(&word, words, sizeof(word));
      for (const Region& r : regions_)
        if (word >= r.piece.host && word < r.piece.host + r.piece.bytes) {
          word = r.memory + (word - r.piece.host);
          break;
        }
      std::memcpy(words, &word, sizeof(word));
    }
  }

  Machine& machine_;
  std::vector<Region> regions_;
  std::string damage_;
};

/// Empty if two cases of one problem hold the same bytes, but for scratch and tables; else where
/// they differ. Canaries and tails count.
template <class Case>
std::string byte_difference(const Case& got, const Case& want) {
  std::vector<Piece> pieces;
  want.for_pieces([&](const Piece& p) { pieces.push_back(p); });
  std::string all;
  size_t i = 0;
  got.for_pieces([&](const Piece& g) {
    const Piece& w = pieces[i++];
    if (g.holds == Holds::kScratch || g.holds == Holds::kPointers) return;
    const auto [at, other] = std::mismatch(g.host, g.host + g.bytes, w.host, w.host + w.bytes);
    if (at != g.host + g.bytes)
      all += text(g.name, " differs at byte ", at - g.host, " of ", g.bytes, "; ");
  });
  return all;
}

}  // namespace cadre::test
