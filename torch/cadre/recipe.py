"""Recipes: the number format of each product of a layer, and the context that sets one."""

import functools
import inspect
import re
import sys
import threading
import types
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, ParamSpec, TypeVar

import torch
from torch._C import _current_autograd_node, _current_graph_task_id
from torch.autograd.function import BackwardCFunction
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from .dtypes import kind_of, working_dtype
from .peer_recipes import PREDICATES, peer_words

PASSES = ("fprop", "dgrad", "wgrad")

_P = ParamSpec("_P")
_T = TypeVar("_T")
_WORDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Recipe:
    """A named recipe with, per pass, another one: `str(Recipe("nvfp4", wgrad="bf16"))` is
    "nvfp4,wgrad=bf16".

    name: "f32", "bf16", "f16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4" or "mxfp4"; or more
        words of a recipe, such as "fp8_block,pinned". They come in the order of a recipe, whatever
        their own: the name, the passes, pinned.
    fprop, dgrad, wgrad: a name as above, "input", which is the type of the layer's input, or the
    formats of both operands as "lhs*rhs" ("mxfp8*mxfp8:2d").

    Errors: ValueError that lists the words there are; TypeError for what is no word.
    """

    name: str
    fprop: str | None = None
    dgrad: str | None = None
    wgrad: str | None = None

    def __post_init__(self) -> None:
        _require_words("Recipe: name", self.name, self.name, "a recipe's name")
        for which in PASSES:
            words = getattr(self, which)
            if words is not None:
                must = "a recipe's name, 'input' or formats 'lhs*rhs'"
                _require_words(f"Recipe: {which}", words, f"f32,{which}={words}", must)
                if "," in words:
                    raise ValueError(f"Recipe: {which} is {words!r}, must be {must}; all other "
                                     "words belong to name")
        _require_words("Recipe", str(self), str(self), "a recipe that names each pass once")

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in PASSES)
        words = [*self.name.split(","), *(f"{name}={words}" for name, words in given if words)]
        return ",".join(sorted(words, key=_place))


def _place(word: str) -> int:
    """Of a word in a recipe."""
    places = ("", *PASSES, "pinned")
    name = word.partition("=")[0]
    return places.index(name) if name in places else 0


def _require_words(argument: str, given: Any, recipe: str, must: str) -> None:
    """Errors: ValueError, that what is given to the argument has to be another thing, unless the
    library knows the recipe; TypeError unless words are given."""
    if not isinstance(given, str):
        raise TypeError(f"{argument} is {kind_of(given)}, must be {must}")
    complaint = _complaint(recipe)
    if complaint:
        raise ValueError(f"{argument} is {given!r}, must be {must}; {complaint}")


@torch.compiler.assume_constant_result
def _complaint(recipe: str) -> str:
    return _complaint_of_library(recipe)


@functools.lru_cache(maxsize=256)
def _complaint_of_library(recipe: str) -> str:
    """What it says of words that are no recipe; "" of those that are."""
    try:
        torch.ops.cadre._require_recipe(_OWN_TYPE.sub("=f32", recipe))
    except ValueError as error:
        return str(error).removeprefix("recipe: ")
    return ""


_OWN_TYPE = re.compile("=input(?=,|$)")


def recipe_text(recipe: Any) -> str:
    """The words of a `Recipe`, of words themselves, of None (""), or of a recipe object of
    TransformerEngine with its options, given to an argument `recipe`.

    Errors: NotImplementedError for delayed scaling and for options that Cadre does not have;
    ValueError for words that are no recipe; TypeError for what is no recipe.
    """
    if recipe is None or isinstance(recipe, str) and not recipe:
        return ""
    words = str(recipe) if isinstance(recipe, (str, Recipe)) else peer_words(recipe)
    if words is None:
        raise TypeError(f"recipe is {kind_of(recipe)}, must be words, a cadre.Recipe or an "
                        "object with one of the methods "
                        + ", ".join(f"{predicate}()" for predicate, _ in PREDICATES))
    _require_words("recipe", words, words, "words of a recipe")
    return words


def words_for(recipe: str, x: Tensor) -> str:
    """The words that torch.ops.cadre takes for a layer on x: "input" becomes the type that the
    layer works in."""
    if not isinstance(recipe, str):  # somebody has put a Recipe where a layer keeps words
        recipe = recipe_text(recipe)
    if "=input" not in recipe:
        return recipe
    return recipe.replace("=input", f"={_WORDS.get(working_dtype(x), 'f32')}")


def is_plain(words: str, x: Tensor) -> bool:
    """Whether all products of a layer on x read x as it is, by these words for it."""
    return words in ("", _WORDS.get(working_dtype(x)))


class _Entry:
    """That a context was entered."""

    def __init__(self, context: "autocast | None", recipe: str, task: int | None) -> None:
        self.context, self.recipe = context, recipe
        self.task = task  # the backward pass that it was in, -1 for none, None of compiled code
        self.was_left = False  # by another thread


