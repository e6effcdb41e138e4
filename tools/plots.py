#!/usr/bin/env python3
"""Draws what bench/results has as docs/plots/*.svg: `tools/plots.py`. With --check it writes
nothing and fails if a plot is not what the records say.

A plot has colours for light and for dark, of which it takes those of the page around it, and mostly
tells things apart by shape besides. Plain Python is enough.
"""
import json
import math
import pathlib
import sys
from html import escape

TOP = pathlib.Path(__file__).resolve().parent.parent
WIDTH, LEFT, RIGHT, LANE = 480, 112, 16, 11  # of a plot, of its labels, of its margin, of a row
STYLE = """text { font: 13px system-ui, Roboto, Helvetica, Arial, sans-serif; fill: #24292f }
.back { fill: #ffffff } .title { font-weight: 600; font-size: 15px } .small { fill: #57606a }
.grid { stroke: #d8dee4 } .base { stroke: #57606a; stroke-dasharray: 4 3 }
.s0 { --c: #0969da } .s1 { --c: #bc4c00 } .s2 { --c: #6e7781 } .s3 { --c: #1a7f37 }
.s4 { --c: #8250df } .s5 { --c: #bf3989 } .s6 { --c: #9a6700 }
.mark { fill: var(--c) } .line { stroke: var(--c); fill: none; stroke-width: 1.8 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .back { fill: #161b22 } .small { fill: #9198a1 }
.grid { stroke: #30363d } .base { stroke: #9198a1 }
.s0 { --c: #58a6ff } .s1 { --c: #f0883e } .s2 { --c: #9198a1 } .s3 { --c: #3fb950 }
.s4 { --c: #bc8cff } .s5 { --c: #f778ba } .s6 { --c: #d29922 } }
"""
SHAPES = ["M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z", "M-4-4h8v8h-8z", "M0-5L5 4H-5z",
          "M0-5.5L5.5 0L0 5.5L-5.5 0z", "M-5-4H5L0 5z",
          "M-5-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z", "M-5-5L0-2L5-5L2 0L5 5L0 2L-5 5L-2 0z"]


class Plot:
    """An SVG that grows downwards."""

    def __init__(self, title, subtitle):
        self.title, self.parts, self.y = title, [], 50
        self.text(14, 24, title, "title")
        self.text(14, 42, subtitle, "small")

    def text(self, x, y, words, style="", anchor="start"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">'
                          f"{escape(words)}</text>")

    def line(self, x1, y1, x2, y2, style):
        self.parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{style}"/>')

    def mark(self, x, y, color, shape, words):
        self.parts.append(f'<path transform="translate({x:.1f} {y:.1f})" d="{SHAPES[shape]}" '
                          f'class="mark s{color}"><title>{escape(words)}</title></path>')

    def legend(self, entries):
        """entries: (words, colour, shape), in as many lines as they need."""
        x, self.y = 20, self.y + 12
        for words, color, shape in entries:
            wide = 34 + 8 * len(words)
            if x + wide > WIDTH:
                x, self.y = 20, self.y + 20
            self.mark(x, self.y, color, shape, words)
            self.text(x + 10, self.y + 4.5, words)
            x += wide
        self.y += 16

    def svg(self):
        height = round(self.y)
        start = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                 f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(self.title)}">')
        back = '<rect class="back" width="100%" height="100%" rx="8"/>'
        return "\n".join([start, f"<style>\n{STYLE}</style>", back, *self.parts, "</svg>\n"])


