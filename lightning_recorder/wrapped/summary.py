"""Summary of a net's calls in one run, printable as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import Self

from lightning_recorder.internals.module_tree import (
    class_name,
    is_scripted,
    modules_of,
    own_parameters_of,
    parameters_of,
    stored_attribute,
)
from lightning_recorder.internals.preserve_state import ModuleState
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.structure import iter_tensors
from lightning_recorder.wrapped.calls import Call, CallWatch, Label, label_calls, last_names

__all__ = ["COLUMNS", "DEFAULT_COLUMNS", "Summary", "SummaryRow", "SummaryWatch"]


def _attention_operations(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the two products of ``softmax(q kᵀ) v``, with shapes ``[..., heads, length, features]``."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _lstm_operations(x: Shape, weight_ih: Shape, weight_hh: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of one direction of one LSTM layer over ``x`` of shape ``[length, batch, features]``."""
    return 2 * x[0] * x[1] * (prod(weight_ih) + prod(weight_hh))


def _layer_operations(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of attention over ``[batch, length, features]`` with its four projections."""
    features = query[-1]
    projections = features * (2 * prod(query) + prod(key) + prod(value))
    return 2 * projections + 2 * prod(query[:-1]) * key[-2] * 2 * features


def _encoder_operations(source: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a whole ``nn.TransformerEncoderLayer``: attention and two linear layers of equal size."""
    linear: Shape = args[_LINEAR]
    return _layer_operations(source, source, source) + 2 * 2 * prod(source[:-1]) * prod(linear)


_LINEAR = 13  # the position of the first linear layer's weight among the arguments after the input

# Fused operations for which torch has no formula.
_MORE_FORMULAS = {
    getattr(torch.ops.aten, name): formula
    for name, formula in (
        ("_scaled_dot_product_flash_attention_for_cpu", _attention_operations),
        ("mkldnn_rnn_layer", _lstm_operations),
        ("_native_multi_head_attention", _layer_operations),
        ("_transformer_encoder_layer_fwd", _encoder_operations),
    )
    if hasattr(torch.ops.aten, name)
}


_TORCH = str(Path(torch.__file__).parent)
# torch wraps dispatch modes in functions of these files, so that they are not compiled.
_WRAPPERS = (f"{_TORCH}/_compile.py", f"{_TORCH}/_dynamo/eval_frame.py")


def _reading_line() -> list[str]:
    """Return the line that reads the value of a tensor; empty if torch itself reads it, for example for printing."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return []
    return [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"]


class OperationCounter(TorchDispatchMode):
    """Count the floating-point operations of this thread with the formulas of torch's ``FlopCounterMode``.

    ``FlopCounterMode`` itself would register hooks on all modules of the process, including those in other threads.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.operations = 0
        self.reads: list[str] = []
        """The lines of the model that read the value of a tensor, such as ``net.py:12``."""
        self._formulas = FlopCounterMode(display=False, custom_mapping=_MORE_FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        if packet is torch.ops.aten._local_scalar_dense:
            self.reads += _reading_line()
        formula = self._formulas.get(packet)
        if formula is None and torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            # In inference mode, composite operations are not decomposed before dispatch.
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if formula is not None:
            # If a formula does not support the arguments, the table is incomplete, but the net still runs.
            with suppress(Exception):
                self.operations += int(formula(*args, **kwargs, out_val=output))
        return output


Shape = tuple[int, ...]

COLUMNS = {
    "input_size": "Input shape",
    "output_size": "Output shape",
    "num_params": "Param #",
    "params_percent": "Param %",
    "mult_adds": "Mult-adds",
    "kernel_size": "Kernel shape",
    "trainable": "Trainable",
}
"""The columns that a table may have, with their titles."""

DEFAULT_COLUMNS = tuple(COLUMNS)[:5]
_FIRST = "Layer (type (name)):depth-idx"
# The right-aligned columns. All other columns contain text and are left-aligned.
_NUMBERS = ("Param #", "Param %", "Mult-adds")
# The maximum number of shapes in a cell, because a cache or a list of hidden states has dozens of tensors.
_SHOWN_SHAPES = 3


@dataclass(frozen=True)
class SummaryRow:
    """One module call, or a container that is not called itself, such as a ``ModuleList``."""

    label: Label
    """``(depth, idx)``."""
    name: str
    """The module's name."""
    type_name: str
    """The name of the module's class."""
    caller: Label | None
    """The calling module call, or the container of the module inside the caller."""
    is_leaf: bool
    """True if the call made no other module calls; False for a container, which is not called."""
    is_repeated: bool
    """True if the call is not the first one of its module."""
    input_shapes: tuple[Shape, ...]
    """The shapes of all tensors among the arguments."""
    output_shapes: tuple[Shape, ...]
    """The shapes of all tensors in the output; none if the call raised."""
    output_bytes: int
    """The total size of the output tensors in bytes."""
    parameters: int
    """The number of parameter elements of the module and its submodules, each parameter counted once."""
    mult_adds: int
    """Multiply-adds of the call, including nested calls."""
    trainable: int = 0
    """The number of parameter elements, among those counted in ``parameters``, that require a gradient."""
    kernel_shape: Shape = ()
    """The ``kernel_size`` of the module, if it has one."""
    tied: int = 0
    """The number of parameter elements, among those in ``parameters``, that are counted at another, tied module."""


@dataclass(frozen=True)
class Summary:
    """The calls of a net in one run, in the order in which they began, with totals.

    Multiply-adds are half of the floating-point operations of the formulas in torch's ``FlopCounterMode`` (matrix
    products, convolutions, attention) and of additional formulas for fused attention, ``nn.TransformerEncoderLayer``
    and LSTM. Bias additions and elementwise operations are not counted.

    Note:
        The size of a forward and backward pass is estimated as 2 × the bytes of the outputs of the leaf calls: each
        output is stored once, and so is its gradient. One megabyte is 10⁶ bytes.

    Example:
        >>> row = SummaryRow((0, 1), "", "ReLU", None, True, False, ((2, 3),), ((2, 3),), 24, 0, 0)
        >>> summary = Summary((row,), 0, 0, 0, 24, 0)
        >>> summary.forward_backward_bytes, summary.total_bytes
        (48, 72)
    """

    rows: tuple[SummaryRow, ...]
    total_params: int
    """The number of elements of all parameters of the net, each parameter counted once."""
    trainable_params: int
    """The number of elements of the parameters that require a gradient."""
    params_bytes: int
    input_bytes: int
    mult_adds: int
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    """The columns of the table after the first."""

    @property
    def non_trainable_params(self) -> int:
        """The number of elements of the parameters that do not require a gradient."""
        return self.total_params - self.trainable_params

    @property
    def forward_backward_bytes(self) -> int:
        """2 × the bytes of the outputs of the leaf calls: each output and a gradient of its size."""
        return 2 * sum(row.output_bytes for row in self.rows if row.is_leaf)

    @property
    def total_bytes(self) -> int:
        """The bytes of the input, the forward and backward pass, and the parameters."""
        return self.input_bytes + self.forward_backward_bytes + self.params_bytes

    def __str__(self) -> str:
        return self.to_text()

    def to_text(
        self,
        *,
        depth: int | None = None,
        recording: Iterable[Label] = (),
        col_names: Sequence[str] | None = None,
    ) -> str:
        """Return the table.

        Args:
            depth: The maximum depth of the calls to show. The totals cover the whole net.
            recording: The labels named in the last line.
            col_names: The columns after the first, from ``input_size``, ``output_size``, ``num_params``,
                ``params_percent``, ``mult_adds``, ``kernel_size`` and ``trainable``; by default ``columns``.
        """
        header, *body = _aligned(self._table(depth, col_names))
        rule = "=" * max(map(len, (header, *body)))
        blocks = [[header], body, *self._totals(recording)]
        return "\n".join([rule, *(line for block in blocks for line in (*block, rule))])

    def to_html(
        self,
        *,
        depth: int | None = None,
        recording: Iterable[Label] = (),
        col_names: Sequence[str] | None = None,
    ) -> str:
        """Return the table as HTML, for a notebook; see :meth:`to_text`."""
        header, *body = self._table(depth, col_names)
        lines = ["".join(f"<th>{escape(cell)}</th>" for cell in header)]
        for cells in body:
            styles = ("left" if title not in _NUMBERS else "right" for title in header)
            lines.append("".join(map(_html_cell, cells, styles)))
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        totals = "".join(f"<p>{'<br>'.join(map(escape, block))}</p>" for block in self._totals(recording))
        return f"<table>{table}</table>{totals}"

    def _repr_html_(self) -> str:
        return self.to_html()

    def _table(self, depth: int | None, col_names: Sequence[str] | None) -> list[tuple[str, ...]]:
        """Return the cells of the table, row by row, beginning with the titles."""
        col_names = self.columns if col_names is None else col_names
        rows = [row for row in self.rows if depth is None or row.label[0] <= depth]
        titles = (_FIRST, *(COLUMNS[name] for name in col_names))
        return [titles, *((tree, *(self._cell(row, name) for name in col_names)) for row, tree in _as_tree(rows))]

    def _totals(self, recording: Iterable[Label]) -> list[list[str]]:
        """Return the lines below the table, in blocks."""
        recorded = ", ".join(f"{depth}-{idx}" for depth, idx in recording)
        parameters = [
            f"Total params: {self.total_params:,}",
            f"Trainable params: {self.trainable_params:,}",
            f"Non-trainable params: {self.non_trainable_params:,}",
            f"Total mult-adds (M): {_millions(self.mult_adds)}",
        ]
        sizes = [
            f"Input size (MB): {_millions(self.input_bytes)}",
            f"Forward/backward pass size (MB): {_millions(self.forward_backward_bytes)}",
            f"Params size (MB): {_millions(self.params_bytes)}",
            f"Estimated Total Size (MB): {_millions(self.total_bytes)}",
        ]
        return [parameters, sizes, [f"Currently recording: {recorded or None}"]]

    def _cell(self, row: SummaryRow, column: str) -> str:
        if column in ("input_size", "output_size"):
            return _shapes(row.input_shapes if column == "input_size" else row.output_shapes)
        if column == "kernel_size":
            return str(list(row.kernel_shape)) if row.kernel_shape else "--"
        if column == "mult_adds":
            return f"{row.mult_adds:,}" if row.mult_adds else "--"
        if not row.parameters:
            return "--"
        if column == "trainable":
            return "Partial" if 0 < row.trainable < row.parameters else str(row.trainable > 0)
        if row.is_repeated:
            return "(recursive)" if column == "num_params" else "--"
        if column == "params_percent":
            own = row.parameters - row.tied
            return f"{100 * own / self.total_params:.2f}%" if own else "--"
        tied = f" ({'' if row.tied == row.parameters else f'{row.tied:,} '}tied)" if row.tied else ""
        return f"{row.parameters:,}{tied}"


def _as_tree(rows: Sequence[SummaryRow]) -> list[tuple[SummaryRow, str]]:
    """Return each row with its first cell, which is indented under the nearest enclosing row."""
    children: dict[Label | None, list[SummaryRow]] = {}
    shown = {row.label for row in rows}
    for row in rows:
        children.setdefault(row.caller if row.caller in shown else None, []).append(row)
    lines: list[tuple[SummaryRow, str]] = []

    def add(row: SummaryRow, around: SummaryRow | None, first: str, further: str) -> None:
        # Names below their caller omit the common prefix.
        prefix = f"{around.name}." if around is not None and around.name else ""
        name = row.name.removeprefix(prefix)
        title = f"{row.type_name} ({name})" if name else row.type_name
        lines.append((row, f"{first}{title}: {row.label[0]}-{row.label[1]}"))
        inner = children.get(row.label, [])
        for each in inner:
            last = each is inner[-1]
            add(each, row, further + ("└─ " if last else "├─ "), further + ("   " if last else "│  "))

    for row in children.get(None, []):
        add(row, None, "", "")
    return lines


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if title in _NUMBERS else cell.ljust(width)
            for title, cell, width in zip(cells[0], line, widths, strict=True)
        )
        for line in cells
    ]


