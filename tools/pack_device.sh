#!/usr/bin/env bash
# usage: tools/pack_device.sh [BUILD]   (default build/cuda)
# Builds what tools/gpu.sh runs and packs it for a machine that has a GPU but no compiler of ours:
# build/device/payload.tar.xz with the command line, the library of bench/peers, the tests with the
# label gpu, the Python package where it was built, all stripped, and the shared libraries that such a
# machine may lack. There:
#   tools/gpu.sh -b build/device -o "$OUT" correct
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/cuda} out=build/device most=$((60 << 20))  # bytes
tests=$(ctest --test-dir "$build" -N -L '^gpu$' | sed -n 's/^ *Test *#[0-9]*: //p')
# shellcheck disable=SC2086
cmake --build "$build" --target cadre_cli cadre_bench_c $tests
payload=$(mktemp -d)
trap 'rm -rf "$payload"' EXIT
mkdir -p "$payload/tests" "$payload/bench" "$payload/lib"
put() { strip -o "$payload/$2" "$1" && chmod +x "$payload/$2"; }
put "$build/cadre" cadre
put "$build/bench/libcadre_bench_c.so" bench/libcadre_bench_c.so
for test in $tests; do
  put "$(find "$build/tests" -type f -perm -u+x -name "$test")" "tests/$test"
done
# oneDNN, if the build has it and however it is called; OpenMP; what Debian's oneDNN names.
for path in $(ldd "$build/cadre" | grep -oE '/[^ ]*/lib(dnnl|gomp|OpenCL)\.so[^ ]*'); do
  put "$path" "lib/$(basename "$path")"
done
if [ -e "$build/torch/cadre/libcadre_torch.so" ]; then
  cmake --build "$build" --target cadre_torch cadre_torch_build
  mkdir -p "$payload/torch/cadre"
  cp -L "$build"/torch/cadre/*.py "$payload/torch/cadre/"
  for path in "$build"/torch/cadre/*.so*; do
    put "$path" "torch/cadre/$(basename "$path")"
  done
fi
git describe --always --dirty --abbrev=12 --exclude='*' >"$payload/commit"
rm -rf "${out:?}"
mkdir -p "$out"
# A large dictionary, since every program holds the same kernels.
tar -C "$payload" -cf - . | xz -T1 -6 --lzma2=preset=6,dict=128MiB >"$out/payload.tar.xz"
bytes=$(stat -c %s "$out/payload.tar.xz")
echo "$out/payload.tar.xz: $bytes bytes, $(find "$payload" -type f | wc -l) files"
[ "$bytes" -le "$most" ] || { echo "that is more than $most bytes" >&2; exit 1; }
