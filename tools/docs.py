#!/usr/bin/env python3
"""Writes the tables in README.md and docs/ that come from the library's own lists and from
bench/results: `tools/docs.py CADRE`, where CADRE is the built command line. With --check it writes
nothing and fails if a table is not up to date.

A page marks its table by two lines, and everything between them is written here:
    <!-- table NAME, written by tools/docs.py -->
    <!-- end of table -->
"""
import json
import re
import subprocess
import sys

from docs_names import headers, python
from docs_speeds import speeds
from docs_table import TOP, code, markdown, records

TABLE = re.compile(r"(<!-- table (\w+), written by tools/docs\.py -->\n).*?(<!-- end of table -->)",
                   re.DOTALL)


def bits_a_value(row):
    """Bits of a code and its part of a block's scale."""
    scale_bits = {"f32": 32, "e8m0": 8, "e4m3": 8}
    bits = row["bits"]
    if row["block"] and row["block"] != "line":
        bits += scale_bits[row["block_scale"]] / row["block"]
    return f"{bits:g}"


def formats(info):
    rows = []
    for row in info["formats"]:
        scaled = [f"{row['block_scale']} per {row['block']}"] if row["block"] else []
        scaled += [f"{row['expert_scale']} per expert"] if row["expert_scale"] else []
        rows.append([code(row["name"]), row["element"], ", ".join(scaled) or "-",
                     bits_a_value(row), " ".join(map(code, row["options"])) or "-",
                     row["summary"]])
    return markdown(["format", "code", "scales", "bits a value", "options", ""], rows)


def options(info):
    rows = []
    for row in info["format_options"]:
        usual = [code(f["name"]) for f in info["formats"] if f["default_scales"] == row["name"]]
        rows.append([code(row["name"]), row["summary"] + ("; default of " if usual else "") +
                     ", ".join(usual)])
    return markdown(["option", "what it does"], rows)


def activations(info):
    rows = [[code(row["name"]), "gate, up" if row["gated"] else "x", row["formula"]]
            for row in info["activations"]]
    return markdown(["name", "z", "act"], rows)


def recipes(info):
    rows = []
    for row in info["recipes"]:
        passes = [f"`{row[p]['lhs']}` x `{row[p]['rhs']}`" for p in ("fprop", "dgrad", "wgrad")]
        rows.append([code(row["name"]), *passes, row["summary"]])
    return markdown(["recipe", "fprop: x, w", "dgrad: dy, w", "wgrad: dy, x", ""], rows)


def cpu_gemm(info):
    """Every recorded processor's grouped GEMM, as a part of the speed of one dense product."""
    rows, routings = [], ["uniform", "zipf:1"]
    for path in sorted((TOP / "bench/results").glob("*-cpu-gemm.json")):
        record = json.loads(path.read_text())
        speeds = {}
        for case in record["cases"]:
            of_routing = speeds.setdefault((case["problem"], case["layer"]), {})
            of_routing[case["routing"]] = f"{case['speed_of_peer']['onednn_dense']:.2f}"
        where = f"{record['machine']}, {record['date'][:10]}"
        for (problem, layer), of_routing in speeds.items():
            shape = problem.removeprefix("grouped_gemm ")
            rows.append([where, code(shape), layer, *(of_routing[r] for r in routings)])
    return markdown(["processor", "problem", "", *routings], rows)


ROUTINGS = ["uniform", "gamma:1"]


def beside_peers(topic):
    """(where, {cell: {(peer, routing): speed over the peer}}) of every recorded GPU."""
    of_torch = {record["machine"]: record["cases"] for _, record in records(topic + "-torch")}
    for where, record in records(topic):
        speeds = {}
        for case in record["cases"] + of_torch.get(record["machine"], []):
            of_cell = speeds.setdefault((case["layer"], case["problem"].split()[1]), {})
            for peer, speed in case["speed_of_peer"].items():
                of_cell[peer, case["routing"]] = f"{speed:.2f}"
        yield where, speeds


def gpu_gemm(info):
    """Grouped GEMM on every recorded GPU: the speed of a peer is 1."""
    peers = {"cublas_dense": "dense cuBLAS", "torch": "torch", "deepgemm": "DeepGEMM"}
    rows = [[where, layer, which, *(of_cell.get((peer, routing), "")
                                    for peer in peers for routing in ROUTINGS)]
            for where, speeds in beside_peers("grouped-gemm")
            for (layer, which), of_cell in speeds.items()]
    return markdown(["GPU", "layer", "pass", *(f"{peer}, {routing}" for peer in peers.values()
                                               for routing in ROUTINGS)], rows)


