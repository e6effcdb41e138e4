"""The contexts that set recipes: of threads, tasks and generators, in eager and compiled code."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import draw
from linear_reference import module
from torch._subclasses.fake_tensor import FakeTensorMode

import cadre
from cadre.recipe import active_recipe

COUNTS = [3, 0, 9, 1, 4]
WORDS = ["", "bf16", "mxfp8", "fp8_block"]


@pytest.fixture(autouse=True)
def first_fake_mode_of_the_process():
    """In this thread: without a GPU torch keeps what the first one made for all others, and it ends
    with the thread that made it."""
    with FakeTensorMode():
        pass


def test_contexts_nest():
    assert active_recipe() == ""
    with cadre.autocast():
        assert active_recipe() == "mxfp8"
        with cadre.autocast(recipe=cadre.Recipe("nvfp4", wgrad="bf16")):
            assert active_recipe() == "nvfp4,wgrad=bf16"
            with cadre.autocast(enabled=False):
                assert active_recipe() == ""
        assert active_recipe() == "mxfp8"
        with pytest.raises(KeyError), cadre.autocast(recipe="bf16"):
            raise KeyError
        assert active_recipe() == "mxfp8"
    assert active_recipe() == ""


def test_one_context_used_twice_and_within_itself():
    context = cadre.autocast(recipe="nvfp4")
    with context, cadre.autocast(recipe="bf16"), context:
        assert active_recipe() == "nvfp4"
    assert active_recipe() == ""


def test_decorator():
    @cadre.autocast(recipe="fp8_block")
    def named(a, *, b):
        """Says what it sees."""
        return a, b, active_recipe()

    assert named(1, b=2) == (1, 2, "fp8_block")
    assert named.__name__ == "named" and active_recipe() == ""


def holding(recipe):
    """A generator that is in a context where it stands."""
    with cadre.autocast(recipe=recipe):
        yield 1
        yield 2


def test_a_generator_leaves_its_own_context():
    """Whichever others were entered since."""
    first, second = holding("nvfp4"), holding("fp8_block")
    next(first)
    next(second)
    with cadre.autocast(recipe="bf16"):
        first.close()
        assert active_recipe() == "bf16"
        next(second)
        second.close()
        assert active_recipe() == "bf16"
    assert active_recipe() == ""


def test_a_generator_that_another_thread_closes(threads, read):
    one, other = threads
    held = [holding(recipe) for recipe in ("mxfp8", "fp8_block")]
    for generator in held:
        one(next, generator)
    with cadre.autocast(recipe="bf16"):
        held[1].close()
        assert active_recipe() == read() == "bf16"
    assert one(active_recipe) == one(read) == "mxfp8"
    other(held[0].close)
    assert one(active_recipe) == one(read) == other(active_recipe) == active_recipe() == ""


def test_a_context_that_nobody_has_entered():
    context = cadre.autocast(recipe="nvfp4")
    with cadre.autocast(recipe="bf16"):
        context.__exit__(None, None, None)
        assert active_recipe() == "bf16"


def test_contexts_that_overlap_for_ever_leave_nothing_behind(threads):
    for close in (threads[0], lambda call: call()):
        held = [holding("bf16")]
        for _ in range(2000):
            held.append(holding("mxfp8"))
            next(held[-1])
            close(held.pop(0).close)
        assert active_recipe() == "mxfp8"
        close(held.pop().close)
        assert active_recipe() == ""


def steps(seen):
    """Yields what it is sent, and goes on behind a KeyError."""
    given = None
    try:
        while given != "end":
            seen.append(active_recipe())
            try:
                given = yield given
            except KeyError as error:
                given = str(error)
        return "over"
    finally:
        seen.append(active_recipe())


def test_a_decorated_generator_is_in_the_context_step_by_step():
    decorated = cadre.autocast(recipe="fp8_block")(steps)
    made = decorated(seen := [])
    with cadre.autocast(recipe="bf16"):
        assert next(made) is None and active_recipe() == "bf16"
        assert made.send("a") == "a" and active_recipe() == "bf16"
    assert made.throw(KeyError(1)) == "1" and active_recipe() == ""
    with pytest.raises(StopIteration) as end:
        made.send("end")
    assert end.value.value == "over" and seen == ["fp8_block"] * 4 and active_recipe() == ""
    for stop in ("close", "throw"):
        made = decorated(seen := [])
        next(made)
        if stop == "close":
            made.close()
        else:
            with pytest.raises(IndexError, match="^out$"):
                made.throw(IndexError("out"))
        assert seen == ["fp8_block"] * 2 and active_recipe() == "" and not list(made)


def test_a_decorated_generator_in_compiled_code():
    @cadre.autocast(recipe="fp8_block")
    def generator(x):
        for factor in (1, 2):
            yield x * factor + WORDS.index(active_recipe())

    def call(x):
        return [y * 10 + WORDS.index(active_recipe()) for y in generator(x)]

    torch._dynamo.reset()
    x = torch.ones(())
    with cadre.autocast(recipe="bf16"):
        assert torch.compile(call, backend="eager")(x) == call(x) == [41, 51]


def test_a_decorated_coroutine_keeps_its_context_from_other_tasks():
    seen = {}

    async def task(recipe, meet):
        seen[recipe] = [active_recipe()]
        await meet.wait()
        seen[recipe].append(active_recipe())
        await asyncio.sleep(0)
        seen[recipe].append(active_recipe())
        return recipe

    async def run():
        meet = asyncio.Barrier(3)
        recipes = ["mxfp8", "nvfp4", "bf16"]
        calls = [cadre.autocast(recipe=recipe)(task) for recipe in recipes]
        assert await asyncio.gather(*(call(recipe, meet) for call, recipe in zip(calls, recipes))
                                    ) == recipes
        assert active_recipe() == ""

    asyncio.run(run())
    assert seen == {recipe: [recipe] * 3 for recipe in seen}


def test_each_thread_has_its_own():
    seen = []
    with cadre.autocast(recipe="nvfp4"):
        thread = threading.Thread(target=lambda: seen.append(active_recipe()))
        thread.start()
        thread.join()
    assert seen == [""]


@pytest.fixture
def read():
    """A compiled function that returns the words that it sees. `read.compiled` counts."""
    torch._dynamo.reset()

    def backend(graph, _):
        call.compiled += 1
        return graph.forward

    compiled = torch.compile(lambda x: x + WORDS.index(active_recipe()), backend=backend,
                             fullgraph=True)

    def call():
        return WORDS[int(compiled(torch.zeros(())))]

    call.compiled = 0
    return call


@pytest.fixture
def threads():
    """Two threads that run the calls they are sent, one after the other."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        yield [lambda call, *args, pool=pool: pool.submit(call, *args).result(60)
               for pool in (one, other)]


