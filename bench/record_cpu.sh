#!/usr/bin/env bash
# usage: bench/record_cpu.sh [BUILD]   (default build/cpu, which must have been built)
# Times grouped_gemm on this machine beside one dense oneDNN product of equal work, with uniform and
# skewed routing, and writes bench/results/<processor>-cpu-gemm.json. Wants an idle machine: the two
# contestants alternate, but one of them reads more memory than the other.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build/cpu}
processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1 | tr 'A-Z' 'a-z' |
  sed 's/([^)]*)//g; s/[^a-z0-9]\{1,\}/-/g; s/^-//; s/-$//')
mkdir -p bench/results
"$build/cadre" bench --file bench/shapes/cpu_gemm.txt --offsets uniform,zipf:1 --repeat 41 \
  --json "bench/results/${processor:-unknown}-cpu-gemm.json"