def gpu_accumulate(info):
    """wgrad that accumulates into fp32: of its floor, and beside DeepGEMM. The floor is the slower
    of one dense product and of reading and writing the gradients as fast as memory is copied."""
    copied = {record["machine"]: fact["value"] * 1e3 for _, record in records("facts")
              for fact in record["facts"] if fact["name"] == "copy"}  # bytes a us
    speeds, rows = dict(beside_peers("grouped-gemm-accumulate")), []
    for where, record in records("grouped-gemm-accumulate"):
        shares = {}
        for case in record["cases"]:
            size = dict(word.split("=") for word in case["problem"].split() if "=" in word)
            touched = 8 * int(size["E"]) * int(size["N"]) * int(size["K"])
            floor = max(case["us"]["cublas_dense"], touched / copied[record["machine"]])
            share = f"{floor / case['us']['cadre']:.2f}"
            shares.setdefault(case["layer"], {})[case["routing"]] = share
        rows += [[where, layer, *(of_layer[r] for r in ROUTINGS),
                  *(speeds[where][layer, "wgrad"].get(("deepgemm", r), "") for r in ROUTINGS)]
                 for layer, of_layer in shares.items()]
    return markdown(["GPU", "layer", *(f"{what}, {routing}" for what in ("the floor", "DeepGEMM")
                                       for routing in ROUTINGS)], rows)


def shown(numbers, names, form, unit=1):
    """Numbers of these names, `-` for whoever was left out."""
    return [format(numbers[name] / unit, form) if name in numbers else "-" for name in names]


def layers_beside(topic, peers):
    """Whole layers, or their experts alone, beside peers of Python: their speed is 1."""
    def table(info):
        rows = [[where, case["layer"], case["routing"], case["call"], case["from"],
                 *shown(case["us"], ["cadre"], ".2f", 1e3),
                 *shown(case["speed_of_peer"], peers, ".2f")]
                for where, record in records(topic) for case in record["cases"]]
        return markdown(["GPU", "layer", "routing", "call", "from", "ms", *peers], rows)
    return table


def huggingface(info):
    """Models of transformers beside their own experts, whose speed is 1."""
    peers = ["grouped_mm", "batched_mm", "eager"]
    rows = [[where, case["layer"] + ", grouped" * ("attention=grouped" in case["problem"]),
             case["call"], case.get("sequences", "-"),
             *shown(case["us"], ["cadre"], ".2f", 1e3), *shown(case["layer_us"], ["cadre"], ".0f"),
             *shown(case["speed_of_peer"], peers, ".2f")]
            for topic in ("huggingface", "huggingface-compiled")
            for where, record in records(topic) for case in record["cases"]]
    return markdown(["GPU", "model", "call", "sequences", "ms", "us a layer", *peers], rows)


def expert_parallel(info):
    """What crosses between GPUs, beside their DMA engines, and a copy of what is delivered."""
    rows = [[where, case["layer"], case["routing"], case["call"],
             *shown(case["us"], ["cadre", "cadre_graph"], ".0f"),
             f"{case['crossed_bytes'] / 2**21:.2f}", f"{case['delivered_bytes'] / 2**21:.2f}",
             *(f"{case['us'][peer] / case['us']['cadre']:.2f}" for peer in ("dma_engine", "copy"))]
            for where, record in records("expert-parallel") for case in record["cases"]]
    return markdown(["GPUs", "layer", "routing", "call", "us", "in a graph", "MiB crossed, a rank",
                     "delivered", "DMA engines", "copy"], rows)


def exchanges_by(topic, call, word, usual):
    """An exchange beside another, which differs in a word of the problem."""
    return lambda info: markdown(["GPUs", "layer", word, "us", "in a graph"], [
        [where, case["layer"], f"{case['problem']} {word}={usual}".split(f" {word}=")[1].split()[0],
         *shown(case["us"], ["cadre", "cadre_graph"], ".0f")]
        for where, record in records(topic) for case in record["cases"] if case["call"] == call])


