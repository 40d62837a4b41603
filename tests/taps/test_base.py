"""Tests of properties of every tap: no effect on training, no leftovers, no leaks, and errors cost only a record."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from lightning_recorder.errors import ArgumentError, RecorderWarning, RecordingError
from lightning_recorder.internals.compiled import EagerStance
from lightning_recorder.internals.pause_recording import is_paused
from lightning_recorder.selection import Selection
from lightning_recorder.structure import iter_tensors
from lightning_recorder.taps import (
    InputGradientTap,
    InputTap,
    OutputGradientTap,
    OutputTap,
    ParameterGradientTap,
    ParameterTap,
    Receiver,
    Site,
    Tap,
)
from tests.pairs import pairwise
from tests.taps.inspection import hooks_on
from tests.taps.models import MODELS, PRECISIONS, Precision, each_model, make

TAPS: list[type[Tap]] = [
    InputTap,
    OutputTap,
    InputGradientTap,
    OutputGradientTap,
    ParameterTap,
    ParameterGradientTap,
]
FORWARD = [InputTap, OutputTap, ParameterTap]
each_tap = pytest.mark.parametrize("kind", TAPS)


def ignore(site: Site, tensor: Tensor) -> None:
    """A receiver that does nothing."""


def fail(site: Site, tensor: Tensor) -> None:
    """A receiver that always fails."""
    raise ZeroDivisionError("no luck")


def fail_on(name: str, seen: list[str]) -> Receiver:
    """Return a receiver that fails for one module and notes the others."""

    def receive(site: Site, tensor: Tensor) -> None:
        if site.name == name:
            raise ZeroDivisionError("no luck")
        seen.append(site.name)

    return receive


def put_on(kind: type[Tap], module: nn.Module, receive: Receiver = ignore, *, strict: bool = False) -> Tap:
    """Return a tap on all submodules, not yet attached."""
    return kind(Selection("**").resolve(module), receive, strict=strict)


# No effect on training


def train(module: nn.Module, x: Tensor, precision: Precision, taps: list[type[Tap]]) -> dict[str, Tensor]:
    """Run two training steps with taps that read every number; return all numbers that taps could affect."""
    read: list[type[Tap]] = []
    numbers: dict[str, Tensor] = {}

    def reader(kind: type[Tap]) -> Receiver:
        return lambda site, tensor: read.append(kind) if tensor.abs().sum().item() >= 0 else None

    torch.manual_seed(1)
    for step in range(2):
        module.zero_grad()
        x.grad = None
        with ExitStack() as stack:
            for kind in taps:
                stack.enter_context(put_on(kind, module, reader(kind)))
            loss = precision.forward(module, x)
            loss.backward()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)  # one per step, because lazy parameters are created late
        optimizer.step()
        numbers[f"loss {step}"] = loss.detach()
        leaves = [("x", x), *module.named_parameters()]
        numbers |= {f"{name}.grad {step}": leaf.grad for name, leaf in leaves if leaf.grad is not None}
    # After a frozen layer the inputs of modules have no gradient.
    assert set(read) == set(taps) - ({InputGradientTap} if "x.grad 0" not in numbers else set())
    flags = torch.tensor([each.training for each in module.modules()])
    state = {f"state {key}": value for key, value in module.state_dict().items()}
    return numbers | state | {"random numbers": torch.get_rng_state(), "flags": flags}


@functools.cache
def train_bare(name: str, precision: str) -> dict[str, Tensor]:
    """Return the numbers of a training without taps, once for each model and precision."""
    return train(*make(name, PRECISIONS[precision].dtype), PRECISIONS[precision], [])


EACH_AND_ALL: dict[str, list[type[Tap]]] = {**{kind.__name__: [kind] for kind in TAPS}, "all": TAPS}


@pytest.mark.quick_cases(60)
@pytest.mark.parametrize(("name", "precision", "taps"), pairwise(list(MODELS), list(PRECISIONS), list(EACH_AND_ALL)))
def test_training_is_the_same_to_the_bit(name: str, precision: str, taps: str) -> None:
    """Losses, gradients, parameters, buffers, their names, random numbers and train flags equal those without a tap."""
    expected = train_bare(name, precision)
    found = train(*make(name, PRECISIONS[precision].dtype), PRECISIONS[precision], EACH_AND_ALL[taps])
    assert list(found) == list(expected)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@each_tap
def test_the_graph_of_autograd_is_the_same(kind: type[Tap]) -> None:
    """A tap adds no node to the autograd graph."""

    def nodes(loss: Tensor) -> list[str]:
        def below(node: torch.autograd.graph.Node) -> list[str]:
            return [node.name(), *(name for each, _ in node.next_functions if each for name in below(each))]

        assert loss.grad_fn is not None
        return below(loss.grad_fn)

    module, x = make("residual")
    expected = nodes(module(x))
    with put_on(kind, module):
        assert nodes(module(x)) == expected


# No leftovers


@each_model
def test_no_hook_is_left_after_a_step(name: str) -> None:
    """After a step no hook is on any module, parameter or output, even while the outputs are alive."""
    for kind in TAPS:
        assert_no_hook_is_left(*make(name), kind)


def assert_no_hook_is_left(module: nn.Module, x: Tensor, kind: type[Tap]) -> None:
    """Check that a step with a tap leaves no hook."""
    own = hooks_on(module)  # hooks of weight_norm and lazy layers
    outputs: list[Tensor] = []
    handles = [
        each.register_forward_hook(lambda module, args, output: outputs.extend(dict(iter_tensors(output)).values()))
        for each in module.modules()
    ]
    tap = put_on(kind, module)
    with tap:
        attached = [tap.attached]
        module(x).backward()
    for handle in handles:
        handle.remove()
    assert [*attached, tap.attached] == [True, False], kind
    assert outputs
    assert [hook for hook in hooks_on(module, outputs) if hook not in own] == [], kind


class Broken(nn.Module):
    """A module that fails in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("broken")


