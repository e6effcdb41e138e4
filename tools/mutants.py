#!/usr/bin/env python3
"""Proves that the tests see faults: `tools/mutants.py [OPTION...] [SOURCE [SCRATCH]]`.

tools/mutants.toml lists faults, each one replacement in one file and the test that must turn red.
The sources are copied to SCRATCH (build/mutants), once for each of --jobs; every test that is named
is built and must pass there; then each fault is planted alone, that test is built again, and must
fail: when it runs, or by a static assertion. Prints a table, and exits 1 unless each was caught.
A test that is a file of tests/torch runs with pytest on the package that a preset has built, with
the Python files of the copy; its mutants are skipped where none is built or torch is missing.
--check only looks whether every replacement still finds its text exactly once and names what can be
its test; --cpu leaves out those whose tests run GPU code on the emulator, which take longest;
--in-turn takes those that the last commits touched, their tests first, and a third of the others
(tools/turn.py); --seconds plants no more after so many, and says how many were left. SOURCE itself
is never written to.
"""
import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib

import turn

SECONDS_OF_A_TEST = 900  # a fault may make it run for ever
LEFT_OUT = {"build", ".git", ".venv", ".cache", "__pycache__"}


@dataclasses.dataclass
class Mutant:
    name: str
    file: str
    old: str
    new: str
    test: str
    filter: str = "*"  # of GoogleTest, or -k of pytest, to run only what should fail
    cpu: str = ""  # flags of /proc/cpuinfo without which the code does not run; !: with which
    emulated: bool = False  # its test runs GPU code on the emulator, which needs CUDA's headers
    touched: bool = False  # its file or its test was changed of late

    def fault_in(self, root):
        """Why this mutant cannot be planted in the tree at `root`, or an empty string."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        count = path.read_text().count(self.old)
        if count != 1:
            return f"the old text stands {count} times in {self.file}, must be once"
        if self.old == self.new:
            return "the new text is the old text"
        if self.file.startswith("torch/csrc/"):
            return "no copy builds the C++ of the package"
        return "" if self.is_test(root) else f"{self.test} is neither a *_test nor in tests/torch"

    def is_test(self, root):
        if self.test.endswith(".py"):
            return (root / "tests/torch" / self.test).is_file()
        return self.test.endswith("_test")


def copy_tree(source, target):
    """Makes `target` equal to `source` without touching files that are equal already."""
    wanted = set()
    for folder, folders, names in os.walk(source):
        folders[:] = [f for f in folders if f not in LEFT_OUT]
        for name in names:
            path = pathlib.Path(folder, name)
            wanted.add(path.relative_to(source))
            copy = target / path.relative_to(source)
            if not copy.is_file() or copy.read_bytes() != path.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
                shutil.copymode(path, copy)
    for folder, folders, names in os.walk(target):
        folders[:] = [f for f in folders if f not in LEFT_OUT]
        for name in names:
            copy = pathlib.Path(folder, name)
            if copy.relative_to(target) not in wanted:
                copy.unlink()


def in_turn(source, mutants):
    """Those whose file or test was changed, and those whose turn it is."""
    def is_touched(mutant, changed):
        names = {pathlib.PurePath(path).stem for path in changed}
        return mutant.file in changed or pathlib.PurePath(mutant.test).stem in names

    touched, others = turn.in_turn(source, mutants, is_touched, lambda mutant: mutant.name)
    for mutant in touched:
        mutant.touched = True
    return touched + others


def call(*command, check=False, **environment):
    done = subprocess.run([str(c) for c in command], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=os.environ | environment)
    if check and done.returncode:
        sys.exit(f"mutants: failed: {' '.join(map(str, command))}\n{done.stdout}")
    return done


class GoogleTests:
    """Of a tree, in a build whose folder is as deep as the presets' and whose flags are theirs, so
    that all objects but those with a fault come from the compiler's cache."""

    missing = "headers of CUDA"

    def __init__(self, tree):
        self.build = tree / "build/mutants"
        call("cmake", "-G", "Ninja", "-S", tree, "-B", self.build, "-DCMAKE_BUILD_TYPE=Release",
             "-DCADRE_TORCH=OFF", f"-DCADRE_LAUNCHER={tree / 'tools/with_warnings.sh'}", check=True)

    def has(self, test):
        return call("ninja", "-C", self.build, "-n", test).returncode == 0

    def builds(self, test):
        done = call("cmake", "--build", self.build, "--target", test)
        return "" if done.returncode == 0 else done.stdout

    def run(self, test, pattern):
        """The exit code, the number of red tests, and whether any ran at all."""
        program = next(p for p in self.build.rglob(test) if os.access(p, os.X_OK) and p.is_file())
        done = call("timeout", SECONDS_OF_A_TEST, program, f"--gtest_filter={pattern}",
                    "--gtest_fail_fast")  # one red test is enough
        failures = re.search(r"(\d+) FAILED TEST", done.stdout)
        ran = re.search(r"Running (\d+) tests?", done.stdout)
        return done.returncode, int(failures.group(1)) if failures else 0, not ran or ran[1] != "0"


