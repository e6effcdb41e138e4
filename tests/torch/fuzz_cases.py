"""Random calls of the door, each compared with a loop over experts in fp64, forward and backward. A
call that is refused must be one that may be, by an error that names an argument of the user."""

import re
from contextlib import nullcontext

import torch
from conftest import STEP, slices_of
from hypothesis import strategies as st

import cadre

SIZES = st.sampled_from([1, 2, 3, 7, 8, 16, 17, 24, 32, 33, 64])
FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
BLOCKS = {"fp8_tensor": 0.3, "fp8_block": 0.3, "mxfp8": 0.3, "nvfp4": 1.2, "mxfp4": 1.2}
RECIPES = st.sampled_from(["", "", "", "f32", "bf16", "f16", *BLOCKS])

# How a tensor lies: from its shape to (shape of the leaf, view of the leaf).
LAYOUTS = {
    "plain": lambda *s: (s, lambda t: t),
    "transposed": lambda *s: ((*s[:-2], s[-1], s[-2]), lambda t: t.transpose(-1, -2)),
    "columns": lambda *s: ((*s[:-1], s[-1] + 3), lambda t: t[..., 1:-2]),
    "steps": lambda *s: ((*s[:-1], 2 * s[-1]), lambda t: t[..., ::2]),
    "rows": lambda *s: ((2 * s[0], *s[1:]), lambda t: t[::2]),
    "moved": lambda *s: ((*s[1:-1], s[0], s[-1]), lambda t: t.movedim(-2, 0)),
    "expanded": lambda *s: ((1, *s[1:]), lambda t: t.expand(s)),
    "one column": lambda *s: ((*s[:-1], 1), lambda t: t.expand(s)),
}
ANY = st.sampled_from([*LAYOUTS, "plain", "plain"])


class Leaf:
    """A tensor that learns, and how the call sees it."""

    def __init__(self, layout, shape, dtype, scale=1.0):
        if len(shape) < 2 and layout in ("transposed", "moved"):
            layout = "plain"
        self.layout = layout
        own, self.look = LAYOUTS[layout](*shape)
        self.leaf = (torch.randn(own) * scale).to(dtype)

    def of(self, make):
        """(the leaf, made from the numbers and learning; what the call sees of it)"""
        leaf = make(self.leaf).detach().requires_grad_()
        return leaf, self.look(leaf)


def runs(leaves, make, call, dy):
    """The result and the gradients of all leaves."""
    made = {name: leaf.of(make) for name, leaf in leaves.items()}
    y = call({name: seen for name, (_, seen) in made.items()})
    gradients = torch.autograd.grad(y, [leaf for leaf, _ in made.values()], make(dy),
                                    allow_unused=True)
    return {"y": y.detach(), **dict(zip((f"d{name}" for name in made), gradients))}


def compare(leaves, call, want_call, dy, tolerance):
    """`tolerance(name, got, want, sizes)` checks each result; `sizes` is what it would be if no
    two numbers cancelled."""
    got = runs(leaves, lambda t: t.clone(), call, dy)
    want = runs(leaves, lambda t: t.double(), want_call, dy)
    sizes = runs(leaves, lambda t: t.double().abs(), want_call, dy)
    for name, value in got.items():
        if value is None or want[name] is None:
            assert want[name] is None or not want[name].any(), f"{name} is missing"
            continue
        assert value.shape == want[name].shape, name
        assert torch.isfinite(value).all(), f"{name} is not finite"
        tolerance(name, value, want[name], sizes[name])


def by_element(terms):
    """Of products in their own type."""

    def check(name, got, want, sizes):
        bound = (2 * STEP[got.dtype] + terms * 2.0**-21) * sizes + 1e-7
        worst = ((got.double() - want).abs() - bound).max() if got.numel() else 0
        assert worst <= 0, f"{name} is off by {worst} beyond the bound"

    return check


