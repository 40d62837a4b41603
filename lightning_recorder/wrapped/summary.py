"""Summary of a net's calls in one run, printable as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import Self

from lightning_recorder.internals.autograd import is_uninitialized
from lightning_recorder.internals.preserve_state import ModuleState
from lightning_recorder.structure import iter_tensors
from lightning_recorder.wrapped.calls import Call, CallWatch, Label, label_calls

__all__ = ["Summary", "SummaryRow", "SummaryWatch"]

Shape = tuple[int, ...]

_COLUMNS = ("Layer (type (name)):depth-idx", "Input shape", "Output shape", "Param #", "Param %", "Mult-adds")
# The number of text columns; number columns are right-aligned.
_WORDS = 3
# Limits the shapes shown: a cache or a list of hidden states has dozens of tensors.
_SHOWN_SHAPES = 3


@dataclass(frozen=True)
class SummaryRow:
    """One call of a module."""

    label: Label
    """``(depth, idx)``."""
    name: str
    """The module's name."""
    type_name: str
    """The name of the module's class."""
    caller: Label | None
    """The call that made this one."""
    is_leaf: bool
    """True if the call made no other call."""
    is_repeated: bool
    """True if the call is not the first one of its module."""
    input_shapes: tuple[Shape, ...]
    """The shapes of all tensors among the arguments."""
    output_shapes: tuple[Shape, ...]
    """The shapes of all tensors in the output; none if the call raised."""
    output_bytes: int
    """The total size of the output tensors in bytes."""
    parameters: int
    """The number of parameter elements of the module and those below it, each parameter counted once."""
    mult_adds: int
    """Multiply-adds of the call, including nested calls."""


@dataclass(frozen=True)
class Summary:
    """The calls of a net in one run, in the order in which they began, with totals.

    Multiply-adds are half of the floating-point operations that torch's ``FlopCounterMode`` has formulas for (matrix
    products, convolutions, attention), plus fused attention and LSTM on CPUs. Bias additions and elementwise operations
    are not counted.

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

    @property
    def non_trainable_params(self) -> int:
        """The number of elements of the parameters that do not require a gradient."""
        return self.total_params - self.trainable_params

    @property
    def forward_backward_bytes(self) -> int:
        """2 × the bytes of the outputs of the leaf calls."""
        return 2 * sum(row.output_bytes for row in self.rows if row.is_leaf)

    @property
    def total_bytes(self) -> int:
        """The bytes of the input, the forward and backward pass, and the parameters."""
        return self.input_bytes + self.forward_backward_bytes + self.params_bytes

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, depth: int | None = None, recording: Iterable[Label] = ()) -> str:
        """Return the table.

        Args:
            depth: The maximum depth of the calls that are shown; the totals are those of the whole net.
            recording: The labels named in the last line.
        """
        rows = [row for row in self.rows if depth is None or row.label[0] <= depth]
        recorded = ", ".join(f"{depth}-{idx}" for depth, idx in recording)
        header, *body = _aligned([_COLUMNS, *(self._cells(row, tree) for row, tree in _as_tree(rows))])
        totals = [
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
        rule = "=" * max(map(len, (header, *body)))
        blocks = [[header], body, totals, sizes, [f"Currently recording: {recorded or None}"]]
        return "\n".join([rule, *(line for block in blocks for line in (*block, rule))])

    def _cells(self, row: SummaryRow, tree: str) -> tuple[str, ...]:
        share = f"{100 * row.parameters / self.total_params:.2f}%" if row.parameters else "--"
        return (
            tree,
            _shapes(row.input_shapes),
            _shapes(row.output_shapes),
            "(recursive)" if row.is_repeated else f"{row.parameters:,}" if row.parameters else "--",
            "--" if row.is_repeated else share,
            f"{row.mult_adds:,}" if row.mult_adds else "--",
        )


def _as_tree(rows: Sequence[SummaryRow]) -> list[tuple[SummaryRow, str]]:
    """Return each row with its first cell, indented under the nearest shown call that encloses it."""
    children: dict[Label | None, list[SummaryRow]] = {}
    shown = {row.label for row in rows}
    for row in rows:
        children.setdefault(row.caller if row.caller in shown else None, []).append(row)
    lines: list[tuple[SummaryRow, str]] = []

    def add(row: SummaryRow, around: SummaryRow | None, first: str, further: str) -> None:
        # A name below its caller omits the common prefix.
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
            cell.ljust(width) if column < _WORDS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


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
    """Observations of one call."""

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
    """A watch of the labeling run.

    Args:
        modules: All modules of the net by name.
        snapshot: The snapshot that saves a lazy module once it has been initialized.
    """

    def __init__(self, modules: Mapping[str, nn.Module], snapshot: ModuleState) -> None:
        super().__init__(modules)
        self._snapshot = snapshot
        self._counter = _OperationCounter()
        self._seen: dict[Call, _Seen] = {}
        self._input_bytes = 0

    def begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments."""
        self._snapshot.take(self.modules[call.name])
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

    def summary(self, net: nn.Module) -> Summary:
        """Return the summary of the observed calls and the net's parameters."""
        labels = {call: label for label, call in label_calls(self.calls).items()}
        parameters = [each for each in net.parameters() if not is_uninitialized(each)]
        return Summary(
            rows=tuple(self._row(call, label, labels) for call, label in labels.items()),
            total_params=sum(each.numel() for each in parameters),
            trainable_params=sum(each.numel() for each in parameters if each.requires_grad),
            params_bytes=sum(map(_bytes, parameters)),
            input_bytes=self._input_bytes,
            mult_adds=self._counter.operations // 2,
        )

    def _row(self, call: Call, label: Label, labels: Mapping[Call, Label]) -> SummaryRow:
        seen, module = self._seen[call], self.modules[call.name]
        return SummaryRow(
            label=label,
            name=call.name,
            type_name=type(module).__name__,
            caller=None if seen.caller is None else labels[seen.caller],
            is_leaf=seen.is_leaf,
            is_repeated=call.number > 1,
            input_shapes=seen.input_shapes,
            output_shapes=seen.output_shapes,
            output_bytes=seen.output_bytes,
            parameters=sum(each.numel() for each in module.parameters() if not is_uninitialized(each)),
            mult_adds=seen.operations // 2,
        )


