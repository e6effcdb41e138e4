#include "cadre/pointers.h"

#include <vector>

#include "tests/judge/errors.h"
#include "tests/judge/on_machine.h"

namespace cadre {
namespace {

using Pointers = test::OnMachine;

std::vector<const void*> addresses(size_t count, uintptr_t seed) {
  std::vector<const void*> list;
  for (size_t i = 0; i < count; ++i)
    list.push_back(reinterpret_cast<const void*>(seed + 0x10000001ull * 16 * (i + 1)));
  return list;
}

TEST_F(Pointers, AreWrittenWhateverTheirNumberAndAgainByAReplay) {
  for (size_t count : {1, 3, 447, 448, 449, 1000}) {
    const size_t bytes = count * sizeof(void*);
    auto list = addresses(count, 256);
    const std::vector<const void*> want = list, canary = addresses(count + 1, 7);
    auto** table = static_cast<const void**>(machine->take(int64_t(bytes + sizeof(void*))));
    machine->upload(table, canary.data(), int64_t(bytes + sizeof(void*)));
    const auto recorded = machine->record(
        [&](Stream stream) { write_pointers(list, table, machine->device(), stream); });
    if (machine->device().kind == DeviceKind::kCuda) list.assign(count, nullptr);
    machine->upload(table, canary.data(), int64_t(bytes + sizeof(void*)));
    recorded->replay();
    std::vector<const void*> got(count + 1);
    machine->download(got.data(), table, int64_t(bytes + sizeof(void*)));
    EXPECT_EQ(got.back(), canary.back()) << count;
    got.pop_back();
    EXPECT_EQ(got, want) << count;
    machine->give_back(table);
  }
}

TEST_F(Pointers, MayBeNone) {
  machine->run([&](Stream stream) { write_pointers({}, nullptr, machine->device(), stream); });
}

TEST(PointerErrors, OfTheTable) {
  const void* table[2] = {};
  const std::vector<const void*> list = {table};
  EXPECT_EQ(test::invalid([&] { write_pointers(list, nullptr, this_cpu(), {}); }),
            "write_pointers: table is null, must have room for 1 pointers");
  auto* misaligned = reinterpret_cast<const void**>(reinterpret_cast<char*>(table) + 4);
  const std::string said = test::invalid([&] { write_pointers(list, misaligned, this_cpu(), {}); });
  EXPECT_NE(said.find(", must be aligned to 8 bytes"), said.npos) << said;
}

}  // namespace
}  // namespace cadre