def by_norm(relative):
    """Of products of quantised numbers, and of layers that round between."""

    def check(name, got, want, sizes):
        off, limit = (got.double() - want).norm(), relative * sizes.norm() + 1e-7
        assert off <= limit, f"{name} is off by {off}, must be {limit} at most"

    return check


NAMED = re.compile(r"\b(inp|input|x|a|b|m_splits|counts|offs|weight\d?|w[12]|bias\d?|bias_scale|"
                   r"bias2_scale|prob|recipe|out|out_dtype|dgrad_out|main_grad|accumulate|"
                   r"grouped_linear|grouped_mlp|grouped_gemm)\b")


def refused(error, allowed):
    """Errors: AssertionError for a refusal that should not be, or that names no argument."""
    assert isinstance(error, (TypeError, ValueError, NotImplementedError)), repr(error)
    assert NAMED.search(str(error)), f"names no argument: {error}"
    assert allowed, f"refused: {error}"


# Counts


@st.composite
def counts_of(draw, experts):
    """(rows of each expert, rows of the buffer, what the call gets, whether that is good)"""
    counts = draw(st.lists(st.integers(0, 7), min_size=experts, max_size=experts))
    rows = sum(counts) + draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["list", "tuple", "i64", "i32", "i16", "u8", "steps", "offsets",
                                 "made", "list", "i64", "short", "many", "negative", "float"]))
    tensor = torch.tensor(counts)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    given = {
        "list": lambda: counts, "tuple": lambda: tuple(counts), "i64": lambda: tensor,
        "i32": tensor.int, "i16": tensor.short, "u8": tensor.byte,
        "steps": lambda: torch.stack([tensor, tensor + 1], 1)[:, 0],
        "offsets": lambda: cadre.Offsets(starts),
        "made": lambda: cadre.offsets(tensor, "counts", rows),
        "short": lambda: counts[1:], "many": lambda: [rows + 1, *counts[1:]],
        "negative": lambda: tensor - rows - 1, "float": tensor.float}[kind]()
    return counts, rows, given, kind not in ("short", "many", "negative", "float")


def parts_of(x, counts):
    return [x[rows] for rows in slices_of(counts)]


def joined(parts, rows, width):
    tail = rows - sum(len(part) for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(tail, width)])


def dense(leaves, name):
    """Whether there is no such factor of the rows, or it has no gaps."""
    return name not in leaves or leaves[name].layout == "plain"


# The linear layer


@st.composite
def linears(draw):
    torch.manual_seed(draw(st.integers(0, 2**20)))
    experts, n, k = draw(st.integers(1, 4)), draw(SIZES), draw(SIZES)
    dtype, recipe = draw(FLOATS), draw(RECIPES)
    counts, rows, given, good = draw(counts_of(experts))
    packed, bias = draw(st.booleans()), draw(st.booleans())
    weights = draw(ANY) if packed else draw(st.sampled_from(["plain", "transposed", "steps"]))
    leaves = {"inp": Leaf(draw(ANY), (rows, k), dtype)}
    shapes = {"weight": (experts, n, k)} if packed else {
        f"weight{e}": (n, k) for e in range(experts)}
    if bias:
        shapes |= {"bias": (experts, n)} if packed else {f"bias{e}": (n,) for e in range(experts)}
    biases = draw(st.sampled_from(["plain", "expanded", "steps"]))
    other = draw(st.sampled_from([dtype, dtype, torch.float32, torch.bfloat16]))
    for name, shape in shapes.items():
        leaves[name] = Leaf(weights if name.startswith("weight") else biases, shape, other)
    if bias and draw(st.booleans()):
        leaves["bias_scale"] = Leaf(draw(st.sampled_from(["plain", "steps"])), (rows,),
                                    torch.float32)
    return {"experts": experts, "n": n, "k": k, "dtype": dtype, "recipe": recipe,
            "counts": counts, "rows": rows, "given": given, "good": good, "packed": packed,
            "bias": bias, "weights": weights, "biases": biases, "leaves": leaves,
            "mixed": other != dtype, "cube": draw(st.booleans()), "save": draw(st.booleans()),
            "dy": torch.randn(rows, n).to(dtype), "meta": draw(st.integers(0, 9))}