@each_tap
def test_no_hook_is_left_after_an_exception_in_the_model(kind: type[Tap]) -> None:
    """An exception in the forward pass propagates unchanged, and all hooks are removed."""
    net = nn.Sequential(nn.Linear(2, 2), Broken())
    with pytest.raises(KeyError, match="broken"), put_on(kind, net):
        net(torch.ones(1, 2))
    assert hooks_on(net) == []


@each_tap
@pytest.mark.parametrize("strict", [False, True])
def test_no_hook_is_left_after_an_exception_in_the_receiver(kind: type[Tap], strict: bool) -> None:
    """An error in the receiver, raised or reported as a warning, leaves no hooks."""
    module, x = make("parameter")
    with (
        pytest.raises(RecordingError) if strict else pytest.warns(RecorderWarning),
        put_on(kind, module, fail, strict=strict),
    ):
        module(x).backward()
    assert hooks_on(module) == []


@pytest.fixture
def scripted() -> nn.Module:
    """Return a model with a TorchScript module, which does not support hooks, between two plain modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.13 deprecates scripting, which still works
        return nn.Sequential(nn.PReLU(), torch.jit.script(nn.PReLU()), nn.PReLU())


each_tap_on_calls = pytest.mark.parametrize("kind", [kind for kind in TAPS if kind is not ParameterGradientTap])


@each_tap_on_calls
def test_a_module_that_accepts_no_hook_is_not_recorded(kind: type[Tap], scripted: nn.Sequential) -> None:
    """A module that does not support hooks causes one warning that names it, and the others are recorded."""
    seen: list[str] = []
    tap = kind(dict(scripted.named_children()), lambda site, _: seen.append(site.name))
    with pytest.warns(RecorderWarning, match=rf"^{kind.__name__} could not record module '1': ") as warned, tap:
        scripted(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(warned) == 1
    assert sorted(seen) == ["0", "2"]
    assert hooks_on(scripted) == []


def test_the_parameters_of_a_module_that_takes_no_hook_have_gradients(scripted: nn.Sequential) -> None:
    """The parameters of a TorchScript module support hooks, so their gradients are recorded."""
    seen: list[str] = []
    with ParameterGradientTap(dict(scripted.named_children()), lambda site, _: seen.append(site.name)):
        scripted(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == ["0", "1", "2"]
    assert hooks_on(scripted) == []


@each_tap_on_calls
def test_no_hook_is_left_when_strict_attaching_fails(kind: type[Tap], scripted: nn.Sequential) -> None:
    """With strict, attaching to a module that does not support hooks raises and leaves no hook on other modules."""
    tap = kind(dict(scripted.named_children()), ignore, strict=True)
    with pytest.raises(RecordingError, match=rf"^{kind.__name__} could not record module '1': "):
        tap.attach()
    assert (hooks_on(scripted), tap.attached) == ([], False)


@each_tap
def test_a_users_hooks_stay(kind: type[Tap]) -> None:
    """Hooks of the user on the same modules and parameters run with the tap and remain after it."""
    module, x = make("parameter")
    calls: list[str] = []
    module.stem.register_forward_hook(lambda *_: calls.append("forward"))
    module.get_parameter("weight.held").register_hook(lambda grad: calls.append("backward"))
    with put_on(kind, module):
        module(x).backward()
    module(x).backward()
    assert calls == ["forward", "backward"] * 2
    assert len(hooks_on(module)) == 2


# Attaching and removing


@each_tap
def test_attaching_twice_is_attaching_once(kind: type[Tap]) -> None:
    """A tap that is attached twice records each tensor once, and a single removal is enough."""
    module, x = make("single")
    seen: list[str] = []
    tap = put_on(kind, module, lambda site, _: seen.append(site.name))
    tap.attach()
    tap.attach()
    module(x).backward()
    tap.remove()
    tap.remove()
    module(x).backward()
    assert sorted(seen) == ["act", "head", "stem"]


@each_tap
def test_a_tap_can_be_put_on_again(kind: type[Tap]) -> None:
    """A tap records the steps for which it is attached and no others."""
    module, x = make("single")
    seen: list[str] = []
    tap = put_on(kind, module, lambda site, _: seen.append(site.name))
    for recorded in (True, False, True):
        if recorded:
            tap.attach()
        module(x).backward()
        tap.remove()
    assert sorted(seen) == ["act", "act", "head", "head", "stem", "stem"]


@each_tap
def test_a_paused_tap_sees_nothing_and_keeps_its_hooks(kind: type[Tap]) -> None:
    """A paused tap records nothing until it is attached again; its hooks remain until it is removed."""
    module, x = make("single")
    seen: list[str] = []
    tap = put_on(kind, module, lambda site, _: seen.append(site.name))
    with tap:
        hooks = len(hooks_on(module))
        for recorded in (True, False, True):
            if recorded:
                tap.attach()
            module(x).backward()
            tap.pause()
            assert not tap.attached
            assert len(hooks_on(module)) == hooks
    assert sorted(seen) == ["act", "act", "head", "head", "stem", "stem"]
    assert hooks_on(module) == []
    tap.pause()
    module(x).backward()
    assert len(seen) == 6


@each_tap
def test_a_copy_of_a_paused_tap_is_put_on_anew(kind: type[Tap]) -> None:
    """Attaching a copy of a paused tap adds hooks to the copied modules and does not affect those of the original."""
    module, x = make("single")
    _SEEN.clear()
    with put_on(kind, module, note) as tap:
        tap.pause()
        copied, copied_module = copy.deepcopy((tap, module))
        with copied:
            copied_module(x).backward()
            assert sorted(_SEEN) == ["act", "head", "stem"]
        tap.attach()
        module(x).backward()
    assert sorted(_SEEN) == ["act", "act", "head", "head", "stem", "stem"]


_SEEN: list[str] = []


def note(site: Site, tensor: Tensor) -> None:
    """A receiver that a tap shares with its copy."""
    _SEEN.append(site.name)


class Leaf(nn.Module):
    """A module that returns its own parameter and its input unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.scale


