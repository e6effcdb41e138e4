#include "cpu/gemm/products.h"

#include <omp.h>

#include <array>

#include "cpu/gemm/onednn/matmul.h"
#include "cpu/gemm/processor.h"

namespace cadre::cpu::gemm {
namespace {

using dnnl::memory;

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

/// Makes a product of a new shape, and keeps the last of them.
class OnednnProducts final : public Products {
 public:
  explicit OnednnProducts(Multiplicand type) : type_(type), stream_(cpu_engine()) {
    // Of this thread alone: oneDNN plans a product for as many threads as OpenMP would start here.
    omp_set_num_threads(1);
  }
  void multiply(const ProductShape&, const void* a, const void* b, void* t) const override;

 private:
  struct Slot {
    ProductShape shape;
    dnnl::matmul primitive;
    memory a, b, t;
  };
  Slot& slot(const ProductShape&) const;
  Slot make(const ProductShape&) const;

  static constexpr size_t kSlots = 64;

  Multiplicand type_;
  dnnl::stream stream_;
  mutable std::array<Slot, kSlots> slots_;
  mutable size_t used_ = 0;
};

OnednnProducts::Slot OnednnProducts::make(const ProductShape& s) const {
  const auto type = type_ == Multiplicand::kF32 ? memory::data_type::f32 : memory::data_type::bf16;
  const memory::desc a({s.height, s.depth}, type, memory::format_tag::ab);
  const memory::desc b({s.depth, s.width}, type, tag_of_b(type_, s.width));
  const memory::desc t({s.height, s.width}, memory::data_type::f32, memory::format_tag::ab);
  return {s, make_matmul({a, b, t}, s.accumulate), memory(a, cpu_engine(), nullptr),
          memory(b, cpu_engine(), nullptr), memory(t, cpu_engine(), nullptr)};
}

OnednnProducts::Slot& OnednnProducts::slot(const ProductShape& shape) const {
  const size_t filled = used_ < kSlots ? used_ : kSlots;
  for (size_t i = 0; i < filled; ++i)
    if (slots_[i].shape == shape) return slots_[i];
  Slot& next = slots_[used_++ % kSlots];
  next = make(shape);
  return next;
}

void OnednnProducts::multiply(const ProductShape& shape, const void* a, const void* b,
                              void* t) const {
  Slot& s = slot(shape);
  s.a.set_data_handle(const_cast<void*>(a));
  s.b.set_data_handle(const_cast<void*>(b));
  s.t.set_data_handle(t);
  const dnnl_exec_arg_t args[] = {
      {DNNL_ARG_SRC, s.a.get()}, {DNNL_ARG_WEIGHTS, s.b.get()}, {DNNL_ARG_DST, s.t.get()}};
  dnnl::error::wrap_c_api(dnnl_primitive_execute(s.primitive.get(), stream_.get(), 3, args),
                          "could not execute a product");
}

}  // namespace

ThreadProducts onednn_products(Multiplicand type) {
  // tidy: allocation because oneDNN allocates the handles that are in it, one by one
  return {new OnednnProducts(type), [](const Products* one) { delete one; }};
}

}  // namespace cadre::cpu::gemm
