"""`python -m cadre doctor`: which versions meet here, which devices there are, what runs where, and
why something does not."""

import argparse
import importlib
import platform
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import NamedTuple

from ._library import PATH

HELP = """Says which versions meet here, which devices there are, what runs where and why something
does not. With a PROBLEM, plans that one and says all about it. Exit code 0: all is well here, or
the PROBLEM has a plan."""


class Answer(NamedTuple):
    """What planning a problem on a device came to."""

    plan: str  # the implementation, or a layer's route; empty if there is none
    steps: str  # of a layer, many lines
    refusals: list[str]  # implementations that did not take it, and why


def explain(problem: str, device: str) -> Answer:
    """`problem` as text, such as "grouped_gemm fprop R=64 N=32 K=16 E=4"; `device`: "cpu",
    "cuda:1", "sm_90".

    Errors: ValueError for a problem or device that means nothing.
    """
    import torch

    return Answer(*torch.ops.cadre._explain(problem, device))


def _distribution(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch_version() -> str:
    try:
        return importlib.import_module("torch").__version__
    except ImportError as error:
        return f"not importable: {error}"


def versions() -> list[tuple[str, str]]:
    """Names and versions. Needs neither torch nor the library."""
    rows = [("python", platform.python_version()), ("torch", _torch_version()),
            ("transformers", _distribution("transformers"))]
    try:
        from . import _build as build
    except ImportError:
        return [("cadre", "not built"), *rows]
    cuda = f"CUDA {build.CUDA} for {build.ARCHITECTURES}" if build.CUDA else "no CUDA"
    return [("cadre", f"{build.VERSION}, commit {build.COMMIT}"),
            ("built for", f"torch {build.TORCH}, {cuda}"), ("library", str(PATH)), *rows]


def problems() -> list[tuple[str, str]]:
    """What a table has a row for, and a problem of its kind: each operation and layer, and those
    that have formats or recipes once with each."""
    import torch

    rows, recipes = [], torch.ops.cadre._recipes()
    for problem in torch.ops.cadre._problems():
        name = problem.split()[0]
        for words, choices in (("format|along_k|along_rows", torch.ops.cadre._formats()),
                               ("recipe", recipes)):
            pattern = rf"\b({words})=\w+"
            if re.search(pattern, problem):
                for choice in choices:
                    # The format of a product is that of a recipe.
                    pair = name == "grouped_gemm" and choice not in recipes
                    said = f"x={choice} w={choice}" if pair else rf"\1={choice}"
                    rows.append((f"{name} {choice}", re.sub(pattern, said, problem)))
                break
        else:
            rows.append((name, problem))
    return rows


def _table(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def multiplies(device: str) -> str:
    """Why a small grouped product does not run on `device`, or is wrong; empty if all is well."""
    import torch

    try:
        x = torch.ones(3, 16, device=device, dtype=torch.bfloat16)
        w = torch.ones(2, 8, 16, device=device, dtype=torch.bfloat16)
        offsets = torch.tensor([0, 1, 3], device=device, dtype=torch.int32)
        y = torch.ops.cadre.grouped_gemm(x, [w], offsets, "fprop")
        return "" if bool((y == 16).all()) else f"a product of ones is {y.tolist()}, must be 16"
    except Exception as error:  # whatever stops it is the answer
        return f"{type(error).__name__}: {error}"


def covers(architectures: str, sm: int) -> bool:
    """Whether kernels compiled for `architectures`, such as "80 90a-real" (CMake's words), run on a
    GPU with compute capability `sm`, such as 90."""
    for word in architectures.split():
        match = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", word)
        if not match:
            return True  # native, all: whoever built it knows
        number, only, kind = int(match[1]), match[2], match[3]
        machine_code = number == sm if only == "a" else number // 10 == sm // 10 and number <= sm
        if machine_code and kind != "-virtual" or number <= sm and not only and kind != "-real":
            return True
    return False


def _devices() -> tuple[list[list[str]], list[str]]:
    """Rows of name, architecture and SMs or threads; and what is wrong with these devices."""
    import torch

    from . import _build as build

    rows = [line.split() for line in torch.ops.cadre._devices()]
    wrong = []
    if not build.CUDA and torch.cuda.is_available():
        wrong.append(f"torch sees {torch.cuda.device_count()} GPUs, and this build of cadre has no "
                     "CUDA; build it where nvcc is on the path")
    for name, architecture, _ in rows:
        if architecture != "cpu" and not covers(build.ARCHITECTURES, int(architecture[3:])):
            wrong.append(f"{name} is {architecture}, and this build has kernels for "
                         f"{build.ARCHITECTURES}; build it with --config-settings="
                         f"cmake.define.CMAKE_CUDA_ARCHITECTURES={architecture[3:]}-real")
        elif why := multiplies(name):
            wrong.append(f"{name} runs no grouped_gemm: {why}")
    return rows, wrong


def _implementations(answer: Answer) -> str:
    """All those of a layer, whose steps look like "  dx: cpu_avx512_bf16  [grouped_gemm ...]"."""
    used = dict.fromkeys(re.findall(r"^ +[\w ,]+: (\w+)  \[", answer.steps, re.M))
    return ", ".join(used) or answer.plan or "no"


def _plans(devices: list[str]) -> str:
    """A table of what runs where, and what does not by the reason."""
    table, reasons = [["", *devices]], {}
    for name, problem in problems():
        answers = [explain(problem, device) for device in devices]
        table.append([name, *map(_implementations, answers)])
        for device, answer in zip(devices, answers):
            if not answer.plan:
                # A layer names the step that stops it, then the implementations that refused.
                why = "\n".join(answer.refusals).split(":\n")[-1].strip()
                reasons.setdefault((device, why), []).append(name)
    parts = [_table(table)]
    for (device, why), names in reasons.items():
        parts.append(textwrap.fill(f"not on {device}: {', '.join(names)}", 100) + f"\n  {why}")
    return "\n\n".join(parts)


def _print_plan(problem: str, device: str) -> int:
    try:
        answer = explain(problem, device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"problem  {problem}\ndevice   {device}\nplan     {answer.plan or 'none'}")
    for refusal in answer.refusals:
        print(f"refused  {refusal}")
    if answer.steps:
        print(f"\n{answer.steps}", end="")
    return 0 if answer.plan else 1


def broken(error: ImportError) -> int:
    """Says why the package cannot be used. Returns the exit code."""
    print(f"{_table(versions())}\n\n{error}", flush=True)
    return 1


def main(words: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cadre")
    verbs = parser.add_subparsers(dest="verb", required=True)
    doctor = verbs.add_parser("doctor", help="versions, devices, what runs where", description=HELP)
    doctor.add_argument("problem", nargs="*", metavar="PROBLEM",
                        help="such as: grouped_gemm fprop R=64 N=32 K=16 E=4")
    doctor.add_argument("--device", action="append", metavar="WORD",
                        help="cpu, cuda, cuda:1 or, for planning alone, sm_80, sm_90, sm_100; may "
                        "be given again (default: those of this machine, or cpu for a PROBLEM)")
    options = parser.parse_args(words)
    if options.problem:
        problem = " ".join(options.problem)
        return max(_print_plan(problem, device) for device in options.device or ["cpu"])
    devices, wrong = _devices()
    # One column for GPUs that are alike.
    alike = {architecture: name for name, architecture, _ in reversed(devices)}
    names = options.device or [name for name, *_ in devices if name in alike.values()]
    try:
        plans = _plans(names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{_table(versions())}\n")
    print(f"{_table([['device', 'architecture', 'SMs or threads'], *devices])}\n")
    print(f"{plans}\n")
    print("\n".join(f"wrong: {line}" for line in wrong) or "all is well")
    return 1 if wrong else 0