@each_tap
def test_steps_under_one_attachment_are_alike(kind: type[Tap]) -> None:
    """A tap that stays attached records the same for each step, even for tensors that outlive the steps."""
    module = Leaf()
    x = torch.ones(2, requires_grad=True)
    counts: list[int] = []
    with kind({"m": module}, lambda *_: counts.append(counts.pop() + 1)):
        for _ in range(3):
            counts.append(0)
            given, scale = module(x)
            (given * scale).sum().backward()
    tensors = {OutputTap: 2, OutputGradientTap: 2}.get(kind, 1)
    assert counts == [tensors] * 3


@each_tap
def test_a_tap_without_modules_does_nothing(kind: type[Tap]) -> None:
    """A tap with no modules can be attached and removed."""
    with kind({}, fail) as tap:
        assert tap.attached
    assert (tap.attached, tap.modules) == (False, {})


@each_tap
def test_the_modules_are_those_that_were_given(kind: type[Tap]) -> None:
    """A tap copies the mapping of modules, so later changes of it have no effect."""
    module = nn.ReLU()
    given: dict[str, nn.Module] = {"a": module}
    tap = kind(given, ignore)
    given.clear()
    assert tap.modules == {"a": module}


# Arguments of a receiver


@each_tap
def test_a_receiver_works_without_autograd_and_unrecorded(kind: type[Tap]) -> None:
    """A receiver gets detached tensors, and its computations are not recorded by autograd or a graph capture."""
    module, x = make("single")
    states: set[tuple[bool, bool, bool]] = set()

    def receive(site: Site, tensor: Tensor) -> None:
        states.add((tensor.requires_grad, torch.is_grad_enabled(), is_paused()))

    with put_on(kind, module, receive):
        module(x).backward()
    assert states == {(False, False, True)}


