"""A net that is wrapped to show the outputs of chosen module calls after each forward pass."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.autograd import in_backward
from lightning_recorder.errors import ArgumentError, FlowError, check_integer
from lightning_recorder.inputs import arguments, make_inputs
from lightning_recorder.names import named_submodules
from lightning_recorder.recorders.activations import Kept, Postprocessor, Recording
from lightning_recorder.recorders.calls import Label, differences, label_calls
from lightning_recorder.recorders.labelling import run_without_trace
from lightning_recorder.recorders.levels import NET, leave_level_out, name_as_in_net, put_level_in
from lightning_recorder.recorders.summary import Summary, SummaryWatch
from lightning_recorder.untouched import ModuleState

__all__ = ["RecordedNet"]


class RecordedNet(nn.Module):
    """A net whose module calls have labels, by which their outputs are recorded.

    When it is wrapped the net is run once. Each call of a module gets the label ``(depth, idx)``: the depth of the
    module's name, 0 for the net itself, and the place of the call among those of that depth, from 1. A module that is
    called several times has several labels. In later runs a call is known by its module and how often that was called
    before, never by its place alone. Modules that are never called, such as the ``out_proj`` of
    ``nn.MultiheadAttention``, have none.

    The wrapper is a module like any other: parameters, modes, devices, copies and pickles are those of the net in it,
    and so are the keys of its ``state_dict()``.

    Args:
        net: The net. Not copied: the wrapper changes nothing of it, and hooks are on it only during a recorded forward.
        input_size: The shape of the input to label with, or a list of shapes for several inputs. They are made on the
            device of the net's first parameter or buffer.
        input_data: Instead of ``input_size``, the input itself: a tensor, a tuple or list of positional arguments, or a
            dictionary of keyword arguments. The net is given a copy.
        input_kwargs: Keyword arguments beside either.
        dtypes: The dtype of the inputs of ``input_size``, or a list of one for each; by default that of the net's first
            floating-point parameter. Integers and booleans are zeros, floats random numbers.
        depth: Calls deeper than this are left out of the table; they have their labels all the same.
        force_static_flow: Every run must make the calls of the labelling run, in their order. If ``False``, other calls
            may come and go, and only the recorded ones must be made.

    Raises:
        ArgumentError: If not exactly one of ``input_size`` and ``input_data`` is given, or something has a value that
            can never work.
        RecordingError: If the net raises; the message names the module in which it did.

    Note:
        The labelling run takes place in the current mode, without autograd, and leaves no trace: attributes and buffers
        of modules, train flags and random number generators are as before, the given tensors are not touched, and taps
        and recorders see nothing of it. Only lazy modules, such as ``nn.LazyLinear``, are initialised by it; what a
        forward pass writes into parameters, or into lists and dictionaries that a module has, stays, and hooks of
        others are called.

    Note:
        Losses, gradients and buffers are those of the bare net, bit for bit. Of each recorded tensor a copy is made in
        case that something writes to it later, so recording costs its size once more; tensors, copies and the autograd
        graph that hangs on them are kept until the next forward starts. Compiled modules run as they are written during
        a recorded forward. In eval mode without autograd, ``nn.TransformerEncoderLayer`` does not take its fused path
        while it has hooks, so that last bits may differ.

    Note:
        What ``torch.utils.checkpoint`` computes anew in the backward pass is not recorded. Nor is it postprocessed,
        as the hooks are off by then: do not postprocess inside a checkpointed block, or its gradients are wrong.

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

    def __init__(
        self,
        net: nn.Module,
        /,
        *,
        input_size: Sequence[int] | Sequence[Sequence[int]] | None = None,
        input_data: Any = None,
        input_kwargs: Mapping[str, Any] | None = None,
        dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
        depth: int | None = None,
        force_static_flow: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise ArgumentError(f"net must be a torch.nn.Module, got {type(net).__name__}")
        if (input_size is None) == (input_data is None):
            raise ArgumentError("give input_size or input_data" + (", not both" if input_size is not None else ""))
        if depth is not None:
            check_integer("depth", depth, 0)
        self._net = net
        self._depth = depth
        self._static = force_static_flow
        self._recording: tuple[Label, ...] = ()
        self._records: dict[Label, Kept | dict[str, Kept]] = {}
        data = make_inputs(net, input_size, dtypes) if input_size is not None else input_data
        self._label(*arguments(data, input_kwargs))
        self.register_state_dict_post_hook(leave_level_out)  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.register_load_state_dict_pre_hook(put_level_in)  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.register_load_state_dict_post_hook(name_as_in_net)  # type: ignore[no-untyped-call]  # torch has no annotations there

    def _label(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        modules = named_submodules(self._net)
        snapshot = ModuleState(modules.values())
        watch = SummaryWatch(modules, snapshot)
        run_without_trace(self._net, watch, snapshot, args, kwargs)
        self._summary = watch.summary(self._net)
        self._calls = label_calls(watch.calls)
        # What raised, and was caught by the net, has not ended.
        ends = {call: place for place, call in enumerate(watch.ended)}
        self._order = sorted(self._calls, key=lambda label: ends.get(self._calls[label], len(ends)))

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the net's, as its submodules are."""
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
        """What the labelling run showed, as data; ``repr()`` of the wrapper is its table."""
        return self._summary

    @property
    def labels(self) -> Mapping[Label, str]:
        """The name of the module behind each label, in the order in which the calls began."""
        return MappingProxyType({label: call.name for label, call in self._calls.items()})

    @property
    def recording(self) -> tuple[Label, ...]:
        """The labels that are recorded, sorted."""
        return self._recording

    @property
    def recorded_modules(self) -> dict[Label, nn.Module]:
        """The modules whose calls are recorded."""
        modules = named_submodules(self._net)
        return {label: modules[self._calls[label].name] for label in self._recording}

    @property
    def recorded_params(self) -> dict[str, nn.Parameter]:
        """The parameters of the recorded modules and of those below them, each once, by their names in the net."""
        recorded = {id(each) for module in self.recorded_modules.values() for each in module.parameters()}
        return {name: each for name, each in self._net.named_parameters() if id(each) in recorded}

    @property
    def activations(self) -> Mapping[Label, Tensor | dict[str, Tensor]]:
        """The recorded outputs of the latest forward, in the order in which the calls ended; read-only.

        An output that is no tensor is given as its tensors by their paths, as in ``{"out[0]": ..., "out[1][0]": ...}``.
        Empty before the first forward, after one with ``dont_record=True`` and after one that raised.

        Note:
            The tensor is the output itself, so that ``torch.autograd.grad(loss, activations[label])`` works; unless
            something has written to it since. Then it is a copy of what the module gave, differentiable down to the
            net's parameters, through which no loss has been computed. Tensors of inference mode are always copies.
            Writes through ``tensor.data`` go unnoticed. The choice is made whenever this attribute is read.
        """
        return MappingProxyType(
            {
                label: {path: kept.value for path, kept in record.items()} if isinstance(record, dict) else record.value
                for label, record in self._records.items()
            }
        )

    def record(self, *labels: Sequence[int] | str) -> None:
        """Choose what is recorded from the next forward on, in place of what was; nothing without arguments.

        Args:
            labels: Labels ``(depth, idx)``, or names of modules, each for all of its calls; ``""`` is the net itself.
                Order and duplicates do not matter.

        Raises:
            ArgumentError: If there is no such label or name. What is recorded stays as it was.
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
        pair = tuple(entry) if isinstance(entry, (tuple, list)) else ()
        return [label for label in self._calls if label == pair]

    def _explain(self, entry: object) -> str:
        if isinstance(entry, str):
            if entry in named_submodules(self._net):
                return f"module {entry!r} was not called when the net was labelled"
            known = list(dict.fromkeys(self.labels.values()))
            closest = difflib.get_close_matches(entry, known, n=3, cutoff=0.5) or known[1:4] or known
            return f"no module is called {entry!r}; the closest names are {', '.join(map(repr, closest))}"
        last: dict[int, Label] = {}
        for label in sorted(self._calls):
            last[label[0]] = label
        return f"no call has the label {entry!r}; the last ones are {', '.join(map(str, last.values()))}"

    def forward(
        self,
        *args: Any,
        activation_postproc: Postprocessor | Sequence[Postprocessor] | None = None,
        dont_record: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the net, and record.

        Args:
            args: The net's.
            activation_postproc: Applied to the output of each recorded call after it was recorded, and passed on in its
                place unless it gives ``None``. A sequence has one for each recorded call, in the order in which these
                ended when the net was labelled; surplus ones are ignored.
            dont_record: Keep nothing. The postprocessing takes place nevertheless.
            kwargs: The net's.

        Returns:
            What the net gives.

        Raises:
            ArgumentError: If ``activation_postproc`` is too short, before anything runs.
            FlowError: If the net has made other calls than those that were labelled, after it ran.

        Note:
            Without anything to record or postprocess the net is merely called. A forward inside a backward pass is one
            that ``torch.utils.checkpoint`` repeats: it leaves ``activations`` alone.
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
            # What is compiled cannot be recorded: a break in the graph here lets this forward run as it is written.
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
        with Recording(modules, labels, postprocs, keep) as recording:
            output = self._net(*args, **kwargs)
        self._check_flow(recording)
        if keep:
            self._records = recording.records
        return output

    def _check_flow(self, recording: Recording) -> None:
        if self._static:
            found = differences(self._calls, recording.calls)
            if found is not None:
                raise FlowError(
                    f"the net made other calls than when it was labelled: {found}. With force_static_flow=False only "
                    "the recorded ones must be made."
                )
        missed = [
            f"{label} {self._calls[label]}" for label in self._recording if self._calls[label] not in recording.ended
        ]
        if missed:
            raise FlowError(f"recorded calls that were not made to their end: {', '.join(missed)}")

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by their names in the net, as those of the state dictionary."""
        return ((name.replace(f"{NET}.", "", 1), each) for name, each in super().named_parameters(*args, **kwargs))

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers by their names in the net, as those of the state dictionary."""
        return ((name.replace(f"{NET}.", "", 1), each) for name, each in super().named_buffers(*args, **kwargs))

    def __repr__(self) -> str:
        table = self._summary.to_text(depth=self._depth, recording=self._recording)
        return f"{type(self).__name__} of {type(self._net).__name__}\n{table}"

    def __getstate__(self) -> dict[str, Any]:
        # Tensors in the middle of an autograd graph can be neither copied nor pickled.
        return {**super().__getstate__(), "_records": {}}  # type: ignore[no-untyped-call]  # torch has no annotations there
