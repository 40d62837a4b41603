"""What holds for every tap: training is not changed, nothing is left behind, nothing is kept, faults cost a record."""

from __future__ import annotations

import copy
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
from lightning_recorder.selection import Selection
from lightning_recorder.stance import EagerStance
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
from lightning_recorder.unrecorded import is_unrecorded
from tests.taps.inspection import hooks_on
from tests.taps.models import MODELS, Precision, each_model, each_precision, make

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
    """A receiver that fails for one module and notes the others."""

    def receive(site: Site, tensor: Tensor) -> None:
        if site.name == name:
            raise ZeroDivisionError("no luck")
        seen.append(site.name)

    return receive


def put_on(kind: type[Tap], module: nn.Module, receive: Receiver = ignore, *, strict: bool = False) -> Tap:
    """A tap on all submodules, not yet attached."""
    return kind(Selection("**").resolve(module), receive, strict=strict)


# Training is not changed


def train(module: nn.Module, x: Tensor, precision: Precision, taps: list[type[Tap]]) -> dict[str, Tensor]:
    """Two steps of training under taps that read every number, and all numbers that may depend on it."""
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
        optimizer = torch.optim.SGD(module.parameters(), 0.1)  # of each step's own, since lazy parameters come late
        optimizer.step()
        numbers[f"loss {step}"] = loss.detach()
        leaves = [("x", x), *module.named_parameters()]
        numbers |= {f"{name}.grad {step}": leaf.grad for name, leaf in leaves if leaf.grad is not None}
    # Behind a frozen layer nothing that a module takes has a gradient.
    assert set(read) == set(taps) - ({InputGradientTap} if "x.grad 0" not in numbers else set())
    flags = torch.tensor([each.training for each in module.modules()])
    state = {f"state {key}": value for key, value in module.state_dict().items()}
    return numbers | state | {"random numbers": torch.get_rng_state(), "flags": flags}


@each_model
@each_precision
@pytest.mark.parametrize("taps", [*([kind] for kind in TAPS), TAPS], ids=[*(kind.__name__ for kind in TAPS), "all"])
def test_training_is_the_same_to_the_bit(name: str, precision: Precision, taps: list[type[Tap]]) -> None:
    """Losses, gradients, parameters, buffers, their names, random numbers and train flags equal those without a tap."""
    expected = train(*make(name, precision.dtype), precision, [])
    found = train(*make(name, precision.dtype), precision, taps)
    assert list(found) == list(expected)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@each_tap
def test_the_graph_of_autograd_is_the_same(kind: type[Tap]) -> None:
    """A tap puts no node into the autograd graph."""

    def nodes(loss: Tensor) -> list[str]:
        def below(node: torch.autograd.graph.Node) -> list[str]:
            return [node.name(), *(name for each, _ in node.next_functions if each for name in below(each))]

        assert loss.grad_fn is not None
        return below(loss.grad_fn)

    module, x = make("residual")
    expected = nodes(module(x))
    with put_on(kind, module):
        assert nodes(module(x)) == expected


# Nothing is left behind


@each_model
@each_tap
def test_no_hook_is_left_after_a_step(name: str, kind: type[Tap]) -> None:
    """After a step no hook is on any module, parameter or output, although the outputs live on."""
    module, x = make(name)
    own = hooks_on(module)  # of weight_norm and of lazy layers
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
    assert [*attached, tap.attached] == [True, False]
    assert outputs
    assert [hook for hook in hooks_on(module, outputs) if hook not in own] == []


class Broken(nn.Module):
    """Fails in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("broken")


@each_tap
def test_no_hook_is_left_after_an_exception_in_the_model(kind: type[Tap]) -> None:
    """An exception in a forward pass passes through the tap unchanged, and all hooks are taken off."""
    net = nn.Sequential(nn.Linear(2, 2), Broken())
    with pytest.raises(KeyError, match="broken"), put_on(kind, net):
        net(torch.ones(1, 2))
    assert hooks_on(net) == []


@each_tap
@pytest.mark.parametrize("strict", [False, True])
def test_no_hook_is_left_after_an_exception_in_the_receiver(kind: type[Tap], strict: bool) -> None:
    """Whether a fault is told or raised, all hooks are taken off."""
    module, x = make("parameter")
    with (
        pytest.raises(RecordingError) if strict else pytest.warns(RecorderWarning),
        put_on(kind, module, fail, strict=strict),
    ):
        module(x).backward()
    assert hooks_on(module) == []


@pytest.fixture
def scripted() -> nn.Module:
    """A model with a TorchScript module, which takes no hooks, between two plain ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch 2.13; scripting goes on to work
        return nn.Sequential(nn.PReLU(), torch.jit.script(nn.PReLU()), nn.PReLU())