def expert_parallel_torch(info):
    """Rows to their experts and back through the door, in us of the slower rank, beside peers."""
    peers = ["nccl", "all_to_all_vdev_2d"]
    rows = [[where, case["layer"], case["call"], *shown(case["us"], ["cadre"], ".0f"),
             *shown(case["speed_of_peer"], peers, ".2f")]
            for where, record in records("expert-parallel-torch") for case in record["cases"]]
    return markdown(["GPUs", "layer", "call", "us", *peers], rows)


def expert_layers(info):
    """Whole layers on several GPUs, in ms until the last rank is through, beside NCCL, whose speed
    is 1, and beside one GPU with the tokens of all ranks."""
    rows = [[where, case["layer"], case["routing"], case["call"],
             *shown(case["us"], ["cadre", "cadre_graph"], ".2f", 1e3),
             *shown(case["tflops"], ["cadre"], ".0f"),
             *shown(case["speed_of_peer"], ["nccl", "nccl_known_counts"], ".2f"),
             *shown(case["two_over_one"], ["cadre", "nccl"], ".2f")]
            for where, record in records("expert-layer-torch") for case in record["cases"]]
    return markdown(["GPUs", "layer", "routing", "call", "ms", "in a graph", "TFLOP/s a GPU",
                     "nccl", "nccl, known counts", "over one GPU", "nccl over one GPU"], rows)


def layer_products(topic):
    """Layers of C++ beside their own products, of which the time is 1, and their rate of memory."""
    def table(info):
        rows = [[where, case["layer"], case["problem"].split()[1], case["routing"], case["call"],
                 case["plan"], *shown(case["us"], ["cadre"], ".0f"),
                 f"{case['us']['cadre'] / case['us']['products']:.3f}",
                 f"{case['bytes'] / case['us']['cadre'] / 1e6:.2f}"]
                for where, record in records(topic) for case in record["cases"]]
        return markdown(["GPU", "layer", "rows", "routing", "call", "route", "us", "over products",
                         "TB/s"], rows)
    return table


def recipe_speed(*topics):
    """Expert MLPs in a recipe beside the same in bf16, and beside their own products."""
    def row(where, case):
        words = case["problem"].split()
        twin = next(peer for peer in case["speed_of_peer"] if peer.startswith("cadre "))
        return [where, case["layer"],
                next(w.split("=", 1)[1] for w in words if w.startswith("recipe=")),
                case["call"] + ", cached" * ("cache_weights=yes" in words),
                *shown(case["us"], ["cadre"], ".0f"), f"{case['speed_of_peer'][twin]:.2f}",
                f"{case['us']['cadre'] / case['us']['products']:.3f}"]

    return lambda info: markdown(
        ["GPU", "layer", "recipe", "call", "us", "over bf16", "over products"],
        [row(where, case) for topic in topics for where, record in records(topic)
         for case in record["cases"]])


def moe_memory(info):
    """MiB of a step that live from forward to backward, and at most; peers as in their record."""
    peers = {(record["machine"], case["layer"], case["from"]): case
             for _, record in records("moe-torch")
             for case in record["cases"] if (case["call"], case["routing"]) == ("step", "uniform")}
    names, rows = ["cadre", "torch", "sonicmoe"], []
    for where, record in records("moe-memory"):
        for case in record["cases"]:
            others = peers.get((record["machine"], case["layer"], case["from"]), {})
            rows.append([where, case["layer"], case["from"],
                         *(" / ".join(shown(others.get(what, {}) | case[what], names, ".0f", 2**20))
                           for what in ("kept_bytes", "peak_bytes"))])
    return markdown(["GPU", "layer", "from", f"kept MiB: {' / '.join(names)}", "peak MiB"], rows)


def commands(info):
    """What the two commands of the README take, as far as it is recorded."""
    columns = {"first_minutes": "minutes", "again_seconds": "seconds, the second time",
               "download_mb": "MB to download", "disk_gb": "GB on the disk", "what": ""}
    rows = [(where, case) for where, record in records("commands") for case in record["cases"]]
    named = {key: title for key, title in columns.items() if any(key in case for _, case in rows)}
    return markdown(["command", *named.values(), "machine"],
                    [[code(case["command"]), *(case.get(key, "-") for key in named), where]
                     for where, case in rows])


