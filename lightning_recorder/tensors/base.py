"""Base class of tensor recorders, with one subrecorder per selected module."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_recorder.dumps import read_tensors, write_tensors
from lightning_recorder.errors import ArgumentError, DumpError, SelectionError, check_callable
from lightning_recorder.internals.module_tree import children_of, named_modules_of
from lightning_recorder.records.tags import make_tag
from lightning_recorder.reductions import Reduction
from lightning_recorder.reductions.accumulators import Accumulator, ByteBudget, Fold, Metric, make_accumulator
from lightning_recorder.selection import Selection, is_of_types
from lightning_recorder.taps import Receiver, Tap
from lightning_recorder.tensors.subrecorder import RecordedData, SubRecorder

__all__ = ["Recorder"]

FORMAT = "lightning_recorder.recording/1"


def save_recording(folder: Path, state: Mapping[str, Any], kind: str) -> None:
    """Write the result of ``Recorder.state_dict`` to ``<folder>.safetensors``, next to the folder.

    Raises:
        OSError: If the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {}
    for name, paths in state.items():
        layout[name] = {}
        for path, recorded in paths.items():
            keys = {}
            for part, tensor in recorded["state"].items():
                keys[part] = _unique(make_tag("", name, path, part), tensors)
                tensors[keys[part]] = tensor
            layout[name][path] = {**recorded, "state": keys}
    write_tensors(_file(folder), tensors, {"format": FORMAT, "kind": kind, "layout": json.dumps(layout)})


