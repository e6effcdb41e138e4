#include "cuda/portable/activation_codes.cuh"
#include "formats/list.h"

namespace cadre::cuda::portable {

template void launch_activation_codes<formats::Mxfp4, formats::E2m1>(const ActivationPlan&,
                                                                     const ActivationCodesJob&,
                                                                     cudaStream_t);

}  // namespace cadre::cuda::portable
