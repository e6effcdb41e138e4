#!/usr/bin/env bash
# usage: tools/gpu.sh [-b PROGRAMS] [-o OUT] [-d DEVICE] [-t SECONDS] [-r REPEAT] STEP...
#
# Everything that is to be seen on a GPU, step by step: each has a time limit, and a failure stops
# none behind it. Programs are of a build (default build/cuda), or what tools/pack_device.sh packed
# (build/device). OUT (default build/gpu) gets log.txt, summary.txt and records.tar.gz; the latter's
# files belong into bench/results. Steps that no longer fit into SECONDS (default 570) are left out;
# benchmarks launch each contestant REPEAT times (default 31).
#
#   tests      every test with the label gpu
#   check, layers    the shapes of bench/shapes/check.txt and 3000 random problems, and layers.txt,
#              with a hash of the bits of each in log.txt
#   memcheck, racecheck, synccheck, initcheck    of compute-sanitizer, on small sets
#   gemm, accumulate, few, other    `cadre bench` beside cuBLAS, on bench/shapes/h200_*.txt
#   torch, torch_accumulate, torch_few, torch_other    the same beside torch and DeepGEMM
#   torch_fine    products of layers whose experts are many or narrow, on h200_fine_grained.txt
#   f16        fp16 beside bf16
#   torch_fp8  products of fp8_block by sm90_fp8_rows, beside bf16 and DeepGEMM
#   torch_fp8_tensor    those of fp8_tensor, beside fp8_block, bf16 and torch._scaled_grouped_mm
#   torch_packed    products of packed weights by sm90_packed_rows, beside bf16
#   gated      fc1 with its activation in the product, on h200_gated.txt
#   quantize   quantise and dequantise beside a copy of as many bytes
#   moves      what stands around the products, beside a copy of as many bytes, on h200_moves.txt
#   moe_few    whole layers with few tokens, on h200_moe_few.txt
#   moe, mlp   whole layers, and their expert MLPs, beside their own products, on h200_moe.txt and _mlp
#   recipes, recipes_uncached, decoded_recipes    the expert MLPs in fp8_block with weights that are cached
#              and not, and in recipes whose operands are decoded, beside bf16, on h200_recipes.txt, ...
#   quantized_weights    forward of those whose weights come quantised, likewise
#   host       what the host needs for a call
#   facts      `cadre facts`
#   links      what two GPUs do with each other
#   expert_parallel, torch_expert_parallel    rows between two GPUs, beside copies and beside NCCL
#   expert_parallel_few    few tokens between two ranks that share a GPU
#   expert_parallel_codes, expert_parallel_sums    the same rows as numbers and as codes; summed at
#              home and at the experts' rank
#   torch_expert_layer    whole layers on two GPUs, beside NCCL and one GPU
#   door       the tests of the PyTorch door, with the torch and the pytest of python3
#   lost_ranks, soak    on two GPUs: ranks that are killed or raise; a hundred thousand exchanges
#   torch_door, torch_door_host    the door beside torch, and what it costs the host
#   torch_moe, torch_moe_few    whole layers beside torch, and SonicMoE and triton_kernels if installed
#   torch_mlp    their experts alone beside torch
#   huggingface, huggingface_compiled    models of transformers beside their own experts; the latter
#              decodes with Qwen3-MoE as inductor compiles it, which needs a C compiler, and with the
#              attention of bench/peers/grouped_attention.py
#   gpt        examples/train_gpt.py: loss and speed of Cadre's experts and of torch's
#
#   correct    tests check layers memcheck racecheck synccheck initcheck
#   speed      gemm torch accumulate torch_accumulate few torch_few f16 host facts
#   others     other torch_other
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
programs=build/cuda out=build/gpu device=cuda limit=570 repeat=31
while getopts b:o:d:t:r: option; do
  case $option in
    b) programs=$OPTARG ;;
    o) out=$OPTARG ;;
    d) device=$OPTARG ;;
    t) limit=$OPTARG ;;
    r) repeat=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# What was packed is unpacked; programs of a build are where CMake put them.
if [ -f "$programs/payload.tar.xz" ]; then
  mkdir "$work/programs"
  tar -xJf "$programs/payload.tar.xz" -C "$work/programs" ||
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" \
      "$programs/payload.tar.xz" "$work/programs" || exit 1
  programs=$work/programs
  export LD_LIBRARY_PATH=$programs/lib:${LD_LIBRARY_PATH:-}
fi
# cuBLAS comes with torch where CUDA's own folder is not in the loader's path.
for folder in /usr/local/cuda/lib64 \
  "$(python3 -c 'import nvidia.cu13 as p; print(p.__path__[0] + "/lib")' 2>/dev/null)" \
  "$(python3 -c 'import nvidia.cublas as p; print(p.__path__[0] + "/lib")' 2>/dev/null)"; do
  [ -e "$folder/libcublas.so.13" ] && export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$folder
