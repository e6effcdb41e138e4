"""One mixture-of-experts layer (SwiGLU, softmax over the chosen) as Cadre, torch, SonicMoE and
triton_kernels compute it, and as plain fp32 does. torch_moe.py times them.

A contestant is made for a `Layer`; of a peer that is not there that raises. It has `weights`, its
own leaves for w1 and w2, or none where it cannot learn; `mix(x, logits)`, which is [T, H];
`route_and_mix(x, router)`, the same by its own product of tokens and router; perhaps
`mlp(rows, prob)`, the experts alone, which is [R, H]; and `gates_first(dw1)`. It keeps nothing for
backward where gradients are off.
"""
import functools
import typing

import torch
from torch.nn import functional

BF16 = torch.bfloat16
NOISE = 1.28  # the deviation of Gumbel's distribution: of noise that draws by the weights


class Layer:
    """T tokens of H, E experts of width F of which a token takes top_k, and data in bf16. Logits
    are the logarithms of the experts' weights and noise, so that tokens choose by them; the router
    makes these logits, since the first feature of each token is 1."""

    def __init__(self, sizes, weights, seed, device):
        self.sizes = self.tokens, self.top_k, self.hidden, self.features, self.experts = tuple(
            sizes[name] for name in ("T", "top_k", "H", "F", "E"))
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape, scale=1.0):
            numbers = torch.empty(shape, device=device, dtype=BF16)
            return numbers.normal_(0.0, scale, generator=generator)

        hidden, features, experts = self.hidden, self.features, self.experts
        self.x, self.dout = normal(self.tokens, hidden), normal(self.tokens, hidden)
        self.w1 = normal(experts, 2 * features, hidden, scale=hidden ** -0.5)  # gates, then ups
        self.w2 = normal(experts, hidden, features, scale=features ** -0.5)
        self.router = normal(experts, hidden, scale=NOISE * hidden ** -0.5)
        self.x[:, 0] = 1
        self.router[:, 0] = torch.tensor(weights, device=device).log().to(BF16)
        self.logits = self.x.float() @ self.router.float().T

    @functools.cached_property
    def in_order(self):
        """order_of() the layer's choices."""
        return order_of(self.logits, self.top_k, self.experts)

    @functools.cached_property
    def rows(self):
        """x [R, H], prob [R] and dout [R, H] in the order of experts."""
        order = self.in_order
        return (self.x[order.token_of_row], order.prob[order.choice_of_row],
                self.dout[order.token_of_row])

    def clear_tokens(self, most):
        """Some that choose the same experts where logits are rounded to bf16."""
        best = self.logits.topk(min(self.top_k + 1, self.experts)).values
        gap = best[:, self.top_k - 1] - best[:, -1]
        clear = gap > 2 ** -6 * best.abs().amax(-1) if self.top_k < self.experts else gap >= 0
        return clear.nonzero().flatten()[:most]

    def prob(self, logits):
        """fp32 [T, E], zero where an expert was not chosen."""
        best = logits.topk(self.top_k)
        return torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))

    def reference(self, tokens, experts):
        """What `experts` add to the sums of these tokens, and the gradients, in fp32: out, dx,
        dlogits and, of a single expert, dw1 and dw2."""
        x, logits = (t[tokens].float().requires_grad_() for t in (self.x, self.logits))
        prob, out, leaves = self.prob(logits), torch.zeros_like(x), [x, logits]
        for e in experts:
            rows = prob[:, e].nonzero().flatten()
            w1, w2 = self.w1[e].float(), self.w2[e].float()
            if len(experts) == 1:
                leaves += [w1.requires_grad_(), w2.requires_grad_()]
            gate, up = (x[rows] @ w1.T).chunk(2, -1)
            y = (functional.silu(gate) * up) @ w2.T
            out = out.index_add(0, rows, y * prob[rows, e, None])
        return out.detach(), *torch.autograd.grad(out, leaves, self.dout[tokens].float())


def leaf(weight):
    return weight.detach().requires_grad_()


def interleaved(w1):
    """Gate, up, gate, up, ... of gates first."""
    return w1.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