class Pytests:
    """Files of tests/torch, on the newest package that is built in the source, but with the Python
    files of the tree."""

    missing = "built package or torch"

    def __init__(self, source, tree):
        self.tree, self.package = tree, tree / "build/door/cadre"
        python = source / ".venv/bin/python3"
        self.environment = {"PYTHONPATH": str(self.package.parent), "OMP_WAIT_POLICY": "passive",
                            "PYTHONDONTWRITEBYTECODE": "1", "CADRE_REQUIRE": "0"}
        if python.exists():
            self.environment["CADRE_PYTHON"] = str(python)
        self.link(max(source.glob("build/*/torch/cadre/libcadre_torch.so"), default=None,
                      key=lambda library: library.stat().st_mtime))

    def link(self, library):
        shutil.rmtree(self.package, ignore_errors=True)
        self.package.mkdir(parents=True)
        for file in library.parent.iterdir() if library else ():
            own = self.tree / "torch/cadre" / file.name
            (self.package / file.name).symlink_to(own if own.is_file() else file)

    def has(self, test):
        return any(self.package.iterdir()) and self.pytest("--version").returncode == 0

    def builds(self, test):
        return ""

    def run(self, test, pattern):
        """As that of GoogleTests."""
        done = self.pytest(self.tree / "tests/torch" / test, "-k", pattern.replace("*", ""))
        failures = re.search(r"(\d+) failed", done.stdout)
        return done.returncode, int(failures.group(1)) if failures else 0, done.returncode != 5

    def pytest(self, *words):
        return call("timeout", SECONDS_OF_A_TEST, self.tree / "tools/python.sh", "torch,pytest",
                    "-m", "pytest", "-qx", "-p", "no:cacheprovider", *words, **self.environment)


class Yard:
    """A copy of the tree, and what runs the tests of it."""

    def __init__(self, source, scratch):
        self.source, self.tree = source, scratch / "tree"

    def prepare(self):
        copy_tree(self.source, self.tree)

    @functools.cached_property
    def programs(self):
        return GoogleTests(self.tree)

    @functools.cached_property
    def package(self):
        return Pytests(self.source, self.tree)

    def tests(self, name):
        """Of which the test of that name is one."""
        return self.package if name.endswith(".py") else self.programs

    def restore(self, file):
        shutil.copyfile(self.source / file, self.tree / file)

    def plant(self, mutant):
        path = self.tree / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))


def verdict(yard, mutant):
    """Plants one mutant and says what its test made of it: (caught, what)."""
    yard.plant(mutant)
    try:
        tests = yard.tests(mutant.test)
        errors = tests.builds(mutant.test)
        if "static assertion failed" in errors:
            return True, "red while compiling"
        if errors:
            return False, f"does not compile; plant a fault that does\n{errors}"
        code, failures, _ = tests.run(mutant.test, mutant.filter)
        if code == 0:
            return False, "SURVIVED: no test saw it"
        return True, f"{failures} red" if failures else f"ended with {code}"
    finally:
        yard.restore(mutant.file)


def baseline(tests, test, mutants):
    """The test must build, run something and pass before a fault is planted."""
    errors = tests.builds(test)
    if errors:
        sys.exit(f"mutants: {test} does not build without a mutant\n{errors}")
    for pattern in sorted({m.filter for m in mutants}):
        code, _, ran = tests.run(test, pattern)
        if code or not ran:
            sys.exit(f"mutants: {test} ({pattern}) must run and pass without a mutant")