done
export OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1 PYTHONPATH=$programs/torch:${PYTHONPATH:-}

cadre=$programs/cadre library=$programs/bench/libcadre_bench_c.so
mkdir -p "$out" "$work/records"
log=$out/log.txt summary=$out/summary.txt
: >"$log"
: >"$summary"
commit=$(cat "$programs/commit" 2>/dev/null || git describe --always --dirty --abbrev=12 --exclude='*')
name=
[ "$device" = cpu ] || name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null |
  head -1 | tr 'A-Z ' 'a-z-')
name=${name:-cpu}

# run NAME SECONDS COMMAND...: one line of summary; the end of what a failure said.
run() {
  local step=$1 most=$2 start=$SECONDS left=$((limit - SECONDS)) code words
  shift 2
  if [ "$left" -lt 10 ]; then
    echo "$step: NOT RUN, no time left" | tee -a "$summary"
    return
  fi
  echo "==== $step: $*" >>"$log"
  timeout -k 5 $((most < left ? most : left)) "$@" >"$work/output" 2>&1
  code=$?
  cat "$work/output" >>"$log"
  case $code in
    0) words=good
      grep -q '^\[  SKIPPED \]' "$work/output" && words="SKIPPED, at least in part" ;;
    124 | 137) words="STOPPED by its time limit" ;;
    *) words="FAILED with $code" ;;
  esac
  echo "$step: $words, $((SECONDS - start)) s" | tee -a "$summary"
  [ $code = 0 ] || tail -n 15 "$work/output" | cut -c1-300 | sed 's/^/    /' | tee -a "$summary"
}

programs_of() { find "$programs/tests" -type f -perm -u+x -name "$1" | sort; }

run_tests() {
  local test
  for test in $(programs_of '*_on_device*'); do
    run "test $(basename "$test")" 240 "$test"
  done
}

# Small, since a sanitized kernel is a hundred times slower; random only by its seed. In one thread:
# racecheck loses its way, or stops, when threads launch kernels at the same time.
run_sanitizer() {
  local sanitized=(env OMP_NUM_THREADS=1 compute-sanitizer --tool "$1" --error-exitcode 9 "$cadre"
    check --device "$device" --raw-workspace)
  run "$1" 60 "${sanitized[@]}" --file bench/shapes/sanitizer.txt
  run "$1 of random problems" 60 "${sanitized[@]}" --random 24 --seed 5
  run "$1 of codes" 60 "${sanitized[@]}" --only sm90_fp8_rows grouped_gemm dgrad R=300 N=272 K=136 \
    E=5 format=fp8_block rhs_major=column lhs_scales_major=column discrete_rhs=yes tail=zero
  run "$1 of packed weights" 60 "${sanitized[@]}" --only sm90_packed_rows \
    --file bench/shapes/sanitizer_packed.txt
}

# record STEP SECONDS TOPIC COMMAND...: the command writes the record of that topic.
record() {
  local step=$1 most=$2 topic=$3
  shift 3
  run "$step" "$most" "$@" --json "$work/$name-$topic.json"
  [ -s "$work/$name-$topic.json" ] || return
  sed -i "s|$work/||g" "$work/$name-$topic.json"  # no path of a machine
  mv "$work/$name-$topic.json" "$work/records/"
  tar -czf "$out/records.tar.gz" -C "$work/records" .
}

# bench STEP SECONDS TOPIC SHAPES OPTION...
bench() {
  local step=$1 most=$2 topic=$3 shapes=$4
  shift 4
  record "$step" "$most" "$topic" "$cadre" bench --device "$device" \
    --file "bench/shapes/$shapes.txt" --repeat "$repeat" "$@"
}

beside_torch() {
  local step=$1 most=$2 topic=$3 shapes=$4
  shift 4
  record "$step" "$most" "$topic-torch" python3 bench/peers/torch_grouped_gemm.py \
    --library "$library" --commit "$commit" --file "bench/shapes/$shapes.txt" \
    --repeat "$repeat" "$@"
}

# Files of tests side by side, which leaves the GPU busy; the one whose tensors are large behind them.
# A file of which no test is for a GPU is good.
# shellcheck disable=SC2016
one_file='out=$(timeout --foreground 330 python3 -m pytest -q -p no:cacheprovider -k "not cpu" "$0" 2>&1); code=$?
  echo "$0: $code"; [ $code = 5 ] || { echo "$out" | tail -n 60; exit $code; }'
