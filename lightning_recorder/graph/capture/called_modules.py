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
"""Class name, parameter count of the module itself, parameter count including its submodules, settings."""


class CalledModules:
    """Describes the modules of the recorded calls once the step has ended.

    By then, lazy modules have their final class and parameters. A slow ``extra_repr`` does not delay the step.
    """

    def __init__(self, nodes: Sequence[Draft], calls: Sequence[Call]) -> None:
        self._nodes = nodes
        self._calls = calls
        self._modules: dict[int, int] = {}
        """By node of a call: the id of the module, which is described later."""
        self._settings: dict[int, tuple[weakref.ref[nn.Module], tuple[tuple[str, str], ...]]] = {}
        """The settings of each module, by its id. They are cached so that a user's ``extra_repr`` runs only once."""
        self._recomputed: set[int] = set()
        """The ids of the modules that a checkpoint called again."""
        self._hidden: dict[int, int] = {}
        """By node of a call whose inside is not observed: the number of all parameters of its module."""

    def note(self, node: int, module: nn.Module) -> None:
        """Remember the module of a call, to describe it at the end of the step if it still exists."""
        self._nodes[node].type_name = class_name(type(module))
        self._modules[node] = id(module)

    def note_recomputed(self, module: nn.Module) -> None:
        """Remember that a checkpoint called a module again during a backward pass."""
        self._recomputed.add(id(module))

    def note_hidden(self, node: int, parameters: int) -> None:
        """Set the parameter count of a call whose submodule calls are not observed, including the submodules."""
        self._hidden[node] = self._nodes[node].parameters = parameters

    def leave(self, node: int, module: nn.Module) -> None:
        """Describe an unregistered module when its call ends, since the module may be freed during the step."""
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
        """Describe the modules of all calls, including calls in progress."""
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
            if key in self._recomputed and RECOMPUTED not in draft.note:  # describe may run more than once
                draft.note = f"{draft.note}, {RECOMPUTED}".removeprefix(", ")
            if node in hidden:
                draft.parameters = hidden[node]
        nodes[0].arguments = ()