def test_a_receiver_gets_no_copy() -> None:
    """A receiver gets the memory of the output itself, not a copy."""
    seen: list[int] = []
    module = nn.Identity()
    x = torch.ones(3)
    with OutputTap({"m": module}, lambda _, tensor: seen.append(tensor.data_ptr())):
        module(x)
    assert seen == [x.data_ptr()]


# Errors


def path_of(kind: type[Tap]) -> str:
    """Return the path of the first tensor of a module that a tap records."""
    return "weight" if "Parameter" in kind.__name__ else "in[0]" if "Input" in kind.__name__ else "out"


@each_tap
def test_a_fault_is_one_warning_that_names_the_module(kind: type[Tap]) -> None:
    """A receiver that raises causes one warning with tap, module and cause, and the module is ignored from then on."""
    module, x = make("single")
    seen: list[str] = []
    tap = put_on(kind, module, fail_on("act", seen))
    message = f"{kind.__name__} could not record module 'act' at {path_of(kind)!r}: ZeroDivisionError: no luck"
    with pytest.warns(RecorderWarning) as warned, tap:
        module(x).backward()
    assert [str(warning.message) for warning in warned] == [
        f"{message}. It is no longer recorded; strict=True raises instead."
    ]
    for _ in range(2):
        with tap:
            module(x).backward()
    assert sorted(seen) == ["head"] * 3 + ["stem"] * 3


@each_tap
def test_a_fault_of_one_call_ends_the_other_calls_of_its_module(kind: type[Tap]) -> None:
    """A module that is called several times per step is ignored within the step of its error."""
    module, x = make("repeated")
    with pytest.warns(RecorderWarning) as warned, put_on(kind, module, fail):
        module(x).backward()
    assert len(warned) == 1


@each_tap
def test_a_fault_leaves_training_as_it_is(kind: type[Tap]) -> None:
    """If recording fails for every module, the gradients are still bitwise equal to those without a tap."""
    module, x = make("residual")
    module(x).backward()
    expected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    with pytest.warns(RecorderWarning), put_on(kind, module, fail):
        module(x).backward()
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.equal(expected[name])] == []


@each_tap
def test_strict_raises_from_the_pass_and_names_the_module(kind: type[Tap]) -> None:
    """With strict an error is raised from the forward or backward pass, with the name of the module and the cause."""
    module, x = make("single")
    path = re.escape(path_of(kind))
    message = rf"^{kind.__name__} could not record module 'act' at '{path}': ZeroDivisionError: no luck$"
    with put_on(kind, module, fail_on("act", []), strict=True):
        if kind in FORWARD:
            with pytest.raises(RecordingError, match=message) as raised:
                module(x)
        else:
            loss = module(x)
            with pytest.raises(RecordingError, match=message) as raised:
                loss.backward()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@each_tap
def test_a_fault_never_raises_where_warnings_are_errors(kind: type[Tap], caplog: pytest.LogCaptureFixture) -> None:
    """With python -W error, errors of the receiver do not raise from either pass and are logged instead."""
    module, x = make("single")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with put_on(kind, module, fail_on("act", [])):
            module(x).backward()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "module 'act'" in caplog.text


@each_tap
def test_an_interruption_is_not_swallowed(kind: type[Tap]) -> None:
    """A KeyboardInterrupt in a receiver propagates, and the hooks are removed."""
    module, x = make("single")

    def interrupt(site: Site, tensor: Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), put_on(kind, module, interrupt):
        module(x).backward()
    assert hooks_on(module) == []