run_door() {
  find tests/torch -name 'test_*.py' ! -name 'test_wheel*' ! -name '*_long.py' \
    ! -name test_package.py ! -name test_typing.py ! -name test_megatron.py ! -name test_large.py \
    ! -name test_expert_parallel_lost_ranks.py | sort >"$work/files"
  run door 480 env OMP_NUM_THREADS=2 xargs -a "$work/files" -P 11 -n 1 bash -c "$one_file"
  run door_large 90 bash -c "$one_file" tests/torch/test_large.py
  run door_families 200 bash -c "$one_file" tests/torch/test_huggingface_long.py
}

on_two_gpus=(env NCCL_NVLS_ENABLE=0 python3 -m torch.distributed.run --standalone
  --nproc-per-node 2)

beside_torch_in_python() {
  local topic=$1
  shift
  record "${topic//-/_}" 200 "$topic" python3 bench/peers/torch_door.py --commit "$commit" "$@"
}

# beside_moe_peers SECONDS TOPIC SHAPES OPTION...: it writes what it has after each row.
beside_moe_peers() {
  local most=$1 topic=$2 shapes=$3
  shift 3
  record "${topic//-/_}" "$most" "$topic" python3 bench/peers/torch_moe.py --commit "$commit" \
    --file "bench/shapes/$shapes.txt" --seconds $((most - 60)) "$@"
}

# beside_ranks SECONDS TOPIC SCRIPT OPTION...: on two GPUs.
beside_ranks() {
  local most=$1 topic=$2 script=$3
  shift 3
  record "$script" "$most" "$topic" "${on_two_gpus[@]}" "bench/peers/$script.py" \
    --commit "$commit" "$@"
}

# Its record is one file of several.
run_gpt() {
  run gpt 400 python3 examples/train_gpt.py --forbid-waits --commit "$commit" --out "$work/gpt" \
    --compare cadre:0 torch:0 cadre:1 torch:1 cadre:0:compiled torch:0:compiled \
    cadre:0:graphed torch:0:graphed
  [ -s "$work/gpt/record.json" ] || return
  cp "$work/gpt/record.json" "$work/records/$name-gpt.json"
  cp "$work/gpt/loss.png" "$out/"
  tar -czf "$out/records.tar.gz" -C "$work/records" .
}

