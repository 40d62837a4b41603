"""The parts of a model that a recorded step did not use."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Unused", "joined_names"]

_WIDTH = 95  # characters of a line of text
_MOST_NUMBERS = 4  # in a joined name

_NUMBER = re.compile(
    r"((?<![^.])\d+(?=\.)|(?<=\[)\d+(?=\]))"
)  # of a layer: ``h.0.attn``, or ``h[0].attn`` in a Python list


@dataclass(frozen=True)
class Unused:
    """The parts of a model that a recorded step did not use or did not train; falsy if there are none.

    Args:
        modules: Names of the outermost registered modules of which neither a call nor a parameter was used. Metrics of
            torchmetrics are left out.
        parameters: Names of the parameters that require a gradient and got none: no backward pass reached them. In a
            recording without a backward pass, those that no result of the model depends on; in one without any
            gradients, those that nothing used.
        frozen: Names of the parameters that require no gradient, or of the outermost modules that have only such.
        stops: The functions at which a gradient stops on the way to something that is used later, with the reason:
            ``detach``, ``no_grad``, a result of integers, or a function without a gradient; and the line of code.
        unregistered: Names of the parameters that got a gradient although the model does not register their module,
            which is in a Python list, tuple or dictionary, and that no recorded optimizer step has updated.
    """

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    unregistered: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters or self.frozen or self.stops or self.unregistered)

    def __str__(self) -> str:
        """Return a line for each kind of part; see :func:`joined_names`."""
        parts = {
            "modules never called": self.modules,
            "parameters without a gradient": self.parameters,
            "frozen": self.frozen,
            "the gradient stops at": self.stops,
            "not registered in the model, so not trained": self.unregistered,
        }
        lines = (f"{title}: {', '.join(joined_names(names))}" for title, names in parts.items() if names)
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
        return "\n".join(textwrap.fill(line, _WIDTH, **options) for line in lines)


def joined_names(names: Iterable[str]) -> list[str]:
    """Join the names that differ only in their numbers.

    The numbers of a joined name are written as ``h.0…11.drop ×12`` or ``h.2,5.drop ×2`` if they can be told in short,
    and otherwise as ``h.*.drop ×40``.
    """
    groups: dict[str, list[list[str]]] = {}
    for name in names:
        parts = _NUMBER.split(name)
        groups.setdefault("*".join(parts[::2]), []).append(parts)
    return ["".join(each[0]) if len(each) == 1 else f"{_joined(each)} ×{len(each)}" for each in groups.values()]


def _joined(names: list[list[str]]) -> str:
    """Return names, each in parts of which every second one is a number, as one."""
    columns = [sorted({name[place] for name in names}, key=int) for place in range(1, len(names[0]), 2)]
    # Several numbers that vary can only be told if all their combinations are there.
    is_whole = math.prod(map(len, columns)) == len(names)
    return "".join(
        _numbers(columns[place // 2], is_whole=is_whole) if place % 2 else text for place, text in enumerate(names[0])
    )


def _numbers(found: list[str], *, is_whole: bool) -> str:
    if len(found) > 2 and is_whole and int(found[-1]) - int(found[0]) == len(found) - 1:
        return f"{found[0]}…{found[-1]}"
    return ",".join(found) if len(found) == 1 or (is_whole and len(found) <= _MOST_NUMBERS) else "*"
