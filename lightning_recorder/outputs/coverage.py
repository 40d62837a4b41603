"""The coverage of a recording: the modules without a record, and the reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.modules.loss import _Loss

from lightning_recorder.functions import function_of
from lightning_recorder.internals.module_tree import (
    class_attribute,
    class_name,
    is_a,
    is_training,
    stored_attribute,
    takes_hooks,
)
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.module_names import named_submodules, own_parameters
from lightning_recorder.taps import Site

__all__ = ["Coverage", "with_gradients"]

_NO_PART = "removed from the model, or replaced"
_FEW = 3  # the maximum number of compiled functions that a reason names

# The reasons for a missing record, the most important ones first.
_REASONS = (
    "failed",
    "TorchScript",
    "bypassed",
    "no gradient",
    "changed in place",
    "unsupported output",
    "unsupported input",
    "compiled",
    "frozen",
    "state",
    "empty",
    "no step",
    "shared",
    "never called",
)


@dataclass(frozen=True)
class Coverage:
    """The facts about the selected modules after a recorded step."""

    root: nn.Module  # the model
    modules: Mapping[str, nn.Module]  # the selected modules by name
    fired: Collection[str]  # the names of the modules that were recorded
    called: Collection[str] = ()  # the names of the modules that were called, as observed by hooks
    failed: Collection[str] = ()  # the names of the modules whose recording failed
    skipped: Collection[str] = ()  # the names of the modules that were skipped because they are compiled
    without_gradient: Collection[str] = ()  # the names of the modules whose outputs require no gradient
    # the names of the modules with an unknown output gradient because the output was changed in place
    changed_in_place: Collection[str] = ()
    trained: Collection[str] = ()  # the names of the modules that own a parameter with a gradient
    of: str = "activations"  # the kind of tensors: ``"activations"``, ``"gradients"`` or ``"parameters"``
    tensors: Collection[str] = ("outputs",)  # the recorded tensors of modules: ``"inputs"``, ``"outputs"`` or both
    parts: Collection[str] = ()  # the recorded tensors of parameters, such as ``"gradients"``
    # True if the modules were selected by default. Loss modules that are never called are then not listed as missing.
    is_default: bool = False
    state_bytes: int = 0  # the size of the states on the devices, in bytes
    ran_eagerly: Collection[str] = ()  # the names of the compiled functions that ran eagerly because they were recorded
    compiled_calls: Collection[str] = ()  # the names of the compiled functions that ran while the hooks were registered
    # How compiled modules are recorded: ``"inside"`` or ``"eager"``, sometimes followed by a colon and the reason.
    # Empty without compiled modules, or if they are skipped.
    compiled: str = ""
    # the part of the model in which torch functions could not be recorded, with the reason; empty if there is none
    unseen_functions: str = ""

    @property
    def types(self) -> dict[str, str]:
        """The class names of the selected modules, including the skipped ones."""
        return {name: class_name(type(module)) for name, module in {**self.modules, **self._skipped}.items()}

    @cached_property
    def _skipped(self) -> dict[str, nn.Module]:
        known = named_submodules(self.root, remove_duplicate=False) if self.skipped else {}
        return {name: known[name] for name in self.skipped}

    def functions_in(self, names: Iterable[str]) -> list[str]:
        """Return the torch functions among recorded names."""
        return [name for name in names if name not in self.modules and function_of(name) is not None]

    def having(self, **known: Any) -> Coverage:
        """Return a copy with additional facts."""
        return replace(self, **known)

    def missing_reasons(self) -> dict[str, str]:
        """Return the reason for each module without a record, the most important reasons first."""
        parents = _parents(self.root)
        fired = set(self.fired)
        missing = [name for name in (*self.modules, *self.skipped) if name not in fired]
        if self.of == "parameters":
            missing = [name for name in missing if name in self.skipped or any(own_parameters(self.modules[name]))]
        why = {name: self._missing_reason(name, parents.get(name)) for name in missing if not self._is_idle_loss(name)}
        return dict(sorted(why.items(), key=lambda item: self._importance(*item)))

    @property
    def _what(self) -> str:
        return "output" if "outputs" in self.tensors else "input"

    def _importance(self, name: str, why: str) -> tuple[int, bool]:
        """Return a sort key: by reason, with modules without parameters, such as ``Identity``, last."""
        reason = why.partition(":")[0]
        owns = any(True for _ in own_parameters(self.modules[name])) if name in self.modules else True
        return _REASONS.index(reason) if reason in _REASONS else 0, not owns

    def _is_idle_loss(self, name: str) -> bool:
        """Return True if the module is a loss that was selected by default and is never called."""
        module = self.modules.get(name)
        attribute = name.rpartition(".")[2].lower()
        named_loss = class_name(type(module)).endswith("Loss") or attribute.startswith(("loss", "criterion"))
        is_loss = is_a(module, _Loss) or named_loss or attribute.endswith("_loss")
        return self.is_default and name not in self.called and is_loss and not list(own_parameters(self.modules[name]))

    def _missing_reason(self, name: str, parent: nn.Module | None) -> str:
        if name in self.skipped and not takes_hooks(self._skipped[name]):
            return "TorchScript: its calls run outside of Python and have no hooks"
        if name in self.skipped:
            return "compiled: skipped because of compiled='skip'"
        if name in self.failed:
            return "failed: see the warning"
        if self.of == "parameters":
            return self._missing_parameter_reason(name)
        if name in self.called:
            if self.of == "activations":
                return f"unsupported {self._what}: its {self._what} has no tensors"
            if name in self.without_gradient:
                return f"no gradient: its {self._what} does not require one"
            if name in self.changed_in_place:
                return "changed in place: its output is a view that was changed after the module returned it"
            return f"no gradient: its {self._what} was not used by the loss, or is not a tensor"
        if is_a(parent, nn.MultiheadAttention):
            return "bypassed: nn.MultiheadAttention uses its parameters without calling it"
        fused = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
        if parent is not None and is_a(parent, fused) and not is_training(parent):
            return f"bypassed: nn.{type(parent).__name__} took its fused path"
        if self.compiled_calls:
            names = ", ".join(sorted(self.compiled_calls)[:_FEW])
            how = (
                "stays compiled unless compiled='eager'"
                if self.compiled == "inside"
                else "compiled='skip' keeps in use"
            )
            return f"compiled: no call of it outside of compiled code ({names}), which {how}"
        if name in self.trained:
            sharing = self._shares_parameters_with(name)
            if sharing:
                return f"shared: never called, its parameters are those of {sharing}"
            return "bypassed: its parameters have a gradient, so .forward() or a function used them without a call"
        if name in self.modules and class_attribute(type(self.modules[name]), "__call__") is not nn.Module.__call__:
            return f"bypassed: {type(self.modules[name]).__name__} overrides __call__, so its hooks are not called"
        return "never called: no recorded step called it"

    def _shares_parameters_with(self, name: str) -> str:
        """Return the first module that shares a parameter, if all trained parameters are shared, or an empty string."""
        own = {id(each) for _, each in own_parameters(self.modules[name]) if each.requires_grad}
        found = ""
        # A selected module that was not called cannot have caused a gradient, so it is left out. Modules that are not
        # selected may have been called.
        idle = self.modules.keys() - {*self.called, *self.fired}
        for other, module in named_submodules(self.root).items():
            if module is self.modules[name] or other in idle:
                continue
            shared = own.intersection(id(each) for _, each in own_parameters(module))
            own -= shared
            found = found or (other if shared else "")
        return "" if own else found

    def stop_reason(self, name: str) -> str:
        """Return the reason why a previously recorded module was missing from the latest records."""
        if not self._is_part(name):
            return _NO_PART
        if name not in self.called:
            return "no longer called"
        if self.of == "activations":
            return f"its {self._what} no longer has tensors"
        if name not in self.without_gradient:
            return f"its {self._what} is no longer used by the loss"
        own = [each for _, each in own_parameters(self.modules[name])]
        frozen = own and not any(each.requires_grad for each in own)
        return f"its {self._what} no longer requires a gradient" + (", its parameters are frozen" if frozen else "")

    def gradient_stop_reason(self, name: str, path: str) -> str:
        """Return the reason why a parameter that had a gradient before has none now."""
        if not self._is_part(name):
            return _NO_PART
        parameter = dict(own_parameters(self.modules[name])).get(path)
        if parameter is None:
            return "it is no longer a parameter of the module"
        return "backward passes no longer reach it" if parameter.requires_grad else "frozen, requires_grad is False"

    def _is_part(self, name: str) -> bool:
        return any(each is self.modules[name] for each in named_submodules(self.root, with_lent=True).values())

    def without_gradients(self, sites: Collection[Site]) -> list[str]:
        """Return the names of the recorded parameters that had no gradient in any recorded step."""
        if "gradients" not in self.parts:
            return []
        return [
            f"{name}.{path}" if name else path
            for name, module in self.modules.items()
            for path, parameter in own_parameters(module)
            if parameter.requires_grad
            and Site(name, f"{path}.grad") not in sites
            and {Site(name, path), Site(name, f"{path}.update")}.intersection(sites)
        ]

    def _missing_parameter_reason(self, name: str) -> str:
        parameters = [parameter for _, parameter in own_parameters(self.modules[name])]
        if not any(parameter.requires_grad for parameter in parameters):
            # Keras layers store their seed and running statistics as parameters. Frozen layers are not trainable.
            is_state = stored_attribute(self.modules[name], "_trainable") is True
            if is_state or not any(each.dtype.is_floating_point or each.dtype.is_complex for each in parameters):
                return "state: its own parameters are none that a gradient moves, such as a seed"
            return "frozen: none of its own parameters requires a gradient"
        if all(not is_uninitialized(parameter) and not parameter.numel() for parameter in parameters):
            return "empty: its own parameters have no elements"
        theirs = {id(parameter) for parameter in parameters}
        for other in self.fired:
            if other in self.modules and theirs <= {id(each) for _, each in own_parameters(self.modules[other])}:
                return f"shared: its parameters are recorded as those of {other or '(root)'}"
        if not {"values", "updates"}.intersection(self.parts) and name not in self.trained:
            return "no gradient: none of its parameters has one"
        return (
            "no step: no optimizer that stepped has its parameters, or they are recorded for another module that "
            "shares them"
        )


def with_gradients(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the modules that own a parameter with a gradient."""
    return {
        name
        for name, module in modules.items()
        if any(parameter.grad is not None for _, parameter in own_parameters(module))
    }


def _parents(root: nn.Module) -> dict[str, nn.Module]:
    named = named_submodules(root)
    return {name: named[name.rpartition(".")[0]] for name in named if name and name.rpartition(".")[0] in named}
