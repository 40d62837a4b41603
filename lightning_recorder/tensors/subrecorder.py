"""The tap and the data of one module in a recorder."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from lightning_recorder.errors import ArgumentError, did_you_mean, warn
from lightning_recorder.internals.random_states import unchanged_random_numbers
from lightning_recorder.reductions.accumulators import Accumulator
from lightning_recorder.reductions.base import UnequalBatchError, without_autocast
from lightning_recorder.taps import Receiver, Site, Tap

__all__ = ["RecordedData", "SubRecorder"]

_MISSING = object()


class SubRecorder:
    """A recorder of one module, used by :class:`~lightning_recorder.tensors.Recorder`.

    Args:
        name: The module's name, unique in the recorder.
        module: The module.
        make_tap: A function that creates the tap of the module.
        make_accumulator: A function that creates the accumulator for a new tensor path.
        empty_data: A function that returns the data of a module before its first tensor.
        first_sample: True to record only the first sample of each tensor.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        make_tap: Callable[[Mapping[str, nn.Module], Receiver], Tap],
        make_accumulator: Callable[[], Accumulator],
        empty_data: Callable[[], Any],
        first_sample: bool = False,
    ) -> None:
        self.name = name
        self.module = module
        self.tap = make_tap({name: module}, self._receive)
        self._make_accumulator = make_accumulator
        self._empty_data = empty_data
        self._first_sample = first_sample
        self._warned = False
        self._sites: dict[str, _Recorded] = {}
        self._initial: Any = _MISSING  # data assigned before the first tensor

    @property
    def paths(self) -> dict[str, Any]:
        """The data by tensor path; see :class:`~lightning_recorder.taps.Site`.

        Assigning to a path replaces the recorded data of this path.
        """
        return _PathData(self, {path: site.accumulator.value for path, site in self._sites.items()})

    @property
    def data(self) -> Any:
        """The data of the only path, or a dictionary by path if the module has several tensors.

        Assigning replaces the data. For several paths, assign a dictionary with a value for each path. A value assigned
        before the first tensor is the initial value of the reduction.
        """
        if not self._sites:
            return self._empty_data() if self._initial is _MISSING else self._initial
        values = self.paths
        return values if len(values) > 1 else next(iter(values.values()))

    @data.setter
    def data(self, value: Any) -> None:
        if not self._sites:
            self._initial = value
        elif len(self._sites) == 1:
            next(iter(self._sites.values())).accumulator.replace(value)
        elif isinstance(value, Mapping) and value.keys() == self._sites.keys():
            for path, each in value.items():
                self.replace(path, each)
        else:
            paths = ", ".join(map(repr, self._sites))
            raise ArgumentError(
                f"module {self.name!r} has data for several tensors: assign to one of them, by its path {paths}, or a "
                "dictionary with a value for each path"
            )

    def replace(self, path: str, value: Any) -> None:
        """Replace the recorded data of the tensor at a path.

        Raises:
            KeyError: If no tensor was recorded at this path. The message lists the known paths.
        """
        if path not in self._sites:
            hint = did_you_mean(path, self._sites)
            there = ", ".join(map(repr, self._sites)) or "none"
            raise KeyError(
                f"no tensor was recorded at {path!r} of the module {self.name!r}{hint or ';'} there are {there}"
            )
        self._sites[path].accumulator.replace(value)

    @property
    def samples(self) -> int:
        """The number of recorded samples: rows of the first recorded tensor. A 0-d tensor counts as one sample."""
        return next(iter(self._sites.values())).samples if self._sites else 0

    @property
    def calls(self) -> int:
        """The number of recorded calls, or of gradients for a gradient recorder."""
        return max((site.calls for site in self._sites.values()), default=0)

    def apply(self, function: Callable[[Any, int], Any]) -> None:
        """Replace the data of each path by ``function(data, samples)``."""
        for site in self._sites.values():
            site.accumulator.replace(function(site.accumulator.value, site.samples))

    def reset(self) -> None:
        """Clear the recorded data and the failure. The hooks remain."""
        self.tap.revive()
        for site in self._sites.values():
            site.accumulator.release()
        self._sites.clear()
        self._initial = _MISSING

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded data as plain containers and tensors."""
        return {
            path: {"samples": site.samples, "calls": site.calls, "state": site.accumulator.state_dict()}
            for path, site in self._sites.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.reset()
        for path, saved in state.items():
            site = _Recorded(self._make_accumulator(), int(saved["samples"]), int(saved["calls"]))
            site.accumulator.load_state_dict(saved["state"])
            self._sites[path] = site

    # Leave inference mode, which validation may use: tensors created in this mode could not be updated outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _receive(self, site: Site, tensor: Tensor) -> None:
        recorded = self._sites.get(site.path)
        if recorded is None:
            recorded = _Recorded(self._make_accumulator())
            self._start(recorded.accumulator, site.path)
        samples = tensor.size(0) if tensor.dim() else 1
        if self._first_sample and tensor.dim() and samples:
            tensor, samples = tensor[0], 1
        with without_autocast(tensor.device), unchanged_random_numbers(tensor.device):
            taken = self._update(recorded.accumulator, tensor)
        if taken:
            recorded.calls += 1
            recorded.samples += samples
            self._sites[site.path] = recorded

    def _update(self, accumulator: Accumulator, tensor: Tensor) -> bool:
        try:
            return accumulator.update(tensor)
        except UnequalBatchError as error:
            if self.tap.strict:
                raise
            if not self._warned:
                self._warned = True
                warn(f"module {self.name!r}: {error}. Such a batch is left out; strict=True raises instead.")
            return False

    def _start(self, accumulator: Accumulator, path: str) -> None:
        """Initialize the accumulator of a new path with data that were assigned before its first tensor."""
        if isinstance(self._initial, Mapping) and path in self._initial:
            accumulator.replace(self._initial[path])
        elif self._initial is not _MISSING and not self._sites:
            accumulator.replace(self._initial)


def _refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError(
        "a recorder has one entry of data for each module, and one for each tensor of it: entries can be assigned but "
        "not added or deleted. recorder.remove(…) removes a module, list(recorder.data) is an independent list"
    )


class RecordedData(list[Any]):
    """The data of several modules, as a list with assignable entries.

    Assigning to an entry or a slice replaces the recorded data of these modules. The number of entries is fixed. Copies
    and pickles are plain lists.
    """

    def __init__(self, subrecorders: Iterable[SubRecorder]) -> None:
        self._subrecorders = list(subrecorders)
        super().__init__(each.data for each in self._subrecorders)

    def __setitem__(self, index: SupportsIndex | slice, value: Any) -> None:
        if isinstance(index, slice):
            places, values = range(len(self))[index], list(value)
            if len(values) != len(places):
                raise ValueError(f"cannot assign {len(values)} values to the data of {len(places)} modules")
            for place, each in zip(places, values, strict=True):
                self[place] = each
            return
        subrecorder = self._subrecorders[index]
        subrecorder.data = value
        super().__setitem__(index, subrecorder.data)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return list, (list(self),)

    __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse


class _PathData(dict[str, Any]):
    """The data of a module by the paths of its tensors, as a dictionary with assignable values."""

    def __init__(self, subrecorder: SubRecorder, values: Mapping[str, Any]) -> None:
        self._subrecorder = subrecorder
        super().__init__(values)

    def __setitem__(self, path: str, value: Any) -> None:
        self._subrecorder.replace(path, value)
        super().__setitem__(path, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign several values."""
        for path, value in dict(*args, **kwargs).items():
            self[path] = value

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # torch.load(weights_only=True) allows a call that creates an OrderedDict, but not one that creates a dict.
        return OrderedDict, (), None, None, iter(list(self.items()))

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = _refuse


@dataclass
class _Recorded:
    """The recorded data of one tensor of a module."""

    accumulator: Accumulator
    samples: int = 0
    calls: int = 0