def check_linear(c):
    layer = cadre.GroupedLinear(
        c["experts"], c["k"], c["n"], bias=c["bias"], params_dtype=c["dtype"], device="cpu",
        single_grouped_weight=c["packed"], single_grouped_bias=c["packed"],
        scale_bias="bias_scale" in c["leaves"], save_original_input=c["save"],
        recipe=c["recipe"] or None)

    def call(t):
        given = {name: t[name] for name in t if name.startswith(("weight", "bias"))
                 and name != "bias_scale"}
        x = t["inp"][None] if c["cube"] else t["inp"]
        y = torch.func.functional_call(layer, given, (x, c["given"]),
                                       {"bias_scale": t.get("bias_scale")})
        return y[0] if c["cube"] else y

    def loop(t):
        w = t["weight"] if c["packed"] else [t[f"weight{e}"] for e in range(c["experts"])]
        parts = [x @ w[e].t() for e, x in enumerate(parts_of(t["inp"], c["counts"]))]
        if c["bias"]:
            b = t["bias"] if c["packed"] else [t[f"bias{e}"] for e in range(c["experts"])]
            scale = t.get("bias_scale", t["inp"].new_ones(c["rows"]))
            parts = [part + b[e] * s[:, None]
                     for e, (part, s) in enumerate(zip(parts, parts_of(scale, c["counts"])))]
        return joined(parts, c["rows"], c["n"])

    if c["meta"] == 0:
        check_meta(c["leaves"], call)
    plain = c["recipe"] in ("", {torch.float32: "f32", torch.bfloat16: "bf16",
                                 torch.float16: "f16"}[c["dtype"]])
    if plain:
        tolerance = by_element(max(c["k"], c["n"], c["rows"]))
    else:
        tolerance = by_norm(BLOCKS.get(c["recipe"], 2.0**-6))
    allowed = (not c["good"] or not plain or c["mixed"] or c["weights"] != "plain"
               or c["biases"] != "plain" and c["bias"] or not dense(c["leaves"], "bias_scale"))
    try:
        compare(c["leaves"], call, loop, c["dy"], tolerance)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        refused(error, allowed)
    else:
        assert c["good"], f"{c['given']} were taken for {c['rows']} rows"


def check_meta(leaves, call):
    """One tensor on meta is refused; all of them give shapes, or what they would give."""
    for only in (*leaves, None):
        made = {name: leaf.of(lambda t: t.to("meta") if only in (name, None) else t)[1]
                for name, leaf in leaves.items()}
        try:
            y = call(made)
        except (TypeError, ValueError, NotImplementedError) as error:
            assert NAMED.search(str(error)), error
        else:
            assert y.is_meta and len(made) == 1 or only is None, f"{only} on meta was taken"
            assert y.is_meta


# What the module adds to autograd: main_grad, later weight gradients, buffers, cached copies


@st.composite
def protocols(draw):
    torch.manual_seed(draw(st.integers(0, 2**20)))
    experts, n, k = draw(st.integers(1, 4)), draw(SIZES), draw(SIZES)
    counts, rows, given, good = draw(counts_of(experts))
    return {"experts": experts, "n": n, "k": k, "dtype": draw(FLOATS), "counts": counts,
            "rows": rows, "given": given, "good": good, "packed": draw(st.booleans()),
            "fuse": draw(st.booleans()), "later": draw(st.booleans()),
            "first": draw(st.sampled_from([None, True, False])), "out": draw(st.booleans()),
            "dgrad_out": draw(st.booleans()), "main": draw(FLOATS),
            "marks": draw(st.booleans()), "steps": draw(st.integers(1, 3)),
            "cast": draw(st.sampled_from([None, None, torch.bfloat16]))}


