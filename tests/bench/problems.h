#pragma once

namespace cadre::test {

/// Small problems of every operation, whose arguments have every form.
inline constexpr const char* kProblems[] = {
    "activation backward swiglu R=64 F=24 E=4 prob=yes",
    "bias_grad R=64 N=24 E=4 dbias=f32 discrete=yes bias_scale=yes accumulate=per_expert",
    "dequantize rows R=64 C=40 E=4 format=nvfp4",
    "grouped_gemm fprop R=64 N=24 K=40 E=4 bias=yes discrete_bias=yes bias_scale=yes alpha=yes",
    "grouped_gemm dgrad R=64 N=24 K=40 E=4 format=mxfp8 discrete_rhs=yes beta=yes",
    "grouped_gemm wgrad R=64 N=24 K=40 E=4 out=f32 discrete_out=yes accumulate=per_expert",
    "grouped_gemm fprop R=64 N=24 K=40 E=4 gather=lhs T=33 top_k=2 act=swiglu prob=yes z=yes",
    "grouped_gemm wgrad R=64 N=24 K=40 E=4 gather=rhs T=33 top_k=2",
    "offsets routing R=64 E=4 T=32 top_k=2",
    "permute combine_backward T=32 top_k=2 R=64 H=24 E=4 prob=yes",
    "permute permute T=32 top_k=2 R=64 H=64 E=4 prob=yes format=mxfp8",
    "quantize rows R=64 C=40 E=4 along_k=nvfp4:sr along_rows=nvfp4:rht+sr role=dy",
    "quantize rows R=64 C=40 E=4 along_k=mxfp8 along_rows=fp8_tensor gather=yes T=33 top_k=2",
    "quantize weights N=64 K=40 E=4 source=bf16 along_k=nvfp4 role=w discrete=yes",
    "routing backward softmax T=32 E=8 top_k=2",
};

}  // namespace cadre::test