class Cadre:
    """torch.ops.cadre.moe, as cadre.MoE calls it."""

    def __init__(self, layer):
        import cadre  # noqa: F401, registers the operators
        self.top_k, self.weights = layer.top_k, [leaf(layer.w1), leaf(layer.w2)]
        self.offsets = functional.pad(layer.in_order.ends, (1, 0))

    def mlp(self, rows, prob):
        w1, w2 = self.weights
        return torch.ops.cadre.grouped_mlp(rows, self.offsets, prob, [w1], [], [w2], [])[0]

    def mix(self, x, logits):
        w1, w2 = self.weights
        return torch.ops.cadre.moe(x, logits, self.top_k, None, [w1], [], [w2], [],
                                   routing="topk_softmax")[0]

    def route_and_mix(self, x, router):
        return self.mix(*torch.ops.cadre._router(x, router))

    def gates_first(self, dw1):
        """The gradient of one expert, in the order of `Layer.w1`."""
        return dw1


class Rows(torch.autograd.Function):
    """Tokens in the order of their experts. The gradient is a sum over the choices of a token,
    where that of indexing would add with atomics."""

    @staticmethod
    def forward(ctx, x, token_of_row, row_of_choice):
        ctx.save_for_backward(row_of_choice)
        return x[token_of_row]

    @staticmethod
    def backward(ctx, dy):
        return dy[ctx.saved_tensors[0]].sum(1), None, None


class Sums(torch.autograd.Function):
    """Of the rows of each token."""

    @staticmethod
    def forward(ctx, y, token_of_row, row_of_choice):
        ctx.save_for_backward(token_of_row)
        return y[row_of_choice].sum(1)

    @staticmethod
    def backward(ctx, dout):
        return dout[ctx.saved_tensors[0]], None, None


class Order(typing.NamedTuple):
    """Choices in the order of their experts."""

    token_of_row: torch.Tensor
    choice_of_row: torch.Tensor
    row_of_choice: torch.Tensor  # [T, top_k]
    ends: torch.Tensor  # of each expert's rows
    prob: torch.Tensor  # of each choice


def order_of(logits, top_k, experts):
    best, chosen = logits.topk(top_k)
    prob = best.float().softmax(-1).flatten()
    in_order, choice_of_row = chosen.flatten().to(torch.int32).sort()
    numbers = torch.arange(experts, device=logits.device, dtype=torch.int32)
    ends = torch.searchsorted(in_order, numbers, right=True, out_int32=True)
    places = torch.arange(choice_of_row.numel(), device=logits.device)
    row_of_choice = torch.empty_like(places).scatter(0, choice_of_row, places).view(-1, top_k)
    return Order(choice_of_row // top_k, choice_of_row, row_of_choice, ends, prob)


def torch_mlp(rows, prob, w1, w2, ends):
    gate, up = functional.grouped_mm(rows, w1.transpose(1, 2), offs=ends).float().chunk(2, -1)
    h = (functional.silu(gate) * up * prob[:, None]).to(rows.dtype)
    return functional.grouped_mm(h, w2.transpose(1, 2), offs=ends)


def torch_layer(x, logits, w1, w2, top_k):
    order = order_of(logits, top_k, w1.shape[0])
    rows = Rows.apply(x, order.token_of_row, order.row_of_choice)
    y = torch_mlp(rows, order.prob[order.choice_of_row], w1, w2, order.ends)
    return Sums.apply(y, order.token_of_row, order.row_of_choice)


def torch_router(x, router):
    return functional.linear(x, router).float()


@functools.lru_cache(maxsize=1)
def compiled(sizes, backend_name):
    """torch_layer, torch_router and torch_mlp for one layer's sizes, and a list that grows by what
    was compiled of them."""
    torch._dynamo.reset()  # for every layer's sizes one function would be compiled too often
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend_name)(graph, inputs)

    options = {"backend": backend, "fullgraph": True, "dynamic": False}
    functions = (torch.compile(function, **options)
                 for function in (torch_layer, torch_router, torch_mlp))
    return *functions, graphs


