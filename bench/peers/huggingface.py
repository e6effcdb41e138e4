#!/usr/bin/env python3
"""Times models of transformers whose experts are Cadre's beside the same models with transformers'
own: grouped_mm, batched_mm, eager, and deepgemm and sonicmoe where they can be loaded. One process,
the same weights, calls in turns. Writes a record like that of `cadre bench --json`.

  huggingface.py --seconds 480 --json record.json
  huggingface.py --models qwen3_moe --calls compiled --sequences 1 --json one.json

step: forward, loss and backward of 4 x 1024 tokens. prefill: forward of as many, with a cache.
decode: one token of 1, 16 or 64 sequences behind prompts; graph: the same as a CUDA graph;
compiled: by torch.compile(mode="reduce-overhead"). Steps and decode are timed as the host starts
them, all else on the GPU, but where a model's own code waits for it: `timed_by_host` says which.
Each is timed at two depths of one model, and the difference is that of whole decoder layers.
Results are compared with eager's first.
PYTHONPATH names the folder of the package cadre. On the CPU models are tiny: it only shows that it
runs.
"""
import argparse
import gc
import json
import pathlib
import sys
import time

import torch
import transformers

import cadre.huggingface  # noqa: F401  it registers "cadre"
import torch_grouped_gemm as beside
from huggingface_check import (
    MOST_COMPILED_DIFFERENCE, DecodedCheck, LearnedCheck, learned, require_same_steps)
from huggingface_models import PEERS, RELEASED, Decoder, Models
from torch_moe import Timer, add_run_options, record, words

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import digest  # noqa: E402

CALLS = ("step", "prefill", "decode", "graph", "compiled")
FEWEST, ENOUGH_US = 3, 1e6  # turns; time of one contestant, beyond which there are no more
# Calls that the host starts behind each other where they are timed by its clock: transformers' own
# code waits for the GPU at the start of each training step, whatever the experts are.
TOGETHER = {"step": 2, "decode": 8}
ROOM = 16  # steps that a cache has room for


class Sizes:
    """How many tokens; few on the CPU."""

    def __init__(self, device):
        on_gpu = device == "cuda"
        self.batch = (4, 1024) if on_gpu else (2, 12)
        self.prompt = 512 if on_gpu else 10


class Shape:
    """One thing to be timed, at both depths."""

    def __init__(self, models, sizes, call, sequences):
        self.models, self.call, self.sequences = models, call, sequences
        self.words = models.words(*sizes.batch)
        self.decoders = {}
        if sequences:
            prompt = models.words(sequences, sizes.prompt)
            models.take("cadre")
            self.decoders = {depth: Decoder(model, prompt, ROOM)
                             for depth, model in models.both.items()}

    def made(self, depth):
        """What runs it, with the experts that the models have now."""
        model, decoder = self.models.both[depth], self.decoders.get(depth)
        if self.call == "step":
            return lambda: learned(model, self.words)
        if self.call == "prefill":
            return torch.no_grad()(lambda: model(self.words, use_cache=True, logits_to_keep=1))
        decoder.rewind()
        if self.call == "decode":
            return decoder.step
        if self.call == "graph":
            run = decoder.captured()
            require_same_steps(decoder, run)
        else:
            run = decoder.compiled()
            require_same_steps(decoder, run, MOST_COMPILED_DIFFERENCE)
        return run

    def rewind(self, depth):
        if self.sequences:
            self.decoders[depth].rewind()