_Entries = tuple[_Entry, Any]  # the innermost, and those around it likewise, None beyond the last


class _Thread(threading.local):
    """The contexts that a thread is in. torch.compile guards an attribute of a thread, but no
    ContextVar; so the tasks of asyncio in one thread share them, as they share torch.no_grad."""

    def __init__(self) -> None:
        self.entries: _Entries = (_Entry(None, "", -1), None)


_thread = _Thread()
_used = False  # whether there ever was a context


def _innermost() -> _Entry:
    entry, around = _thread.entries
    while entry.was_left:
        entry, around = around
    return entry


def _find(context: "autocast") -> _Entry | None:
    """The innermost of this thread that is of the context."""
    entry, around = _thread.entries
    while around is not None:
        if entry.context is context and not entry.was_left:
            return entry
        entry, around = around
    return None


def _without(entries: _Entries, gone: _Entry | None = None) -> _Entries:
    """Without one, and without those that another thread has left, too."""
    entry, around = entries
    if around is None:
        return entries
    around = _without(around, gone)
    return around if entry is gone or entry.was_left else (entry, around)


def _depth() -> int:
    (_, around), depth = _without(_thread.entries), 0
    while around is not None:
        (_, around), depth = around, depth + 1
    return depth


def active_recipe() -> str:
    """The words of the innermost `cadre.autocast`, "" without one: each layer then works in the
    type of its input."""
    if is_dynamo_compiling():
        return _innermost().recipe
    if not _used:
        return ""
    entry, task = _innermost(), _current_graph_task_id()
    recipe = entry.recipe
    if task != -1 and entry.task not in (task, None):  # forward again, no context inside
        _, recipe = getattr(_current_autograd_node(), _REMEMBERED, (0, recipe))
    if not torch.is_grad_enabled():
        _remember(_depth(), recipe)
    return recipe


# Checkpointing calls a forward again in backward, outside of all contexts. That of torch is told
# below to call it in one, which compiled code sees, too. Others are an autograd.Function, whose
# node remembers the words that were there the first time: those seen in the fewest contexts, since
# the contexts inside are entered again.
_REMEMBERED = "_cadre_recipe"