def hunt(yard, groups, until):
    """Takes tests with their mutants from `groups`, an iterator that all yards share, up to a time:
    how many were caught, the names of those missed, and how many were left."""
    yard.prepare()
    caught, missed, left = 0, [], 0
    for test, mutants in groups:
        if time.monotonic() >= until:
            left += len(mutants)
            continue
        tests = yard.tests(test)
        optional = test.endswith(".py") or any(m.emulated for m in mutants)
        if optional and not tests.has(test):
            for mutant in mutants:
                print(f"skipped {mutant.name:<34} there are no {tests.missing} here", flush=True)
            continue
        baseline(tests, test, mutants)
        for mutant in sorted(mutants, key=lambda m: m.file):
            start = time.monotonic()
            if start >= until:
                left += 1
                continue
            seen, what = verdict(yard, mutant)
            caught += seen
            missed += [] if seen else [mutant.name]
            print(f"{'caught' if seen else 'MISSED'}  {mutant.name:<34} {mutant.test:<24} "
                  f"{time.monotonic() - start:5.1f} s  {what}", flush=True)
    return caught, missed, left


def hunt_in_yards(source, scratch, mutants, jobs, seconds):
    """Each yard in a thread of its own; a test and its mutants stay in one."""
    until = time.monotonic() + seconds
    by_test = sorted(mutants, key=lambda m: m.test)
    groups = [(test, list(of)) for test, of in itertools.groupby(by_test, lambda m: m.test)]
    groups.sort(key=lambda group: (not any(m.touched for m in group[1]), -len(group[1])))
    yards = [Yard(source, scratch / str(at)) for at in range(max(1, min(jobs, len(groups))))]
    shared = iter(groups)
    with concurrent.futures.ThreadPoolExecutor(len(yards)) as threads:
        counts = list(threads.map(lambda yard: hunt(yard, shared, until), yards))
    caught, missed, left = zip(*counts)
    return sum(caught), sorted(itertools.chain(*missed)), sum(left)


def runs_on(cpu, info=pathlib.Path("/proc/cpuinfo")):
    """Whether a mutant's code runs on the processor that `info` describes."""
    flags = set(info.read_text().split()) if info.is_file() else set()
    return all((word.removeprefix("!") in flags) != word.startswith("!") for word in cpu.split())


def read(source):
    table = tomllib.loads((source / "tools/mutants.toml").read_text())["mutant"]
    mutants = [Mutant(**row) for row in table]
    names = [m.name for m in mutants]
    if len(set(names)) != len(names):
        sys.exit("mutants: two have the same name")
    return mutants


def main(arguments):
    here = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only look for the texts")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="without those of the emulator")
    parser.add_argument("--in-turn", action="store_true", help="what changed, a third of the rest")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then plant no more")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)),
                        help="copies of the tree at work (the number of processors)")
    parser.add_argument("source", nargs="?", type=pathlib.Path, default=here)
    parser.add_argument("scratch", nargs="?", type=pathlib.Path)
    options = parser.parse_args(arguments)
    mutants = [m for m in read(options.source) if options.only in m.name]
    faults = [(m.name, m.fault_in(options.source)) for m in mutants]
    for name, fault in faults:
        if fault:
            print(f"mutants: {name}: {fault}")
    if any(fault for _, fault in faults):
        return 1
    print(f"mutants: each of {len(mutants)} finds its text once")
    if options.check:
        return 0

    for mutant in [m for m in mutants if not runs_on(m.cpu)]:
        print(f"skipped {mutant.name:<34} this processor is not {mutant.cpu}")
    mutants = [m for m in mutants if runs_on(m.cpu) and not (options.cpu and m.emulated)]
    if options.in_turn:
        mutants = in_turn(options.source, mutants)
    scratch = (options.scratch or options.source / "build/mutants").resolve()
    caught, missed, left = hunt_in_yards(options.source.resolve(), scratch, mutants, options.jobs,
                                         options.seconds)
    if left:
        print(f"mutants: {left} left, since {options.seconds:.0f} s were over")
    print(f"mutants: {caught} caught, {len(missed)} missed{':' if missed else ''}", *missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
