"""Wrapper around a net that exposes the outputs of selected module calls after each forward pass."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.errors import ArgumentError, FlowError, InputError, check_some, checked_depth, warn
from lightning_recorder.inputs import arguments, checked_device, make_inputs
from lightning_recorder.internals.autograd import in_backward
from lightning_recorder.internals.module_tree import named_parameters_of, parameters_of
from lightning_recorder.internals.preserve_state import ModuleState
from lightning_recorder.module_names import named_submodules
from lightning_recorder.signatures import with_replacements
from lightning_recorder.wrapped.calls import (
    Label,
    OutputRecorder,
    Postprocessor,
    SavedOutput,
    differences,
    run_without_trace,
)
from lightning_recorder.wrapped.summary import COLUMNS, DEFAULT_COLUMNS, Summary, SummaryWatch

__all__ = ["RecordedNet"]

NET = "_net"
"""The attribute name of the net in its wrapper."""


def _renamed(keys: Iterable[str], old: str, new: str) -> dict[str, str]:
    return {key: new + key[len(old) :] for key in keys if key.startswith(old)}


def remove_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Rename the entries of a state dictionary to their names in the net itself."""
    inner = f"{prefix}{NET}."
    _rename(state_dict, _renamed(state_dict, inner, prefix))
    metadata = getattr(state_dict, "_metadata", {})
    # The bare net needs the module versions under the net's names, and a wrapper needs them under the original names.
    for key in [key for key in metadata if f"{key}.".startswith(inner)]:
        metadata[(prefix + f"{key}."[len(inner) :])[:-1]] = metadata[key]


def add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object) -> None:
    """Rename the entries of a state dictionary to the names that torch expects."""
    inner = f"{prefix}{NET}."
    names = _renamed(state_dict, prefix, inner)
    # The state dictionary of scio's wrapper already has the names that torch expects.
    if not all(key.startswith(inner) for key in names) or hasattr(vars(module)["_modules"][NET], NET):
        _rename(state_dict, names)
    # The module versions saved with a bare net are only available if load_state_dict was called on the wrapper itself.
    # If the wrapper is inside another module, torch only passes the metadata below the prefix of the wrapper.
    metadata = getattr(state_dict, "_metadata", {})
    for key in [key for key in metadata if f"{key}.".startswith(prefix) and not f"{key}.".startswith(inner)]:
        metadata.setdefault((inner + f"{key}."[len(prefix) :])[:-1], metadata[key])
    vars(module)["_prefix"] = inner


def name_as_in_net(module: nn.Module, incompatible_keys: Any) -> None:
    """Rename missing and unexpected keys to their names in the net itself."""
    inner = vars(module).pop("_prefix", None)
    if inner is None:
        return
    outer = inner[: -len(NET) - 1]
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        renamed = _renamed(keys, inner, outer)
        keys[:] = [renamed.get(key, key) for key in keys]


def _rename(state_dict: dict[str, Any], names: Mapping[str, str]) -> None:
    # Pop all entries first, because a new name may equal another entry's old name.
    entries = {new: state_dict.pop(old) for old, new in names.items()}
    state_dict.update(entries)


_TORCHINFO = {
    "batch_dim": "input_size=… with the batch dimension",
    "cache_forward_pass": "nothing: the net runs once per RecordedNet",
    "col_width": "nothing: the columns are as wide as their text",
    "mode": "net.eval() or net.train() before RecordedNet(net, …)",
    "row_settings": "nothing: each row has the name and the label",
    "verbose": "print(RecordedNet(net, …)), without it",
}
"""The code to write instead of unsupported arguments of torchinfo's ``summary``."""


