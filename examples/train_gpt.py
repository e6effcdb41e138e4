"""Trains a small GPT with mixture-of-experts blocks on the bytes of text files:

    python examples/train_gpt.py                                  this repository's text
    python examples/train_gpt.py notes/ book.txt --mode graphed   yours, each step one CUDA graph
    python examples/train_gpt.py --compare cadre:0 cadre:1 torch:0 torch:1
    python examples/train_gpt.py --ep 2 --replicas 2              experts on two ranks, twice
    torchrun --nproc-per-node 4 examples/train_gpt.py --ep 4 --parallel fsdp2

Writes curve.json and loss.png into --out. --compare runs IMPLEMENTATION:SEED[:MODE] one after the
other, with the same weights and batches for a seed, and says whether the implementations differ by
more than the seeds do. gpt.py has the model, in both implementations; gpt_ranks.py what several
ranks do. A checkpoint of --save can be loaded by any number of ranks.
"""

import argparse
import functools
import gc
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

import gpt_ranks
import matplotlib
import torch
from gpt import GPT, MOES, Shape
from gpt_ranks import Ranks
from torch import Tensor
from tqdm import tqdm

import cadre

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

TOP = Path(__file__).resolve().parent.parent
SOURCES = {".md", ".py", ".h", ".cpp", ".cu", ".cuh", ".txt"}
MODES = ("eager", "compiled", "graphed")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BALANCE = 0.01  # weight of the load-balancing loss
WARM_STEPS = 3  # run as they are before a step is captured

# Seconds on a CPU, at a rate at which roundings do not decide where a run ends; on an H200, a model
# whose experts matter.
SMALL = dict(steps=300, batch=8, context=128, layers=2, hidden=64, experts=8, top_k=2, features=64,
             rate=1e-3, dtype="fp32")
LARGE = dict(steps=300, batch=16, context=1024, layers=8, hidden=1024, experts=64, top_k=4,
             features=512, rate=3e-4, dtype="bf16")