def _remember(depth: int, recipe: str) -> None:
    """Tells the words to every autograd.Function whose forward is running."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] not in ((), ("self",)):
            node = frame.f_locals.get(code.co_varnames[0])  # of any name
            if (isinstance(node, BackwardCFunction)
                    and depth < getattr(node, _REMEMBERED, (depth + 1, ""))[0]):
                setattr(node, _REMEMBERED, (depth, recipe))
        frame = frame.f_back


class autocast:  # noqa: N801 (a context manager, named as torch's and TransformerEngine's)
    """Sets the recipe of the layers called inside: `with cadre.autocast(recipe="mxfp8"): ...`. Also
    a decorator, of generators and coroutines too: each of their steps is in the context. Contexts
    nest, the innermost counts. Each thread has its own, as with torch.no_grad: one that is open
    where a generator yields or a coroutine awaits is also that of what its thread runs meanwhile.

    enabled: False is as if no context were there.
    recipe, fp8_recipe: words ("mxfp8", "nvfp4,wgrad=bf16"), a `Recipe`, or a recipe object of
        TransformerEngine (anything with the methods mxfp8(), nvfp4(), float8_block_scaling(),
        float8_current_scaling()), whose options are translated or refused. None: mxfp8.
    amax_reduction_group, fp8_group, _graph: of delayed scaling, which shares its scales among
        ranks. No scale outlives a call here, so nothing is shared, as there with other recipes.

    A layer's backward uses the recipe of its forward. torch.utils.checkpoint runs forward again
    under the recipe of the first time; checkpoints that are not torch's own, such as Megatron's,
    do so but for compiled code, if their forward has its node (`ctx`) as the first argument.
    `context_fn=cadre.checkpoint_contexts` says it in words.

    Errors: ValueError for words that are no recipe, with those there are, and for two recipes;
    TypeError for what is no recipe, or no bool; NotImplementedError for calibrating=True, which
    collects the numbers of delayed scaling, and for options of a recipe object that Cadre does not
    have. Formats that the device does not have are NotImplementedError, with the reasons, from the
    layer that needs them.
    """

    def __init__(self, enabled: bool = True, calibrating: bool = False, recipe: Any = None,
                 amax_reduction_group: Any = None, _graph: bool = False, *,
                 fp8_recipe: Any = None, fp8_group: Any = None) -> None:
        for name, given in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(given, bool):
                raise TypeError(f"{name} is {given!r}, must be a bool; write recipe={given!r}")
        if calibrating:
            raise NotImplementedError(
                "calibrating is True, must be False; it collects numbers for delayed scaling, and "
                "scales come from the data at hand here")
        if recipe is not None and fp8_recipe is not None:
            raise ValueError(f"fp8_recipe is {fp8_recipe!r}, must be left out; recipe is given, "
                             "and both mean the same")
        recipe = fp8_recipe if recipe is None else recipe
        self.recipe: str = recipe_text("mxfp8" if recipe is None else recipe) if enabled else ""
        self._entered: list[_Entry] = []  # and not left, but for what compiled code has entered

    def __enter__(self) -> "autocast":
        global _used
        _used = True
        if is_dynamo_compiling():
            _thread.entries = (_Entry(self, self.recipe, None), _thread.entries)
            return self
        entry = _Entry(self, self.recipe, _current_graph_task_id())
        self._entered.append(entry)
        _thread.entries = (entry, _without(_thread.entries))
        return self

    def __exit__(self, *error: Any) -> None:
        """A generator may leave its context when others are inside, or in another thread."""
        entry = _find(self)
        if entry is not None:
            _thread.entries = _without(_thread.entries, entry)
        if is_dynamo_compiling():
            return
        if entry is None and self._entered:
            entry = self._entered[-1]
            entry.was_left = True
        if entry in self._entered:
            self._entered.remove(entry)

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        recipe = self.recipe
        if inspect.isasyncgenfunction(function):
            raise TypeError("autocast decorates an async generator, must decorate a function, a "
                            "generator or a coroutine; decorate what it calls")

        @functools.wraps(function)
        def with_recipe(*args: Any, **kwargs: Any) -> Any:
            with autocast(recipe=recipe):
                return function(*args, **kwargs)

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from _in_steps(function(*args, **kwargs), recipe))

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _awaited(function(*args, **kwargs), recipe)

        made: Any = (generator if inspect.isgeneratorfunction(function) else
                     coroutine if inspect.iscoroutinefunction(function) else with_recipe)
        return made


def _in_steps(steps: Any, recipe: str) -> Generator[Any, Any, Any]:
    """What a generator yields and returns. It runs under the recipe, and what takes from it does
    not."""
    go_on, given = steps.send, None
    try:
        while True:
            with autocast(recipe=recipe):
                made = go_on(given)
            try:
                go_on, given = steps.send, (yield made)
            except GeneratorExit:
                with autocast(recipe=recipe):
                    steps.close()
                raise
            except BaseException as error:
                go_on, given = steps.throw, error
    except StopIteration as end:
        return end.value


@types.coroutine
def _awaited(coroutine: Any, recipe: str) -> Generator[Any, Any, Any]:
    return (yield from _in_steps(coroutine.__await__(), recipe))


fp8_autocast = autocast  # as TransformerEngine called it before


def quantized_model_init(enabled: bool = True, recipe: Any = None,
                         preserve_high_precision_init_val: bool = False) -> ContextManager[Any]:
    """TransformerEngine's context for layers whose parameters are quantised, which do not exist
    here: with enabled=False it does nothing, as there.

    Errors: NotImplementedError for enabled=True.
    """
    if enabled:
        raise NotImplementedError(
            "quantized_model_init: enabled is True, must be False; parameters keep their type "
            "here, and is_first_microbatch keeps quantised copies of them")
    return nullcontext()


fp8_model_init = quantized_model_init  # as TransformerEngine called it before


def _again(function: Callable[_P, _T], recipe: str) -> Callable[_P, _T]:
    """The function under a recipe, whatever context it is called in."""

    def again(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with autocast(recipe=recipe) if recipe or _used else nullcontext():
            return function(*args, **kwargs)

    return again


UNSEEN = "_cadre_unseen_by_a_checkpoint"


def _mark_unseen(outputs: Any) -> None:
    """Tensors made within tuples, which a reentrant checkpoint gives no gradient."""
    for nested in outputs if isinstance(outputs, tuple) else ():
        for tensor in nested if isinstance(nested, tuple) else ():
            if isinstance(tensor, Tensor) and not tensor.requires_grad:
                setattr(tensor, UNSEEN, True)


def _keep_recipes_in_checkpoints() -> None:
    own = CheckpointFunction.forward

    def forward(ctx: Any, run_function: Callable[..., Any], *rest: Any) -> Any:
        recipe = active_recipe()
        outputs = own(ctx, run_function, *rest)
        ctx.run_function = _again(run_function, recipe)  # what backward calls
        if any(isinstance(given, Tensor) and given.requires_grad for given in rest):
            _mark_unseen(outputs)
        return outputs

    CheckpointFunction.forward = staticmethod(forward)
    make = _CheckpointFrame.__init__

    @functools.wraps(make)
    def init(self: Any, recompute_fn: Callable[..., Any], *rest: Any, **named: Any) -> None:
        make(self, _again(recompute_fn, active_recipe()), *rest, **named)

    _CheckpointFrame.__init__ = init  # of those that are not reentrant


_keep_recipes_in_checkpoints()


def checkpoint_contexts() -> tuple[ContextManager[Any], ContextManager[Any]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False,
    context_fn=cadre.checkpoint_contexts)`: forward, and forward again, under the recipe that is
    active now."""
    recipe = active_recipe()
    return autocast(recipe=recipe), autocast(recipe=recipe)