take() {
  local routings=uniform,gamma:1 step
  case $1 in
    correct)
      for step in tests check layers memcheck racecheck synccheck initcheck; do
        take $step
      done
      ;;
    speed)
      for step in gemm torch accumulate torch_accumulate few torch_few f16 host facts; do
        take $step
      done
      ;;
    others) for step in other torch_other; do take $step; done ;;
    tests) run_tests ;;
    check) run check 240 "$cadre" check --device "$device" --file bench/shapes/check.txt \
      --random 3000 --seed 1 --limit 0 --digest ;;
    layers) run layers 120 "$cadre" check --device "$device" --file bench/shapes/layers.txt --digest ;;
    memcheck | racecheck | synccheck | initcheck) run_sanitizer "$1" ;;
    gemm) bench gemm 540 grouped-gemm h200_grouped_gemm --offsets $routings ;;
    accumulate)
      bench accumulate 240 grouped-gemm-accumulate h200_accumulate --offsets $routings
      ;;
    few) bench few 300 grouped-gemm-few-tokens h200_few_tokens ;;
    other)
      bench other 540 grouped-gemm-other-layers h200_other_layers --offsets $routings
      ;;
    f16) bench f16 400 grouped-gemm-f16 h200_f16 --beside "format=bf16 out=bf16" ;;
    gated) bench gated 400 grouped-gemm-gated h200_gated ;;
    torch_fp8)
      record torch_fp8 300 grouped-gemm-fp8-torch python3 bench/peers/torch_fp8_block.py \
        --library "$library" --commit "$commit" --file bench/shapes/h200_fp8.txt \
        --offsets $routings --repeat "$repeat"
      ;;
    torch_fp8_tensor)
      record torch_fp8_tensor 300 grouped-gemm-fp8-tensor-torch python3 \
        bench/peers/torch_fp8_tensor.py --library "$library" --commit "$commit" \
        --file bench/shapes/h200_fp8_tensor.txt --offsets $routings --repeat "$repeat"
      ;;
    torch_packed)
      record torch_packed 300 grouped-gemm-packed-torch python3 bench/peers/torch_packed.py \
        --library "$library" --commit "$commit" --file bench/shapes/h200_packed.txt \
        --offsets uniform --repeat "$repeat" --load 0.3
      ;;
    quantize) bench quantize 240 quantize h200_quantize ;;
    moves) bench moves 240 moves h200_moves ;;
    moe_few) bench moe_few 120 moe-few-tokens h200_moe_few ;;
    moe) bench moe 540 moe h200_moe --offsets $routings ;;
    mlp) bench mlp 540 mlp h200_mlp --offsets $routings ;;
    recipes)
      bench recipes 500 recipes h200_recipes --beside 'recipe=bf16 cache_weights=no' --load 1
      ;;
    recipes_uncached)
      bench recipes_uncached 500 recipes-uncached h200_recipes_uncached \
        --beside 'recipe=bf16 cache_weights=no' --load 1
      ;;
    decoded_recipes)
      bench decoded_recipes 540 decoded-recipes h200_decoded_recipes \
        --beside 'recipe=bf16 cache_weights=no' --load 1
      ;;
    quantized_weights)
      bench quantized_weights 200 quantized-weights h200_quantized_weights \
        --beside 'recipe=bf16 quantized_w=no' --load 1
      ;;
    host) bench host 60 host-time host_time --host-time ;;
    torch) beside_torch torch 120 grouped-gemm h200_grouped_gemm --offsets $routings ;;
    torch_accumulate)
      beside_torch torch_accumulate 60 grouped-gemm-accumulate h200_accumulate --offsets $routings
      ;;
    torch_few) beside_torch torch_few 60 grouped-gemm-few-tokens h200_few_tokens ;;
    torch_other)
      beside_torch torch_other 90 grouped-gemm-other-layers h200_other_layers --offsets $routings
      ;;
    torch_fine) beside_torch torch_fine 60 grouped-gemm-fine-grained h200_fine_grained ;;
    expert_parallel)
      bench expert_parallel 300 expert-parallel h200_expert_parallel --offsets $routings --load 0.3
      ;;
    expert_parallel_few)
      bench expert_parallel_few 60 expert-parallel-few-one-gpu h200_expert_parallel_few --load 0.3
      ;;
    expert_parallel_codes)
      bench expert_parallel_codes 300 expert-parallel-codes h200_expert_parallel_codes --load 0.3
      ;;
    expert_parallel_sums)
      bench expert_parallel_sums 200 expert-parallel-sums h200_expert_parallel_sums --load 0.3
      ;;
    torch_expert_parallel)
      beside_ranks 300 expert-parallel-torch torch_expert_parallel \
        --file bench/shapes/h200_expert_parallel.txt --offsets $routings
      ;;
    torch_expert_layer)
      beside_ranks 540 expert-layer-torch torch_expert_layer --file bench/shapes/h200_moe.txt \
        --layers mixtral8x7b,dsv3_ep8,qwen3_30b,olmoe,gptoss120b --offsets $routings --seconds 480
      ;;
    facts) record facts 60 facts "$cadre" facts --device "$device" ;;
    links) record links 60 link "$cadre" facts --ranks 2 ;;
    door) run_door ;;
    lost_ranks)
      run lost_ranks 300 env NCCL_NVLS_ENABLE=0 python3 -m pytest -q -p no:cacheprovider \
        tests/torch/test_expert_parallel_lost_ranks.py
      ;;
    soak)
      run soak 400 "${on_two_gpus[@]}" tests/torch/expert_parallel_soak.py --exchanges 100000 \
        --replays 10000 --seconds 360
      ;;
    torch_door)
      beside_torch_in_python torch-door --file bench/shapes/h200_grouped_gemm.txt \
        --offsets $routings --repeat "$repeat"
      ;;
    torch_door_host) beside_torch_in_python torch-door-host --host ;;
    torch_moe) beside_moe_peers 500 moe-torch h200_moe --offsets $routings ;;
    torch_mlp) beside_moe_peers 300 mlp-torch h200_moe --from rows --peers torch ;;
    torch_moe_few) beside_moe_peers 300 moe-few-tokens-torch h200_moe_few --calls forward ;;
    huggingface)
      record huggingface 540 huggingface env HF_HUB_OFFLINE=1 python3 bench/peers/huggingface.py \
        --commit "$commit" --seconds 480
      ;;
    huggingface_compiled)
      record huggingface_compiled 540 huggingface-compiled env HF_HUB_OFFLINE=1 python3 \
        bench/peers/huggingface.py --commit "$commit" --models qwen3_moe --calls graph,compiled \
        --attention grouped --seconds 420
      ;;
    gpt) run_gpt ;;
    *) echo "$1: NO SUCH STEP" | tee -a "$summary" ;;
  esac
}

for step in "$@"; do take "$step"; done
python3 bench/digest.py "$work/records"/*.json 2>&1 | tee -a "$summary"
echo "---- $SECONDS s in all"
! grep -qE ': (FAILED|SKIPPED|STOPPED|NOT RUN|NO SUCH)' "$summary"
