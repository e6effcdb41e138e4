#!/usr/bin/env bash
# clang-format, then clang-tidy, over this project's sources: `tools/lint.sh BUILD_DIR [REGEX]`.
# BUILD_DIR holds compile_commands.json; REGEX chooses the files that clang-tidy reads.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
regex=${2:-"/(src|apps|cli|bench)/.*[.]cpp$"}

mapfile -t sources < <(find [a-z]* -path build -prune -o \
                         -regex '.*[.]\(h\|cpp\|cuh\|cu\)' -print | sort)
clang-format --dry-run -Werror "${sources[@]}"
echo "lint: clang-format agrees with ${#sources[@]} files"

# Compiler commands are g++'s: clang reads none of its precompiled headers, and does not know every
# warning that they name.
database=$build/lint
mkdir -p "$database"
sed -E 's# -(Winvalid-pch|fpch-preprocess|include [^ ]*/cmake_pch\.hxx)##g' \
  "$build/compile_commands.json" >"$database/compile_commands.json"
log=$build/clang-tidy.log
if ! run-clang-tidy -quiet -p "$database" -extra-arg=-Wno-unknown-warning-option \
    "$PWD$regex" >"$log" 2>&1; then
  grep -E "(warning|error|note):" -A 3 "$log" | head -200 || cat "$log"
  exit 1
fi
read_files=$(grep -c '^clang-tidy' "$log") || { echo "lint: no file is $regex"; exit 1; }
echo "lint: clang-tidy agrees with $read_files files"
