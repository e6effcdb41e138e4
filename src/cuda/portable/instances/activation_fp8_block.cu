#include "cuda/portable/activation_codes.cuh"
#include "formats/list.h"

namespace cadre::cuda::portable {

template void launch_activation_codes<formats::Fp8Block, formats::E4m3>(const ActivationPlan&,
                                                                        const ActivationCodesJob&,
                                                                        cudaStream_t);
template void launch_activation_codes<formats::Fp8Block, formats::E5m2>(const ActivationPlan&,
                                                                        const ActivationCodesJob&,
                                                                        cudaStream_t);

}  // namespace cadre::cuda::portable