class Torch:
    """torch alone, compiled by inductor, which leaves grouped_mm as it is; on the CPU by a backend
    that takes no minute."""

    def __init__(self, layer):
        self.top_k, self.weights = layer.top_k, [leaf(layer.w1), leaf(layer.w2)]
        self.layer, self.router, self.experts, self.graphs = compiled(
            layer.sizes, "inductor" if layer.x.is_cuda else "aot_eager")
        self.ends = layer.in_order.ends

    def mix(self, x, logits):
        return self.if_compiled(self.layer(x, logits, *self.weights, self.top_k))

    def mlp(self, rows, prob):
        return self.if_compiled(self.experts(rows, prob, *self.weights, self.ends))

    def if_compiled(self, out):
        if not self.graphs:
            raise SystemExit("torch ran eager, must be compiled; is TORCH_COMPILE_DISABLE set?")
        return out

    def route_and_mix(self, x, router):
        return self.mix(x, self.router(x, router))

    def gates_first(self, dw1):
        return dw1


class SonicMoE:
    """As sonicmoe.MoE has it, without its loss for balance: the router of `route_and_mix` in one
    call, the same steps behind it for logits that are given."""

    def __init__(self, layer):
        import sonicmoe.functional as sonic
        from sonicmoe.enums import ActivationType
        self.sonic, self.swiglu, self.top_k = sonic, ActivationType.SWIGLU, layer.top_k
        self.weights = [leaf(interleaved(layer.w1)), leaf(layer.w2)]

    def gates_first(self, dw1):
        return torch.cat([dw1[::2], dw1[1::2]])

    def route_and_mix(self, x, router):
        w1, w2 = (w.permute(1, 2, 0) for w in self.weights)
        return self.sonic.moe_TC_softmax_topk_layer(
            x, router, w1, None, w2, None, self.top_k, torch.cuda.current_stream().cuda_stream,
            self.swiglu, not torch.is_grad_enabled())[0]

    def mix(self, x, logits):
        sonic, (tokens, experts) = self.sonic, logits.shape
        w1, w2 = (w.permute(1, 2, 0) for w in self.weights)
        scores, chosen = sonic.TC_Softmax_Topk_Router_Function.apply(logits, experts, self.top_k,
                                                                     True, False)
        rows = tokens * self.top_k
        counts, offsets, gather, scatter, place = (
            torch.empty(n, dtype=torch.int32, device=x.device)
            for n in (experts, experts + 1, rows, rows, rows))
        sonic.TC_topk_router_metadata_triton(chosen, experts, counts, offsets, gather, scatter,
                                             place)
        h, z = sonic._UpProjection.apply(x, w1, None, offsets, rows, self.top_k, gather, scatter,
                                         place, None, False, self.swiglu,
                                         not torch.is_grad_enabled())
        return sonic._DownProjection.apply(h, z, w2, None, scores, offsets, tokens, self.top_k,
                                           gather, scatter, place, None, False, self.swiglu)


class TritonKernels:
    """triton_kernels, which has no backward. Its SwiGLU adds 1 to up, which a bias takes away."""

    def __init__(self, layer):
        from triton_kernels import matmul_ogs, routing, swiglu
        self.top_k, self.weights, self.route = layer.top_k, [], routing.routing
        self.multiply, self.precision = matmul_ogs.matmul_ogs, matmul_ogs.PrecisionConfig()
        self.w1 = interleaved(layer.w1).transpose(1, 2)
        self.w2 = layer.w2.transpose(1, 2)
        self.bias = torch.zeros(layer.experts, 2 * layer.features, device=layer.x.device)
        self.bias[:, 1::2] = -1
        self.activation = matmul_ogs.FusedActivation(
            matmul_ogs.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit")), (1.0, None), 2)

    def mix(self, x, logits):
        routing, gather, scatter = self.route(logits, self.top_k)
        h = self.multiply(x, self.w1, self.bias, routing, gather_indx=gather,
                          precision_config=self.precision, fused_activation=self.activation)
        return self.multiply(h, self.w2, None, routing, scatter_indx=scatter,
                             precision_config=self.precision, gammas=routing.gate_scal)

    def route_and_mix(self, x, router):
        return self.mix(x, functional.linear(x, router))


CONTESTANTS = {"cadre": Cadre, "torch": Torch, "sonicmoe": SonicMoE,
               "triton_kernels": TritonKernels}