def _html_cell(text: str, align: str) -> str:
    return f'<td style="text-align: {align}; white-space: pre">{escape(text)}</td>'


def _shapes(shapes: tuple[Shape, ...]) -> str:
    texts = [str(list(shape)) for shape in shapes[:_SHOWN_SHAPES]]
    if len(shapes) == 1:
        return texts[0]
    more = ", ..." if len(shapes) > _SHOWN_SHAPES else ""
    return f"[{', '.join(texts)}{more}]" if texts else "--"


def _millions(number: int) -> str:
    return f"{number / 1e6:,.2f}"


@dataclass
class _Seen:
    """The observed properties of one call."""

    caller: Call | None
    input_shapes: tuple[Shape, ...]
    before: int
    """The floating-point operations of the run before the call."""
    operations: int = 0
    """The floating-point operations of the call, unless it raised."""
    is_leaf: bool = True
    output_shapes: tuple[Shape, ...] = ()
    output_bytes: int = 0


class SummaryWatch(CallWatch):
    """Observe the module calls of the labeling run."""

    def __init__(self, modules: Mapping[str, nn.Module], snapshot: ModuleState) -> None:
        super().__init__(modules)
        self._snapshot = snapshot
        self._counter = OperationCounter()
        self._seen: dict[Call, _Seen] = {}
        self._input_bytes = 0

    def begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments."""
        module = self.modules[call.name]
        if not is_scripted(module):
            self._snapshot.take(module)
        given = [tensor for _, tensor in iter_tensors((args, kwargs))]
        if not call.name and call.number == 1:
            self._input_bytes = sum(map(_bytes, given))
        if self.caller is not None:
            self._seen[self.caller].is_leaf = False
        self._seen[call] = _Seen(self.caller, tuple(map(_shape, given)), self._counter.operations)

    def end(self, call: Call, output: Any) -> None:
        """Record the output."""
        seen, tensors = self._seen[call], [tensor for _, tensor in iter_tensors(output)]
        seen.operations = self._counter.operations - seen.before
        seen.output_shapes = tuple(map(_shape, tensors))
        seen.output_bytes = sum(map(_bytes, tensors))

    def __enter__(self) -> Self:
        self._counter.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        return super().__enter__()

    def _leave(self) -> None:
        super()._leave()
        self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no annotations there

    @property
    def reads(self) -> list[str]:
        """The lines of the model that read the value of a tensor, each once. Other inputs may lead to other calls."""
        return list(dict.fromkeys(self._counter.reads))

    def labels(self, net: nn.Module) -> dict[Label, Call]:
        """Return the labels of the observed calls and of their containers."""
        return label_calls(self.calls, last_names(net))

    def summary(self, net: nn.Module) -> Summary:
        """Return the summary of the observed calls and the net's parameters."""
        labels = self._shown(self.labels(net))
        callers = self._callers(labels)
        parameters = [each for each in parameters_of(net) if not is_uninitialized(each)]
        owners = self._owners()
        seen: set[str] = set()
        rows = []
        for label, call in labels.items():
            rows.append(self._row(call, label, callers[label], call.name in seen, owners))
            seen.add(call.name)
        return Summary(
            rows=tuple(rows),
            total_params=sum(each.numel() for each in parameters),
            trainable_params=sum(each.numel() for each in parameters if each.requires_grad),
            params_bytes=sum(map(_bytes, parameters)),
            input_bytes=self._input_bytes,
            mult_adds=self._counter.operations // 2,
        )

    def _shown(self, labels: Mapping[Label, Call]) -> dict[Label, Call]:
        """Return the labels of all calls, and of each container that is inside the module that makes the next call.

        Other containers are omitted: if a module calls contents of another module, a row for their container would show
        the container inside a module that does not contain it.
        """
        called = {call.name for call in self.calls}
        shown: dict[Label, Call] = {}
        containers: list[tuple[Label, Call]] = []
        for label, call in labels.items():
            if not call.number:
                containers.append((label, call))
                continue
            maker = self._seen[call].caller
            inside = f"{maker.name}." if maker is not None and maker.name else ""
            shown |= {
                each: title for each, title in containers if title.name not in called and title.name.startswith(inside)
            }
            shown[label] = call
            containers.clear()
        return shown

    def _owners(self) -> dict[int, nn.Module]:
        """Return, by parameter id, the module at which each tied parameter is counted: the module called first."""
        found: dict[int, list[nn.Module]] = {}
        for name in dict.fromkeys([*(call.name for call in self.calls), *self.modules]):
            module = self.modules[name]
            for each in own_parameters_of(module).values():
                found.setdefault(id(each), []).append(module)
        return {parameter: modules[0] for parameter, modules in found.items() if len(modules) > 1}

    def _callers(self, labels: Mapping[Label, Call]) -> dict[Label, Label | None]:
        """Return the parent row of each row: the caller, or the container of the module inside the caller."""
        label_of = {call: label for label, call in labels.items() if call.number}
        found: dict[Label, Label | None] = {}
        containers: dict[str, tuple[Label, Label | None]] = {}  # the latest row and the caller of each container
        new: list[tuple[Label, str]] = []
        for label, call in labels.items():
            new.append((label, call.name))
            if not call.number:  # a container has the same caller as the next call
                continue
            maker = self._seen[call].caller
            caller = None if maker is None else label_of[maker]
            for each, name in new:
                container, around = containers.get(name.rpartition(".")[0], (caller, caller))
                found[each] = container if around == caller else caller
                if each != label:
                    containers[name] = each, caller
            new.clear()
        return found

    def _row(
        self, call: Call, label: Label, caller: Label | None, is_repeated: bool, owners: Mapping[int, nn.Module]
    ) -> SummaryRow:
        module = self.modules[call.name]
        seen = self._seen.get(call, _Seen(None, (), 0, is_leaf=False))
        kernel = stored_attribute(module, "kernel_size", ())
        parameters = [each for each in parameters_of(module) if not is_uninitialized(each)]
        inside = set(map(id, modules_of(module))) if owners else set()
        tied = [each for each in parameters if id(each) in owners and id(owners[id(each)]) not in inside]
        return SummaryRow(
            label=label,
            name=call.name,
            type_name=class_name(type(module)),
            caller=caller,
            is_leaf=seen.is_leaf,
            is_repeated=is_repeated,
            input_shapes=seen.input_shapes,
            output_shapes=seen.output_shapes,
            output_bytes=seen.output_bytes,
            parameters=sum(each.numel() for each in parameters),
            mult_adds=seen.operations // 2,
            trainable=sum(each.numel() for each in parameters if each.requires_grad),
            kernel_shape=tuple(kernel) if isinstance(kernel, (tuple, list)) else (kernel,) if kernel else (),
            tied=sum(each.numel() for each in tied),
        )


def _shape(tensor: Tensor) -> Shape:
    try:
        return tuple(int(size) for size in tensor.shape)
    except Exception:  # noqa: BLE001 - sizes of nested tensors may be symbolic or raise in many ways
        return ()


def _bytes(tensor: Tensor) -> int:
    # The size of nested tensors is unknown.
    return 0 if tensor.is_nested else tensor.numel() * tensor.element_size()
