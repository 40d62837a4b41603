"""The modules and parameters that a recorded step did not use or did not train."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Unused", "joined_names"]

_WIDTH = 95  # maximum number of characters in a line of text
_MOST_NUMBERS = 4  # maximum number of numbers listed in a joined name

_NUMBER = re.compile(
    r"((?<![^.])\d+(?=\.)|(?<=\[)\d+(?=\]))"
)  # the number of a layer: ``h.0.attn``, or ``h[0].attn`` in a Python list


@dataclass(frozen=True)
class Unused:
    """The modules and parameters that a recorded step did not use or did not train; falsy if there are none.

    Args:
        modules: Names of the outermost registered modules that were not called and of which no tensor was used. Metrics
            of torchmetrics are left out.
        parameters: Names of the parameters that require a gradient and got none, because no backward pass reached them.
            For a recording without a backward pass, these are the parameters that no result of the model depends on.
            For a recording without any gradients, these are the parameters that nothing used.
        frozen: Names of the parameters that require no gradient. If all parameters of a module are frozen, they are
            replaced by the name of the outermost such module.
        stops: The functions that stop a gradient although their result is used later, with the reason and the line of
            code. The reason is ``detach``, ``no_grad``, an integer result, or a function without a gradient.
        unregistered: Names of the parameters that got a gradient although the model does not register their module,
            which is in a Python list, tuple or dictionary. No recorded optimizer step has updated them.
    """

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    unregistered: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters or self.frozen or self.stops or self.unregistered)

    def __str__(self) -> str:
        """Return a line for each non-empty field, with the names joined by :func:`joined_names`."""
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

    The numbers of a joined name are written as ``h.0…11.drop ×12`` or ``h.2,5.drop ×2`` if they can be listed briefly,
    and otherwise as ``h.*.drop ×40``.
    """
    groups: dict[str, list[list[str]]] = {}
    for name in names:
        parts = _NUMBER.split(name)
        groups.setdefault("*".join(parts[::2]), []).append(parts)
    return ["".join(each[0]) if len(each) == 1 else f"{_joined(each)} ×{len(each)}" for each in groups.values()]


def _joined(names: list[list[str]]) -> str:
    """Join names that were split at their numbers. Every second part of a name is a number."""
    columns = [sorted({name[place] for name in names}, key=int) for place in range(1, len(names[0]), 2)]
    # If several numbers vary, they can only be listed if all of their combinations occur.
    is_whole = math.prod(map(len, columns)) == len(names)
    return "".join(
        _numbers(columns[place // 2], is_whole=is_whole) if place % 2 else text for place, text in enumerate(names[0])
    )


def _numbers(found: list[str], *, is_whole: bool) -> str:
    if len(found) > 2 and is_whole and int(found[-1]) - int(found[0]) == len(found) - 1:
        return f"{found[0]}…{found[-1]}"
    return ",".join(found) if len(found) == 1 or (is_whole and len(found) <= _MOST_NUMBERS) else "*"
