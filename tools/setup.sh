#!/usr/bin/env bash
# Installs what is missing to build and test on Debian 12: `tools/setup.sh [build|demo|lint]`.
#
# Debian packages by apt-get, as root or through sudo; Python packages into .venv where PyPI can be
# had. Asks nobody anything, installs nothing twice, and takes no time when nothing is missing.
# CADRE_REQUIRE=1 makes missing Python packages an error instead of a message.
set -euo pipefail
cd "$(dirname "$0")/.."

# libdnnl-dev's CMake configuration looks for OpenCL, which the package does not depend on.
build_packages=(g++ ccache cmake ninja-build libdnnl-dev ocl-icd-opencl-dev libgtest-dev libcli11-dev
                nlohmann-json3-dev pkg-config python3 python3-venv)
fuzz_packages=(clang-14 libclang-rt-14-dev)  # libFuzzer is clang's
lint_packages=(clang-format clang-tidy)
venv_retry_minutes=720  # after PyPI could not be had

say() { echo "setup: $*" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

missing_packages() {
  local package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' ||
      echo "$package"
  done
}

install_packages() {
  local missing
  command -v dpkg-query >/dev/null || {
    say "this is no Debian; install the counterparts of: $* (going on with what is here)"
    return 0
  }
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
    say "missing packages: ${missing[*]}"
    say "you are neither root nor have sudo; have somebody run: apt-get install ${missing[*]}"
    exit 1
  fi
  say "installing ${missing[*]}"
  as_root apt-get -qq update
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install --yes --no-install-recommends "${missing[@]}" >/dev/null
}

# .venv/complete holds the requirements that are installed; make configures again when it changes.
# .venv/unavailable remembers that PyPI could not be had, so that only one run in a while waits for it.
# torch is large: where it alone cannot be had, the rest is installed.
install_python() {
  local all=(tools/requirements.txt tools/requirements-torch.txt) count
  cat "${all[@]}" | cmp -s - .venv/complete && return 0
  if [ "${CADRE_REQUIRE:-0}" != 1 ] &&
     [ -n "$(find .venv/unavailable -mmin -$venv_retry_minutes 2>/dev/null)" ]; then
    say "not all Python packages are here (PyPI could not be had); tests that need them are skipped"
    return 0
  fi
  local python=/usr/bin/python3
  [ -x $python ] || python=python3
  $python -m venv .venv || mkdir -p .venv
  for count in ${#all[@]} 1; do
    if install_requirements "${all[@]:0:$count}"; then
      cat "${all[@]:0:$count}" >.venv/complete
      break
    fi
  done
  if cat "${all[@]}" | cmp -s - .venv/complete; then
    rm -f .venv/unavailable
    return 0
  fi
  touch .venv/unavailable
  [ -e .venv/complete ] || : >.venv/complete
  if [ "${CADRE_REQUIRE:-0}" = 1 ]; then
    say "Python packages are required here (CADRE_REQUIRE=1), and PyPI could not be had"
    exit 1
  fi
  say "PyPI could not be had; tests that need Python packages are skipped"
}

# install_requirements FILE...: all of them at once, so that they agree on versions.
install_requirements() {
  local files=("${@/#/--requirement=}")
  say "installing $(grep -hv '^#' "$@" | tr '\n' ' ')into .venv; torch's are gigabytes"
  .venv/bin/pip install --disable-pip-version-check --retries 1 --timeout 10 "${files[@]}"
}

case "${1:-build}" in
  build) install_packages "${build_packages[@]}" "${fuzz_packages[@]}"; install_python ;;
  demo) install_packages "${build_packages[@]}" ;;
  lint) install_packages "${lint_packages[@]}" ;;
  *) say "unknown set '$1', must be build, demo or lint"; exit 2 ;;
esac
