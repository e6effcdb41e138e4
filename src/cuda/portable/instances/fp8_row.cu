#include "cuda/portable/dequantize.cuh"
#include "cuda/portable/quantize.cuh"

namespace cadre::cuda::portable {

template void launch_quantize<formats::Fp8Row, formats::E4m3>(const QuantizeJob&,
                                                              const QuantizeStream&);
template void launch_quantize<formats::Fp8Row, formats::E5m2>(const QuantizeJob&,
                                                              const QuantizeStream&);
template void launch_dequantize<formats::Fp8Row, formats::E4m3>(const DequantizeJob&,
                                                                const QuantizeStream&);
template void launch_dequantize<formats::Fp8Row, formats::E5m2>(const DequantizeJob&,
                                                                const QuantizeStream&);

}  // namespace cadre::cuda::portable
