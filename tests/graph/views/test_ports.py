"""Ports: the wiring of a picture is that of its view."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_recorder.graph import Edge, Graph, capture_graph, fit_view, fold_repeats, record
from lightning_recorder.graph.views.ports import CHAIN, with_ports
from tests.graph.nets import Net, X, linear
from tests.graph.random_nets import graphs

TOKENS = torch.tensor([[5, 3, 9, 1], [2, 7, 7, 4]])


class Block(nn.Module):
    """A block with a skip connection around each of its two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = linear(), nn.Sequential(linear(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        total: Tensor = x + self.mlp(x)
        return total


def without_ports(graph: Graph) -> Graph:
    """Return the view that a graph with ports shows, by the meaning of a port."""
    ports = {node.id: node for node in graph.nodes if node.kind == "port"}
    edges = list(graph.edges)
    while any(edge.source in ports for edge in edges):
        # The innermost ports lead to no other port.
        last = {edge.source for edge in edges} & ports.keys() - {e.source for e in edges if e.target in ports}
        edges = [each for edge in edges for each in _through(edge, edges, graph, last)]
        edges = [edge for edge in edges if edge.target not in last]
    edges = [each for edge in edges for each in _of_closed_chain(edge, edges, graph)]
    return replace(graph, nodes=tuple(node for node in graph.nodes if node.id not in ports), edges=tuple(edges))


def _through(edge: Edge, edges: list[Edge], graph: Graph, last: set[int]) -> list[Edge]:
    """Return the edges of the view for one that leaves a port."""
    if edge.source not in last:
        return [edge]
    port = graph[edge.source]
    into = [each for each in edges if each.target == port.id]
    if port.name != CHAIN:
        return [replace(each, target=edge.target) for each in into]
    call = port.parent or 0
    onward = [each for each in into if (call, "next") in each.across]
    first = [
        replace(each, target=edge.target, across=((call, "first"), *each.across)) for each in into if each not in onward
    ]
    later = onward or _leaving(call, edges, graph)
    return [*first, *(replace(each, target=edge.target, across=((call, "next"),)) for each in later)]


def _leaving(call: int, edges: list[Edge], graph: Graph) -> list[Edge]:
    """Return an edge of the only tensor that leaves a repeated call."""
    inside = {node.id for node in graph.nodes if call in {node.id, *(each.id for each in graph.ancestors(node))}}
    found: dict[tuple[int, tuple[int, ...]], Edge] = {}
    for edge in edges:
        outer = any(word == "next" and group not in inside for group, word in edge.across)
        if edge.source in inside and (edge.target not in inside or outer) and (call, "all") not in edge.across:
            found[edge.source, edge.outputs] = edge
    assert len(found) == 1
    return list(found.values())


def _of_closed_chain(edge: Edge, edges: list[Edge], graph: Graph) -> list[Edge]:
    """Return the edges of the view for one into a repeated node without contents that is a chain."""
    node = graph[edge.target]
    into = [each for each in edges if each.target == node.id]
    related = any(group == node.id for each in into for group, _ in each.across)
    if node.repeats == 1 or node.parallel or related or graph.children(node):
        return [edge]
    first = replace(edge, across=((node.id, "first"), *edge.across))
    later = [replace(each, target=node.id, across=((node.id, "next"),)) for each in _leaving(node.id, edges, graph)]
    return [first, *(later if edge is into[0] else [])]


def wiring(graph: Graph) -> set[tuple[Any, ...]]:
    return {(edge.source, edge.target, frozenset(edge.across), edge.outputs) for edge in graph.edges}


def assert_same_wiring(view: Graph) -> Graph:
    """Check that a view with ports has the wiring of the view, and return it."""
    ported = with_ports(view)
    assert wiring(without_ports(ported)) == wiring(view)
    return ported


def ends(graph: Graph) -> list[tuple[str, str]]:
    return [(graph[edge.source].name, graph[edge.target].name) for edge in graph.edges]


def test_an_input_that_is_used_twice_enters_once() -> None:
    """A frame has one edge from each source; a port inside leads it to its users, and no skip is outside."""
    view = fit_view(record(nn.Sequential(Block(), linear()), "", input_data=(X,)))
    assert ends(assert_same_wiring(view))[:3] == [("input", ""), ("", "0.attn"), ("", "add")]


def test_a_chain_of_equal_blocks_has_no_edge_back() -> None:
    """Equal blocks in a row have one edge in and one edge out."""
    view = fit_view(record(nn.Sequential(*(Block() for _ in range(4)), linear()), "", input_data=(X,)))
    ported = assert_same_wiring(view)
    assert [edge for edge in ported.edges if edge.across] == []
    frame = ported.module_calls()[0]
    inside = {node.id for node in ported.nodes if frame in ported.ancestors(node)}
    assert len([edge for edge in ported.edges if (edge.source in inside) != (edge.target in inside)]) == 2


def test_a_closed_chain_has_no_loop() -> None:
    """A layer that is drawn once for several in a row has a single edge in and a single edge out."""
    view = fit_view(record(nn.Sequential(*(linear() for _ in range(4)), nn.ReLU()), "", input_data=(X,)))
    assert ends(assert_same_wiring(view)) == [("input", "0"), ("0", "4"), ("4", "output")]


def test_a_chain_with_a_further_output_keeps_its_edge() -> None:
    """If another tensor leaves the blocks too, the edge to the next repetition leads to the port of the chain."""

    def forward(net: Any, x: Tensor) -> Tensor:
        kept = []
        for part in net.children():
            x = part(x) + x
            kept.append(x.sin())
        return torch.stack(kept)

    net = Net(forward, **{f"{at}": linear() for at in range(5)})
    ported = assert_same_wiring(fit_view(record(net, "", input_data=(X,))))
    back = [ported[edge.target].name for edge in ported.edges if edge.relates("next")]
    assert back == [CHAIN]


def test_two_states_have_two_ports() -> None:
    """Each state of a loop has its own port, and each port its own edge from the repetition before."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h, c = x.sin(), x.cos()
        for _ in range(6):
            h, c = net.fc(h) + c, c.tanh() * h
        return h + c

    ported = assert_same_wiring(fit_view(record(Net(forward, fc=linear()), "", input_data=(X,))))
    assert [node.name for node in ported.nodes if node.kind == "port"] == [CHAIN, CHAIN]
    assert sum(edge.relates("next") for edge in ported.edges) == 2


def test_two_results_of_a_call_have_two_ports() -> None:
    """Cosine and sine of a rotary embedding enter a block at a port each, with their names."""

    def angles(_net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cos() * 0.5, x.sin() * 0.5

    def rotate(net: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = net.q(x), net.k(x)
        return q * cos + q.flip(0) * sin + k * cos + k.flip(0) * sin  # type: ignore[no-any-return]  # not declared

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.attn(x, *net.rope(x))  # type: ignore[no-any-return]  # not declared

    net = Net(forward, rope=Net(angles), attn=Net(rotate, q=linear(), k=linear()))
    ported = assert_same_wiring(fit_view(record(net, "", input_data=(X,))))
    entering = [edge.part for edge in ported.edges if ported[edge.source].name == "rope"]
    assert entering == ["cos", "sin"]
    assert sum(node.kind == "port" for node in ported.nodes) == 3


@pytest.mark.parametrize("name", ["GPT-2", "T5"])
def test_ports_of_transformers(name: str) -> None:
    """The blocks of a language model are a chain, and those of a decoder also take the encoder's output."""
    config: dict[str, Any] = {"num_layers": 3, "num_heads": 2, "d_model": 8, "d_kv": 4, "d_ff": 16, "vocab_size": 20}
    if name == "T5":
        graph = capture_graph(
            hf.T5ForConditionalGeneration(hf.T5Config(**config)), input_ids=TOKENS, decoder_input_ids=TOKENS
        )
    else:
        small = hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2)
        graph = capture_graph(hf.GPT2LMHeadModel(small), input_ids=TOKENS)
    ported = assert_same_wiring(fit_view(graph))
    blocks = [node for node in ported.module_calls() if node.repeats > 1]
    for block in blocks:
        assert any(node.name == CHAIN and node.parent == block.id for node in ported.nodes)
    if name == "GPT-2":
        assert not any(edge.relates("first") or edge.relates("next") for edge in ported.edges)


@settings(max_examples=40)
@given(graph=graphs)
def test_ports_keep_the_wiring_of_every_graph(graph: Graph) -> None:
    """A graph, and its folded view, have the wiring that their ports mean."""
    for view in (graph, fold_repeats(graph), fit_view(graph, 20)):
        assert_same_wiring(view)