# Copies of the model


def deep_copy(module: nn.Module) -> nn.Module:
    """Return a copy as made by EMA and SWA."""
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    """Return a copy as sent to another process."""
    return pickle.loads(pickle.dumps(module))  # type: ignore[no-any-return]


def saved(module: nn.Module) -> nn.Module:
    """Return a copy as loaded from a checkpoint of the whole model."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@each_tap
@pytest.mark.parametrize("duplicate", [deep_copy, pickled, saved])
@pytest.mark.parametrize("name", ["plain", "parameter"])
def test_a_copy_made_under_the_tap_is_not_tapped(
    kind: type[Tap], duplicate: Callable[[nn.Module], nn.Module], name: str
) -> None:
    """A model with hooks can be copied, pickled and saved, and the copy trains without being recorded."""
    module, x = make(name)
    seen: list[str] = []
    with put_on(kind, module, lambda site, _: seen.append(site.name)):
        twin = duplicate(module)
        twin(x).backward()
        assert seen == []
        module(x).backward()
        assert seen != []
    grads = [[p.grad.tolist() for p in each.parameters() if p.grad is not None] for each in (module, twin)]
    assert grads[0] == grads[1] != []


def test_an_output_can_be_saved_under_the_tap() -> None:
    """An output with a hook of the tap is saved without a warning and loaded without the hook."""
    module = nn.Linear(2, 2)
    file = io.BytesIO()
    with OutputGradientTap({"m": module}, ignore):
        output = module(torch.ones(1, 2))
        torch.save(output, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, output)
    assert hooks_on(nn.Module(), [loaded]) == []


# No leaks


@pytest.fixture
def collector() -> Iterator[None]:
    """Collect only garbage of the test, not that of modules imported earlier."""
    gc.freeze()
    yield
    gc.unfreeze()


def watch(module: nn.Module, found: list[weakref.ref[Any]]) -> list[RemovableHandle]:
    """Collect weak references to the outputs of all submodules."""

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        own = {id(each) for each in (*module.parameters(), *module.buffers())}
        found.extend(weakref.ref(tensor) for _, tensor in iter_tensors(output) if id(tensor) not in own)

    return [each.register_forward_hook(note) for each in module.modules()]


def test_no_living_output_is_forgotten() -> None:
    """All hooks are removed even from hundreds of live outputs, such as those of a long unrolled sequence."""
    module = nn.Linear(2, 2)
    outputs: list[Tensor] = []
    seen: list[Site] = []
    with OutputGradientTap({"m": module}, lambda site, _: seen.append(site)):
        for _ in range(1000):
            outputs.append(module(torch.ones(2)))  # noqa: PERF401  # separate calls, as in a loop over time
    assert hooks_on(module, outputs) == []
    torch.stack(outputs).sum().backward()
    assert seen == []


@pytest.mark.quick_cases(4)
@each_tap
@pytest.mark.parametrize("backward", [True, False], ids=["train", "forward only"])
@pytest.mark.usefixtures("collector")
def test_a_long_attachment_grows_by_nothing(kind: type[Tap], backward: bool) -> None:
    """A tap that stays attached for a whole epoch keeps only a few hundred objects, for any number of steps."""
    module, x = make("single")

    def count(steps: int) -> int:
        for _ in range(steps):
            loss = module(x)
            if backward:
                loss.backward()
        del loss
        gc.collect()
        kinds = [type(each) for each in gc.get_objects()]
        return sum(each is RemovableHandle or each.__module__.startswith("lightning_recorder") for each in kinds)

    with put_on(kind, module):
        before = count(1)
        assert [count(steps) - before < 600 for steps in (300, 301, 302)] == [True] * 3


class Saved:
    """A placeholder for a tensor that autograd saves in a step."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable garbage collection, so that only reference counting frees objects."""
    gc.disable()
    yield
    gc.enable()


# torch.func takes no hooks on the saved tensors.
FREED = pairwise([name for name in MODELS if name != "vmap"], TAPS, [True, False])