def few_tokens(info):
    """Bytes a second of grouped GEMM with few rows an expert."""
    rows, tokens = [], ["64 tokens", "256 tokens", "1024 tokens"]
    for where, record in records("grouped-gemm-few-tokens"):
        rates = {}
        for case in record["cases"]:
            layer, _, which = case["layer"].rpartition(", ")
            rates.setdefault(layer, {})[which] = case["bytes"] / case["us"]["cadre"] / 1e6
        rows += [[where, layer, *(f"{of_layer[t]:.2f}" for t in tokens)]
                 for layer, of_layer in rates.items()]
    return markdown(["GPU", "layer", *(f"{t}, TB/s" for t in tokens)], rows)


def products_beside(topic, peers):
    """Products: TFLOP/s, and over others of the same numbers, whose speed is 1."""
    return lambda info: markdown(["GPU", "layer", "pass", "TFLOP/s", *peers], [
        [where, case["layer"], case["problem"].split()[1],
         f"{case['flops'] / case['us']['cadre'] / 1e6:.0f}",
         *shown(case["speed_of_peer"], peers, ".2f")]
        for where, record in records(topic) for case in record["cases"]])


def router(info):
    """Products of routers, beside cuBLAS, whose speed is 1, launched and in a graph."""
    rows = [[where, case["layer"], *(re.search(f" {n}=(\\d+)", case["problem"])[1] for n in "RNK"),
             *shown(case["us"], ["cadre"], ".1f"),
             *shown(case["speed_of_peer"], ["cublas_dense", "cublas_graph"], ".2f")]
            for where, record in records("router") for case in record["cases"]]
    return markdown(["GPU", "layer", "tokens", "experts", "K", "us", "cuBLAS", "in a graph"], rows)


def gpu_fp8(info):
    """Products of fp8_block: TFLOP/s, and over the bf16 products of the same numbers."""
    rows = []
    for where, record in records("grouped-gemm-fp8-torch"):
        cells = {}
        for case in record["cases"]:
            cell = cells.setdefault((case["layer"], case["problem"].split()[1]), {})
            cell[case["routing"]] = case
        rows += [[where, layer, which,
                  *(f"{cell[r]['flops'] / cell[r]['us']['cadre'] / 1e6:.0f}" for r in ROUTINGS),
                  *(f"{cell[r]['speed_of_peer']['cadre bf16']:.2f}" for r in ROUTINGS)]
                 for (layer, which), cell in cells.items()]
    return markdown(["GPU", "layer", "pass", *(f"{what}, {routing}" for what in ("TFLOP/s", "bf16")
                                               for routing in ROUTINGS)], rows)


def gpu_packed(info):
    """Products of packed weights, over those of the same weights in bf16."""
    rows = []
    for where, record in records("grouped-gemm-packed-torch"):
        for case in record["cases"]:
            layer, _, rest = case["layer"].partition(", ")
            tokens, _, weights = rest.rpartition(" ")
            rows.append([where, layer, tokens, code(weights),
                         f"{case['speed_of_peer']['cadre bf16']:.2f}"])
    return markdown(["GPU", "layer", "tokens", "weights", "bf16"], rows)


def host_time(info):
    """What the host needs to enqueue a call."""
    rows = [[where, code(case["problem"]), case["call"], f"{case['host_us']:.1f}"]
            for where, record in records("host-time") for case in record["cases"]]
    return markdown(["GPU", "problem", "call", "us"], rows)


def torch_door(info):
    """Grouped GEMM through the PyTorch door: the speed of torch is 1."""
    rows = [[where, layer, which, *(of_cell.get(("torch", routing), "") for routing in ROUTINGS)]
            for where, speeds in beside_peers("torch-door")
            for (layer, which), of_cell in speeds.items()]
    return markdown(["GPU", "layer", "pass", *ROUTINGS], rows)


def torch_door_host(info):
    """What the host needs for a GroupedLinear from Python."""
    rows = [[where, case["problem"], case["layer"], case["call"], f"{case['host_us_p10']:.0f}",
             f"{case['host_us']:.0f}"]
            for where, record in records("torch-door-host") for case in record["cases"]]
    return markdown(["GPU", "problem", "parameters", "call", "us, quickest tenth", "us, median"],
                    rows)


def gpt(info):
    """Loss and speed of examples/train_gpt.py in both implementations, and how they compare."""
    tables = []
    for where, record in records("gpt"):
        rows = [[case["implementation"], case["mode"], case["seed"], f"{case['final_loss']:.4f}",
                 case["tokens_per_s"]] for case in record["cases"]]
        tables.append(markdown([where, "mode", "seed", "final loss", "tokens/s"], rows))
        rows = [[c["mode"], f"{c['difference']:.4f}", f"{c['spread']:.4f}" if c["spread"] else "",
                 f"{c['speed_of_torch']:.2f}"] for c in record["comparisons"]]
        tables.append(markdown(["mode", "losses of cadre and torch differ by", "those of seeds by",
                                "speed, torch is 1"], rows))
    return "\n".join(tables)


