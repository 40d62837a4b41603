"""The parts of a model that a recorded step did not use."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Unused"]

_WIDTH = 95  # characters of a line of text


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
    """

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters or self.frozen or self.stops)

    def __str__(self) -> str:
        """Return a line for each kind of part; names that differ only in a number are joined, as ``h.*.drop ×12``."""
        parts = {
            "modules never called": self.modules,
            "parameters without a gradient": self.parameters,
            "frozen": self.frozen,
            "the gradient stops at": self.stops,
        }
        lines = (f"{title}: {', '.join(_without_indices(names))}" for title, names in parts.items() if names)
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
        return "\n".join(textwrap.fill(line, _WIDTH, **options) for line in lines)


def _without_indices(names: Iterable[str]) -> list[str]:
    """Join the names that differ only in their numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?=\.)", "*", name), []).append(name)
    return [each[0] if len(each) == 1 else f"{group} ×{len(each)}" for group, each in groups.items()]