@dataclass(frozen=True)
class Run:
    """What --compare may vary."""

    implementation: str
    seed: int
    mode: str

    def __str__(self) -> str:
        return f"{self.implementation} seed {self.seed} {self.mode}"


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", nargs="*", type=Path, help="files and folders (this repository's)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in SMALL.items():
        if name not in ("rate", "dtype"):
            parser.add_argument(f"--{name.replace('_', '-')}", type=int,
                                help=f"{value}; on a GPU {LARGE[name]}")
    parser.add_argument("--rate", type=float, help="highest learning rate")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of products; fp32, on a GPU bf16")
    parser.add_argument("--mode", choices=MODES, default="eager")
    parser.add_argument("--implementation", choices=list(MOES), default="cadre")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="inductor", help="of torch.compile (%(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps (%(default)s)")
    parser.add_argument("--forbid-waits", action="store_true",
                        help="fail if a step waits for the GPU")
    gpt_ranks.add_arguments(parser)
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="go on from its checkpoint")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="for a checkpoint at the end")
    parser.add_argument("--until", type=int, metavar="STEP", help="end there (all --steps)")
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="IMPLEMENTATION:SEED[:MODE]")
    parser.add_argument("--out", type=Path, default=Path("train-gpt"), help="folder (%(default)s)")
    parser.add_argument("--commit", help="for the record of --compare; default: asks git")
    options = parser.parse_args(words)
    defaults = SMALL if torch.device(options.device).type == "cpu" else LARGE
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.until = min(options.until or options.steps, options.steps)
    try:
        options.runs = runs_of(options)
        gpt_ranks.refuse(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def runs_of(options: argparse.Namespace) -> list[Run]:
    """Errors: ValueError for words that name no run, and for runs that cannot be."""
    if not 1 <= options.top_k <= options.experts:
        raise ValueError(f"top-k is {options.top_k}, must be 1 to {options.experts}, the experts")
    if options.load and not (options.load / ".metadata").exists():
        raise ValueError(f"load is {options.load}, must be a folder that --save wrote")
    if options.compare and (options.save or options.load):
        raise ValueError("compare is given, must be left out with --save and --load; a checkpoint "
                         "is of one run")
    if not options.compare:
        runs = [Run(options.implementation, options.seed, options.mode)]
    else:
        runs = [run_of(word, options.mode) for word in options.compare]
    for run in runs:
        if run.mode == "graphed" and torch.device(options.device).type != "cuda":
            raise ValueError(f"mode is graphed, must be eager or compiled on {options.device}; "
                             "only CUDA has graphs")
        if (run.implementation, run.mode, options.dtype) == ("torch", "compiled", "fp32"):
            raise ValueError("dtype is fp32, must be bf16 for torch compiled; torch compiles its "
                             "grouped_mm in bf16 only")
    return runs


def run_of(word: str, mode: str) -> Run:
    parts = [*word.split(":"), mode]
    if len(parts) < 3 or parts[0] not in MOES or not parts[1].isdigit() or parts[2] not in MODES:
        raise ValueError(f"run is {word!r}, must be IMPLEMENTATION:SEED or with :MODE; there are "
                         f"{', '.join(MOES)} and {', '.join(MODES)}")
    return Run(parts[0], int(parts[1]), parts[2])


# Text


def default_text() -> list[Path]:
    return [TOP / name for name in ("README.md", "docs", "include", "src", "torch", "tests")]


def files_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Files as named; of folders, what looks like text or code, in the order of names."""
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.suffix in SOURCES and p.is_file())
        else:
            yield path


def read_text(paths: Sequence[Path], context: int) -> Tensor:
    """uint8 [bytes]. Errors: SystemExit if there is too little."""
    text = b"\n".join(path.read_bytes() for path in files_of(paths or default_text()))
    if len(text) < 2 * context:
        raise SystemExit(f"text has {len(text)} bytes, must have {2 * context} or more; name more "
                         "files")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# Training


class Trainer:
    """A model, its optimizer and its batches. A step neither waits for the device nor tells the
    host anything; losses gather in `losses`."""

    def __init__(self, options: argparse.Namespace, run: Run, text: Tensor, ranks: Ranks) -> None:
        device = torch.device(options.device)
        self.ranks = ranks
        shape = Shape(**{field.name: getattr(options, field.name) for field in fields(Shape)})
        self.options, self.device, self.text = options, device, text.to(device)
        self.model = GPT(shape, run.implementation, DTYPES[options.dtype], device, ranks.ep)
        self.model.draw(run.seed)
        self.is_graphed, self.graph, self.done = run.mode == "graphed", None, 0
        self.warm_steps = WARM_STEPS if ranks.count == 1 else gpt_ranks.DDP_WARM_STEPS
        self.side = torch.cuda.Stream() if self.is_graphed else None
        with torch.cuda.stream(self.side):
            self.forward: Callable[[Tensor], tuple[Tensor, Tensor]] = ranks.spread(
                self.model, compiler(options) if run.mode == "compiled" else None)
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            ranks.groups(self.model), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1,
            fused=True, capturable=device.type == "cuda")
        cadre.keep_whole(self.optimizer, self.model)

        draw = torch.Generator().manual_seed(run.seed)
        starts = torch.randint(len(text) - options.context, (options.steps, options.batch),
                               generator=draw)
        self.starts = ranks.part(starts).to(device)
        self.within = torch.arange(options.context + 1, device=device)
        self.batch = torch.empty(self.starts.shape[1], options.context + 1, dtype=torch.int64,
                                 device=device)
        self.loss = torch.zeros((), device=device)
        self.losses = torch.zeros(options.steps, device=device)

    def step(self, number: int) -> None:
        """The batch and the learning rate are new in every step, the memory they lie in is not."""
        self.batch.copy_(self.text[self.starts[number][:, None] + self.within])
        self.rate.fill_(self.options.rate * part_of_rate(number, self.options.steps))
        if self.is_graphed:
            self._replay(number)
        else:
            self._learn()
        self.losses[number].copy_(self.loss)

    def _learn(self) -> None:
        entropy, balance = self.forward(self.batch)
        (entropy + BALANCE * balance).backward()
        self.ranks.finish_gradients(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss.copy_(entropy.detach())

    def _replay(self, number: int) -> None:
        """The same, as a graph that is captured once. The rows of each expert are others in every
        replay: they are numbers on the device, like the batch."""
        self.done += 1
        if self.done <= self.warm_steps:
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                self._learn()
            here.wait_stream(self.side)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            watch = "global" if self.ranks.count == 1 else "thread_local"  # NCCL has a thread
            with torch.cuda.graph(self.graph, capture_error_mode=watch):
                self._learn()
        self.graph.replay()

    def load(self) -> int:
        """The first step to make."""
        if self.options.load is None:
            return 0
        return gpt_ranks.load(self.options.load, self.model, self.optimizer)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compiler(options: argparse.Namespace) -> Callable[[Callable], Callable]:
    """torch.compile as one graph, unless it must break: where the host reads counts, and around
    experts that FSDP2 shards by themselves."""
    breaks = options.ep > 1 and (options.route == "collective" or options.parallel == "fsdp2"
                                 and options.replicas > 1)
    torch._dynamo.config.optimize_ddp = False  # which would split the graph
    return functools.partial(torch.compile, fullgraph=not breaks, backend=options.backend)


def part_of_rate(number: int, steps: int) -> float:
    """Rises straight in the first tenth, then falls along half a cosine to a tenth."""
    rise = max(steps // 10, 1)
    if number < rise:
        return (number + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * (number - rise) / max(steps - rise, 1))


@contextmanager
def no_waits(forbidden: bool) -> Iterator[None]:
    """Inside, whatever waits for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode() if forbidden else 0
    if forbidden:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if forbidden:
            torch.cuda.set_sync_debug_mode(before)


def train(options: argparse.Namespace, run: Run, text: Tensor, ranks: Ranks) -> dict:
    """Losses and speed of one run. The steps that warm up, compile or capture are not timed."""
    torch.compiler.reset()
    gc.collect()  # the model of the run before
    trainer = Trainer(options, run, text, ranks)
    first, last = trainer.load(), options.until
    if first >= last:
        raise SystemExit(f"steps of the checkpoint are {first}, must be below {last}")
    untimed = min(first + 2 * trainer.warm_steps, last - 1)
    tokens = options.batch * options.context
    began = 0.0
    with tqdm(total=last - first, desc=str(run), unit="step", disable=ranks.rank > 0) as bar:
        for number in range(first, last):
            if number == untimed:
                trainer.wait()
                began = time.perf_counter()
            with no_waits(options.forbid_waits and number > untimed):
                trainer.step(number)
            done = number + 1
            if done % options.log_every == 0 or done == last:
                loss = ranks.mean(trainer.losses[number]).item()  # the only wait
                speed = tokens * (done - untimed) / (time.perf_counter() - began) if began else 0
                bar.set_postfix_str(f"loss {loss:.4f}, {speed:,.0f} tokens/s")
                bar.update(done - first - bar.n)
        trainer.wait()
        seconds = time.perf_counter() - began
    losses = ranks.mean(trainer.losses)[first:last].tolist()
    bad = next((at for at, loss in enumerate(losses, first) if not math.isfinite(loss)), None)
    if bad is not None:
        raise SystemExit(f"{run}: loss of step {bad + 1} is {losses[bad - first]}, must be finite; "
                         "lower --rate")
    if options.save:
        gpt_ranks.save(options.save, trainer.model, trainer.optimizer, last)
    final = max(len(losses) // 10, 1)
    return {**asdict(run), "final_loss": round(sum(losses[-final:]) / final, 4),
            "final_steps": final, "tokens_per_s": round(tokens * (last - untimed) / seconds),
            "loss": [round(x, 4) for x in losses]}


# Results


def describe(options: argparse.Namespace) -> str:
    """The problem, in one line."""
    names = (*(field.name for field in fields(Shape)), "batch", "steps", "dtype", "rate")
    if options.ep * options.replicas > 1:
        names += "ep", "replicas", "parallel", "route"
    return " ".join(["gpt", *(f"{name}={getattr(options, name)}" for name in names)])


def running_mean(losses: Sequence[float], width: int) -> list[float]:
    return [sum(part) / len(part) for part in (losses[max(at - width + 1, 0):at + 1]
                                               for at in range(len(losses)))]


def plot(results: Sequence[dict], title: str, path: Path) -> None:
    """All curves, each as a running mean; of a single run the losses themselves too."""
    looks = dict(zip(MOES, (("tab:blue", 3), ("tab:orange", 1.2))))  # torch above cadre
    styles = {"eager": "-", "compiled": "--", "graphed": ":"}
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    width = max(len(results[0]["loss"]) // 30, 1)
    seeds = sorted({r["seed"] for r in results})
    for r in results:
        alpha = 1 - 0.5 * seeds.index(r["seed"]) / len(seeds)
        if len(results) == 1:
            axes.plot(r["loss"], color="0.8", linewidth=0.8)
        colour, line_width = looks[r["implementation"]]
        axes.plot(running_mean(r["loss"], width), styles[r["mode"]], alpha=alpha, color=colour,
                  linewidth=line_width,
                  label=f"{r['implementation']} seed {r['seed']} {r['mode']}")
    axes.set(xlabel="step", ylabel=f"cross entropy a byte, mean of {width} steps")
    axes.set_title(title, fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def print_table(results: Sequence[dict]) -> None:
    print(f"\n{'implementation':16}{'seed':>6}  {'mode':10}{'final loss':>12}{'tokens/s':>14}")
    for r in results:
        print(f"{r['implementation']:16}{r['seed']:6}  {r['mode']:10}{r['final_loss']:12.4f}"
              f"{r['tokens_per_s']:14,}")


def compare(results: Sequence[dict]) -> list[dict]:
    """For every mode that both implementations ran: the difference of their mean final losses, the
    largest difference that seeds make within one, and the ratio of their speeds."""
    by_mode: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for r in results:
        by_mode[r["mode"]][r["implementation"]].append(r)
    found = []
    for mode, of_mode in by_mode.items():
        if len(of_mode) < 2:
            continue
        losses = {name: [r["final_loss"] for r in rs] for name, rs in of_mode.items()}
        means = {name: sum(x) / len(x) for name, x in losses.items()}
        speeds = {name: sum(r["tokens_per_s"] for r in rs) / len(rs)
                  for name, rs in of_mode.items()}
        difference = abs(means["cadre"] - means["torch"])
        spread = max(max(x) - min(x) for x in losses.values())
        enough = min(map(len, losses.values())) > 1
        found.append({"mode": mode, "difference": round(difference, 4), "spread": round(spread, 4),
                      "within": difference <= spread if enough else None,
                      "speed_of_torch": round(speeds["cadre"] / speeds["torch"], 3)})
    return found


def print_comparison(comparisons: Sequence[dict]) -> None:
    verdicts = {True: "within the spread of the seeds", False: "more than the seeds do",
                None: "two seeds each would tell whether that is much"}
    for c in comparisons:
        print(f"{c['mode']}: mean final losses differ by {c['difference']:.4f}, seeds of one "
              f"implementation by {c['spread']:.4f}: {verdicts[c['within']]}; cadre runs at "
              f"{c['speed_of_torch']:.2f} times the speed of torch")


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.multi_processor_count} SMs"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, {torch.get_num_threads()} threads"


def commit() -> str:
    head = subprocess.run(["git", "-C", TOP, "rev-parse", "--short=12", "HEAD"], text=True,
                          capture_output=True, check=False)
    return head.stdout.strip() or "unknown"


def record(options: argparse.Namespace, words: Sequence[str], results: Sequence[dict]) -> dict:
    """As bench/results has it; paths of this machine are cut to their names."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return {
        "command": shlex.join(["train_gpt.py", *words]),
        "machine": machine(torch.device(options.device)),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": options.commit or commit(),
        "versions": f"torch {torch.__version__}",
        "comparisons": compare(results),
        "cases": [{"problem": describe(options), **r} for r in results],
    }


def write_json(path: Path, content: dict) -> None:
    """One value a line, lists of numbers in one."""
    text = re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]",
                  json.dumps(content, indent=1))
    path.write_text(text + "\n")


def main(words: Sequence[str]) -> None:
    options = parse_arguments(words)
    text = read_text(options.text, options.context)
    options.out.mkdir(parents=True, exist_ok=True)
    if gpt_ranks.must_start(options):
        gpt_ranks.start(options, [__file__, *words])
        return
    ranks = Ranks.join(options, DTYPES[options.dtype])
    if ranks.rank == 0:
        print(describe(options))
        print(f"{len(text):,} bytes of text, {machine(torch.device(options.device))}", flush=True)
    results = [train(options, run, text, ranks) for run in options.runs]
    if ranks.rank == 0:
        write(options, words, results)
    ranks.leave()


def write(options: argparse.Namespace, words: Sequence[str], results: Sequence[dict]) -> None:
    plot(results, describe(options), options.out / "loss.png")
    print_table(results)
    if options.compare:
        content = record(options, words, results)
        print_comparison(content["comparisons"])
        name = "record.json"
    else:
        content, name = {"problem": describe(options), **results[0]}, "curve.json"
    write_json(options.out / name, content)
    print(f"wrote {options.out / name} and {options.out / 'loss.png'}")


if __name__ == "__main__":
    main(sys.argv[1:])