def ticks(low, high):
    """Round numbers from below `low` to above `high`."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def scale(of, start, end):
    """From the numbers between the first and last tick to places."""
    return lambda value: start + (value - of[0]) / (of[-1] - of[0]) * (end - start)


def dots(title, subtitle, base, colors, shapes, rows):
    """A row of marks for each of `rows`, {label: [(value, color, shape)]}; `colors` and `shapes`
    are names, a row has a lane for every colour. `base` is where a line is drawn."""
    plot = Plot(title, subtitle)
    if len(colors) > 1:
        plot.legend([(name, i, 0) for i, name in enumerate(colors)])
    if len(shapes) > 1:
        plot.legend([(name, 2 if len(colors) > 1 else 0, i) for i, name in enumerate(shapes)])
    values = [value for marks in rows.values() for value, _, _ in marks] + [base]
    at = ticks(min(values), max(values))
    place = scale(at, LEFT, WIDTH - RIGHT - 14)
    top, high = plot.y, len(colors) * LANE + 8
    bottom = top + len(rows) * high
    for tick in at:
        plot.line(place(tick), top, place(tick), bottom, "grid")
        plot.text(place(tick), bottom + 16, f"{tick:g}", "small", "middle")
    plot.line(place(base), top, place(base), bottom, "base")
    for number, (label, marks) in enumerate(rows.items()):
        y = top + number * high
        plot.line(14, y, WIDTH - RIGHT, y, "grid")
        plot.text(14, y + high / 2 + 4.5, label)
        for value, color, shape in marks:
            plot.mark(place(value), y + 4 + (color + 0.5) * LANE, color, shape,
                      f"{label}, {colors[color]}, {shapes[shape]}: {value:.4g}")
    plot.y = bottom + 26
    return plot.svg()


def lines(title, subtitle, across, series):
    """A line for each of `series`, {name: [(x, y)]}, over an axis that is called `across`."""
    plot = Plot(title, subtitle)
    plot.legend([(name, i, i) for i, name in enumerate(series)])
    points = [point for line in series.values() for point in line]
    x_at = ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_at = ticks(min(y for _, y in points), max(y for _, y in points))
    top, bottom, left = plot.y, plot.y + 240, 52
    x_place, y_place = scale(x_at, left, WIDTH - RIGHT - 14), scale(y_at, bottom, top)
    for tick in y_at:
        plot.line(left, y_place(tick), WIDTH - RIGHT, y_place(tick), "grid")
        plot.text(left - 8, y_place(tick) + 4.5, f"{tick:g}", "small", "end")
    for tick in x_at:
        plot.text(x_place(tick), bottom + 18, f"{tick:g}", "small", "middle")
    plot.text(WIDTH - RIGHT, bottom + 36, across, "small", "end")
    for color, (name, line) in enumerate(series.items()):
        way = "L".join(f"{x_place(x):.1f} {y_place(y):.1f}" for x, y in line)
        plot.parts.append(f'<path d="M{way}" class="line s{color}"/>')
        for x, y in line[-1:] if len(line) > 30 else line:
            plot.mark(x_place(x), y_place(y), color, color, f"{name}, {x:g}: {y:.4g}")
    plot.y = bottom + 46
    return plot.svg()


def record(name):
    return json.loads((TOP / f"bench/results/{name}.json").read_text())


def where(one):
    return f"{one['machine']}, {one['date'][:10]}"


def grouped_gemm():
    """Of every layer and pass, in the routing where all experts have as many rows."""
    peers = {"torch": "torch", "deepgemm": "DeepGEMM", "cublas_dense": "one dense cuBLAS product"}
    passes, rows = ["fprop", "dgrad", "wgrad"], {}
    for name in ("nvidia-h200-grouped-gemm-torch", "nvidia-h200-grouped-gemm"):
        for case in record(name)["cases"]:
            if case["routing"] == "uniform":
                shape = passes.index(case["problem"].split()[1])
                rows.setdefault(case["layer"], []).extend(
                    (speed, list(peers).index(peer), shape)
                    for peer, speed in case["speed_of_peer"].items() if peer in peers)
    return dots("Grouped GEMM in bf16: Cadre's speed over that of", where(record(name)), 1,
                list(peers.values()), passes, rows)


def moe():
    """Of whole layers that begin with the router's logits."""
    peers, calls, rows = ["torch", "sonicmoe"], ["forward", "step"], {}
    one = record("nvidia-h200-moe-torch")
    for case in one["cases"]:
        if case["routing"] == "uniform" and case["from"] == "logits":
            rows.setdefault(case["layer"], []).extend(
                (speed, peers.index(peer), calls.index(case["call"]))
                for peer, speed in case["speed_of_peer"].items() if peer in peers)
    return dots("Whole MoE layers in bf16: Cadre's speed over that of", where(one), 1,
                ["torch", "SonicMoE"], ["forward", "forward and backward"], rows)


def gpt():
    """Training of examples/train_gpt.py, each point the mean of ten steps."""
    one = record("nvidia-h200-gpt")
    series = {}
    for case in one["cases"]:
        if case["mode"] == "eager" and case["seed"] == 0:
            loss = case["loss"]
            series[f"experts of {case['implementation']}"] = [
                (step + 5, sum(loss[step:step + 10]) / 10) for step in range(0, len(loss), 10)]
    return lines("A GPT with 64 experts: loss", where(one), "steps", series)


def recipes():
    """Of the model of `cadre train`: what it costs to train in fewer bits."""
    one, rows, seeds = record("amd-epyc-train"), {}, []
    for case in one["cases"]:
        seeds += [case["seed"]] if case["seed"] not in seeds else []
        rows.setdefault(case["recipe"], []).append(
            (case["held_out_bits_per_byte"], 0, seeds.index(case["seed"])))
    base = sum(bits for bits, _, _ in rows["f32"]) / len(rows["f32"])
    return dots("Loss by recipe: bits per byte of held-out text", where(one), base,
                ["cadre train"], [f"seed {seed}" for seed in seeds], rows)


PLOTS = {"grouped_gemm": grouped_gemm, "moe": moe, "gpt": gpt, "recipes": recipes}


def main(arguments):
    check = arguments == ["--check"]
    if arguments and not check:
        raise SystemExit("usage: tools/plots.py [--check]")
    stale = 0
    for name, draw in PLOTS.items():
        path, drawn = TOP / f"docs/plots/{name}.svg", draw()
        if path.is_file() and path.read_text() == drawn:
            continue
        stale += 1
        what = "out of date; run tools/plots.py" if check else "written"
        print(f"{path.relative_to(TOP)}: {what}")
        if not check:
            path.write_text(drawn)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