@pytest.mark.quick_cases(60)
@pytest.mark.parametrize(("name", "kind", "backward"), FREED)
@pytest.mark.usefixtures("no_collector")
def test_a_step_is_freed_without_garbage_collection(name: str, kind: type[Tap], backward: bool) -> None:
    """When the loss is freed, so are outputs and saved tensors, as without a tap, even while the tap is attached."""

    def count_living(modules: nn.Module, x: Tensor) -> int:
        outputs: list[weakref.ref[Any]] = []
        saved: weakref.WeakSet[Saved] = weakref.WeakSet()

        def save(tensor: Tensor) -> Saved:
            token = Saved(tensor)
            saved.add(token)
            return token

        watch(modules, outputs)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda token: token.tensor):
            loss = modules(x)
            if backward:
                loss.backward()
            del loss
        assert outputs
        return len(saved) + sum(reference() is not None for reference in outputs)

    expected = count_living(*make(name))
    module, x = make(name)
    with put_on(kind, module):
        assert count_living(module, x) == expected


@each_tap
@pytest.mark.usefixtures("no_collector")
def test_a_model_is_freed_without_garbage_collection(kind: type[Tap]) -> None:
    """A model is freed at once after its tap was removed and dropped."""
    module, x = make("checkpoint")
    with put_on(kind, module) as tap:
        module(x).backward()
    reference = weakref.ref(module)
    del module, tap
    assert reference() is None


@pytest.mark.quick_cases(2)
@each_tap
def test_memory_is_the_same_after_each_step(kind: type[Tap]) -> None:
    """With a tap and a sum as receiver, each step frees as many bytes as it allocates."""
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.ones(4, 16, requires_grad=True)
    total = torch.zeros(())

    def steps(count: int) -> None:
        for _ in range(count):
            module(x).sum().backward()
            module.zero_grad()
            x.grad = None

    def add(site: Site, tensor: Tensor) -> None:
        total.add_(tensor.sum())

    with put_on(kind, module, add):
        steps(8)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            steps(8)
    assert total != 0
    assert sum(event.self_cpu_memory_usage for event in profile.function_events or ()) == 0


# Devices


@each_model
def test_a_tap_reads_no_number(name: str) -> None:
    """The hooks do not synchronize a device: a tap adds no read of a value to a step."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                found.append(func)
            return func(*args, **(kwargs or {}))

    found: list[object] = []

    def reads(module: nn.Module, x: Tensor) -> int:
        found.clear()
        with Count():  # type: ignore[no-untyped-call]  # torch is untyped here
            module(x).backward()
        return len(found)

    expected = reads(*make(name))
    for kind in TAPS:
        module, x = make(name)
        with put_on(kind, module):
            assert reads(module, x) == expected, kind


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"packed", "lazy", "vmap"}])
@each_tap
def test_a_tap_works_on_the_meta_device(name: str, kind: type[Tap]) -> None:
    """On the meta device, where tensors have no values, everything is recorded with its shape."""
    module, x = make(name)
    shapes: dict[str, list[tuple[Site, torch.Size]]] = {"cpu": [], "meta": []}
    for device, seen in shapes.items():
        twin, batch = copy.deepcopy(module).to(device), x.detach().to(device).requires_grad_()
        total = torch.zeros((), device=device)

        def receive(
            site: Site, tensor: Tensor, total: Tensor = total, seen: list[tuple[Site, torch.Size]] = seen
        ) -> None:
            total.add_(tensor.abs().sum())
            seen.append((site, tensor.shape))

        with put_on(kind, twin, receive, strict=True):
            twin(batch).backward()
    assert sorted(shapes["meta"]) == sorted(shapes["cpu"])


# Conditions


@each_tap
def test_a_condition_is_called_once_for_each_call(kind: type[Tap]) -> None:
    """The condition is called once per call or gradient, and if it returns false nothing is recorded."""
    module, x = make("single")
    seen: list[str] = []
    answers = iter([True, False, True, False, True, False])
    tap = kind(Selection("**").resolve(module), lambda site, _: seen.append(site.name), condition=lambda: next(answers))
    with tap:
        module(x).backward()
        first = len(seen)
        module(x).backward()
    assert next(answers, None) is None
    assert (first, len(seen)) == (2, 3)


@each_tap
def test_a_condition_is_called_once_for_many_tensors(kind: type[Tap]) -> None:
    """The condition is called once for a call with several tensors, but separately for each gradient."""
    module = nn.MultiheadAttention(4, 2)
    asked: list[int] = []
    tensors = [torch.ones(3, 1, 4, requires_grad=True) for _ in range(3)]
    with kind({"m": module}, fail, condition=lambda: asked.append(1)):
        output, weights = module(*tensors)
        (output.sum() + weights.sum()).backward()
    each_gradient: dict[type[Tap], int] = {InputGradientTap: 3, OutputGradientTap: 2, ParameterGradientTap: 4}
    assert len(asked) == each_gradient.get(kind, 1)


@each_tap
@pytest.mark.parametrize("strict", [False, True])
def test_a_condition_that_raises_is_a_fault(kind: type[Tap], strict: bool) -> None:
    """An error in the condition causes a warning with the name of the module, or raises with strict."""
    module = nn.PReLU()
    message = rf"^{kind.__name__} could not record module 'm': ZeroDivisionError"
    tap = kind({"m": module}, ignore, condition=lambda: 1 // 0, strict=strict)
    with pytest.raises(RecordingError, match=message) if strict else pytest.warns(RecorderWarning, match=message), tap:
        module(torch.ones(2, requires_grad=True)).sum().backward()
    assert hooks_on(module) == []


# Kinds of calls


class Moody(nn.Module):
    """A module that can be told to fail after it has called its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.PReLU()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        y = self.child(x)
        if fails:
            raise KeyError("moody")
        return y * self.scale  # type: ignore[no-any-return]


