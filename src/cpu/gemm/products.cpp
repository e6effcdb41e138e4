#include "cpu/gemm/products.h"

#include <omp.h>

#include "cpu/gemm/cpuid.h"

namespace cadre::cpu::gemm {
namespace {

using dnnl::memory;

constexpr bool includes(dnnl::cpu_isa all, dnnl::cpu_isa one) {
  return (unsigned(all) & unsigned(one)) == unsigned(one);
}

/// oneDNN believes cpuid's word that there are matrix tiles. On some virtual machines the leaf that
/// says how large they are is empty, and then its kernels die of an illegal instruction. Where a
/// processor has tiles but oneDNN may not use them, its bf16 vector instructions are half as fast
/// as fp32's.
Processor ask_processor() {
  const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  const bool tiles_used = includes(isa, dnnl::cpu_isa::avx512_core_amx);
  const bool good = tiles_used ? matrix_tiles_are_described() : !has_matrix_tiles();
  return {.bf16 = includes(isa, dnnl::cpu_isa::avx512_core_bf16) && good,
          .free_tiles = includes(isa, dnnl::cpu_isa::avx512_core),
          .matrix_tiles = tiles_used && good};
}

/// The layout of b by its column width.
memory::format_tag tag_of_b(Multiplicand type, int64_t width) {
  using Tag = memory::format_tag;
  const bool f32 = type == Multiplicand::kF32;
  if (!processor().free_tiles) return Tag::ab;
  if (width == 16) return f32 ? Tag::BA16a16b : Tag::BA16a16b2a;
  if (width == 32) return f32 ? Tag::BA16a32b : Tag::BA16a32b2a;
  if (width == 48) return f32 ? Tag::BA16a48b : Tag::BA16a48b2a;
  return f32 ? Tag::BA16a64b : Tag::BA16a64b2a;
}

}  // namespace

const Processor& processor() {
  static const Processor kProcessor = ask_processor();
  return kProcessor;
}

const dnnl::engine& cpu_engine() {
  static const dnnl::engine kEngine(dnnl::engine::kind::cpu, 0);
  return kEngine;
}

Products::Products(Multiplicand type) : type_(type), stream_(cpu_engine()) {
  // Of this thread alone: oneDNN plans a product for as many threads as OpenMP would start here.
  omp_set_num_threads(1);
}

Products::Slot Products::make(const ProductShape& s) const {
  const auto type = type_ == Multiplicand::kF32 ? memory::data_type::f32 : memory::data_type::bf16;
  const memory::desc a({s.height, s.depth}, type, memory::format_tag::ab);
  const memory::desc b({s.depth, s.width}, type, tag_of_b(type_, s.width));
  const memory::desc t({s.height, s.width}, memory::data_type::f32, memory::format_tag::ab);
  dnnl::primitive_attr attributes;
  if (s.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum();
    attributes.set_post_ops(sum);
  }
  const dnnl::matmul::primitive_desc plan(dnnl::matmul::desc(a, b, t), attributes, cpu_engine());
  return {s, dnnl::matmul(plan), memory(a, cpu_engine(), nullptr), memory(b, cpu_engine(), nullptr),
          memory(t, cpu_engine(), nullptr)};
}

Products::Slot& Products::slot(const ProductShape& shape) {
  const size_t filled = used_ < kSlots ? used_ : kSlots;
  for (size_t i = 0; i < filled; ++i)
    if (slots_[i].shape == shape) return slots_[i];
  Slot& next = slots_[used_++ % kSlots];
  next = make(shape);
  return next;
}

void Products::multiply(const ProductShape& shape, const void* a, const void* b, void* t) {
  Slot& s = slot(shape);
  s.a.set_data_handle(const_cast<void*>(a));
  s.b.set_data_handle(const_cast<void*>(b));
  s.t.set_data_handle(t);
  const dnnl_exec_arg_t args[] = {
      {DNNL_ARG_SRC, s.a.get()}, {DNNL_ARG_WEIGHTS, s.b.get()}, {DNNL_ARG_DST, s.t.get()}};
  dnnl::error::wrap_c_api(dnnl_primitive_execute(s.primitive.get(), stream_.get(), 3, args),
                          "could not execute a product");
}

}  // namespace cadre::cpu::gemm
