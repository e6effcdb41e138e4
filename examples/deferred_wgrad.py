"""Weight gradients of an expert MLP beside what follows in backward, on a stream of their own:

    python examples/deferred_wgrad.py [--device cuda]

With delay_wgrad_compute=True backward leaves the gradients of the experts' weights to
`backward_dw()`. Here that is called on a second stream, as soon as the experts have passed their
input's gradient on, while the dense layers below go on with backward on the first. The gradients
are those of an ordinary backward, bit for bit. On the CPU the same calls run in order.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import cadre


class Model(nn.Module):
    """Dense layers, then experts. Rows are in the order of the experts."""

    def __init__(self, width: int, experts: int, delay: bool, device: torch.device,
                 dtype: torch.dtype) -> None:
        super().__init__()
        options = dict(bias=False, delay_wgrad_compute=delay, params_dtype=dtype, device=device,
                       single_grouped_weight=True)
        self.dense = nn.Sequential(*(nn.Linear(width, width, device=device, dtype=dtype)
                                     for _ in range(4)))
        self.up = cadre.GroupedLinear(experts, width, 2 * width, **options)
        self.down = cadre.GroupedLinear(experts, width, width, **options)

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The result [R, width], and the input of the experts [R, width]."""
        rows = self.dense(x)
        where = cadre.offsets(counts, "counts", x.shape[0])  # once for both layers
        h = cadre.activation(self.up(rows, where), where.offsets)
        return self.down(h, where), rows


def step(model: Model, data: tuple[Tensor, Tensor, Tensor], side: torch.cuda.Stream | None) -> None:
    """Forward and backward; gradients are complete when the current stream gets there."""
    x, counts, dy = data
    y, rows = model(x, counts)
    if not model.up.need_backward_dw():
        y.backward(dy)
    elif side is None:
        y.backward(dy)
        model.down.backward_dw()
        model.up.backward_dw()
    else:
        rows.register_hook(lambda _: start_wgrad(model, side))
        y.backward(dy)
        torch.cuda.current_stream().wait_stream(side)  # before anybody uses the gradients


def start_wgrad(model: Model, side: torch.cuda.Stream) -> None:
    """Called in backward, when the gradient of the experts' input is there."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model.down.backward_dw()
        model.up.backward_dw()


def milliseconds(run: Callable[[], None], model: Model, repeat: int) -> float:
    """Of one call, the median; waits included."""
    times = []
    for _ in range(repeat + 1):
        model.zero_grad()
        wait(model)
        began = time.perf_counter()
        run()
        wait(model)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def wait(model: Model) -> None:
    if model.up.weight.is_cuda:
        torch.cuda.synchronize(model.up.weight.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, help="256; on a GPU 8192")
    parser.add_argument("--width", type=int, help="64; on a GPU 1024")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    rows = options.rows or (8192 if on_gpu else 256)
    width = options.width or (1024 if on_gpu else 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    torch.manual_seed(0)
    plain = Model(width, options.experts, False, device, dtype)
    deferred = Model(width, options.experts, True, device, dtype)
    deferred.load_state_dict(plain.state_dict())
    share = torch.rand(options.experts).softmax(0)  # not all alike
    counts = (share * rows).long().to(device)
    data = (torch.randn(rows, width).to(device, dtype), counts,
            torch.randn(rows, width).to(device, dtype))
    side = torch.cuda.Stream() if on_gpu else None
    print("weight gradients on a stream of their own" if on_gpu else
          "the CPU has no streams: weight gradients run after the rest of backward")

    step(plain, data, None)
    step(deferred, data, side)
    same = [torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), deferred.parameters())]
    print(f"{sum(same)} of {len(same)} gradients have the bits of an ordinary backward")
    if not all(same):
        raise SystemExit("gradients differ, must be equal")

    runs = [("ordinary", plain, None), ("deferred, in order", deferred, None)]
    if side is not None:
        runs.append(("deferred, on a side stream", deferred, side))
    for name, model, stream in runs:
        time_ms = milliseconds(lambda: step(model, data, stream), model, options.repeat)
        print(f"{name}: {time_ms:.3f} ms a step, {options.repeat} steps")


if __name__ == "__main__":
    main()
