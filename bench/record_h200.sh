#!/usr/bin/env bash
# usage: bench/record_h200.sh [BUILD [WORDS]]   (default build/cuda, which must have been built)
# Times grouped_gemm on a GPU beside cuBLAS, with uniform and skewed routing, and writes
# bench/results/nvidia-h200-grouped-gemm.json. Where torch is there, times it (and DeepGEMM) beside
# cadre too, into nvidia-h200-grouped-gemm-torch.json. WORDS, an extended regular expression, takes
# those lines of bench/shapes/h200_grouped_gemm.txt alone, such as 'olmoe|qwen3'.
# OFFSETS and OUT in the environment replace the routings and the folder of the records.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build/cuda}
words=${2:-}
offsets=${OFFSETS:-uniform,zipf:1}
out=${OUT:-bench/results}
mkdir -p "$out"
shapes=bench/shapes/h200_grouped_gemm.txt
if [ -n "$words" ]; then
  shapes=$build/record_h200_shapes.txt  # the record names it
  grep '^grouped_gemm' bench/shapes/h200_grouped_gemm.txt | grep -E "$words" >"$shapes"
fi
"$build/cadre" bench --device cuda --file "$shapes" --offsets "$offsets" --repeat 31 \
  --json "$out/nvidia-h200-grouped-gemm.json"
if python3 -c 'import torch' 2>/dev/null; then
  commit=$(sed -n 's/^ "commit": "\(.*\)",$/\1/p' "$out/nvidia-h200-grouped-gemm.json")
  python3 bench/peers/torch_grouped_gemm.py --commit "$commit" --library "$build/bench/libcadre_bench_c.so" \
    --file "$shapes" --offsets "$offsets" --json "$out/nvidia-h200-grouped-gemm-torch.json"
else
  echo "torch is not here, so it was not timed"
fi