@each_tap
def test_a_call_after_one_that_raised_is_recorded_as_ever(kind: type[Tap]) -> None:
    """With a tap that stays attached, a call that raised does not affect the record of the next one."""
    module = Moody()
    x = torch.ones(2, requires_grad=True)

    def step(seen: list[tuple[Site, Any]]) -> None:
        seen.clear()
        module(x).sum().backward()

    seen: list[tuple[Site, Any]] = []
    with kind({"m": module, "c": module.child}, lambda site, tensor: seen.append((site, tensor.tolist())), strict=True):
        step(seen)
        expected = list(seen)
        for _ in range(2):
            with pytest.raises(KeyError, match="moody"):
                module(x, fails=True)
        step(seen)
    assert seen == expected
    assert {site.name for site, _ in seen} == {"m", "c"}


@each_tap
def test_a_call_inside_a_transform_is_skipped(kind: type[Tap]) -> None:
    """Calls inside vmap and func.grad are ignored without changing results; the next call is recorded."""
    net = nn.Sequential(nn.Linear(2, 2), nn.PReLU())
    x = torch.randn(3, 2, requires_grad=True)
    total = torch.zeros(())
    seen: list[str] = []

    def receive(site: Site, tensor: Tensor) -> None:
        total.add_(tensor.sum())  # like a reduction; a transform allows this only for its own tensors
        seen.append(site.name)

    def transform() -> list[Tensor]:
        def loss(x: Tensor) -> Tensor:
            return net(x).sum()  # type: ignore[no-any-return]

        slopes = [torch.func.grad(loss)(x[0]), torch.func.vmap(torch.func.grad(loss))(x)]
        return [torch.func.vmap(net)(x), *slopes, torch.func.jacrev(net)(x[0])]

    expected = transform()
    with put_on(kind, net, receive, strict=True):
        assert all(torch.equal(*pair) for pair in zip(transform(), expected, strict=True))
        assert seen == []
        torch.func.functional_call(net, dict(net.named_parameters()), (x,)).sum().backward()
    assert set(seen) == {"0", "1"}


