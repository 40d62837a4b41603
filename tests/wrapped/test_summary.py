"""The summary table of a wrapped net and its numbers."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import ResNetConfig, ResNetForImageClassification

from lightning_recorder.wrapped.net import RecordedNet
from lightning_recorder.wrapped.summary import SummaryRow
from tests.graph.nets import Net


def rows(wrapped: RecordedNet) -> dict[tuple[int, int], SummaryRow]:
    """Return the rows by label."""
    return {row.label: row for row in wrapped.summary.rows}


TOY = """\
RecordedNet of Sequential
=====================================================================================
Layer (type (name)):depth-idx  Input shape  Output shape  Param #  Param %  Mult-adds
=====================================================================================
Sequential: 0-1                [1, 5]       [1, 3]             39  100.00%         32
├─ Linear (0): 1-1             [1, 5]       [1, 4]             24   61.54%         20
├─ ReLU (1): 1-2               [1, 4]       [1, 4]             --       --         --
├─ Linear (2): 1-3             [1, 4]       [1, 3]             15   38.46%         12
└─ ReLU (3): 1-4               [1, 3]       [1, 3]             --       --         --
=====================================================================================
Total params: 39
Trainable params: 39
Non-trainable params: 0
Total mult-adds (M): 0.00
=====================================================================================
Input size (MB): 0.00
Forward/backward pass size (MB): 0.00
Params size (MB): 0.00
Estimated Total Size (MB): 0.00
=====================================================================================
Currently recording: None
====================================================================================="""


def test_the_table_of_the_toy() -> None:
    """The table of two layers is exact, and its last line names the recorded calls."""
    wrapped = RecordedNet(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU()), input_size=(1, 5))
    assert repr(wrapped) == TOY
    wrapped.record((1, 3), (0, 1))
    assert repr(wrapped) == TOY.replace("recording: None", "recording: 0-1, 1-3")


def test_totals_by_hand() -> None:
    """Parameters, bytes and multiply-adds of a convolution and a linear layer follow from their shapes."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 10)).half()
    net[0].requires_grad_(False)
    summary = RecordedNet(net, input_size=(4, 3, 8, 8)).summary
    conv, linear = 8 * 3 * 9 + 8, 10 * 288 + 10
    assert (summary.total_params, summary.trainable_params, summary.non_trainable_params) == (
        conv + linear,
        linear,
        conv,
    )
    # Each of 4 × 8 × 6 × 6 values of the convolution needs 3 × 3 × 3 products, each of 4 × 10 of the layer 288.
    assert summary.mult_adds == 4 * 8 * 36 * 27 + 4 * 10 * 288
    assert summary.input_bytes == 2 * 4 * 3 * 64
    assert summary.forward_backward_bytes == 2 * 2 * (2 * 4 * 288 + 4 * 10)
    assert summary.params_bytes == 2 * (conv + linear)
    assert summary.total_bytes == 1536 + 9376 + 6228


def test_megabytes_are_millions_of_bytes() -> None:
    """Sizes are given in units of 10⁶ bytes, and multiply-adds in millions."""
    net = nn.Sequential(nn.Linear(1000, 500, bias=False))
    text = repr(RecordedNet(net, input_size=(250, 1000)))
    for line in (
        "Total params: 500,000",
        "Total mult-adds (M): 125.00",
        "Input size (MB): 1.00",
        "Forward/backward pass size (MB): 1.00",
        "Params size (MB): 2.00",
        "Estimated Total Size (MB): 4.00",
    ):
        assert line in text.splitlines()