def load_recording(folder: Path, kind: str) -> dict[str, Any]:
    """Return the state saved in ``<folder>.safetensors``.

    Raises:
        ArgumentError: If the file was saved by another kind of recorder.
        DumpError: If the file is damaged or was not written by this package.
        FileNotFoundError: If there is no such file.
    """
    tensors, metadata = read_tensors(_file(folder), FORMAT)
    if metadata.get("kind") != kind:
        raise ArgumentError(f"{_file(folder)} was saved by a {metadata.get('kind')}, and cannot be loaded by a {kind}")
    try:
        state: dict[str, Any] = json.loads(metadata["layout"])
        for paths in state.values():
            for recorded in paths.values():
                recorded["state"] = {part: tensors[key] for part, key in recorded["state"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DumpError(f"{_file(folder)} has metadata that do not match its tensors: {error!r}") from error
    return state


def _file(folder: Path) -> Path:
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}.safetensors")


def _unique(key: str, taken: Mapping[str, Tensor]) -> str:
    """Return the key, with a suffix if it is taken. Two tensors can have the same key if a name contains a slash."""
    while key in taken:
        key += "~"
    return key


_GIBIBYTE = 2**30


class Recorder:
    """Record tensors of selected modules, separately for each module, with or without a reduction.

    :meth:`children`, :meth:`modules` and :meth:`select` register hooks and can be chained. The hooks stay until
    :meth:`detach` or the end of a ``with`` block. The recorded data remain.

    With a reduction, the data of a module are its result, or ``None`` before the first tensor. Without a reduction,
    they are a list of all tensors. If a module has several input or output tensors, the data are a dictionary by path,
    such as ``in[0]``, ``in.mask``, ``out.logits``.

    Args:
        condition: A function without arguments that is called once per module call, or once per gradient. If it returns
            a falsy value, nothing is recorded or counted.
        reduction: The operation that combines the tensors of a site. A function of two arguments, as for
            ``functools.reduce``; a :class:`~lightning_recorder.reductions.Reduction` or its class; or a
            ``torchmetrics.Metric``, which is computed on each rank separately. By default all tensors are kept in a
            list. If a function cannot combine a batch with its previous result, because the numbers of rows differ, the
            batch is skipped with a warning. An example is a smaller last batch.
        data_method: ``"batch"`` to record whole tensors, ``"sample"`` to record the first sample of each tensor,
            without the batch dimension.
        max_bytes: The limit in bytes for the lists of all modules together. Tensors that would exceed the limit are not
            recorded, with a single warning.
        strict: Raise errors of the condition or the reduction, instead of warning once and ignoring the module from
            then on.

    Raises:
        ArgumentError: At construction, if an argument has an invalid value.
        RecordingError: From the model's forward or backward pass, if ``strict``. The message names the module.

    Note:
        Training is not changed. Recorded data are on the device of the model, are not part of an autograd graph and
        share no memory with the model. While hooks are registered, all compiled code of the process runs eagerly.
    """

    _tap: ClassVar[Callable[..., Tap]]
    """Creates the tap, which determines the tensors to record."""

    def __init__(
        self,
        condition: Callable[[], object] | None = None,
        reduction: Fold | Reduction | Metric | type | None = None,
        data_method: Literal["batch", "sample"] = "batch",
        *,
        max_bytes: int = _GIBIBYTE,
        strict: bool = False,
    ) -> None:
        if condition is not None:
            check_callable("condition", condition, "")
        if data_method not in ("batch", "sample"):
            raise ArgumentError(f"data_method must be 'batch' or 'sample', got {data_method!r}")
        self.condition = condition
        self.reduction = reduction
        self.data_method = data_method
        self.strict = strict
        self.subrecorders: list[SubRecorder] = []
        self._budget = ByteBudget(max_bytes)
        self._make_accumulator()  # fail at construction instead of in the first step

    def _make_tap(self, modules: Mapping[str, nn.Module], receive: Receiver) -> Tap:
        return self._tap(modules, receive, condition=self.condition, strict=self.strict)

    def _make_accumulator(self) -> Accumulator:
        return make_accumulator(self.reduction, self._budget)

    def _empty_data(self) -> Any:
        return [] if self.reduction is None else None

    def children(
        self,
        network: nn.Module,
        types: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None = None,
        indices: int | Iterable[int] | None = None,
    ) -> Self:
        """Record the children of a network. Types and positions restrict the selection.

        Args:
            network: The module whose direct children are recorded.
            types: As for :class:`~lightning_recorder.Selection`.
            indices: Positions in ``network.children()``, starting at 0. If types are given too, both must match.

        Returns:
            The recorder itself.

        Raises:
            SelectionError: If no module matches.
        """
        return self._register(_chosen(list(children_of(network)), types, indices))

    def modules(
        self,
        module: nn.Module,
        types: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None = None,
        indices: int | Iterable[int] | None = None,
    ) -> Self:
        """Record a module and all its submodules. Types and positions restrict the selection.

        Args:
            module: The module to record together with all its submodules.
            types: As for :class:`~lightning_recorder.Selection`.
            indices: Positions in ``module.modules()``, where the module itself is 0. If types are given too, both must
                match.

        Returns:
            The recorder itself.

        Raises:
            SelectionError: If no module matches.
        """
        return self._register(_chosen(list(named_modules_of(module)), types, indices))

    def select(self, module: nn.Module, selection: Selection | str | Iterable[str] | None = None) -> Self:
        """Record the modules that a selection, or names and globs, match inside a module.

        Returns:
            The recorder itself.

        Raises:
            SelectionError: If nothing is selected. The message has the closest names.
        """
        chosen = selection if isinstance(selection, Selection) else Selection(selection)
        return self._register(chosen.resolve(module))

    def _register(self, modules: Mapping[str, nn.Module]) -> Self:
        taken = {each.name for each in self.subrecorders}
        for name, module in modules.items():
            unique = next(each for each in _numbered(name) if each not in taken)
            taken.add(unique)
            first_sample = self.data_method == "sample"
            self.subrecorders.append(
                SubRecorder(unique, module, self._make_tap, self._make_accumulator, self._empty_data, first_sample)
            )
            self.subrecorders[-1].tap.attach()
        return self

    @property
    def data(self) -> list[Any]:
        """The data of each module, in the order of registration.

        Assigning to an entry, as in ``recorder.data[0] = …``, replaces the data of that module.
        """
        return RecordedData(self.subrecorders)

    @property
    def failed(self) -> list[str]:
        """The names of the modules that are no longer recorded after a failure. Their data are incomplete."""
        return [each.name for each in self.subrecorders if each.tap.failed]

    @property
    def handles(self) -> list[Tap]:
        """Handles to remove the hooks of a module: ``handles[0].remove()``. :meth:`remove` also discards the module."""
        return [each.tap for each in self.subrecorders]

    @property
    def names(self) -> list[str]:
        """The name of each module, in the order of registration."""
        return [each.name for each in self.subrecorders]

    def __getitem__(self, index: int | str | slice) -> Any:
        """Return the data of a module by position or name, or the list of data for a slice."""
        if isinstance(index, slice):
            return RecordedData(self.subrecorders[index])
        return self.subrecorders[self._position(index)].data

    def __setitem__(self, index: int | str | slice, value: Any) -> None:
        """Replace the data of a module by position or name, or of all modules in a slice."""
        RecordedData(self.subrecorders)[index if isinstance(index, slice) else self._position(index)] = value

    def __delitem__(self, index: int | str | slice) -> None:
        """Remove a module by position or name, or all modules in a slice, like :meth:`remove`."""
        places = range(len(self))[index] if isinstance(index, slice) else [self._position(index)]
        for place in sorted(places, reverse=True):
            self.remove(place)

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
        """Return the number of recorded samples (rows of dimension 0) of a module, given its position or name."""
        return self.subrecorders[self._position(index)].samples

    def calls(self, index: int | str) -> int:
        """Return the number of recorded calls of a module, given its position or name."""
        return self.subrecorders[self._position(index)].calls

    def iter_samples(self) -> Iterator[int]:
        """Yield the number of samples of each module."""
        return (each.samples for each in self.subrecorders)

    def apply(self, function: Callable[[Any], Any]) -> None:
        """Replace the data of each module, or of each path if there are several, by ``function(data)``.

        To continue recording, the result must be a valid argument of the reduction function. With a Reduction or a
        Metric, recording cannot continue.
        """
        for each in self.subrecorders:
            each.apply(lambda value, samples: function(value))

    def apply_sample(self, function: Callable[[Any, int], Any]) -> None:
        """Replace the data of each module by ``function(data, samples)``, like :meth:`apply`."""
        for each in self.subrecorders:
            each.apply(function)

    def remove(self, index: int | str) -> Any:
        """Remove the hooks of one module and discard the module. The positions of later modules decrease by one.

        Returns:
            The recorded data of the module.
        """
        gone = self.subrecorders.pop(self._position(index))
        gone.tap.remove()
        data = gone.data
        gone.reset()
        return data

    def attach(self) -> None:
        """Register the hooks again after :meth:`detach`."""
        for each in self.subrecorders:
            each.tap.attach()

    def detach(self) -> None:
        """Remove all hooks. The recorded data remain."""
        for each in self.subrecorders:
            each.tap.remove()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def reset(self) -> None:
        """Clear the recorded data and the failures. Modules and hooks remain."""
        for each in self.subrecorders:
            each.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded data by module name, as plain containers and tensors."""
        return {each.name: each.state_dict() for each in self.subrecorders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ArgumentError: If the modules of the state are not the modules of this recorder.
        """
        if list(state) != self.names:
            raise ArgumentError(
                f"the state is of the modules {list(state)}, this recorder has {self.names}; select the same ones first"
            )
        for each in self.subrecorders:
            each.load_state_dict(state[each.name])

    def save(self, path: str | Path, mkdir: bool = False, *args: Any, **kwargs: Any) -> None:
        """Save the data as ``0.pt``, ``1.pt``, … in a folder, and as a safetensors file next to the folder.

        Each numbered file holds the data of the module at that position, for ``torch.load``. ``<path>.safetensors``
        holds all data under ``<name>/<path>``, for :meth:`load`, without pickle.

        Args:
            path: The folder.
            mkdir: True to create the folder.
            args: Positional arguments of ``pathlib.Path.mkdir``.
            kwargs: Keyword arguments of ``pathlib.Path.mkdir``, such as ``parents=True`` or ``exist_ok=True``.

        Raises:
            FileNotFoundError: If the folder does not exist and ``mkdir`` is False.
            ArgumentError: If a reduction returned something other than tensors and numbers. The numbered files are
                complete nevertheless.
        """
        folder = Path(path)
        if mkdir:
            folder.mkdir(*args, **kwargs)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}; mkdir=True creates it")
        for index, data in enumerate(self):
            torch.save(data, folder / f"{index}.pt")
        save_recording(folder, self.state_dict(), type(self).__name__)

    def load(self, path: str | Path) -> None:
        """Continue from the data of :meth:`save`. The data are loaded on the CPU.

        The recorder must have the same modules and the same kind of reduction as the saved recorder.

        Raises:
            ArgumentError: If the file belongs to other modules or another kind of recorder.
            DumpError: If the safetensors file is damaged or was not written by this package.
            FileNotFoundError: If the file does not exist.
        """
        self.load_state_dict(load_recording(Path(path), type(self).__name__))


def _chosen(
    modules: list[tuple[str, nn.Module]],
    types: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None,
    indices: int | Iterable[int] | None,
) -> dict[str, nn.Module]:
    """Return the modules that match the given types and positions."""
    wanted = Selection(types=types, indices=indices)  # checks and normalizes both
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
    """Yield the name, followed by numbered variants for duplicates."""
    yield name
    number = 2
    while True:
        yield f"{name} ({number})"
        number += 1
