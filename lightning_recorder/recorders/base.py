"""What every recorder of tensors is: a subrecorder for each module that was chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from lightning_recorder.errors import ArgumentError, SelectionError, check_callable
from lightning_recorder.recorders.files import load_recording, save_recording
from lightning_recorder.recorders.stores import Budget, Fold, Metric, Store, make_store
from lightning_recorder.recorders.subrecorder import SubRecorder
from lightning_recorder.reductions import Reduction
from lightning_recorder.selection import Selection, is_of_types
from lightning_recorder.taps import Receiver, Tap

__all__ = ["Recorder"]

_GIBIBYTE = 2**30


class Recorder(ABC):
    """Records tensors of chosen modules, each module on its own, with or without a reduction.

    :meth:`children`, :meth:`modules` and :meth:`select` put the hooks on, and may be chained. They stay until
    :meth:`detach`, or the end of a ``with`` block; what was recorded remains.

    The data of a module are those of the one tensor which it takes or gives, or a dictionary by path if there are
    several, as ``in[0]``, ``in.mask``, ``out.logits``. With a reduction they are its result, ``None`` before the first
    tensor; without one a list of all tensors.

    Args:
        condition: Called without arguments, once for each call of a module (of gradients for each one); where it gives
            something false, nothing is recorded and nothing counted.
        reduction: What to make of the tensors of a site, one after another. A function of two arguments, as for
            ``functools.reduce``; a :class:`~lightning_recorder.Reduction` or its class; or a ``torchmetrics.Metric``,
            which is then asked on each rank for itself. By default a list of all tensors is kept.
        max_bytes: How much the lists of all modules may hold together; what would exceed it is not recorded, which is
            told once.
        strict: Raise what goes wrong in the condition or the reduction instead of warning once and leaving that module
            alone from then on.

    Raises:
        ArgumentError: At construction, if an argument can never work.
        RecordingError: From the model's forward or backward pass, if ``strict``; names the module.

    Note:
        Training is not changed. What is kept is on the device of the model, belongs to no autograd graph and shares no
        memory with the model. A list takes the memory of all that it holds. While hooks are on, compiled modules of the
        process run eagerly.
    """

    def __init__(
        self,
        condition: Callable[[], object] | None = None,
        reduction: Fold | Reduction | Metric | type | None = None,
        *,
        max_bytes: int = _GIBIBYTE,
        strict: bool = False,
    ) -> None:
        if condition is not None:
            check_callable("condition", condition, "()")
        self.condition = condition
        self.reduction = reduction
        self.strict = strict
        self.subrecorders: list[SubRecorder] = []
        self._budget = Budget(max_bytes)
        self._make_store()  # says now what it would say in the first step

    @abstractmethod
    def _make_tap(self, modules: Mapping[str, nn.Module], receive: Receiver) -> Tap:
        """The tap that brings what this recorder records."""

    def _make_store(self) -> Store:
        return make_store(self.reduction, self._budget)

    def _make_nothing(self) -> Any:
        return [] if self.reduction is None else None

    def children(
        self,
        network: nn.Module,
        types: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None = None,
        indices: int | Iterable[int] | None = None,
    ) -> Self:
        """Record the children of a network, those of given types and at given positions; by default all.

        Args:
            network: The module whose children are meant, not those below them.
            types: As for :class:`~lightning_recorder.Selection`.
            indices: Positions in ``network.children()``, from 0. With types, both must hold.

        Returns:
            The recorder itself.

        Raises:
            SelectionError: If no module is meant.
        """
        return self._register(_chosen(list(network.named_children()), types, indices))

    def modules(
        self,
        module: nn.Module,
        types: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None = None,
        indices: int | Iterable[int] | None = None,
    ) -> Self:
        """Record a module and all modules inside it, those of given types and at given positions; by default all.

        Args:
            module: The module that is meant, with all that is below it.
            types: As for :class:`~lightning_recorder.Selection`.
            indices: Positions in ``module.modules()``, where the module itself is 0. With types, both must hold.

        Returns:
            The recorder itself.

        Raises:
            SelectionError: If no module is meant.
        """
        return self._register(_chosen(list(module.named_modules()), types, indices))

    def select(self, module: nn.Module, selection: Selection | str | Iterable[str] | None = None) -> Self:
        """Record what a selection, or names and globs, choose inside a module; by default its leaves.

        Returns:
            The recorder itself.

        Raises:
            SelectionError: If nothing is selected; with the closest names.
        """
        chosen = selection if isinstance(selection, Selection) else Selection(selection)
        return self._register(chosen.resolve(module))

    def _register(self, modules: Mapping[str, nn.Module]) -> Self:
        taken = {each.name for each in self.subrecorders}
        for name, module in modules.items():
            unique = next(each for each in _numbered(name) if each not in taken)
            taken.add(unique)
            self.subrecorders.append(SubRecorder(unique, module, self._make_tap, self._make_store, self._make_nothing))
            self.subrecorders[-1].tap.attach()
        return self

    @property
    def data(self) -> list[Any]:
        """What was recorded of each module, in the order in which they were registered."""
        return [each.data for each in self.subrecorders]

    @property
    def failed(self) -> list[str]:
        """The names of the modules that are left alone since recording them failed; their data end there."""
        return [each.name for each in self.subrecorders if each.tap.failed]

    @property
    def handles(self) -> list[Tap]:
        """What takes the hooks of each module off: ``handles[0].remove()``. :meth:`remove` forgets the module also."""
        return [each.tap for each in self.subrecorders]

    @property
    def names(self) -> list[str]:
        """The name of each module, in the order in which they were registered."""
        return [each.name for each in self.subrecorders]

    def __getitem__(self, index: int | str) -> Any:
        """What was recorded of the module at a position or of that name."""
        return self.subrecorders[self._position(index)].data

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} modules: {', '.join(map(repr, self.names))}"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.subrecorders)

    def _position(self, index: int | str) -> int:
        if not isinstance(index, str):
            return index
        if index not in self.names:
            raise KeyError(f"no module {index!r} is recorded; there are {', '.join(map(repr, self.names)) or 'none'}")
        return self.names.index(index)

    def samples(self, index: int | str) -> int:
        """How many samples (rows of the first dimension) of the module at a position or of a name were recorded."""
        return self.subrecorders[self._position(index)].samples

    def calls(self, index: int | str) -> int:
        """How many calls of the module at a position or of a name were recorded."""
        return self.subrecorders[self._position(index)].calls

    def iter_samples(self) -> Iterator[int]:
        """The number of samples of each module."""
        return (each.samples for each in self.subrecorders)

    def apply(self, function: Callable[[Any], Any]) -> None:
        """Put ``function(data)`` in the place of the data of each module, where there are several paths, of each path.

        What comes of it must suit the reduction if recording is to go on; after a Reduction or a Metric it does not.
        """
        for each in self.subrecorders:
            each.apply(lambda value, samples: function(value))

    def apply_sample(self, function: Callable[[Any, int], Any]) -> None:
        """Put ``function(data, samples)`` in the place of the data of each module, as :meth:`apply` does."""
        for each in self.subrecorders:
            each.apply(function)

    def remove(self, index: int | str) -> Any:
        """Take the hooks of one module off and forget it; the others move up.

        Returns:
            What was recorded of it.
        """
        gone = self.subrecorders.pop(self._position(index))
        gone.tap.remove()
        data = gone.data
        gone.reset()
        return data

    def attach(self) -> None:
        """Put the hooks on again after :meth:`detach`."""
        for each in self.subrecorders:
            each.tap.attach()

    def detach(self) -> None:
        """Take all hooks off; what was recorded stays."""
        for each in self.subrecorders:
            each.tap.remove()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def reset(self) -> None:
        """Forget what was recorded, and what has failed; modules and hooks stay."""
        for each in self.subrecorders:
            each.reset()

    def state_dict(self) -> dict[str, Any]:
        """What was recorded, by the name of the module, as plain containers and tensors."""
        return {each.name: each.state_dict() for each in self.subrecorders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ArgumentError: If it is of other modules than those of this recorder.
        """
        if list(state) != self.names:
            raise ArgumentError(
                f"the state is of the modules {list(state)}, this recorder has {self.names}; select the same ones first"
            )
        for each in self.subrecorders:
            each.load_state_dict(state[each.name])

    def save(self, path: str | Path, mkdir: bool = False, *args: Any, **kwargs: Any) -> None:
        """Save what was recorded: ``0.pt``, ``1.pt``, … in a folder and, by name, a safetensors file beside it.

        Each numbered file holds the data of the module at that position, for ``torch.load``; ``<path>.safetensors``
        all of them under ``<name>/<path>``, as :meth:`load` reads it, without pickle.

        Args:
            path: The folder.
            mkdir: Whether to make it.
            args: For ``pathlib.Path.mkdir``, as the next.
            kwargs: As ``parents=True`` or ``exist_ok=True``.

        Raises:
            FileNotFoundError: If the folder is not there and ``mkdir`` is false.
            ArgumentError: If a reduction has made something that is neither tensors nor numbers; the numbered files are
                there then.
        """
        folder = Path(path)
        if mkdir:
            folder.mkdir(*args, **kwargs)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}; mkdir=True makes it")
        for index, data in enumerate(self):
            torch.save(data, folder / f"{index}.pt")
        save_recording(folder, self.state_dict(), type(self).__name__)

    def load(self, path: str | Path) -> None:
        """Go on from what :meth:`save` has saved in a folder, on the CPU.

        The recorder has the same modules and the same kind of reduction as the one that was saved.

        Raises:
            ArgumentError: If it is of other modules or another kind than this recorder.
            DumpError: If the file beside the folder is damaged or none of ours.
            FileNotFoundError: If it is not there.
        """
        self.load_state_dict(load_recording(Path(path), type(self).__name__))


def _chosen(
    modules: list[tuple[str, nn.Module]],
    types: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None,
    indices: int | Iterable[int] | None,
) -> dict[str, nn.Module]:
    """Those of the modules that are of the types and at the positions."""
    wanted = Selection(types=types, indices=indices)  # which checks and unifies both
    places = wanted.indices if isinstance(wanted.indices, tuple) else None
    beyond = [place for place in places or () if place >= len(modules)]
    if beyond:
        raise SelectionError(f"indices={beyond}: there are {len(modules)} modules, at 0 to {len(modules) - 1}")
    chosen = {
        name: module
        for place, (name, module) in enumerate(modules)
        if (places is None or place in places) and (wanted.types is None or is_of_types(module, wanted.types))
    }
    if not chosen:
        there = ", ".join(f"{place}: {type(module).__name__}" for place, (_, module) in enumerate(modules[:20]))
        raise SelectionError(f"no module is of types={types} at indices={indices}; there are {there or 'none'}")
    return chosen


def _numbered(name: str) -> Iterator[str]:
    """The name, and what a second and a third of that name are called."""
    yield name
    number = 2
    while True:
        yield f"{name} ({number})"
        number += 1
