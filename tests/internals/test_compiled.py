"""Compiled parts of a model, which run eagerly on recorded steps and compiled on all others."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_recorder
from lightning_recorder.internals.compiled import (
    EagerStance,
    compiled_modules,
    flex_attention_users,
    observe_compiled_calls,
)
from lightning_recorder.selection import Selection
from lightning_recorder.taps import OutputGradientTap, OutputTap, Tap
from tests import forks


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def by_wrapper(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]  # torch declares a function
    return wrapped


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("compile_it", [by_wrapper, in_place])
def test_what_is_compiled_and_all_in_it(compile_it: object) -> None:
    """A compiled module and its descendants are found; its siblings and its parent are not."""
    assert callable(compile_it)
    inner = block()
    net = nn.Sequential(block(), compile_it(inner))
    found = compiled_modules(net)
    assert set(found) == {net[1], *inner.modules()}


def test_nothing_is_compiled() -> None:
    """A plain model has no compiled parts."""
    assert len(compiled_modules(block())) == 0


class Flexible(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = flex_attention(x, x, x)
        return y


def test_users_of_flex_attention() -> None:
    """Users of ``flex_attention`` are found by the code of their forward or by their transformers configuration."""
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config._attn_implementation = "flex_attention"
    net = nn.ModuleDict({"plain": block(), "own": Flexible()})
    assert flex_attention_users(net) == ["own"]
    assert "model.layers.0.self_attn" in flex_attention_users(LlamaForCausalLM(config))


def test_an_abandoned_observer_leaves_torch_as_it_was() -> None:
    """An observer that is freed while it observes is removed, so compiled calls run no code of the package."""
    from torch._dynamo import eval_frame  # not loaded before the first compiled call

    class Observer:
        def see(self, function: object) -> None:
            pass

    before = eval_frame._callback_from_stance
    observer = Observer()
    assert observe_compiled_calls(observer.see)
    assert eval_frame._callback_from_stance is not before
    del observer
    assert eval_frame._callback_from_stance is before


X = torch.ones(3, 2)


class Counter:
    """A backend that counts compilations and runs of compiled code."""

    def __init__(self) -> None:
        self.compiled = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Start and end each test without compiled code and without a stance."""
    gc.collect()  # of taps that other tests have left attached
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert stance() == "default"


def stance() -> str:
    """Return the stance of the process, inferred from the behavior of a compiled function."""
    counter = Counter()

    def double(x: Tensor) -> Tensor:
        return x * 2

    compiled = torch.compile(double, backend=counter)
    try:
        compiled(X)
    except RuntimeError:  # "Detected recompile when torch.compile stance is 'fail_on_recompile'"
        return "fail_on_recompile"
    return "default" if counter.runs else "force_eager"


def make() -> tuple[nn.Sequential, Any, Counter]:
    """Return a model, its compiled form and the counter of its compilations."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    counter = Counter()
    return net, torch.compile(net, backend=counter), counter


# Holding and releasing.


def test_a_hold_runs_compiled_functions_eagerly() -> None:
    """During a hold a compiled function runs eagerly; afterwards it runs compiled again."""
    hold = EagerStance()
    found = [stance()]
    hold.hold()
    found.append(stance())
    hold.release()
    assert [*found, stance()] == ["default", "force_eager", "default"]


def test_holders_release_in_any_order() -> None:
    """The last of several holds restores the stance, in whatever order they are acquired and released."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        holds = [EagerStance() for _ in range(3)]
        for hold in holds:
            hold.hold()
        found = []
        for position in order:
            found.append(stance())
            holds[position].release()
        assert [*found, stance()] == ["force_eager"] * 3 + ["default"]


def test_the_users_own_stance_is_restored() -> None:
    """The user's stance is restored after two holds are released in the order in which they were acquired."""
    with torch.compiler.set_stance("fail_on_recompile"):
        first, second = EagerStance(), EagerStance()
        first.hold()
        second.hold()
        first.release()
        held = stance()
        second.release()
        assert [held, stance()] == ["force_eager", "fail_on_recompile"]


def test_a_hold_counts_once() -> None:
    """Holding twice counts once, releasing without a hold is a no-op, and a hold can be acquired again."""
    hold, other = EagerStance(), EagerStance()
    other.release()
    for _ in range(2):
        hold.hold()
        hold.hold()
        other.release()
        held = stance()
        hold.release()
        hold.release()
        assert [held, stance()] == ["force_eager", "default"]