class Parts(nn.Module):
    """A net with a layer that is called twice, a list, a shared weight and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
        self.lstm = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        x = self.stem(self.stem(x)) * scale
        x = self.blocks[0](x)
        out, _ = self.lstm(x)
        return {"out": self.head(out), "all": [x] * 4}


PARTS = """\
Layer (type (name)):depth-idx  Input shape    Output shape                        Param #  Param %  Mult-adds
=============================================================================================================
Parts: 0-1                     [[2, 4], [1]]  [[2, 4], [2, 4], [2, 4], ...]           204  100.00%        384
├─ Linear (stem): 1-1          [2, 4]         [2, 4]                                   20    9.80%         32
├─ Linear (stem): 1-2          [2, 4]         [2, 4]                          (recursive)       --         32
├─ ModuleList (blocks): 1-3    --             --                                       20    9.80%         --
│  └─ Sequential (0): 2-1      [2, 4]         [2, 4]                                   20    9.80%         32
│     ├─ Linear (0): 3-1       [2, 4]         [2, 4]                                   20    9.80%         32
│     └─ Tanh (1): 3-2         [2, 4]         [2, 4]                                   --       --         --
├─ LSTM (lstm): 1-4            [2, 4]         [[2, 4], [1, 4], [1, 4]]                160   78.43%        256
└─ Linear (head): 1-5          [2, 4]         [2, 4]                         20 (16 tied)    1.96%         32
"""


def test_a_table_with_everything() -> None:
    """Repeated calls, lists, several tensors and shared weights are shown, and totals count each weight once."""
    net = Parts()
    wrapped = RecordedNet(net, input_size=(2, 4), input_kwargs={"scale": torch.ones(1)})
    assert PARTS in repr(wrapped)
    assert wrapped.summary.total_params == sum(each.numel() for each in net.parameters()) == 204
    row = rows(wrapped)[1, 4]
    assert row.output_shapes == ((2, 4), (1, 4), (1, 4))
    assert (row.caller, row.is_leaf, row.is_repeated, row.output_bytes) == ((0, 1), True, False, 64)


class Block(nn.Module):
    """A layer and an activation, which may be that of other blocks, in a list or not."""

    def __init__(self, act: nn.Module, listed: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = nn.ModuleList([act]) if listed else act

    def forward(self, x: Tensor) -> Tensor:
        act: Any = self.act
        return (act[0] if isinstance(act, nn.ModuleList) else act)(self.layer(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("listed", [False, True])
def test_a_shared_activation_shows_no_block_inside_of_another(listed: bool) -> None:
    """The call of a shared module is a row of the block that calls it, and every block has one row."""
    act = nn.ReLU()
    net = nn.Sequential(*(Block(act, listed) for _ in range(3)))
    found = [row for row in RecordedNet(net, input_size=(1, 4)).summary.rows if row.type_name != "ModuleList"]
    callers = {row.label: row for row in found}
    assert [(row.name, row.caller and callers[row.caller].name) for row in found] == [
        ("", None),
        *(each for at in "012" for each in ((at, ""), (f"{at}.layer", at), (f"0.act{'.0' * listed}", at))),
    ]
    assert [row.parameters for row in found if row.type_name == "Block" and not row.is_repeated] == [20] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.13; scripting still works
@pytest.mark.parametrize("kind", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 4))])
def test_a_scripted_part_has_a_row(kind: Callable[[nn.Module], nn.Module]) -> None:
    """A TorchScript module has the row of its call, with shapes, parameters and operations."""
    part = kind(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    row = rows(RecordedNet(nn.Sequential(nn.Linear(4, 4), part), input_size=(2, 4)))[1, 2]
    assert (row.name, row.caller, row.input_shapes, row.output_shapes) == ("1", (0, 1), ((2, 4),), ((2, 3),))
    assert (row.parameters, row.mult_adds) == (15, 24)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.13; scripting still works
def test_a_scripted_part_that_raises_is_no_call_in_progress() -> None:
    """The call of a TorchScript module that raises an error, which the net handles, contains no later call."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with suppress(Exception):
            net.part(x, x)
        return net.head(x)  # type: ignore[no-any-return]

    net = Net(forward, part=torch.jit.script(nn.Linear(4, 4)), head=nn.Linear(4, 4))
    found = RecordedNet(net, input_size=(2, 4)).summary.rows
    assert [(row.name, row.caller) for row in found] == [("", None), ("part", (0, 1)), ("head", (0, 1))]


