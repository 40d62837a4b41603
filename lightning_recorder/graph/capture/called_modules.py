"""The classes, settings and numbers of parameters of the modules that a recording has called."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from lightning_recorder.graph.capture.builder import Draft
from lightning_recorder.graph.capture.call_arguments import describe_module
from lightning_recorder.graph.capture.modules import ModelNames, count_below, count_own
from lightning_recorder.graph.capture.origins import Call
from lightning_recorder.graph.model import RECOMPUTED
from lightning_recorder.internals.module_tree import class_name, is_scripted

__all__ = ["CalledModules"]

_Description = tuple[str, int, int, tuple[tuple[str, str], ...]]
"""Class, number of own parameter elements, number of those below, settings."""


class CalledModules:
    """Describes the modules of calls after the step.

    Lazy modules then have their final class and parameters, and the ``extra_repr`` of users may take any time.
    """

    def __init__(self, nodes: Sequence[Draft], calls: Sequence[Call]) -> None:
        self._nodes = nodes
        self._calls = calls
        self._modules: dict[int, int] = {}
        """The id of the module of each call that is described later."""
        self._settings: dict[int, tuple[weakref.ref[nn.Module], tuple[tuple[str, str], ...]]] = {}
        """The settings of each module by its id, since ``extra_repr`` is code of the user, which runs once."""
        self._recomputed: set[int] = set()
        """The ids of the modules that a checkpoint called again."""
        self._hidden: dict[int, int] = {}
        """The number of all parameters below the module of each call whose inside is not observed."""

    def note(self, node: int, module: nn.Module) -> None:
        """Remember the module of a call, which is described if it lives until the end of the step."""
        self._nodes[node].type_name = class_name(type(module))
        self._modules[node] = id(module)

    def note_recomputed(self, module: nn.Module) -> None:
        """Remember that a module was called again in a backward pass, by a checkpoint."""
        self._recomputed.add(id(module))

    def note_hidden(self, node: int, parameters: int) -> None:
        """Count all parameters below a module for its call, since no calls of its submodules are observed."""
        self._hidden[node] = self._nodes[node].parameters = parameters

    def leave(self, node: int, module: nn.Module) -> None:
        """Describe a module that is not registered at the end of its call, since it may be freed in the step."""
        if node not in self._modules:
            script = is_scripted(module)
            draft = self._nodes[node]
            draft.type_name = class_name(type(module))
            draft.arguments = () if script else self._settings_of(module, id(module))
            draft.parameters, draft.total_parameters = count_own(module), count_below(module)

    def _settings_of(self, module: nn.Module, key: int) -> tuple[tuple[str, str], ...]:
        # Another module may have had the same id before.
        if key not in self._settings or self._settings[key][0]() is not module:
            self._settings[key] = weakref.ref(module), describe_module(module)
        return self._settings[key][1]

    def describe(self, names: ModelNames) -> None:
        """Describe the modules of the calls that have ended and of those in progress."""
        counts = names.parameter_counts()
        known: dict[int, _Description] = {}
        nodes, hidden = self._nodes, self._hidden
        for node, key in ({call.node: id(call.module) for call in self._calls} | self._modules).items():
            found = known.get(key)
            if found is None:
                module = names.module(key)
                if module is None:
                    continue
                own, below = counts.get(key) or (count_own(module), count_below(module))
                found = known[key] = class_name(type(module)), own, below, self._settings_of(module, key)
            draft = nodes[node]
            draft.type_name, draft.parameters, draft.total_parameters, draft.arguments = found
            if key in self._recomputed and RECOMPUTED not in draft.note:  # a graph may be asked for again
                draft.note = f"{draft.note}, {RECOMPUTED}".removeprefix(", ")
            if node in hidden:
                draft.parameters = hidden[node]
        nodes[0].arguments = ()