class Clock:
    """Times behind dense products, or, of what waits for the GPU and of calls in TOGETHER, from one
    idle GPU to the next."""

    def __init__(self, device):
        self.timer, self.by_host = Timer(device), set()

    def forget(self):
        """Other calls come."""
        self.timer.ahead.clear()
        self.by_host.clear()

    def ready(self, name, call, run):
        """First times, after which it is known how others are taken."""
        if call in TOGETHER:
            self.by_host.add(name)
        run()
        try:
            self.us(name, run)
        except RuntimeError as error:
            if "waits for the GPU" not in str(error):
                raise
            self.by_host.add(name)

    def us(self, name, run, steps=1):
        if name not in self.by_host:
            return self.timer.us(name, run)
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        self.wait()
        return 1e6 * (time.perf_counter() - start) / steps

    def wait(self):
        if self.timer.on_gpu:
            torch.cuda.synchronize()


def runs_of(shape, names, clock, left_out):
    """{(name, depth): what runs it}; why others cannot is put into `left_out`."""
    found = {}
    clock.forget()
    for name in names:
        try:
            shape.models.take(name)
            made = {(name, depth): shape.made(depth) for depth in shape.models.both}
            for key, run in made.items():
                shape.rewind(key[1])
                clock.ready(key, shape.call, run)
        except Exception as error:
            leave_out(name, error, left_out)
            continue
        found |= made
    return found


def leave_out(name, error, left_out):
    left_out[name] = " ".join(str(error).split())[:300] or type(error).__name__
    print(f"  {name} left out: {left_out[name]}", flush=True)
    error.__traceback__ = None  # it holds tensors
    gc.collect()
    torch.cuda.empty_cache()


def time_runs(shape, runs, clock, repeat):
    """{depth: {name: [us]}} of runs in turns, fewer of those that are slow."""
    samples = {depth: {} for depth in shape.models.both}
    for turn in range(repeat):
        for (name, depth), run in runs.items():
            mine = samples[depth].setdefault(name, [])
            if turn >= FEWEST and sum(mine) > ENOUGH_US:
                continue
            shape.models.take(name)
            shape.rewind(depth)
            mine.append(clock.us((name, depth), run, TOGETHER.get(shape.call, 1)))
    return samples


def row_of(samples, depths):
    row, deep = {}, samples["deep"]
    for key, share in (("us", 0.5), ("us_p10", 0.1), ("us_p90", 0.9)):
        row[key] = {name: round(beside.quantile(us, share), 3) for name, us in deep.items()}
    shallow = {name: beside.quantile(us, 0.5) for name, us in samples["shallow"].items()}
    row["layer_us"] = {name: round((row["us"][name] - us) / (depths[0] - depths[1]), 3)
                       for name, us in shallow.items()}
    row["speed_of_peer"] = {
        name: round(beside.quantile([b / a for a, b in zip(deep["cadre"], us)], 0.5), 3)
        for name, us in deep.items() if name != "cadre"}
    return row


def shown(row):
    """A line of the table."""
    def cells(of, scale, form):
        return "  ".join(f"{name} {value * scale:{form}}" for name, value in of.items())

    many = f" of {row['sequences']}" if "sequences" in row else ""
    return (f"{row['layer']:10} {row['call'] + many:14}: ms {cells(row['us'], 1e-3, '.3f')} | us a "
            f"layer {cells(row['layer_us'], 1, '.0f')} | speed over "
            f"{cells(row['speed_of_peer'], 1, '.3f')}")


def right_of(check, peers, absent, left_out):
    """The names of those whose results are right."""
    names = []
    for name in ("cadre", *(peer for peer in peers if peer not in absent)):
        begun = time.monotonic()
        try:
            check.require(name)
        except Exception as error:
            is_absent = isinstance(error, ImportError) and name != "cadre"
            leave_out(name, error, absent if is_absent else left_out)
        else:
            names.append(name)
            print(f"  {name} compared in {time.monotonic() - begun:.1f} s", flush=True)
    return names