def _shape(tensor: Tensor) -> Shape:
    try:
        return tuple(int(size) for size in tensor.shape)
    except Exception:  # noqa: BLE001 - sizes of nested tensors may be symbolic or raise in many ways
        return ()


def _bytes(tensor: Tensor) -> int:
    # The size of nested tensors is unknown.
    return 0 if tensor.is_nested else tensor.numel() * tensor.element_size()


def _attention_operations(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the two products of ``softmax(q kᵀ) v``, with shapes ``[..., heads, length, features]``."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _lstm_operations(x: Shape, weight_ih: Shape, weight_hh: Shape, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of one layer and direction over ``x`` of shape ``[length, batch, features]``."""
    return 2 * x[0] * x[1] * (prod(weight_ih) + prod(weight_hh))


# Fused CPU operations that torch has no formula for.
_MORE_FORMULAS = {
    getattr(torch.ops.aten, name): formula
    for name, formula in (
        ("_scaled_dot_product_flash_attention_for_cpu", _attention_operations),
        ("mkldnn_rnn_layer", _lstm_operations),
    )
    if hasattr(torch.ops.aten, name)
}


class _OperationCounter(TorchDispatchMode):
    """Count the floating-point operations of this thread with the formulas of torch's ``FlopCounterMode``.

    That mode itself would register hooks on all modules of the process, which other threads call too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.operations = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_MORE_FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        formula = self._formulas.get(packet)
        if formula is None and torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            # In inference mode composite operations are not decomposed before dispatch.
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if formula is not None:
            # A formula may not support the arguments; the table is then incomplete, but the net still runs.
            with suppress(Exception):
                self.operations += int(formula(*args, **kwargs, out_val=output))
        return output