def test_without_dynamo_nothing_is_done() -> None:
    """If ``torch._dynamo`` is not loaded, a hold does not import it, which would take seconds."""
    code = (
        "import sys; from lightning_recorder.internals.compiled import EagerStance; hold = EagerStance(); hold.hold(); "
        "hold.release(); print('torch._dynamo' in sys.modules)"
    )
    root = Path(lightning_recorder.__file__).parents[1]
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True) == "False\n"


# Taps on compiled models.


@pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap])
def test_a_tap_on_a_compiled_model_sees_it(kind: type[Tap]) -> None:
    """Hooks registered after the first compiled call fire, because the tap holds the stance."""
    net, compiled, _ = make()
    compiled(X).sum().backward()
    seen: list[str] = []
    with kind(Selection().resolve(net), lambda site, _: seen.append(site.name)):
        compiled(X).sum().backward()
    compiled(X).sum().backward()
    assert sorted(seen) == ["0", "1", "2"]


def test_the_compiled_code_is_used_again() -> None:
    """After recorded steps the compiled code runs again without recompilation and returns the same results."""
    net, compiled, counter = make()
    seen: list[str] = []
    tap = OutputTap(Selection().resolve(net), lambda site, _: seen.append(site.name))
    results = []
    for step in range(6):
        if step in (2, 4):
            tap.attach()
        results.append(compiled(X))
        tap.remove()
    assert (counter.compiled, counter.runs, seen) == (1, 4, ["0", "1", "2"] * 2)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_hold_that_is_forgotten_is_released() -> None:
    """Once an abandoned hold or tap is garbage collected, compiled functions run compiled again."""
    hold = EagerStance()
    hold.hold()
    del hold
    assert stance() == "default"
    net, _, _ = make()
    OutputTap(Selection().resolve(net), print).attach()
    assert stance() == "force_eager"
    del net
    gc.collect()
    assert stance() == "default"