def check_protocol(c):
    layer = cadre.GroupedLinear(
        c["experts"], c["k"], c["n"], params_dtype=c["dtype"], device="cpu", bias=False,
        single_grouped_weight=c["packed"], fuse_wgrad_accumulation=c["fuse"],
        delay_wgrad_compute=c["later"])
    weights = list(layer.parameters())
    for w in weights:
        w.data.normal_()
        w.main_grad = torch.ones(w.shape, dtype=c["main"])
        if c["marks"]:
            w.grad_added_to_main_grad = False
    total = torch.zeros(c["experts"], c["n"], c["k"], dtype=torch.float64)
    size = total.clone()
    works = c["cast"] or c["dtype"]
    casts = torch.autocast("cpu", dtype=c["cast"]) if c["cast"] else nullcontext()
    for _ in range(c["steps"]):
        x = torch.randn(c["rows"], c["k"]).to(c["dtype"]).requires_grad_()
        dy = torch.randn(c["rows"], c["n"]).to(works)
        out = torch.full((c["rows"], c["n"]), 7.0).to(works) if c["out"] else None
        dx = torch.full((c["rows"], c["k"]), 7.0).to(works) if c["dgrad_out"] else None
        try:
            with casts:
                y = layer(x, c["given"], c["first"], out, dx)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            return refused(error, not c["good"])
        assert c["good"], f"{c['given']} were taken for {c['rows']} rows"
        assert out is None or y.data_ptr() == out.data_ptr()
        y.backward(dy)
        w = torch.cat([w.detach().view(-1, c["n"], c["k"]) for w in weights]).to(works).double()
        rows = slices_of(c["counts"])
        step = 2 * STEP[works] + 2.0**-14
        for e, part in enumerate(rows):
            xe, ye = x.detach().to(works).double()[part], dy.double()[part]
            near(y[part], xe @ w[e].t(), xe.abs() @ w[e].abs().t(), step)
            near(x.grad[part], ye @ w[e], ye.abs() @ w[e].abs(), step)
            if c["first"] and c["fuse"]:
                total[e], size[e] = 0, 0
            total[e] += ye.t() @ xe
            size[e] += ye.abs().t() @ xe.abs()
        tail = 7.0 if c["out"] else 0.0
        assert (y[sum(c["counts"]):] == tail).all()
    for _ in range(c["steps"] if c["later"] else 0):
        layer.backward_dw()
    check_sum(c, weights, total, size)


def check_sum(c, weights, total, size):
    """The weights' gradients of all steps, where they belong."""
    shape = (c["experts"], c["n"], c["k"])
    holders = [w.main_grad if c["fuse"] else w.grad for w in weights]
    got = torch.cat([t.view(-1, *shape[1:]) for t in holders])
    begun = 1.0 if c["fuse"] and not c["first"] else 0.0
    step = STEP[c["main"] if c["fuse"] else c["dtype"]] + (STEP[c["cast"]] if c["cast"] else 0)
    near(got, total + begun, size + 1, 2 * (c["steps"] + 1) * step + 2.0**-14)


def near(got, want, sizes, step):
    worst = ((got.detach().double() - want).abs() - step * sizes - 1e-7)
    assert got.shape == want.shape and (worst.numel() == 0 or worst.max() <= 0), worst.max()


# grouped_mm