RENAMED = {"the copy engine": "TMA", "the second cache": "L2", "second cache": "L2 cache",
           "a multiprocessor": "an SM", "multiprocessors": "SMs"}


def renamed(words):
    """Records keep the names of their time; pages have those of today."""
    for old, new in RENAMED.items():
        words = words.replace(old, new)
    return words


def facts(topic):
    """What was measured of every recorded GPU, or pair of them."""
    def tables(info):
        all_tables = []
        for where, record in records(topic):
            rows = [[renamed(f["name"]),
                     f"{f['value']:.4g}" if f["value"] < 1e4 else f"{f['value']:.0f}",
                     f.get("unit", ""), renamed(f["how"])] for f in record["facts"]]
            all_tables.append(markdown([where, "", "", ""], rows))
        return "\n".join(all_tables) or "No GPU is recorded yet, so there are no numbers here.\n"
    return tables


TABLES = {"formats": formats, "options": options, "activations": activations, "recipes":
          recipes, "cpu_gemm": cpu_gemm, "gpu_gemm": gpu_gemm, "gpu_accumulate":
          gpu_accumulate, "few_tokens": few_tokens, "router": router,
          "gpu_fine_grained": products_beside("grouped-gemm-fine-grained-torch", ["torch"]),
          "gpu_fp8": gpu_fp8, "gpu_packed": gpu_packed, "commands": commands, "host_time":
          host_time, "torch_door": torch_door, "torch_door_host": torch_door_host, "gpt": gpt,
          "facts": facts("facts"), "link_facts": facts("link"),
          "moe_layers": layers_beside("moe-torch", ["torch", "sonicmoe"]),
          "few_tokens_layers": layers_beside("moe-few-tokens-torch",
                                             ["torch", "sonicmoe", "triton_kernels"]),
          "mlp_layers": layers_beside("mlp-torch", ["torch"]), "moe_memory": moe_memory,
          "expert_parallel_codes": exchanges_by("expert-parallel-codes", "dispatch", "x", "bf16"),
          "expert_parallel_sums": exchanges_by("expert-parallel-sums", "collect", "sum", "choice"),
          "expert_parallel": expert_parallel, "expert_parallel_torch": expert_parallel_torch,
          "expert_layers": expert_layers, "huggingface": huggingface,
          "gpu_fp8_tensor": products_beside(
              "grouped-gemm-fp8-tensor-torch",
              ["cadre bf16", "cadre fp8_block", "torch", "torch fast"]),
          "moe_products": layer_products("moe"), "mlp_products": layer_products("mlp"),
          "recipe_speed": recipe_speed("recipes", "recipes-uncached"),
          "quantized_weights": recipe_speed("quantized-weights"),
          "moe_few_tokens": layer_products("moe-few-tokens"),
          "headers": headers, "python": python, "speeds": speeds}


def rewritten(text, info, path):
    def table(match):
        if match.group(2) not in TABLES:
            raise SystemExit(f"{path}: no table is called {match.group(2)}; there are "
                             f"{', '.join(TABLES)}")
        return match.group(1) + TABLES[match.group(2)](info) + match.group(3)

    return TABLE.sub(table, text)


def main(arguments):
    check = "--check" in arguments
    programs = [a for a in arguments if a != "--check"]
    if len(programs) != 1:
        raise SystemExit("usage: tools/docs.py [--check] CADRE")
    printed = subprocess.run([programs[0], "info", "--json"], check=True, capture_output=True)
    info = json.loads(printed.stdout)
    tables = stale = 0
    for path in [*TOP.glob("README.md"), *sorted((TOP / "docs").rglob("*.md"))]:
        old = path.read_text()
        new = rewritten(old, info, path.relative_to(TOP))
        tables += len(TABLE.findall(old))
        if new == old:
            continue
        stale += 1
        what = "out of date; run tools/docs.py" if check else "written"
        print(f"{path.relative_to(TOP)}: {what}")
        if not check:
            path.write_text(new)
    if tables == 0:
        raise SystemExit("docs/ has no marked table; a marker was lost")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