def rows_of(family, options, clock, absent):
    """The rows of one model, as they are measured."""
    models = Models(family, options.depths, options.device, options.seed, options.attention)
    sizes = Sizes(options.device)
    print(models.text, flush=True)
    for calls, check_of in ((CALLS[:2], lambda: LearnedCheck(models, sizes.batch)),
                            (CALLS[2:], lambda: DecodedCheck(models, sizes.prompt))):
        calls = [call for call in calls if call in options.calls]
        if calls:
            wrong, check = {}, check_of()
            names, seen = right_of(check, options.peers, absent, wrong), check.seen
            del check
            yield from (row | {key: value for key, value in seen.items() if value}
                        for row in rows_of_calls(models, calls, names, options, clock, wrong))


def rows_of_calls(models, calls, names, options, clock, wrong):
    sizes = Sizes(options.device)
    for call in calls:
        for sequences in options.sequences if call in CALLS[2:] else [0]:
            torch._dynamo.reset()
            left_out, shape = dict(wrong), Shape(models, sizes, call, sequences)
            runs = runs_of(shape, names, clock, left_out) if "cadre" in names else {}
            if "cadre" in left_out:
                options.failures.append(f"{models.family} {call}: {left_out['cadre']}")
                continue
            samples = time_runs(shape, runs, clock, options.repeat)
            models.deep.zero_grad()
            tokens = f"{sequences}x1" if sequences else "x".join(map(str, sizes.batch))
            yield ({"problem": f"{models.text} tokens={tokens}", "layer": models.family,
                    "routing": "of its routers", "call": call}
                   | ({"sequences": sequences, "prompt": sizes.prompt} if sequences else {})
                   | row_of(samples, options.depths)
                   | {"timed_by_host": sorted({name for name, _ in clock.by_host & runs.keys()})}
                   | ({"left_out": left_out} if left_out else {}))
            del shape, runs


def depths_of(text):
    deep, _, shallow = text.partition(",")
    if not (deep.isdigit() and shallow.isdigit() and int(deep) > int(shallow) > 0):
        raise argparse.ArgumentTypeError(f"'{text}', must be two depths, the larger first: 4,2")
    return int(deep), int(shallow)


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words(RELEASED), default=list(RELEASED),
                        help=",".join(RELEASED))
    parser.add_argument("--calls", type=words(CALLS), default=CALLS[:4], help=",".join(CALLS))
    parser.add_argument("--sequences", type=lambda text: [int(n) for n in text.split(",")],
                        default=[1, 16, 64], help="of decode, graph and compiled, by commas")
    parser.add_argument("--peers", type=words(PEERS), default=PEERS, help=",".join(PEERS))
    parser.add_argument("--depths", type=depths_of, default=(4, 2), help="layers of the two models")
    parser.add_argument("--attention", choices=["sdpa", "grouped"],
                        help="grouped: grouped_attention.py's; default: transformers' choice")
    add_run_options(parser, "model")
    return parser.parse_args(arguments)


def main():
    options = options_of(sys.argv[1:])
    options.failures = []
    until, cases, absent = time.monotonic() + options.seconds, [], {}
    transformers.logging.set_verbosity_error()
    torch._dynamo.config.recompile_limit = 64
    # Else tokens choose other experts, and then whole results differ.
    torch._inductor.config.emulate_precision_casts = True
    clock = Clock(options.device)
    if clock.timer.on_gpu:
        beside.warm()

    def made():
        of_all = record(cases, options) | {"absent": absent}
        of_all["versions"] += f", transformers {transformers.__version__}"
        return of_all

    for family in options.models:
        if time.monotonic() > until:
            print(f"{family}: not begun, {options.seconds:.0f} s are over")
            continue
        for row in rows_of(family, options, clock, absent):
            cases.append(row)
            print(shown(row), flush=True)
            if options.json:
                pathlib.Path(options.json).write_text(json.dumps(made(), indent=1) + "\n")
            if time.monotonic() > until:
                break
        gc.collect()
    print("\n".join(digest.ratios(made())))
    if options.failures:
        raise SystemExit("cadre failed or is wrong: " + "; ".join(options.failures))


if __name__ == "__main__":
    main()
