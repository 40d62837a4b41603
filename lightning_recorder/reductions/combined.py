"""Several statistics of the same tensors in one row."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions.base import Reduction, ScalarReduction, merged_along, slots_of_all
from lightning_recorder.reductions.values import Values

__all__ = ["Combined"]


class Combined(Reduction):
    """A reduction that combines several reductions in one row and shares intermediate results between them.

    Statistics: all statistics of the combined reductions.

    Args:
        parts: The reductions to combine.

    Raises:
        ArgumentError: If ``parts`` is empty, if a part is not a reduction, or if two parts have a statistic of the same
            name.

    Example:
        >>> import torch
        >>> from lightning_recorder.reductions import Extrema, Norms
        >>> both = Combined([Extrema(), Norms()])
        >>> both.update(torch.tensor([3.0, -4.0]))
        >>> {name: float(value) for name, value in both.compute().items()}
        {'min': -4.0, 'max': 3.0, 'abs_max': 4.0, 'l1_norm': 7.0, 'l2_norm': 5.0}
    """

    def __init__(self, parts: Iterable[Reduction]) -> None:
        found = _checked(parts)
        # Reductions of a few slots come first, so that they can be merged in one operation.
        self.parts = tuple(sorted(found, key=lambda part: not isinstance(part, ScalarReduction)))
        self.statistics = tuple(name for part in self.parts for name in part.statistics)
        twice = [name for name, count in Counter(self.statistics).items() if count > 1]
        if twice:
            raise ArgumentError(f"two reductions have the statistics {', '.join(map(repr, twice))}: remove one of them")
        self._measure()
        self._is_fixed = self.is_sized

    def _measure(self) -> None:
        self._widths = [part.width for part in self.parts]
        self.width = sum(self._widths) if self.is_sized else 0
        self.ordered = any(part.ordered for part in self.parts)
        self._scalars = [part for part in self.parts if isinstance(part, ScalarReduction)]
        ends = list(itertools.accumulate(self._widths))
        self._others = [
            (part, slice(end - part.width, end))
            for part, end in zip(self.parts, ends, strict=True)
            if not isinstance(part, ScalarReduction)
        ]
        self._partial: Reduction | None = None
        if self._scalars:
            self._partial = self if not self._others else Combined(self._scalars)

    def _split(self, state: Tensor) -> zip[tuple[Reduction, Tensor]]:
        return zip(self.parts, state.split(self._widths, dim=-1), strict=True)

    @property
    @override
    def partial(self) -> Reduction | None:
        return self._partial

    @override
    def initial(self) -> Tensor:
        return torch.cat([part.initial() for part in self.parts])

    @property
    @override
    def is_sized(self) -> bool:
        return all(part.is_sized for part in self.parts)

    @override
    def sized_for(self, values: Values) -> Self:
        if self.is_sized:
            return self
        sized = copy.copy(self)
        sized._state = None
        sized.parts = tuple(part.sized_for(values) for part in self.parts)
        sized._measure()
        return sized

    @override
    def add(self, state: Tensor, values: Values) -> None:
        slots = self.update_deferred(state, values)
        if slots is not None and self._partial is not None:
            self._partial.merge_states(state[: self._partial.width], slots)

    @override
    def check(self, values: Values) -> None:
        for part in self.parts:
            part.check(values)

    @override
    def update_deferred(self, state: Tensor, values: Values) -> Tensor | None:
        # Check before any update, so that a tensor rejected by one part is not added to another part.
        self.check(values)
        others = [(part, state[slots]) for part, slots in self._others]
        slots = []
        # Process one piece at a time for all piecewise parts, which share its intermediate results.
        for piece in values.pieces():
            if (found := slots_of_all(self._scalars, piece)) is not None:
                slots.append(found)
            for part, row in others:
                if part.piecewise:
                    part.update_state(row, piece)
        for part, row in others:
            if not part.piecewise:
                part.add(row, values)
        if len(slots) > 1 and self._partial is not None:
            return merged_along(self._partial, torch.stack(slots))
        return slots[0] if slots else None

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        self.add(state, values)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        for (part, row), (_, theirs) in zip(self._split(state), self._split(other), strict=True):
            part.merge_states(row, theirs)

    @override
    def merge_ranks(self, state: Tensor, other: Tensor) -> None:
        for (part, row), (_, theirs) in zip(self._split(state), self._split(other), strict=True):
            part.merge_ranks(row, theirs)

    @override
    def restart(self, state: Tensor) -> None:
        if not self.ordered:
            super().restart(state)
            return
        for part, row in self._split(state):
            part.restart(row)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {name: value for part, row in self._split(state) for name, value in part.summarize(row).items()}

    @override
    def additive_slots(self) -> Tensor:
        return torch.cat([part.additive_slots() for part in self.parts])

    @override
    def state_dict(self) -> dict[str, Tensor]:
        if self._is_fixed:
            return super().state_dict()
        if not self.is_sized:
            return {}
        states = enumerate(part.on(row).state_dict() for part, row in self._split(self.state))
        return {f"{place}.{name}": tensor for place, state in states for name, tensor in state.items()}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        if self._is_fixed:
            super().load_state_dict(state_dict)
            return
        if not state_dict:
            self.reset()
            return
        loaded = [copy.copy(part) for part in self.parts]
        for place, part in enumerate(loaded):
            own = f"{place}."
            part._state = None
            part.load_state_dict({key[len(own) :]: value for key, value in state_dict.items() if key.startswith(own)})
        with torch.inference_mode(False):
            state = torch.cat([part.state for part in loaded])
        for part in loaded:
            part._state = None
        self.parts = tuple(loaded)
        self._measure()
        self._state = state if self._state is None else self._state.copy_(state)

    @override
    def compute(self) -> dict[str, Tensor]:
        if self.is_sized:
            return super().compute()
        return {name: value for part in self.parts for name, value in copy.copy(part).compute().items()}

    @property
    @override
    def choices(self) -> dict[str, Any]:
        return {"parts": [(type(part), part.choices) for part in self.parts]}

    @property
    @override
    def settings(self) -> dict[str, Any]:
        return {"parts": [(type(part), part.settings) for part in self.parts]}

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.parts))}])"


def _checked(parts: object) -> list[Reduction]:
    found: list[Reduction] = []
    for part in parts if isinstance(parts, Iterable) else [parts]:
        if not isinstance(part, Reduction):
            called = f"the class {part.__name__}: write {part.__name__}()" if isinstance(part, type) else repr(part)
            raise ArgumentError(f"reductions are instances of Reduction, got {called}")
        found.append(part)
    if not found:
        raise ArgumentError("at least one reduction is needed, got none")
    return found
