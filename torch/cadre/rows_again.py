"""Rows that ranks send each other a second time in backward, so that forward keeps none."""

from typing import Any, Callable, ContextManager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class RowsAgain:
    """The rows of one dispatch, which a layer's backward reads.

    dispatch: sends them again. Every rank calls it where its backward begins, whether it has rows
        or not, so that exchanges come in one order.
    """

    def __init__(self, dispatch: Callable[[], Tensor]) -> None:
        self._dispatch = dispatch
        self._kept_of_them = 0  # times that autograd was about to keep them
        self._rows: Tensor | None = None
        self._unread = 0

    def not_kept(self, rows: Tensor) -> ContextManager[Any]:
        """While it lasts, autograd keeps everything but these rows."""
        address, shape = rows.data_ptr(), rows.shape

        def pack(t: Tensor) -> Any:
            if t.data_ptr() == address and t.shape == shape:
                self._kept_of_them += 1
                return self
            return t, t._version

        return saved_tensors_hooks(pack, self._unpacked)

    def before_backward(self, y: Tensor) -> Tensor:
        """y of the layer, whose backward has the rows before that of the layer asks for them."""
        asked: Tensor = _Ask.apply(y, self)
        return asked

    def fetch(self) -> None:
        """Unless the layer reads none: its recipe may keep codes of them, its weights be frozen."""
        if self._kept_of_them:
            self._rows, self._unread = self._dispatch(), self._kept_of_them

    def _unpacked(self, kept: Any) -> Tensor:
        if kept is self:
            rows = self._rows
            self._unread -= 1
            if self._unread == 0:
                self._rows = None
            return rows
        t, version = kept
        if t._version != version:
            raise RuntimeError(f"backward reads {list(t.shape)} of {t.dtype} as it was in forward, "
                               "and it was modified in place since")
        return t


class _Ask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: RowsAgain) -> Tensor:
        ctx.rows = rows
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.rows.fetch()
        return dy, None