each_tap_on_calls = pytest.mark.parametrize("kind", [kind for kind in TAPS if kind is not ParameterGradientTap])


@each_tap_on_calls
def test_a_module_that_takes_no_hook_is_left_alone(kind: type[Tap], scripted: nn.Sequential) -> None:
    """A module on which no hook can be put costs one warning that names it, and the others are tapped."""
    seen: list[str] = []
    tap = kind(dict(scripted.named_children()), lambda site, _: seen.append(site.name))
    with pytest.warns(RecorderWarning, match=rf"^{kind.__name__} could not record module '1': ") as told, tap:
        scripted(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(told) == 1
    assert sorted(seen) == ["0", "2"]
    assert hooks_on(scripted) == []


def test_the_parameters_of_a_module_that_takes_no_hook_have_gradients(scripted: nn.Sequential) -> None:
    """The parameters of a TorchScript module take hooks, so that their gradients are seen."""
    seen: list[str] = []
    with ParameterGradientTap(dict(scripted.named_children()), lambda site, _: seen.append(site.name)):
        scripted(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == ["0", "1", "2"]
    assert hooks_on(scripted) == []


@each_tap_on_calls
def test_no_hook_is_left_when_strict_attaching_fails(kind: type[Tap], scripted: nn.Sequential) -> None:
    """Under strict, attaching to a module that takes no hooks raises and leaves no hook on those before it."""
    tap = kind(dict(scripted.named_children()), ignore, strict=True)
    with pytest.raises(RecordingError, match=rf"^{kind.__name__} could not record module '1': "):
        tap.attach()
    assert (hooks_on(scripted), tap.attached) == ([], False)


@each_tap
def test_a_users_hooks_stay(kind: type[Tap]) -> None:
    """Hooks of others on the same modules and parameters are called under the tap and stay after it."""
    module, x = make("parameter")
    calls: list[str] = []
    module.stem.register_forward_hook(lambda *_: calls.append("forward"))
    module.get_parameter("weight.held").register_hook(lambda grad: calls.append("backward"))
    with put_on(kind, module):
        module(x).backward()
    module(x).backward()
    assert calls == ["forward", "backward"] * 2
    assert len(hooks_on(module)) == 2


# Putting on and taking off


@each_tap
def test_attaching_twice_is_attaching_once(kind: type[Tap]) -> None:
    """A tap that is attached twice hands over each tensor once, and is off after one removal."""
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
    """A tap sees the steps for which it is attached and none between."""
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
    """What runs between a pause and the next attaching is not seen; the hooks stay on, and go when the tap is left."""
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
    """Attaching a copy of a paused tap puts hooks on the copied modules, and those of the original are as they were."""
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
    """A receiver that a copy of a tap shares with the tap."""
    _SEEN.append(site.name)


class Leaf(nn.Module):
    """Gives a parameter of its own, and the input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.scale


@each_tap
def test_steps_under_one_attachment_are_alike(kind: type[Tap]) -> None:
    """A tap that stays on hands over as much of each step as of the first, also of tensors that outlive the steps."""
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
    """An empty choice of modules can be put on and taken off."""
    with kind({}, fail) as tap:
        assert tap.attached
    assert (tap.attached, tap.modules) == (False, {})


@each_tap
def test_the_modules_are_those_that_were_given(kind: type[Tap]) -> None:
    """A tap keeps its own list of modules, so that later changes of the given one do not matter."""
    module = nn.ReLU()
    given: dict[str, nn.Module] = {"a": module}
    tap = kind(given, ignore)
    given.clear()
    assert tap.modules == {"a": module}


# What a receiver gets


@each_tap
def test_a_receiver_works_without_autograd_and_unrecorded(kind: type[Tap]) -> None:
    """A receiver gets detached tensors, and what it computes is tracked neither by autograd nor by a graph capture."""
    module, x = make("single")
    states: set[tuple[bool, bool, bool]] = set()

    def receive(site: Site, tensor: Tensor) -> None:
        states.add((tensor.requires_grad, torch.is_grad_enabled(), is_unrecorded()))

    with put_on(kind, module, receive):
        module(x).backward()
    assert states == {(False, False, True)}


def test_a_receiver_gets_no_copy() -> None:
    """A receiver gets the memory of the output itself, so that nothing is copied."""
    seen: list[int] = []
    module = nn.Identity()
    x = torch.ones(3)
    with OutputTap({"m": module}, lambda _, tensor: seen.append(tensor.data_ptr())):
        module(x)
    assert seen == [x.data_ptr()]


# Faults


def path_of(kind: type[Tap]) -> str:
    """The path of the first tensor of a module that a tap hands over."""
    return "weight" if "Parameter" in kind.__name__ else "in[0]" if "Input" in kind.__name__ else "out"


@each_tap
def test_a_fault_is_one_warning_that_names_the_module(kind: type[Tap]) -> None:
    """A receiver that raises costs one warning with tap, module and cause, and that module is left alone ever after."""
    module, x = make("single")
    seen: list[str] = []
    tap = put_on(kind, module, fail_on("act", seen))
    message = f"{kind.__name__} could not record module 'act' at {path_of(kind)!r}: ZeroDivisionError: no luck"
    with pytest.warns(RecorderWarning) as told, tap:
        module(x).backward()
    assert [str(warning.message) for warning in told] == [
        f"{message}. It is left alone from now on; strict=True raises instead."
    ]
    for _ in range(2):
        with tap:
            module(x).backward()
    assert sorted(seen) == ["head"] * 3 + ["stem"] * 3


@each_tap
def test_a_fault_of_one_call_ends_the_other_calls_of_its_module(kind: type[Tap]) -> None:
    """A module that is called again in the step of its fault is left alone within that step already."""
    module, x = make("repeated")
    with pytest.warns(RecorderWarning) as told, put_on(kind, module, fail):
        module(x).backward()
    assert len(told) == 1


@each_tap
def test_a_fault_leaves_training_as_it_is(kind: type[Tap]) -> None:
    """Where every module's recording fails, the gradients are still bitwise those without a tap."""
    module, x = make("residual")
    module(x).backward()
    expected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    with pytest.warns(RecorderWarning), put_on(kind, module, fail):
        module(x).backward()
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.equal(expected[name])] == []


@each_tap
def test_strict_raises_from_the_pass_and_names_the_module(kind: type[Tap]) -> None:
    """Under strict a fault is raised from the forward or the backward pass, with the module's name and the cause."""
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
    """Under python -W error a fault raises from neither pass and is logged instead."""
    module, x = make("single")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with put_on(kind, module, fail_on("act", [])):
            module(x).backward()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "module 'act'" in caplog.text


@each_tap
def test_an_interruption_is_not_swallowed(kind: type[Tap]) -> None:
    """Ctrl-C while a receiver works ends the run as anywhere else, and the hooks are taken off."""
    module, x = make("single")

    def interrupt(site: Site, tensor: Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), put_on(kind, module, interrupt):
        module(x).backward()
    assert hooks_on(module) == []


# Copies of the model


def deep_copy(module: nn.Module) -> nn.Module:
    """A copy as EMA and SWA make it."""
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    """A copy as another process gets it."""
    return pickle.loads(pickle.dumps(module))  # type: ignore[no-any-return]


def saved(module: nn.Module) -> nn.Module:
    """A copy as a checkpoint of the whole model gives it."""
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
    """A model can be copied, pickled and saved while the hooks are on, and the copy trains without being recorded."""
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
    """An output with the tap's hook on it is saved without a warning, and loaded without the hook."""
    module = nn.Linear(2, 2)
    file = io.BytesIO()
    with OutputGradientTap({"m": module}, ignore):
        output = module(torch.ones(1, 2))
        torch.save(output, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, output)
    assert hooks_on(nn.Module(), [loaded]) == []


# Nothing is kept


@pytest.fixture
def collector() -> Iterator[None]:
    """Garbage collection of what the test made, without that of all modules which were imported before it."""
    gc.freeze()
    yield
    gc.unfreeze()


def watch(module: nn.Module, found: list[weakref.ref[Any]]) -> list[RemovableHandle]:
    """Note weak references to the outputs of all submodules."""

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        own = {id(each) for each in (*module.parameters(), *module.buffers())}
        found.extend(weakref.ref(tensor) for _, tensor in iter_tensors(output) if id(tensor) not in own)

    return [each.register_forward_hook(note) for each in module.modules()]


def test_no_living_output_is_forgotten() -> None:
    """From hundreds of outputs that all live, as of a long unrolled sequence, the hooks are taken off all the same."""
    module = nn.Linear(2, 2)
    outputs: list[Tensor] = []
    seen: list[Site] = []
    with OutputGradientTap({"m": module}, lambda site, _: seen.append(site)):
        for _ in range(1000):
            outputs.append(module(torch.ones(2)))  # noqa: PERF401  # one call after another, as in a loop over time
    assert hooks_on(module, outputs) == []
    torch.stack(outputs).sum().backward()
    assert seen == []


@each_tap
@pytest.mark.parametrize("backward", [True, False], ids=["train", "forward only"])
@pytest.mark.usefixtures("collector")
def test_a_long_attachment_grows_by_nothing(kind: type[Tap], backward: bool) -> None:
    """Under a tap that stays on, as around a whole epoch, a few hundred objects are kept, however many the steps be."""
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
        assert [count(steps) - before < 600 for steps in (300, 500, 700)] == [True] * 3


class Saved:
    """What autograd saves of a step in the place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.fixture
def no_collector() -> Iterator[None]:
    """No garbage collection, so that what is freed is freed at once."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vmap"])  # torch.func takes no hooks on the saved