@st.composite
def products(draw):
    torch.manual_seed(draw(st.integers(0, 2**20)))
    groups, m, n, k = draw(st.integers(1, 4)), draw(SIZES), draw(SIZES), draw(SIZES)
    counts, rows, _, _ = draw(counts_of(groups))
    form = draw(st.sampled_from(["rows", "columns", "sums", "stacked"]))
    shapes = {"rows": ((rows, k), (groups, k, n)), "columns": ((groups, m, k), (k, rows)),
              "sums": ((m, rows), (rows, n)), "stacked": ((groups, m, k), (groups, k, n))}[form]
    dtype = draw(FLOATS)
    leaves = {name: Leaf(draw(ANY), shape, dtype) for name, shape in zip("ab", shapes)}
    width = m if form == "columns" else n
    if draw(st.booleans()):
        leaves["bias"] = Leaf(draw(ANY), (groups, width), draw(FLOATS))
    result = {"rows": (rows, n), "columns": (m, rows)}.get(form, (groups, m, n))
    return {"form": form, "counts": counts, "rows": rows, "groups": groups, "leaves": leaves,
            "out_dtype": draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
            "result": result, "dtype": dtype, "terms": max(m, n, k, rows),
            "into": draw(st.sampled_from([None, None, "out", "accumulate"])),
            "layout": draw(st.sampled_from(["plain", "transposed", "columns", "rows", "steps"])),
            "meta": draw(st.integers(0, 9))}


def loop_product(c, t):
    a, b, bias = t["a"], t["b"], t.get("bias")
    ranges = slices_of(c["counts"])
    extra = [0.0 if bias is None else bias[e] for e in range(c["groups"])]
    if c["form"] == "stacked":
        return torch.stack([a[e] @ b[e] + extra[e] for e in range(c["groups"])])
    if c["form"] == "sums":
        return torch.stack([a[:, r] @ b[r] + extra[e] for e, r in enumerate(ranges)])
    if c["form"] == "rows":
        return joined([a[r] @ b[e] + extra[e] for e, r in enumerate(ranges)], *c["result"])
    parts = [b[:, r].t() @ a[e].t() + extra[e] for e, r in enumerate(ranges)]
    return joined(parts, c["rows"], c["result"][0]).t()


def check_product(c):
    offs = None if c["form"] == "stacked" else torch.tensor(c["counts"]).cumsum(0).int()
    dtype = c["out_dtype"] or c["dtype"]

    def call(t):
        where = offs.to("meta") if offs is not None and t["a"].is_meta else offs
        return cadre.grouped_mm(t["a"], t["b"], where, t.get("bias"), c["out_dtype"])

    if c["meta"] == 0:
        check_meta(c["leaves"], call)
    dy = torch.randn(c["result"]).to(dtype)
    # A gradient is rounded in the type of y before, and in that of its tensor.
    worse = max(STEP[dtype], STEP[c["dtype"]]) / STEP[c["dtype"]]
    terms = by_element(c["terms"])

    def tolerance(name, got, want, sizes):
        terms(name, got, want, sizes * (2 + worse))

    try:
        if c["into"]:
            return check_into(c, offs, dtype)
        compare(c["leaves"], call, lambda t: loop_product(c, t), dy, tolerance)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        refused(error, c["into"] is not None and c["layout"] != "plain")
    return None


@torch.no_grad()
def check_into(c, offs, dtype):
    """`out`, of any layout, written or added to; what is no group's stays."""
    own, look = LAYOUTS[c["layout"]](*c["result"])
    memory = torch.randn(own).to(dtype)
    out = look(memory)
    before = out.clone()
    seen = {name: leaf.of(lambda t: t)[1].detach() for name, leaf in c["leaves"].items()}
    got = cadre.grouped_mm(seen["a"], seen["b"], offs, seen.get("bias"), None, out,
                           c["into"] == "accumulate")
    assert got is out
    want = loop_product(c, {name: t.double() for name, t in seen.items()})
    sizes = loop_product(c, {name: t.double().abs() for name, t in seen.items()})
    if c["into"] == "accumulate":
        want, sizes = want + before.double(), sizes + before.double().abs()
    done = sum(c["counts"])
    if c["form"] == "rows":
        assert torch.equal(out[done:], before[done:])
        out, want, sizes = out[:done], want[:done], sizes[:done]
    if c["form"] == "columns":
        assert torch.equal(out[:, done:], before[:, done:])
        out, want, sizes = out[:, :done], want[:, :done], sizes[:, :done]
    by_element(c["terms"])("out", out, want, 2 * sizes)


