"""What holds for every tap: training is not changed, nothing is left behind, nothing is kept, faults cost a record."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_recorder.errors import RecorderWarning, RecordingError
from lightning_recorder.selection import Selection
from lightning_recorder.structure import iter_tensors
from lightning_recorder.taps import OutputGradientTap, OutputTap, Receiver, Site, Tap
from lightning_recorder.unrecorded import is_unrecorded
from tests.taps.inspection import hooks_on
from tests.taps.models import MODELS, make

TAPS: list[type[Tap]] = [OutputTap, OutputGradientTap]
each_tap = pytest.mark.parametrize("kind", TAPS)
each_model = pytest.mark.parametrize("name", MODELS)


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


def train(module: nn.Module, x: Tensor, taps: list[type[Tap]]) -> dict[str, Tensor]:
    """Two steps of training under taps that read every number, and all numbers that may depend on it."""
    read: list[float] = []
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    numbers: dict[str, Tensor] = {}
    torch.manual_seed(1)
    for step in range(2):
        optimizer.zero_grad()
        with ExitStack() as stack:
            for kind in taps:
                stack.enter_context(put_on(kind, module, lambda site, tensor: read.append(tensor.abs().sum().item())))
            loss = module(x)
            loss.backward()
        optimizer.step()
        numbers[f"loss {step}"] = loss.detach()
        numbers |= {f"{name}.grad {step}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert bool(read) == bool(taps)
    flags = torch.tensor([each.training for each in module.modules()])
    return (
        numbers
        | {f"state {key}": value for key, value in module.state_dict().items()}
        | {
            "random numbers": torch.get_rng_state(),
            "flags": flags,
        }
    )


@each_model
@pytest.mark.parametrize("taps", [[OutputTap], [OutputGradientTap], TAPS], ids=["outputs", "gradients", "both"])
def test_training_is_the_same_to_the_bit(name: str, taps: list[type[Tap]]) -> None:
    """Losses, gradients, parameters, buffers, their names, random numbers and train flags equal those without a tap."""
    module, x = make(name)
    expected = train(copy.deepcopy(module), x, [])
    found = train(module, x, taps)
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
    assert hooks_on(module, outputs) == []


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
        return nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()), nn.Linear(2, 2))


@each_tap
def test_a_module_that_takes_no_hook_is_left_alone(kind: type[Tap], scripted: nn.Sequential) -> None:
    """A module on which no hook can be put costs one warning that names it, and the others are tapped."""
    seen: list[str] = []
    tap = kind(dict(scripted.named_children()), lambda site, _: seen.append(site.name))
    with pytest.warns(RecorderWarning, match=rf"^{kind.__name__} could not record module '1': ") as told, tap:
        scripted(torch.ones(1, 2)).sum().backward()
    assert len(told) == 1
    assert sorted(seen) == ["0", "2"]
    assert hooks_on(scripted) == []


@each_tap
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
    module, x = make("plain")
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
    module, x = make("plain")
    seen: list[str] = []
    tap = put_on(kind, module, lambda site, _: seen.append(site.name))
    for recorded in (True, False, True):
        if recorded:
            tap.attach()
        module(x).backward()
        tap.remove()
    assert sorted(seen) == ["act", "act", "head", "head", "stem", "stem"]


@each_tap
def test_a_tap_without_modules_does_nothing(kind: type[Tap]) -> None:
    """An empty choice of modules can be put on and taken off."""
    with kind({}, fail) as tap:
        assert not tap.attached
    assert tap.modules == {}


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
    module, x = make("plain")
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


@each_tap
def test_a_fault_is_one_warning_that_names_the_module(kind: type[Tap]) -> None:
    """A receiver that raises costs one warning with tap, module and cause, and that module is left alone ever after."""
    module, x = make("plain")
    seen: list[str] = []
    tap = put_on(kind, module, fail_on("act", seen))
    message = f"{kind.__name__} could not record module 'act': ZeroDivisionError: no luck"
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
    module, x = make("plain")
    message = rf"^{kind.__name__} could not record module 'act': ZeroDivisionError: no luck$"
    with put_on(kind, module, fail_on("act", []), strict=True):
        if kind is OutputTap:
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
    module, x = make("plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with put_on(kind, module, fail_on("act", [])):
            module(x).backward()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "module 'act'" in caplog.text


@each_tap
def test_an_interruption_is_not_swallowed(kind: type[Tap]) -> None:
    """Ctrl-C while a receiver works ends the run as anywhere else, and the hooks are taken off."""
    module, x = make("plain")

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


@each_model
@each_tap
@pytest.mark.usefixtures("collector")
def test_outputs_die_with_the_step(name: str, kind: type[Tap]) -> None:
    """When a step is over its outputs are freed, although the tap stays on."""
    module, x = make(name)
    found: list[weakref.ref[Any]] = []
    watch(module, found)
    with put_on(kind, module):
        module(x).backward()
        gc.collect()
        assert found
        assert [reference() for reference in found if reference() is not None] == []


@each_tap
@pytest.mark.usefixtures("collector")
def test_a_model_dies_with_its_tap(kind: type[Tap]) -> None:
    """A model whose tap was taken off and forgotten is freed."""
    module, x = make("checkpoint")
    with put_on(kind, module):
        module(x).backward()
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None


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
    module, x = make("plain")

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
