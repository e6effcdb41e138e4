# The files of src/cuda, once for the library and once for the emulator of the tests.

# Any architecture from sm_80 on, and the host's side of all kernels.
set(cadre_cuda_sources
  backend.cpp
  device.cpp
  device/tensor_map.cpp
  poison.cpp
  portable/activation.cu
  portable/bias_grad.cu
  portable/block_offsets.cu
  portable/cast.cu
  portable/expert_amax.cu
  portable/expert_scales.cu
  portable/grouped_gemm.cpp
  portable/instances/fp8_block.cu
  portable/instances/fp8_tensor.cu
  portable/instances/mxfp4.cu
  portable/instances/mxfp8.cu
  portable/instances/nvfp4.cu
  portable/offsets.cu
  portable/permute.cu
  portable/pointers.cu
  portable/quantize.cu
  portable/ragged_contraction.cu
  portable/ragged_rows.cu
  portable/routing.cu
  sm90/fp8_rows.cpp
  sm90/gated_rows.cpp
  sm90/grouped_gemm.cpp
  sm90/packed_rows.cpp
  sm90/prepare.cpp
  sm90/ragged_contraction.cpp
  sm90/ragged_rows.cpp
)

# Kernels for Hopper use what no other architecture has. One instance a file, so that they compile
# side by side.
set(cadre_sm90_sources
  sm90/clear_count.cu
  sm90/expert_maps.cu
  sm90/instances/contraction_bf16_to_bf16.cu
  sm90/instances/contraction_bf16_to_f32.cu
  sm90/instances/contraction_f16_to_f16.cu
  sm90/instances/contraction_f16_to_f32.cu
  sm90/instances/fp8_rows_e4m3_to_bf16.cu
  sm90/instances/fp8_rows_e4m3_to_f32.cu
  sm90/instances/fp8_rows_e5m2_to_bf16.cu
  sm90/instances/fp8_rows_e5m2_to_f32.cu
  sm90/instances/gated_rows_bf16.cu
  sm90/instances/gated_rows_f16.cu
  sm90/instances/packed_rows_mxfp4_to_bf16.cu
  sm90/instances/packed_rows_mxfp4_to_f32.cu
  sm90/instances/packed_rows_mxfp8_to_bf16.cu
  sm90/instances/packed_rows_mxfp8_to_f32.cu
  sm90/instances/packed_rows_nvfp4_to_bf16.cu
  sm90/instances/packed_rows_nvfp4_to_f32.cu
  sm90/instances/rows_k_major_bf16_to_bf16.cu
  sm90/instances/rows_k_major_bf16_to_f32.cu
  sm90/instances/rows_k_major_f16_to_f16.cu
  sm90/instances/rows_k_major_f16_to_f32.cu
  sm90/instances/rows_mn_major_bf16_to_bf16.cu
  sm90/instances/rows_mn_major_bf16_to_f32.cu
  sm90/instances/rows_mn_major_f16_to_f16.cu
  sm90/instances/rows_mn_major_f16_to_f32.cu
)