def test_a_forgotten_hold_may_be_collected_at_any_moment(tmp_path: Path) -> None:
    """Garbage collection of a hold while another one is being acquired does not deadlock."""
    code = (
        "import gc, torch, torch._dynamo\n"
        "from lightning_recorder.internals.compiled import EagerStance, _Stance\n"
        "other, forgotten = EagerStance(), EagerStance()\n"
        "other.hold(), forgotten.hold()\n"
        "cycle = [forgotten]\n"
        "cycle.append(cycle)\n"
        "del forgotten, cycle\n"
        "with _Stance.lock:\n"
        "    gc.collect()\n"
        "print(_Stance.holders)\n"
    )
    (tmp_path / "hold.py").write_text(code, encoding="utf-8")
    # In a separate process, which can be killed if it hangs.
    assert forks.run(tmp_path / "hold.py", folder=tmp_path, timeout_s=60.0) == ([0], "1\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["", "torch.tap = tap; del tap; gc.freeze()"], ids=["collected", "outlives the package"]
)
def test_a_tap_that_is_on_when_the_program_ends_says_nothing(end: str) -> None:
    """A program that ends with an attached tap reports no error, even if the package is gone before the tap."""
    code = (
        "import gc, torch, torch._dynamo\n"
        "from lightning_recorder.taps import OutputTap\n"
        "tap = OutputTap({'m': torch.nn.ReLU()}, print)\n"
        f"tap.attach(); {end}\n"
    )
    root = Path(lightning_recorder.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "ignored" not in done.stderr  # other packages report what they leak


def test_a_copy_of_a_hold_holds_nothing() -> None:
    """A copied or pickled hold is released once."""
    hold = EagerStance()
    hold.hold()
    for twin in (copy.deepcopy(hold), pickle.loads(pickle.dumps(hold))):
        twin.release()
        del twin
    assert stance() == "force_eager"
    hold.release()


class Block(nn.Module):
    """Two layers with a custom forward, since Module.compile ignores torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_a_compiled_part_is_recorded_under_its_own_name(how: str) -> None:
    """Modules inside a compiled part are recorded once each, under their names without compilation."""
    counter = Counter()
    net = nn.Sequential(Block(), nn.Linear(2, 1))
    if how == "torch.compile":
        net = nn.Sequential(cast(nn.Module, torch.compile(net[0], backend=counter)), net[1])
    else:
        net[0].compile(backend=counter)
    net(X)
    seen: list[str] = []
    with OutputTap(Selection("**").resolve(net), lambda site, _: seen.append(site.name)):
        net(X)
    net(X)
    assert seen == ["0.inner", "0.act", "0", "1"]
    assert (counter.compiled, counter.runs) == (1, 2)


@pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap])
def test_a_model_that_is_to_be_compiled_under_a_tap_is_compiled_after_it(kind: type[Tap]) -> None:
    """A first call under a tap is recorded eagerly, and the model is compiled at the first call without a tap."""
    net, compiled, counter = make()
    expected = net(X)
    seen: list[str] = []
    with kind(Selection().resolve(net), lambda site, _: seen.append(site.name)):
        result = compiled(X)
        result.sum().backward()
    assert torch.equal(result, expected)
    assert (counter.compiled, sorted(seen)) == (0, ["0", "1", "2"])
    compiled(X)
    assert (counter.compiled, len(seen)) == (1, 3)


def double(x: Tensor) -> Tensor:
    return x * 2


class Scale:
    """An object with a compiled method."""

    def twice(self, x: Tensor) -> Tensor:
        return x * 2


def names(run: Callable[[], object]) -> tuple[str, ...]:
    """Return the names of compiled code that runs eagerly during a hold."""
    hold = EagerStance()
    hold.hold()
    try:
        run()
        return hold.ran
    finally:
        hold.release()


LINE = double.__code__.co_firstlineno


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: partial(compile_eagerly(double), X), f"double (test_compiled.py:{LINE})"),
        (lambda: lambda: compile_eagerly(double)(X), f"double (test_compiled.py:{LINE})"),
        (lambda: partial(compile_eagerly(Scale().twice), X), "Scale.twice"),
        (lambda: partial(compile_eagerly(Block()), X), "Block.forward"),
        (lambda: partial(compile_eagerly(nn.Linear(2, 2)), X), "Linear.forward"),
        (lambda: partial(compiled_in_place(Block()), X), "Block.forward"),
        (lambda: compile_eagerly(torch.optim.SGD(nn.Linear(2, 2).parameters()).step), "SGD.step"),
    ],
    ids=["function", "lazily", "method", "module", "module of torch", "module.compile", "optimizer"],
)
def test_compiled_code_that_ran_eagerly_is_named(make: Callable[[], Callable[[], object]], name: str) -> None:
    """A hold names the compiled functions, methods and modules that ran during it."""
    assert names(make()) == (name,)


def compile_eagerly(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def test_compiled_code_of_another_thread_is_named() -> None:
    """The stance is global to the process, so code that another thread calls is named too."""
    compiled = compile_eagerly(double)

    def run() -> None:
        thread = threading.Thread(target=compiled, args=(X,))
        thread.start()
        thread.join()

    assert names(run) == (f"double (test_compiled.py:{LINE})",)


def test_only_what_ran_under_a_hold_is_named() -> None:
    """A hold does not name code that ran before it, after it, or eagerly anyway."""
    compiled = compile_eagerly(double)
    compiled(X)
    first, second = EagerStance(), EagerStance()
    first.hold()
    compiled(X)
    second.hold()
    first.release()
    compile_eagerly(Scale().twice)(X)
    second.release()
    compile_eagerly(Block())(X)
    assert (first.ran, second.ran) == ((f"double (test_compiled.py:{LINE})",), ("Scale.twice",))
    q = torch.ones(1, 1, 16, 16)
    assert names(lambda: double(X)) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that it is not compiled
        assert names(lambda: flex_attention(q, q, q)) == ()
    with torch.compiler.set_stance("force_eager"):
        assert names(lambda: compiled(X)) == ()


def test_torch_is_as_before_when_no_hold_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch function replaced during a hold is restored afterwards; without it no code is named."""
    frames: Any = torch._dynamo.eval_frame
    before = frames._callback_from_stance
    names(lambda: compile_eagerly(double)(X))
    assert frames._callback_from_stance is before
    monkeypatch.delattr(frames, "_callback_from_stance")
    assert names(lambda: double(X)) == ()
