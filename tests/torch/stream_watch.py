"""Streams that a CPU stands in for, and who watches them: that whatever one stream made the other
reads behind it, and that memory which is free is used again behind the last read of it."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cadre


class Stream:
    """Of all streams it knows how far what is queued here has been behind them."""

    def __init__(self, device=None, priority=0, name="side"):
        self.device, self.name, self.behind = torch.device("cpu"), name, {}

    def wait_event(self, event):
        for stream, at in event.items():
            self.behind[stream] = max(at, self.behind.get(stream, 0))

    def wait_stream(self, other):
        self.wait_event(other.behind)

    def record_event(self):
        return dict(self.behind)

    def step(self):
        self.behind[self] = self.behind.get(self, 0) + 1
        return self.behind[self]


class Memory:
    """A storage: whose it is, where it was written, and how far each stream was that used it."""

    def __init__(self, storage, stream):
        self.is_there, self.stream = StorageWeakRef(storage), stream
        self.written, self.used = {}, {}


class Watch(TorchDispatchMode):
    """Operations in their order, and what is wrong with them."""

    def __init__(self):
        super().__init__()
        self.main = self.current = Stream(name="main")
        self.memory, self.free, self.calls, self.wrong = {}, [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, stream = kwargs or {}, self.current
        at, name = stream.step(), func.name().removeprefix("cadre::")
        self.calls.append((name, stream.name))
        self.sweep(stream, name)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for t in given:
            own = self.memory_of(t, self.main)
            if any(stream.behind.get(s, 0) < when for s, when in own.written.items()):
                self.wrong.append(f"{name} on {stream.name} reads too early")
            own.used[stream] = at
        made = func(*args, **kwargs)
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.memory:
                own = self.memory_of(t, stream)
                own.written[stream] = own.used[stream] = at
        for argument, t in zip(func._schema.arguments, args):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(t, torch.Tensor):
                self.memory_of(t, stream).written[stream] = at
        return made

    def memory_of(self, t, stream):
        storage = t.untyped_storage()
        return self.memory.setdefault(storage._cdata, Memory(storage, stream))

    def sweep(self, stream, name):
        """What is free may be what this operation makes its results in."""
        for key in [key for key, own in self.memory.items() if own.is_there.expired()]:
            self.free.append(self.memory.pop(key))
        for own in [own for own in self.free if own.stream is stream]:
            self.free.remove(own)
            late = [s.name for s, at in own.used.items() if stream.behind.get(s, 0) < at]
            if late:
                self.wrong.append(f"{name} on {stream.name} takes memory that {late} still uses")

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextmanager
def watched():
    """A Watch of what runs within, for which layers take the CPU's tensors for a GPU's."""
    watch = Watch()
    with ExitStack() as stack:
        for where, name, stand_in in (
                (torch.cuda, "Stream", Stream), (torch.cuda, "stream", watch.stream),
                (torch.cuda, "current_stream", lambda device=None: watch.current),
                (cadre.moe, "has_sides", lambda x: True)):
            stack.enter_context(mock.patch.object(where, name, stand_in))
        stack.enter_context(watch)
        yield watch
