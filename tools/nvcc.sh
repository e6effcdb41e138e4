#!/usr/bin/env bash
# usage: tools/nvcc.sh NVCC ARGUMENT...
# Compiles CUDA code, and fails where a kernel for Hopper spills registers or where its tensor core
# products are serialised: both cost more than any other mistake, and ptxas only mentions them in passing.
# Nobody has timed kernels on other GPUs, where a few spill.
#
# CADRE_DEVICE_CODE, where it is set, names the sources, one a line, whose device code is wanted: for
# Hopper, and for sm_80 where they are not of Hopper alone. That of others ends as PTX that nobody has
# optimised, for checks without a GPU (preset `ci`): errors of the compiler are found, and those of
# ptxas are not.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
command=("$@")
if [ -n "${CADRE_DEVICE_CODE+set}" ]; then
  root=$(realpath "$(dirname "$0")/..")
  optimised=no
  for at in "${!command[@]}"; do
    [ "${command[at]}" = -c ] || continue
    source=$(realpath -m "${command[at + 1]}")
    if grep -qxF "${source#"$root"/}" <<<"$CADRE_DEVICE_CODE"; then
      optimised=yes
      [[ $source = */sm90/* ]] || command+=("--generate-code=arch=compute_80,code=[sm_80]")
    fi
  done
  if [ "$optimised" = no ]; then
    mapfile -t command < <(printf '%s\n' "$@" |
      sed -E 's/code=\[(sm|compute)_([0-9]+[af]?)[^]]*\]/code=[compute_\2]/')
    command+=(-Xcicc=-O0)
  fi
fi
"${command[@]}" -Xptxas=-v 2>"$log"
code=$?
bad=$(awk '/Compiling entry function/ { elsewhere = !/sm_90a/ }
  /\(C75[0-9][0-9]\)/ || (!elsewhere && /[1-9][0-9]* bytes spill/)' "$log")
if [ -n "$bad" ]; then
  echo "$bad" >&2
  echo "tools/nvcc.sh: a kernel spills registers or waits between its products" >&2
  code=1
fi
# What is left is for people.
grep -vE '^ptxas info|bytes stack frame|^$' "$log" >&2
exit $code
