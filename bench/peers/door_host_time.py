"""How long the host needs for a call of an eager layer; torch_door.py records it, and a test of the
PyTorch door bounds it."""
import gc
import time

import torch


def host_samples_us(layers, x, dy, counts, rounds):
    """{call: [us a layer]} of layers in a row, as in a model; the first fifth is left out. The GPU
    is idle before each forward, so no call waits for room in its queue."""
    def roots(results):
        x.grad = None
        return results[-1:], [dy]

    return _samples_us(layers, lambda layer, y: layer(x if y is None else y, counts), roots, rounds)


def autograd_samples_us(layers, rounds):
    """The same of torch.stack of each layer's weights, and of its biases: what autograd itself
    needs for so many parameters, and the host for four kernels."""
    stems = [[[p for name, p in layer.named_parameters() if name.startswith(stem)]
              for stem in ("weight", "bias")] for layer in layers]
    dy = [torch.stack(parameters).detach() for layer in stems for parameters in layer]

    def roots(results):
        return [y for layer in results[1:] for y in layer], dy

    of = dict(zip(layers, stems))
    return _samples_us(layers, lambda layer, _: [torch.stack(p) for p in of[layer]], roots, rounds)


def _samples_us(layers, call, roots, rounds):
    """`call(layer, the result before)`; `roots(results)` is what backward begins with."""
    samples = {"forward": [], "backward": []}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            results = [None]
            for layer in layers:
                layer.zero_grad()
            for layer in layers:
                start = time.perf_counter()
                results.append(call(layer, results[-1]))
                samples["forward"].append(1e6 * (time.perf_counter() - start))
            y, dy = roots(results)
            start = time.perf_counter()
            torch.autograd.backward(y, dy)
            samples["backward"].append(1e6 * (time.perf_counter() - start) / len(layers))
            if dy[0].is_cuda:
                torch.cuda.synchronize()
    finally:
        gc.enable()
    return {call: us[len(us) // 5:] for call, us in samples.items()}