@each_tap
def test_models_in_threads_are_separate(kind: type[Tap]) -> None:
    """Two models that train concurrently in two threads, each with its own tap, are recorded separately."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, width)) for width in (2, 3)]

    def train_alone(module: nn.Sequential) -> list[tuple[Site, Any]]:
        found: list[tuple[Site, Any]] = []
        with put_on(kind, module, lambda site, tensor: found.append((site, tensor.tolist())), strict=True):
            for step in range(20):
                if barrier is not None:
                    barrier.wait(timeout=60)
                module(torch.full((2, 4), float(step), requires_grad=True)).sum().backward()
        assert hooks_on(module) == []
        return found

    barrier: threading.Barrier | None = None
    expected = [train_alone(each) for each in models]
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train_alone, models)) == expected


@each_tap
def test_one_model_in_two_threads_is_seen_whole(kind: type[Tap]) -> None:
    """Every call is recorded if two threads call one model concurrently with one tap."""
    module, _ = make("single")
    module.requires_grad_(kind is ParameterGradientTap)  # otherwise both threads would add to one gradient
    seen: Counter[str] = Counter()
    lock = threading.Lock()
    barrier = threading.Barrier(2)

    def receive(site: Site, tensor: Tensor) -> None:
        with lock:
            seen[site.name] += 1

    def work(number: int) -> None:
        barrier.wait(timeout=60)
        for _ in range(50):
            module(torch.full((3, 4), float(number), requires_grad=True)).backward()

    with put_on(kind, module, receive, strict=True), ThreadPoolExecutor(2) as pool:
        list(pool.map(work, [1, 2]))
    assert seen == {"stem": 100, "act": 100, "head": 100}
    assert hooks_on(module) == []


# A torch warning if a graph starts with the result of another operation.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@each_tap
def test_a_compiled_part_is_seen_as_it_is_in_eager_mode(kind: type[Tap]) -> None:
    """A compiled submodule that was called before is recorded like an eager one, and no hook is left."""
    module, x = make("residual")

    def see() -> list[tuple[Site, Any]]:
        seen: list[tuple[Site, Any]] = []
        with put_on(kind, module, lambda site, tensor: seen.append((site, tensor.tolist())), strict=True):
            module(x).backward()
        return seen

    expected = see()
    branch = module.get_submodule("branch")
    module.branch = torch.compile(branch, backend="eager")  # type: ignore[assignment]  # a module compiles to a module
    stance = EagerStance()
    try:
        module(x).backward()
        stance.hold()
        assert see() == expected
        assert hooks_on(module) == []
    finally:
        stance.release()
        torch._dynamo.reset()


# Arguments


@each_tap
@pytest.mark.parametrize("modules", [nn.ReLU(), "head", [nn.ReLU()], Selection("head"), {"a": 3}, None])
def test_modules_must_be_modules_by_name(kind: type[Tap], modules: Any) -> None:
    """Anything but a mapping from names to modules is rejected with an error that shows how to get one."""
    with pytest.raises(
        ArgumentError, match=r"modules takes a mapping .* the result of Selection\(...\)\.resolve\(model\)"
    ):
        kind(modules, ignore)


@each_tap
def test_what_is_called_must_be_a_function(kind: type[Tap]) -> None:
    """A receiver or a condition that is not callable is rejected."""
    with pytest.raises(ArgumentError, match=r"^receive takes a function \(site, tensor\), got None$"):
        kind({}, None)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ArgumentError, match=r"^condition takes a function \(\), got True$"):
        kind({}, ignore, condition=True)  # type: ignore[arg-type]  # the point of the test


@each_tap
def test_what_failed_can_be_revived(kind: type[Tap]) -> None:
    """A module that is ignored after an error is in ``failed`` until it is revived, and then recorded again."""
    module, failing = nn.PReLU(), [True]
    seen: list[str] = []

    def receive(site: Site, tensor: Tensor) -> None:
        if failing[0]:
            raise ZeroDivisionError
        seen.append(site.name)

    def step() -> None:
        module(torch.ones(2, requires_grad=True)).sum().backward()

    with kind({"m": module}, receive) as tap:
        with pytest.warns(RecorderWarning):
            step()
        failing[0] = False
        step()
        assert (set(tap.failed), seen) == ({"m"}, [])
        tap.revive()
        step()
        assert (set(tap.failed), seen) == (set(), ["m"])


class Opaque:
    """Holds a tensor in an attribute that is not searched."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Gives(nn.Module):
    """Returns its input in an object of an unknown class."""

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(x * 2)


@pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap, InputGradientTap])
def test_an_unknown_object_gives_one_warning(kind: type[Tap]) -> None:
    """Tensors in objects of an unknown class cause one warning that names class, path, module and a solution."""
    module = Gives()
    message = "ignores the tensors inside the Opaque at 'out' of module 'm'; register_container can name them."
    tap = kind({"m": module}, fail)
    with pytest.warns(RecorderWarning) as warned, tap:
        steps(module, torch.ones(2, requires_grad=True))
    assert [str(each.message) for each in warned] == [f"{kind.__name__} {message}"]


def steps(module: nn.Module, x: Tensor) -> None:
    """Run two calls."""
    for _ in range(2):
        module(x)
