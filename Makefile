# The two commands of the README: `make demo` and `make test`. Everything else is CMake's presets.
#
# Both install what they miss (tools/setup.sh), then configure, build and run; a second run starts
# in seconds. REQUIRE=1 turns "skipped, a Python package is missing" into a failure.
NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
PRESET ?= $(if $(NVCC),cuda,cpu)
REQUIRE ?= 0
export CADRE_REQUIRE := $(REQUIRE)
export CUDACXX := $(or $(CUDACXX),$(NVCC))
JOBS := $(shell nproc)
BUILD_DIR := build/$(PRESET)
DEMO_RECIPES := bf16,fp8_block,mxfp8,nvfp4

.PHONY: help setup build test sanitize slow mutants demo lint site clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a Mixture-of-Experts model on this repository's text, in four formats"
	@echo "make test   build, run the fast tests, and run the CPU's again with sanitizers"
	@echo "make sanitize  the GPU's code on the emulator and what the door owns, with sanitizers"
	@echo "make build  build $(BUILD_DIR)      make slow  the slow tests"
	@echo "make lint   clang-format and clang-tidy          make mutants  faults that tests must see"
	@echo "make site   the documentation as a site, in build/site"

setup:
	@tools/setup.sh build

# What setup may change: once it has torch, CMake finds it.
.venv/complete: setup
	@:

# Configuring is skipped while its result is newer than these; CMake itself looks for the rest.
build/%/build.ninja: CMakePresets.json .venv/complete
	cmake --preset $*
	@touch $@

build: build/$(PRESET)/build.ninja
	cmake --build --preset $(PRESET)

# Two halves, of which both run whatever fails first. The second has no GPU's code: that is for
# `make sanitize`, which takes as long.
HALVES := $(PRESET) cpu-asan
test:
	@failed=; for half in $(HALVES); do \
	  $(MAKE) --no-print-directory test-$$half || failed="$$failed $$half"; \
	done; [ -z "$$failed" ] || { echo "make test: FAILED:$$failed"; exit 1; }

$(HALVES:%=test-%): test-%: build/%/build.ninja
	cmake --build --preset $*
	ctest -j $(JOBS) --preset $* -LE slow

# Those labelled slow take minutes each there, and are built by hand.
sanitize: build/emulator-asan/build.ninja
	@test -d build/emulator-asan/tests/emulator || \
	  { echo "make sanitize: FAILED: the emulator wants the headers of CUDA"; exit 1; }
	cmake --build --preset emulator-asan
	ctest -j $(JOBS) --test-dir build/emulator-asan/tests/emulator -LE slow --no-tests=error \
	  --output-on-failure
	ctest --test-dir build/emulator-asan/tests/torch --output-on-failure

slow: build
	ctest -j $(JOBS) --preset $(PRESET) -L slow

# MUTANTS: options of tools/mutants.py.
MUTANTS := --cpu --in-turn
mutants: build
	tools/mutants.py $(MUTANTS)

# Runs on the CPU, so it builds the command line without CUDA, tests or the PyTorch door. A later
# `make test` configures the folder again where it uses it.
demo:
	@tools/setup.sh demo
	@test -e build/cpu/build.ninja || cmake --preset cpu
	cmake --build --preset cpu --target cadre_cli
	build/cpu/cadre train --recipe $(DEMO_RECIPES) --verify-resume --out build/demo --overwrite

# LINTED: a regular expression of the files that clang-tidy reads; all.
LINTED :=
lint: build/$(PRESET)/build.ninja
	@tools/setup.sh lint
	tools/lint.sh $(BUILD_DIR) $(if $(LINTED),'$(LINTED)')

site:
	tools/python.sh mkdocs,material,mkdocstrings,black -m mkdocs build

clean:
	rm -rf build
