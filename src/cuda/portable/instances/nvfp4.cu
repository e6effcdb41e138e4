#include "cuda/portable/dequantize.cuh"
#include "cuda/portable/quantize.cuh"

namespace cadre::cuda::portable {

template void launch_quantize<formats::Nvfp4, formats::E2m1>(const QuantizeJob&,
                                                             const QuantizeStream&);
template void launch_dequantize<formats::Nvfp4, formats::E2m1>(const DequantizeJob&,
                                                               const QuantizeStream&);

}  // namespace cadre::cuda::portable