@pytest.mark.parametrize("shared", [False, True])
def test_compiled_code_has_the_recipe_of_its_thread(threads, read, shared):
    """Whatever order they come and leave in, and if they share one context."""
    one, other = threads
    first = cadre.autocast(recipe="mxfp8")
    second = first if shared else cadre.autocast(recipe="fp8_block")
    one(first.__enter__)
    other(second.__enter__)
    assert (one(read), other(read), read()) == (first.recipe, second.recipe, "")
    one(first.__exit__)
    assert one(active_recipe) == one(read) == "" and other(read) == second.recipe
    with cadre.autocast(recipe="bf16"):
        assert (one(read), other(read), read()) == ("", second.recipe, "bf16")
        other(second.__exit__)
        assert (one(read), other(read), read()) == ("", "", "bf16")
    assert (one(read), other(read), read()) == ("", "", "")


def test_eager_and_compiled_code_are_in_the_same_contexts(read):
    """Other threads of asyncio are in none, tasks of one thread share theirs."""
    def both():
        return active_recipe(), read()

    async def task():
        return both()

    async def run():
        with cadre.autocast(recipe="mxfp8"):
            return [await asyncio.to_thread(both), *await asyncio.gather(task(), task())]

    assert asyncio.run(run()) == [("", "")] + [("mxfp8", "mxfp8")] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_context_that_hooks_enter_and_leave(compiled):
    """Code that is not compiled sees what compiled code entered."""
    seen = []

    class Layer(torch.nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            look()
            return x + WORDS.index(active_recipe())

    @torch._dynamo.disable
    def look():
        seen.append(active_recipe())

    layer, context = Layer(), cadre.autocast(recipe="mxfp8")
    layer.register_forward_pre_hook(lambda *_: context.__enter__() and None)
    layer.register_forward_hook(lambda *_: context.__exit__(None, None, None))
    torch._dynamo.reset()
    call = torch.compile(layer, backend="eager") if compiled else layer
    with cadre.autocast(recipe="bf16"):
        assert call(torch.zeros(())) == WORDS.index("mxfp8") and active_recipe() == "bf16"
    assert seen == ["mxfp8"] and active_recipe() == ""


FIRST = """
import torch, cadre
from cadre.recipe import active_recipe
context = cadre.autocast(recipe="bf16")

@torch.compile(backend="eager", fullgraph=True)
def enter(x):
    context.__enter__()
    return x + 1

enter(torch.zeros(()))
assert active_recipe() == "bf16"
context.__exit__(None, None, None)
assert active_recipe() == ""
"""


def test_the_first_context_of_the_process_is_entered_in_compiled_code():
    subprocess.run([sys.executable, "-c", FIRST], check=True)


def test_contexts_of_one_recipe_compile_once(read, threads):
    """However deep, and in whatever thread."""
    with cadre.autocast(recipe="bf16"), cadre.autocast(recipe="mxfp8"):
        assert read() == "mxfp8"
    with cadre.autocast(recipe="mxfp8"):
        assert read() == "mxfp8"
        with cadre.autocast(enabled=False), cadre.autocast(recipe="mxfp8"):
            assert read() == "mxfp8"
    assert threads[0](lambda: cadre.autocast(recipe="mxfp8")(read)()) == "mxfp8"
    assert read.compiled == 1


def test_a_context_inside_of_compiled_code_is_of_its_thread(threads):
    """While it runs, and if the thread around it leaves its own."""
    one, other = threads
    around, seen = cadre.autocast(recipe="mxfp8"), []

    def backend(graph, _):
        def run(*args):
            one(around.__exit__)
            seen.extend([one(active_recipe), other(active_recipe), active_recipe()])
            return graph(*args)
        return run

    @cadre.autocast(recipe="fp8_block")
    def inside(x):
        return x + len(active_recipe())

    def call(x):
        return x * len(active_recipe()) + inside(x) + len(active_recipe())

    one(around.__enter__)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    with cadre.autocast(recipe="bf16"):
        assert compiled(torch.ones(())) == len("bf16") + 1 + len("fp8_block") + len("bf16")
        assert seen == ["", "", "bf16"] and active_recipe() == "bf16"
    assert active_recipe() == ""


def test_compiled_layers_in_threads_at_once():
    """Each result is that of the recipe of the thread that asked for it."""
    layer = module(torch.device("cpu"), k=64, n=96, dtype=torch.bfloat16)
    x = draw(17, 64, dtype=torch.bfloat16)
    want = {}
    for recipe in WORDS:
        with cadre.autocast(enabled=recipe != "", recipe=recipe or "mxfp8"):
            want[recipe] = layer(x, COUNTS)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    meet = threading.Barrier(len(WORDS))

    def work(recipe):
        right = []
        with cadre.autocast(enabled=recipe != "", recipe=recipe or "mxfp8"):
            for _ in range(3):
                meet.wait(60)
                right.append(torch.equal(compiled(x, COUNTS), want[recipe]))
        return right

    with ThreadPoolExecutor(len(WORDS)) as pool:
        assert list(pool.map(work, WORDS)) == [[True] * 3] * len(WORDS)