@each_tap
@pytest.mark.parametrize("backward", [True, False], ids=["train", "forward only"])
@pytest.mark.usefixtures("no_collector")
def test_a_step_is_freed_without_garbage_collection(name: str, kind: type[Tap], backward: bool) -> None:
    """When the loss dies, outputs and what autograd saved die with it, as without a tap, although the tap stays on."""

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
    """A model whose tap was taken off and forgotten is freed at once."""
    module, x = make("checkpoint")
    with put_on(kind, module) as tap:
        module(x).backward()
    reference = weakref.ref(module)
    del module, tap
    assert reference() is None


@each_tap
def test_memory_is_the_same_after_each_step(kind: type[Tap]) -> None:
    """Under a tap with a sum for a receiver, steps allocate as many bytes as they free."""
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
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
        steps(20)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            steps(20)
    assert total != 0
    assert sum(event.self_cpu_memory_usage for event in profile.function_events or ()) == 0


# Devices


@each_model
@each_tap
def test_a_tap_reads_no_number(name: str, kind: type[Tap]) -> None:
    """The hooks themselves never wait for a device: a tap adds no read of a value to a step."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                found.append(func)
            return func(*args, **(kwargs or {}))

    found: list[object] = []

    def reads(module: nn.Module, x: Tensor) -> int:
        found.clear()
        with Count():  # type: ignore[no-untyped-call]  # of torch
            module(x).backward()
        return len(found)

    expected = reads(*make(name))
    module, x = make(name)
    with put_on(kind, module):
        assert reads(module, x) == expected


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"packed", "lazy", "vmap"}])
@each_tap
def test_a_tap_works_on_the_meta_device(name: str, kind: type[Tap]) -> None:
    """Where tensors have no values, as on the meta device, everything is handed over with its shape."""
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
def test_a_condition_is_asked_once_for_each_call(kind: type[Tap]) -> None:
    """The condition is asked once for each call or gradient, and where it is false nothing is handed over."""
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
def test_a_condition_is_asked_once_for_many_tensors(kind: type[Tap]) -> None:
    """Of a call with several tensors a condition decides at once; each gradient is asked for on its own."""
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
    """A fault in the condition is told with the module's name, or raised under strict."""
    module = nn.PReLU()
    message = rf"^{kind.__name__} could not record module 'm': ZeroDivisionError"
    tap = kind({"m": module}, ignore, condition=lambda: 1 // 0, strict=strict)
    with pytest.raises(RecordingError, match=message) if strict else pytest.warns(RecorderWarning, match=message), tap:
        module(torch.ones(2, requires_grad=True)).sum().backward()
    assert hooks_on(module) == []


# Calls of every kind


class Moody(nn.Module):
    """Fails when it is told to, after it has called its child."""

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
    """Under a tap that stays on, what a call that raised has left behind does not get into the next."""
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
def test_a_call_inside_a_transform_is_passed_over(kind: type[Tap]) -> None:
    """Inside vmap and func.grad nothing is handed over, nothing raises, and the results stay; the next call is seen."""
    net = nn.Sequential(nn.Linear(2, 2), nn.PReLU())
    x = torch.randn(3, 2, requires_grad=True)
    total = torch.zeros(())
    seen: list[str] = []

    def receive(site: Site, tensor: Tensor) -> None:
        total.add_(tensor.sum())  # as a reduction does, which a transform allows only for tensors of its own
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
def test_models_in_threads_are_told_apart(kind: type[Tap]) -> None:
    """Two models that train at the same time in two threads, each under its own tap, are each seen alone."""
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
    """A model that two threads call at the same time under one tap is seen as often as it is called."""
    module, _ = make("single")
    module.requires_grad_(kind is ParameterGradientTap)  # for the others two threads need not add into one gradient
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


# Of torch, when a graph begins with the result of another operation.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@each_tap
def test_a_compiled_part_is_seen_as_it_is_in_eager_mode(kind: type[Tap]) -> None:
    """A submodule that was compiled and called before shows a tap the same under EagerStance, and no hook is left."""
    module, x = make("residual")

    def see() -> list[tuple[Site, Any]]:
        seen: list[tuple[Site, Any]] = []
        with put_on(kind, module, lambda site, tensor: seen.append((site, tensor.tolist())), strict=True):
            module(x).backward()
        return seen

    expected = see()
    branch = module.get_submodule("branch")
    module.branch = torch.compile(branch, backend="eager")  # type: ignore[assignment]  # a module gives a module
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
    """What is no mapping from names to modules is refused, with the way to get one."""
    with pytest.raises(
        ArgumentError, match=r"modules takes a mapping .* as Selection\(...\)\.resolve\(model\) gives it"
    ):
        kind(modules, ignore)


@each_tap
def test_what_is_called_must_be_a_function(kind: type[Tap]) -> None:
    """A receiver or a condition that cannot be called is refused."""
    with pytest.raises(ArgumentError, match=r"^receive takes a function \(site, tensor\), got None$"):
        kind({}, None)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ArgumentError, match=r"^condition takes a function \(\), got True$"):
        kind({}, ignore, condition=True)  # type: ignore[arg-type]  # the point of the test


@each_tap
def test_what_failed_can_be_revived(kind: type[Tap]) -> None:
    """A module that is left alone is among the failed ones until it is revived, and is then recorded again."""
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
    """Holds a tensor where nobody looks."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Gives(nn.Module):
    """Gives its input in an object of a class that is not known."""

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(x * 2)


@pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap, InputGradientTap])
def test_an_unknown_object_is_told_once(kind: type[Tap]) -> None:
    """Tensors inside an object of an unknown class cost one warning that names class, path, module and the way out."""
    module = Gives()
    message = "passes over the tensors inside the Opaque at 'out' of module 'm'; register_container can name them."
    tap = kind({"m": module}, fail)
    with pytest.warns(RecorderWarning) as told, tap:
        steps(module, torch.ones(2, requires_grad=True))
    assert [str(each.message) for each in told] == [f"{kind.__name__} {message}"]


def steps(module: nn.Module, x: Tensor) -> None:
    """Two calls."""
    for _ in range(2):
        module(x)