def test_tied_weights_count_once() -> None:
    """A layer whose weight is that of another layer is marked, and the shares of the layers add up to 100 %."""
    table, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = table.weight
    net = nn.Sequential(table, nn.Sequential(nn.Tanh(), head))
    wrapped = RecordedNet(net, input_data=torch.tensor([[1, 2]]))
    assert {row.name: (row.parameters, row.tied) for row in wrapped.summary.rows if row.parameters} == {
        "": (40, 0),
        "0": (40, 0),
        "1": (40, 40),
        "1.1": (40, 40),
    }
    lines = [line.split("  ") for line in repr(wrapped).splitlines() if "Linear" in line or "Embedding" in line]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert [line[-3:] for line in cells] == [["40", "100.00%", "--"], ["40 (tied)", "--", "80"]]


COLUMNS = """\
Layer (type (name)):depth-idx  Param #  Trainable  Kernel shape
===============================================================
Sequential: 0-1                    312  Partial    --
├─ Conv2d (0): 1-1                 152  False      [3, 2]
├─ Flatten (1): 1-2                 --  --         --
└─ Linear (2): 1-3                 160  True       --
===============================================================
"""


def test_columns_can_be_chosen() -> None:
    """A table has the columns of ``col_names`` in their order, under torchinfo's names."""
    net = nn.Sequential(nn.Conv2d(3, 8, (3, 2)).requires_grad_(False), nn.Flatten(2), nn.Linear(15, 10))
    wrapped = RecordedNet(net, input_size=(1, 3, 5, 6), col_names=("num_params", "trainable", "kernel_size"))
    for table in (repr(wrapped), str(wrapped.summary)):
        assert COLUMNS in "\n".join(line.rstrip() for line in table.splitlines()) + "\n"
    assert "Kernel" in wrapped.summary.to_html()


def test_a_notebook_shows_the_table() -> None:
    """The HTML has a cell for each cell of the text, escaped, and the lines below the table."""
    net = nn.Sequential(OrderedDict({"a<b>&": nn.Linear(5, 4)}))
    wrapped = RecordedNet(net, input_size=(1, 5))
    wrapped.record((1, 1))
    page = wrapped._repr_html_()
    assert page.startswith("<p><b>RecordedNet of Sequential</b></p><table><tr><th>Layer (type (name)):depth-idx</th>")
    cells = re.findall(r"<td style=\"text-align: (left|right); white-space: pre\">(.*?)</td>", page)
    assert cells[6:] == [
        ("left", "└─ Linear (a&lt;b&gt;&amp;): 1-1"),
        ("left", "[1, 5]"),
        ("left", "[1, 4]"),
        ("right", "24"),
        ("right", "100.00%"),
        ("right", "20"),
    ]
    assert "<br>".join(repr(wrapped).splitlines()[7:11]) in page
    assert page.endswith("<p>Currently recording: 1-1</p>")
    assert wrapped.summary._repr_html_().endswith("<p>Currently recording: None</p>")


def test_depth_limits_what_is_shown() -> None:
    """Calls below the maximum depth are hidden, but keep their labels and count towards the totals."""
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh())), nn.Linear(3, 2))
    whole = RecordedNet(net, input_size=(1, 3))
    for depth, labels in ((0, ["0-1"]), (1, ["0-1", "1-1", "1-2"]), (2, ["0-1", "1-1", "2-1", "2-2", "1-2"])):
        cut = RecordedNet(net, input_size=(1, 3), depth=depth)
        lines = repr(cut).splitlines()
        end = lines.index("Total params: 20")
        assert [line.split(": ")[1].split()[0] for line in lines[4 : end - 1]] == labels
        assert cut.labels == whole.labels
        assert cut.summary == whole.summary
        assert lines[end : end + 4] == whole.summary.to_text().splitlines()[-12:-8]


def test_columns_are_as_wide_as_they_need() -> None:
    """Columns are aligned regardless of the length of names."""
    name = "a_layer_with_a_name_that_goes_on_and_on_and_on"
    net = nn.Sequential(OrderedDict({name: nn.Linear(3, 2)}))
    lines = repr(RecordedNet(net, input_size=(7, 3))).splitlines()
    assert lines[2].index("Input shape") == lines[5].index("[7, 3]") > len(name)
    assert len({len(line) for line in lines[1:6]}) == 1


# Multiply-adds.


