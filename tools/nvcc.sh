#!/usr/bin/env bash
# usage: tools/nvcc.sh NVCC ARGUMENT...
# Compiles CUDA code, and fails where a kernel spills registers or where its tensor core products are
# serialised: both cost more than any other mistake, and ptxas only mentions them in passing.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" -Xptxas=-v 2>"$log"
code=$?
bad=$(grep -E '\(C75[0-9]{2}\)|[1-9][0-9]* bytes spill' "$log")
if [ -n "$bad" ]; then
  echo "$bad" >&2
  echo "tools/nvcc.sh: a kernel spills registers or waits between its products" >&2
  code=1
fi
# What is left is for people.
grep -vE '^ptxas info|bytes stack frame|^$' "$log" >&2
exit $code