class RecordedNet(nn.Module):
    """A net with labeled module calls whose outputs can be recorded.

    The net is run once when it is wrapped. Each module call gets the label ``(depth, idx)``: the depth of the module's
    name, 0 for the net itself, and the position of the call among all calls at this depth, starting at 1. As in
    torchinfo, a container that is not called itself, such as a ``ModuleList``, has a position before the calls of its
    contents. A module that is called several times has several labels. In later runs, a call is identified by its
    module and the number of earlier calls of the module, never by its position alone. Other modules that are never
    called, such as the ``out_proj`` of ``nn.MultiheadAttention``, have no label.

    The wrapper is an ordinary module. Its parameters, modes, devices, copies, pickles and the keys of its
    ``state_dict()`` are those of the wrapped net.

    Args:
        net: The net. It is neither copied nor changed, and has hooks only during a recorded forward pass.
        input_size: The shape of the input for the labeling run, or a list of shapes for several inputs. The inputs are
            created on the device of the net's first parameter or buffer.
        input_data: The input itself, instead of ``input_size``: a tensor, a tuple or list of positional arguments, or a
            dictionary of keyword arguments. The net receives a copy.
        input_kwargs: Keyword arguments, alone or in addition to ``input_size`` or ``input_data``.
        dtypes: The dtype of the inputs of ``input_size``, or a list with one dtype per input; by default the dtype of
            the net's first floating-point parameter. Integers and booleans are zeros, floats are random numbers.
        device: The device of the inputs, which must be the net's device. By default, ``input_data`` is not moved.
        depth: The maximum depth of the calls in the table. Deeper calls still have labels.
        col_names: The columns of the table; see :meth:`Summary.to_text`.
        force_static_flow: Require every run to make the calls of the labeling run in the same order, and warn if the
            net reads the value of a tensor, which can change the calls. If ``False``, only the recorded calls are
            required, and other calls may vary.

    Raises:
        ArgumentError: If no input or both ``input_size`` and ``input_data`` are given, or an argument has an invalid
            value.
        UnknownArgumentError: If an argument does not exist. For unsupported arguments of torchinfo's ``summary``, the
            message has the code to write instead.
        RecordingError: If the net raises. The message names the module that raised.

    Note:
        The labeling run uses the current mode, without autograd, and has no side effects: attributes and buffers of
        modules, training flags and random number generators are restored, the given tensors are not modified, and taps
        and recorders do not see it. There are three exceptions: lazy modules, such as ``nn.LazyLinear``, are
        initialized; values that a forward pass writes into parameters, or into lists and dictionaries of a module,
        remain; hooks of other code are called.

    Note:
        Losses, gradients and buffers are bitwise equal to those of the bare net. Each recorded tensor is copied in case
        it is modified in place later, which doubles its memory. Tensors, copies and their autograd graph are kept until
        the next forward pass starts. Compiled modules run eagerly during a recorded forward pass. In eval
        mode without autograd, ``nn.TransformerEncoderLayer`` does not use its fused path while it has hooks, so the
        last bits may differ.

    Note:
        Recomputations by ``torch.utils.checkpoint`` in the backward pass are not recorded. They are not postprocessed
        either, since the hooks have been removed by then. Do not postprocess inside a checkpointed block, because its
        gradients would be wrong.

    Example:
        >>> net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU())
        >>> wrapped = RecordedNet(net, input_size=(1, 5))
        >>> wrapped.record((0, 1), "2")
        >>> output = wrapped(torch.rand(1, 5))
        >>> {label: tuple(tensor.shape) for label, tensor in wrapped.activations.items()}
        {(1, 3): (1, 3), (0, 1): (1, 3)}
        >>> print(wrapped)
        RecordedNet of Sequential
        =====================================================================================
        Layer (type (name)):depth-idx  Input shape  Output shape  Param #  Param %  Mult-adds
        =====================================================================================
        Sequential: 0-1                [1, 5]       [1, 3]             39  100.00%         32
        ├─ Linear (0): 1-1             [1, 5]       [1, 4]             24   61.54%         20
        ├─ ReLU (1): 1-2               [1, 4]       [1, 4]             --       --         --
        ├─ Linear (2): 1-3             [1, 4]       [1, 3]             15   38.46%         12
        └─ ReLU (3): 1-4               [1, 3]       [1, 3]             --       --         --
        ...
        Currently recording: 0-1, 1-3
        ...
    """

    @with_replacements(_TORCHINFO)
    def __init__(
        self,
        net: nn.Module,
        /,
        *,
        input_size: Sequence[int] | Sequence[Sequence[int]] | None = None,
        input_data: Any = None,
        input_kwargs: Mapping[str, Any] | None = None,
        dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
        device: torch.device | str | None = None,
        depth: float | None = None,
        col_names: Sequence[str] = DEFAULT_COLUMNS,
        force_static_flow: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise ArgumentError(f"net must be a torch.nn.Module, got {type(net).__name__}")
        if input_size is not None and input_data is not None:
            raise InputError("give input_size or input_data, not both")
        if input_size is None and input_data is None and input_kwargs is None:
            raise InputError("give input_size, input_data or input_kwargs")
        self._net = net
        self._depth = checked_depth("depth", depth)
        self._columns = check_some("col_names", col_names, tuple(COLUMNS))
        self._static = force_static_flow
        self._recording: tuple[Label, ...] = ()
        self._records: dict[Label, SavedOutput | dict[str, SavedOutput]] = {}
        device = checked_device(net, device)
        data = make_inputs(net, input_size, dtypes, device) if input_size is not None else input_data
        self._label(*arguments(() if data is None else data, input_kwargs, device))
        self.register_state_dict_post_hook(remove_prefix)  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.register_load_state_dict_pre_hook(add_prefix)  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.register_load_state_dict_post_hook(name_as_in_net)  # type: ignore[no-untyped-call]  # torch has no annotations there

    def _label(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        modules = named_submodules(self._net)
        snapshot = ModuleState(modules.values())
        watch = SummaryWatch(modules, snapshot)
        run_without_trace(self._net, watch, snapshot, args, kwargs)
        self._summary = replace(watch.summary(self._net), columns=self._columns)
        labels = watch.labels(self._net)
        self._containers = {label: call.name for label, call in labels.items() if not call.number}
        self._calls = {label: call for label, call in labels.items() if call.number}
        if self._static and watch.reads:
            warn(
                f"{type(self._net).__name__} reads the value of a tensor at {', '.join(watch.reads[:3])}. If its calls "
                "depend on it, a run with other calls than the labeled ones raises a FlowError. "
                "force_static_flow=False requires only the recorded calls."
            )
        # Calls whose errors the net caught are not among the ended calls.
        ends = {call: place for place, call in enumerate(watch.ended)}
        self._order = sorted(self._calls, key=lambda label: ends.get(self._calls[label], len(ends)))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the net, such as a submodule, if the wrapper does not have it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == NET:
                raise
            return getattr(self._net, name)

    @property
    def net(self) -> nn.Module:
        """The wrapped net."""
        return self._net

    @property
    def summary(self) -> Summary:
        """The results of the labeling run as data. ``repr()`` of the wrapper shows them as a table."""
        return self._summary

    @property
    def labels(self) -> Mapping[Label, str]:
        """The module names by label, in the order in which the calls began."""
        return MappingProxyType({label: call.name for label, call in self._calls.items()})

    @property
    def recording(self) -> tuple[Label, ...]:
        """The labels that are recorded, sorted."""
        return self._recording

    @property
    def recorded_modules(self) -> dict[Label, nn.Module]:
        """The modules with recorded calls, by label."""
        modules = named_submodules(self._net)
        return {label: modules[self._calls[label].name] for label in self._recording}

    @property
    def recorded_params(self) -> dict[str, nn.Parameter]:
        """The parameters of the recorded modules and their submodules, each once, by their names in the net."""
        recorded = {id(each) for module in self.recorded_modules.values() for each in parameters_of(module)}
        return {name: each for name, each in named_parameters_of(self._net) if id(each) in recorded}

    @property
    def activations(self) -> Mapping[Label, Tensor | dict[str, Tensor]]:
        """The recorded outputs of the latest forward pass, in the order in which the calls ended; read-only.

        An output that is not a tensor is returned as a dictionary of its tensors by path, as in
        ``{"out[0]": ..., "out[1][0]": ...}``. The mapping is empty before the first forward pass, after a forward pass
        with ``dont_record=True``, and after a forward pass that raised. During a forward pass, as in
        ``activation_postproc``, it contains the outputs recorded so far.

        Note:
            Each tensor is the output itself, so ``torch.autograd.grad(loss, activations[label])`` works. If the output
            was later modified in place, the tensor is a copy of the original output. The copy is differentiable with
            respect to the net's parameters, but not part of the graph of any loss. Inference tensors are always copies.
            Writes through ``tensor.data`` are not detected. Modifications are checked each time this attribute is read.
        """
        return MappingProxyType(
            {
                label: {path: kept.value for path, kept in record.items()} if isinstance(record, dict) else record.value
                for label, record in self._records.items()
            }
        )

    def record(self, *labels: Sequence[int] | str) -> None:
        """Select the calls to record from the next forward pass on. This replaces the previous selection.

        Args:
            labels: Labels ``(depth, idx)``, or module names, which select all calls of the module. ``""`` is the net
                itself. Order and duplicates do not matter. Without arguments, nothing is recorded.

        Raises:
            ArgumentError: If there is no such label or name. The selection is then unchanged.
        """
        found = [(entry, self._resolve(entry)) for entry in labels]
        unknown = [entry for entry, resolved in found if not resolved]
        if unknown:
            if len(labels) == 2 and all(isinstance(entry, int) for entry in labels):
                raise ArgumentError(f"a label is a pair: did you mean record({labels})?")
            raise ArgumentError("; ".join(self._explain(entry) for entry in unknown))
        self._recording = tuple(sorted({label for _, resolved in found for label in resolved}))

    def _resolve(self, entry: object) -> list[Label]:
        if isinstance(entry, str):
            return [label for label, call in self._calls.items() if call.name == entry]
        return [label for label in self._calls if label == _pair(entry)]

    def _explain(self, entry: object) -> str:
        container = next((name for label, name in self._containers.items() if label == _pair(entry)), None)
        again = [label for label, call in self._calls.items() if call.name == container]
        if container is not None and again:
            return (
                f"{entry!r} is {container!r} as the title of a call inside it that another module makes; its own calls "
                f"are {', '.join(map(str, again[:5]))}" + (", …" if len(again) > 5 else "")
            )
        if container is not None:
            inside = [label for label, call in self._calls.items() if call.name.startswith(f"{container}.")]
            return (
                f"{entry!r} is the container {container!r}, which is not called and has no output; the calls inside it "
                f"are {', '.join(map(str, inside[:5]))}" + (", …" if len(inside) > 5 else "")
            )
        if isinstance(entry, str):
            if entry in named_submodules(self._net):
                return f"module {entry!r} was not called when the net was labeled"
            known = list(dict.fromkeys(self.labels.values()))
            closest = difflib.get_close_matches(entry, known, n=3, cutoff=0.5) or known[1:4] or known
            return f"there is no module {entry!r}; the closest names are {', '.join(map(repr, closest))}"
        last = {label[0]: label for label in sorted(self._calls)}
        return f"no call has the label {entry!r}; the last ones are {', '.join(map(str, last.values()))}"

    def forward(
        self,
        *args: Any,
        activation_postproc: Postprocessor | Sequence[Postprocessor] | None = None,
        dont_record: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the net and record.

        Args:
            args: The positional arguments of the net.
            activation_postproc: A function that is applied to the output of each recorded call after recording. Its
                result replaces the output unless it is ``None``. Or a sequence with one function per recorded call, in
                the order in which the calls ended in the labeling run. Extra functions are ignored.
            dont_record: Record nothing. Outputs are still postprocessed.
            kwargs: The keyword arguments of the net.

        Returns:
            The output of the net.

        Raises:
            ArgumentError: Before the net runs, if ``activation_postproc`` is too short.
            FlowError: After the net has run, if its calls differ from the labeled calls.

        Note:
            If there is nothing to record or postprocess, the net is simply called. A forward pass inside a backward
            pass is a recomputation by ``torch.utils.checkpoint`` and does not change ``activations``.
        """
        postprocs = self._assign(activation_postproc)
        keep = not dont_record
        if torch.compiler.is_compiling() or not in_backward():
            self._records = {}
        else:
            keep = False
        if not self._recording or not (keep or postprocs):
            return self._net(*args, **kwargs)
        run = self._run
        if torch.compiler.is_compiling():
            # Compiled code cannot be recorded, so this graph break makes the forward pass run eagerly.
            run = torch.compiler.disable(run)
        return run(postprocs, keep, args, kwargs)

    def _assign(self, postproc: Postprocessor | Sequence[Postprocessor] | None) -> dict[Label, Postprocessor]:
        if postproc is None:
            return {}
        if callable(postproc):
            return dict.fromkeys(self._recording, postproc)
        needed = len(self._recording)
        if not isinstance(postproc, (list, tuple)) or not all(map(callable, postproc[:needed])):
            raise ArgumentError(f"activation_postproc takes a callable or a list of them, got {postproc!r}")
        if len(postproc) < needed:
            raise ArgumentError(f"activation_postproc has {len(postproc)} entries for {needed} recorded calls")
        return dict(zip([label for label in self._order if label in self._recording], postproc, strict=False))

    def _run(
        self, postprocs: Mapping[Label, Postprocessor], keep: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        labels = {self._calls[label]: label for label in self._recording}
        modules = named_submodules(self._net)
        if not self._static:
            called = {call.name for call in labels}
            modules = {name: module for name, module in modules.items() if name in called}
        recording = OutputRecorder(modules, labels, postprocs, keep)
        if keep:  # postprocessing functions may read the outputs recorded so far
            self._records = recording.records
        try:
            with recording:
                output = self._net(*args, **kwargs)
            self._check_flow(recording)
        except BaseException:
            if keep:
                self._records = {}
            raise
        return output

    def _check_flow(self, recording: OutputRecorder) -> None:
        if self._static:
            found = differences(self._calls, recording.calls)
            if found is not None:
                raise FlowError(
                    f"the net made other calls than when it was labeled: {found}. With force_static_flow=False only "
                    "the recorded calls must occur."
                )
        missed = [
            f"{label} {self._calls[label]}" for label in self._recording if self._calls[label] not in recording.ended
        ]
        if missed:
            raise FlowError(f"recorded calls that did not finish: {', '.join(missed)}")

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by their names in the net, as in the state dictionary."""
        return ((name.replace(f"{NET}.", "", 1), each) for name, each in super().named_parameters(*args, **kwargs))

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by their names in the net, as in the state dictionary."""
        return ((name.replace(f"{NET}.", "", 1), each) for name, each in super().named_buffers(*args, **kwargs))

    def __repr__(self) -> str:
        return f"{self._title}\n{self._summary.to_text(**self._shown)}"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self._title)}</b></p>{self._summary.to_html(**self._shown)}"

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} of {type(self._net).__name__}"

    @property
    def _shown(self) -> dict[str, Any]:
        return {"depth": self._depth, "recording": self._recording, "col_names": self._columns}

    def __getstate__(self) -> dict[str, Any]:
        # Drop the records, because non-leaf tensors can be neither copied nor pickled.
        return {**super().__getstate__(), "_records": {}}  # type: ignore[no-untyped-call]  # torch has no annotations there


def _pair(entry: object) -> tuple[object, ...]:
    return tuple(entry) if isinstance(entry, (tuple, list)) else ()