# The MLP

ACTIVATIONS = {
    "swiglu": lambda g, u: torch.nn.functional.silu(g) * u,
    "geglu": lambda g, u: torch.nn.functional.gelu(g) * u,
    "reglu": lambda g, u: torch.relu(g) * u,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "relu_squared": lambda z: torch.relu(z) ** 2,
}
GATED = ("swiglu", "geglu", "reglu")


@st.composite
def mlps(draw):
    torch.manual_seed(draw(st.integers(0, 2**20)))
    experts, h, f = draw(st.integers(1, 3)), draw(SIZES), draw(SIZES)
    activation = draw(st.sampled_from([*ACTIVATIONS]))
    layout = draw(st.sampled_from(["concat", "interleave1"])) if activation in GATED else "concat"
    counts, rows, given, good = draw(counts_of(experts))
    columns = f * (2 if activation in GATED else 1)
    dtype, bias = draw(FLOATS), draw(st.booleans())
    leaves = {"x": Leaf(draw(ANY), (rows, h), dtype)}
    weights = draw(st.sampled_from(["plain", "plain", "transposed", "columns", "expanded"]))
    for name, shape in (("w1", (experts, columns, h)), ("w2", (experts, h, f))):
        leaves[name] = Leaf(weights, shape, dtype, 0.5)
    if bias:
        leaves |= {"bias1": Leaf("plain", (experts, columns), dtype),
                   "bias2": Leaf("plain", (experts, h), dtype)}
    if draw(st.booleans()):
        leaves["prob"] = Leaf(draw(st.sampled_from(["plain", "steps"])), (rows,), torch.float32)
    return {"experts": experts, "h": h, "f": f, "activation": activation, "layout": layout,
            "counts": counts, "rows": rows, "given": given, "good": good, "dtype": dtype,
            "bias": bias, "leaves": leaves, "weights": weights, "keep": draw(st.booleans()),
            "dy": torch.randn(rows, h).to(dtype), "meta": draw(st.integers(0, 9))}


def check_mlp(c):
    mlp = cadre.GroupedMLP(c["experts"], c["h"], c["f"], activation=c["activation"],
                           layout=c["layout"], bias=c["bias"], dtype=c["dtype"], device="cpu",
                           keep_h=c["keep"])

    def call(t):
        given = {name: t[name] for name in t if name not in ("x", "prob")}
        return torch.func.functional_call(mlp, given, (t["x"], c["given"], t.get("prob")))

    def loop(t):
        prob = t.get("prob", t["x"].new_ones(c["rows"]))
        parts = []
        for e, (x, p) in enumerate(zip(parts_of(t["x"], c["counts"]), parts_of(prob, c["counts"]))):
            z = x @ t["w1"][e].t() + (t["bias1"][e] if c["bias"] else 0)
            if c["activation"] not in GATED:
                h = ACTIVATIONS[c["activation"]](z)
            elif c["layout"] == "concat":
                h = ACTIVATIONS[c["activation"]](*z.chunk(2, -1))
            else:
                h = ACTIVATIONS[c["activation"]](z[:, ::2], z[:, 1::2])
            y = (h * p[:, None]) @ t["w2"][e].t()
            parts.append(y + (t["bias2"][e] if c["bias"] else 0))
        return joined(parts, c["rows"], c["h"])

    if c["meta"] == 0:
        check_meta(c["leaves"], call)
    try:
        compare(c["leaves"], call, loop, c["dy"], by_norm(8 * STEP[c["dtype"]] + 1e-5))
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        refused(error, not c["good"] or c["weights"] != "plain" or not dense(c["leaves"], "prob"))
    else:
        assert c["good"], f"{c['given']} were taken for {c['rows']} rows"


CHECKS = {"linear": (linears, check_linear), "protocol": (protocols, check_protocol),
          "product": (products, check_product), "mlp": (mlps, check_mlp)}