class Attend(nn.Module):
    """Attention, fused or as two products."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_fused_attention_counts_its_products() -> None:
    """Fused attention counts the same as its two matrix products."""
    sizes = [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)]
    fused, plain = (RecordedNet(Attend(fused), input_size=sizes).summary.mult_adds for fused in (True, False))
    assert fused == plain == 2 * 3 * 5 * 7 * (4 + 4)


@pytest.mark.parametrize("inference", [False, True])
def test_fused_modules_count_their_products(inference: bool) -> None:
    """In eval mode torch computes attention and encoder layers in one operation, which counts like its parts."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    cases: list[tuple[nn.Module, list[Tensor]]] = [
        (nn.TransformerEncoder(layer, 2), [torch.ones(2, 3, 8)]),
        (nn.MultiheadAttention(8, 2, batch_first=True), [torch.ones(2, 3, 8)] * 3),
    ]
    # Four projections and the feed-forward layers of 2 × 3 tokens, and two products of 3 × 3 × 8 in each sample.
    attention = 2 * 3 * 4 * 8 * 8 + 2 * 2 * 3 * 3 * 8
    for (net, data), expected in zip(cases, (2 * (attention + 2 * 2 * 3 * 8 * 16), attention), strict=True):
        for mode in (net.train, net.eval):
            mode()
            with torch.inference_mode(inference):
                assert RecordedNet(net, input_data=data).summary.mult_adds == expected


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
def test_an_lstm_counts_its_products(layers: int, bidirectional: bool) -> None:
    """An LSTM counts the same as in double precision, where it is decomposed into matrix products."""
    net = nn.LSTM(4, 3, num_layers=layers, bidirectional=bidirectional)
    found = RecordedNet(net, input_size=(5, 2, 4)).summary.mult_adds
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net.double()(torch.ones(5, 2, 4, dtype=torch.float64))
    assert found == counter.get_total_flops() // 2 > 0


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.LazyLinear(3)),
            (2, 3, 6, 6),
        ),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 3, 8)),
        (lambda: nn.Sequential(nn.GRU(4, 3)), (5, 2, 4)),
        (
            lambda: ResNetForImageClassification(
                ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
            ),
            (2, 3, 16, 16),
        ),
    ],
    ids=["convolutions", "transformer", "gru", "resnet"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_multiply_adds_agree_with_torch(make: Callable[[], nn.Module], size: tuple[int, ...], inference: bool) -> None:
    """The total is half of the count of torch's own counter if attention is not fused."""
    net = make()
    with torch.inference_mode(inference):
        summary = RecordedNet(net, input_size=size).summary
    unfused = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), unfused, FlopCounterMode(display=False) as counter:
        net(torch.ones(size))
    assert summary.mult_adds == counter.get_total_flops() // 2 > 0
    assert summary.rows[0].mult_adds == summary.mult_adds
    # Every product belongs to a leaf, or is computed by a module between its children's calls.
    assert sum(row.mult_adds for row in summary.rows if row.is_leaf) <= summary.mult_adds


def test_calls_that_raise_have_no_output() -> None:
    """A call whose error the net caught has a row without output and without multiply-adds."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(3, 3)
            self.bad = nn.Linear(9, 9)
            self.good = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            try:
                return self.bad(x)  # type: ignore[no-any-return]
            except RuntimeError:
                return self.good(x)  # type: ignore[no-any-return]

    found = rows(RecordedNet(Careful(), input_size=(1, 3)))
    assert [(row.name, row.output_shapes, row.mult_adds) for row in found.values()] == [
        ("", ((1, 2),), 15),
        ("stem", ((1, 3),), 9),
        ("bad", (), 0),
        ("good", ((1, 2),), 6),
    ]
    assert found[1, 3].caller == (0, 1)


def test_an_lm_head_that_is_tied() -> None:
    """A weight shared by two modules counts in both rows and once in the total, so the shares exceed 100 %."""
    embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    head.weight = embedding.weight
    wrapped = RecordedNet(nn.Sequential(embedding, head), input_size=(2,), dtypes=torch.int64)
    assert [row.parameters for row in wrapped.summary.rows] == [21, 21, 21]
    assert wrapped.summary.total_params == 21
