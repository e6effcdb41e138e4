// The library as a build with CADRE_POISON has it: this test is linked with a poison.cpp of its
// own, compiled with that word.
#include "backend/poison.h"

#include <cmath>

#include "backend/entry.h"
#include "cadre/dequantize.h"
#include "cadre/pointers.h"
#include "tests/judge/on_machine.h"
#include "tests/layers/layer_copy.h"
#include "tests/layers/linear_model.h"
#include "tests/layers/moe_case.h"

namespace cadre {
namespace {

struct Poison : test::OnMachine {
  /// Memory of the machine that holds the byte everywhere.
  char* take(int64_t bytes, char byte) {
    auto* memory = static_cast<char*>(machine->take(bytes));
    machine->upload(memory, std::string(size_t(bytes), byte).data(), bytes);
    return memory;
  }
};

TEST_F(Poison, FillsTheseBytesAndNoOthersAndAgainInAReplay) {
  for (const int64_t bytes : {0, 1, 100, 5000}) {
    char* memory = take(bytes + 64, 3);
    auto** table = static_cast<const void**>(machine->take(sizeof(void*)));
    const auto recorded = machine->record([&](Stream stream) {
      backend::poison(machine->device(), {memory, bytes}, stream);
      const void* kernels_are_recorded[] = {memory};
      write_pointers(kernels_are_recorded, table, machine->device(), stream);
    });
    const std::string before(size_t(bytes + 64), 5);
    machine->upload(memory, before.data(), bytes + 64);
    recorded->replay();
    std::string got(size_t(bytes + 64), 0);
    machine->download(got.data(), memory, bytes + 64);
    EXPECT_EQ(got, std::string(size_t(bytes), '\xff') + std::string(64, 5)) << bytes;
    machine->give_back(memory);
    machine->give_back(table);
  }
}

TEST_F(Poison, OfNoMemoryIsNothing) {
  machine->run([&](Stream stream) { backend::poison(machine->device(), {nullptr, 0}, stream); });
}

/// An implementation with a fault: what it decodes is its workspace, which nobody wrote.
void decode_workspace(const DequantizePlan& chosen, const DequantizeArgs& args, Workspace workspace,
                      Stream stream) {
  DequantizeArgs scratch = args;
  scratch.source.codes.data = workspace.data;
  run(plan(chosen.problem, chosen.device), scratch, {}, stream);
}

TEST_F(Poison, ShowsAnImplementationThatReadsItsWorkspace) {
  constexpr backend::Entry<DequantizeProblem> kFaulty{"reads_scratch", backend::takes_all,
                                                      backend::no_workspace, decode_workspace};
  const auto problem = parse_dequantize_problem("dequantize weights N=4 K=16 E=1 format=bf16");
  constexpr int64_t kCount = 64, kBytes = 256;
  char *codes = take(kBytes, 0), *scratch = take(kBytes, 0), *out = take(4 * kCount, 0);
  const DequantizePlan faulty{.problem = problem,
                              .device = machine->device(),
                              .name = kFaulty.name,
                              .workspace_bytes = kBytes,
                              .refusals = {},
                              .entry = &kFaulty};
  const DequantizeArgs args{.source = quantized_view(problem.source, codes),
                            .offsets = {},
                            .out = view(out, DType::kF32, {1, 4, 16})};
  machine->run([&](Stream stream) { run(faulty, args, {scratch, kBytes}, stream); });
  std::array<float, kCount> values{};
  machine->download(values.data(), out, sizeof(values));
  for (const float value : values) EXPECT_TRUE(std::isnan(value)) << value;
  for (char* memory : {codes, scratch, out}) machine->give_back(memory);
}

TEST_F(Poison, LeavesAStepOfALayerWithinItsBounds) {
  const test::Counts counts{.rows = 75, .of = {17, 0, 33, 20}};
  GroupedLinearProblem p{.rows = 75, .n = 24, .k = 40, .experts = 4};
  p.options.deferred = p.bias = true;
  const test::LinearCase before(p, counts, 1, {machine->device(), 8});
  test::LinearCase after(p, counts, 1, {machine->device(), 8});
  test::LayerCopy copy(*machine, after);
  machine->run([&](Stream stream) { copy.step(stream); });
  copy.memory.fetch();
  test::LinearModel(before, after).check();
}

/// Whoever reads what it has not written reads NaN.
TEST_F(Poison, LeavesAStepOfAnExpertLayerFinite) {
  for (bool keep_rows : {true, false}) {
    MoeProblem p{.tokens = 30, .top_k = 2, .hidden = 24, .features = 16, .experts = 5};
    p.bias1 = p.bias2 = true;
    p.keep_rows = keep_rows;
    p.options.deferred = !keep_rows;
    p.shared_features = 32;
    p.shared_gate = keep_rows;
    test::MoeCase c(p, 1, {machine->device(), 8});
    c.change_args = [](MoeArgs& a) { a.prob = nullptr; };
    test::LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream); });
    copy.memory.fetch();
    for (const auto& [name, values] : results(c))
      for (const double value : values)
        EXPECT_TRUE(std::isfinite(value) || name == std::string_view("prob") ||
                    (!p.shared_gate && name == std::string_view("dshared_gate")))
            << name;
  }
}

}  // namespace
}  // namespace cadre
