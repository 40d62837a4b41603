"""Drawing a model in one call."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_recorder.errors import ArgumentError, InputError, check_integer, check_number, checked_depth
from lightning_recorder.graph.layout import Layout
from lightning_recorder.graph.model import Graph
from lightning_recorder.graph.record_model import check_model, record
from lightning_recorder.graph.renderers.details import SOURCE_LINK, check_measured
from lightning_recorder.graph.renderers.graphviz import Direction, GraphvizRenderer, check_direction
from lightning_recorder.graph.renderers.graphviz_styler import GraphvizStyler, Shapes
from lightning_recorder.graph.renderers.mermaid import to_mermaid
from lightning_recorder.graph.views.collapse import collapse
from lightning_recorder.graph.views.fit import fit_view, view_at_depth
from lightning_recorder.graph.views.roll import roll as rolled
from lightning_recorder.graph.views.show_tensors import show_tensors
from lightning_recorder.graph.views.show_unused import show_unused
from lightning_recorder.inputs import shapes_in
from lightning_recorder.notebook import framed
from lightning_recorder.signatures import with_replacements
from lightning_recorder.temporary import TemporaryFolder, copy_whole

if TYPE_CHECKING:
    from graphviz import Digraph

__all__ = ["Drawing", "draw", "make_dot", "render_network"]

_TORCHVIEW = {
    "strict": "nothing: several tensors between two nodes are one edge with their number",
    "save_graph": "draw(…).save('directory/filename.png') to save the picture, and nothing otherwise",
    "filename": "draw(…).save('directory/filename.png')",
    "directory": "draw(…).save('directory/filename.png')",
    "collect_attributes": "drawing.graph.module(node), which returns the module of a node",
}
"""For further arguments of torchview's ``draw_graph``: the code to write instead."""

_RESIZE = dict.fromkeys(("size_per_element", "min_size"), "resize_graph(scale) alone: the size follows the contents")
"""For further arguments of torchview's ``resize_graph``: the code to write instead."""

_NOTEBOOK_PX = 520  # the maximum height of a picture in a notebook


def make_dot(
    graph: Graph | None = None,
    render_depth: float = 256,
    styler_cls: type[GraphvizStyler] | None = None,
    *,
    rec: Graph | None = None,
    **styler_args: Any,
) -> Digraph:
    """Convert a recorded graph to a Graphviz document.

    Nodes down to the given depth are drawn, including parameters. A module call at that depth is one node, which
    replaces the deeper nodes inside it and has their edges. Module calls above that depth are drawn as frames.

    Args:
        graph: The result of :func:`record` or of a capture.
        render_depth: The depth down to which nodes are drawn. 0 draws the whole model as one box, 1 draws its layers,
            and ``float("inf")`` sets no limit.
        styler_cls: The class that decides how nodes and edges look. An instance is created with ``styler_args``.
        rec: Another name of ``graph``, as in torchrecorder.
        styler_args: Graphviz attributes for all nodes, and other arguments of the styler.

    Raises:
        ArgumentError: If there is no graph, the depth is negative, or ``styler_cls`` is not a class.

    Example:
        >>> from torch import nn
        >>> graph = record(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "net", (1, 2))
        >>> dot = make_dot(graph, render_depth=1, fillcolor="white")
        >>> sum("fillcolor=white" in line for line in dot.body)
        4
    """
    recorded = rec if graph is None else graph
    if isinstance(recorded, (str, Path)):
        raise ArgumentError(f"make_dot takes a graph, got a path: write Graph.from_json({str(recorded)!r}) to read it")
    if not isinstance(recorded, Graph):
        raise ArgumentError(f"make_dot takes a graph, such as the result of record(…), got {recorded!r}")
    view = collapse(recorded, checked_depth("render_depth", render_depth), leaves=False)
    if styler_cls is not None and not callable(styler_cls):
        raise ArgumentError(f"styler_cls must be a subclass of GraphvizStyler, got {styler_cls!r}")
    styler = (styler_cls or GraphvizStyler)(**styler_args)
    check_measured(getattr(styler, "color_by", None), recorded)
    return GraphvizRenderer(view, styler).render()


def render_network(
    net: nn.Module,
    name: str,
    input_shapes: Any,
    directory: str | os.PathLike[str],
    filename: str | None = None,
    fmt: str = "svg",
    input_data: Any = None,
    render_depth: float = 1,
    **styler_args: Any,
) -> Path:
    """Run a model once and write a picture of its graph.

    Args:
        net: The model. Its state is restored afterwards; see :func:`record`.
        name: The name of the graph in the picture.
        input_shapes: As for :func:`record`; ``None`` if ``input_data`` is given.
        directory: The directory to write to; created if it does not exist.
        filename: The name of the file without its suffix. By default, it is ``name`` or the class of the model,
            followed by ``-`` and the depth, so that pictures of different depths do not overwrite each other.
        fmt: A Graphviz format, such as ``svg``, ``png`` or ``pdf``.
        input_data: As for :func:`record`.
        render_depth: As for :func:`make_dot`.
        styler_args: As for :func:`make_dot`.

    Returns:
        The path of the picture.

    Raises:
        ArgumentError: If an argument is invalid.
        ForwardError: If the model raises.
        RenderError: If no renderer is installed, or the renderer fails.
    """
    checked_depth("render_depth", render_depth)
    if not fmt.isalnum():
        raise ArgumentError(f"fmt must be a format of Graphviz, such as svg, png or pdf; got {fmt!r}")
    file = f"{filename or f'{name or type(net).__name__}-{render_depth}'}.{fmt}"
    # The rules of Windows are the strictest: a file name has neither kind of slash and no drive letter.
    if file != PureWindowsPath(file).name or "\0" in file:
        raise ArgumentError(f"filename must be a file name without a folder; got {file!r}")
    dot = make_dot(record(net, name, input_shapes, input_data), render_depth, **styler_args)
    return _write(dot, Path(directory) / file)


@dataclass(frozen=True, repr=False)
class Drawing:
    """A picture of a model, with the graphs that it was made from. Notebooks display the picture.

    Args:
        graph: The whole recorded graph.
        view: The part of the graph that is drawn.
        visual_graph: The view as a Graphviz document.
    """

    graph: Graph
    view: Graph
    visual_graph: Digraph

    def save(self, path: str | os.PathLike[str], *, timeout_s: float = 60.0) -> Path:
        """Write the picture. The suffix selects the format: ``.svg``, ``.png`` or ``.pdf``.

        ``.mmd`` writes the view as Mermaid text. ``.json`` writes the whole graph, for :meth:`Graph.from_json`.

        Raises:
            RenderError: If no renderer is installed, or the renderer fails or needs more than ``timeout_s`` seconds. A
                smaller view takes less time: use ``max_nodes``, ``depth``, ``fold`` or ``roll``.
        """
        path = Path(path)
        if path.suffix.lower() in _TEXTS:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_TEXTS[path.suffix.lower()](self) + "\n", encoding="utf-8")
            return path
        return _write(self.visual_graph, path, timeout_s)

    @with_replacements(_RESIZE)
    def resize_graph(self, scale: float = 1.0) -> None:
        """Scale the picture when it is written or shown from now on. 1 is the original size.

        Raises:
            ArgumentError: If the scale is not a positive number.
        """
        check_number("scale", scale, 0)
        if not 0 < scale < math.inf:
            raise ArgumentError(f"scale must be a positive number, got {scale!r}")
        # dot lays out pictures at 72 points per inch.
        self.visual_graph.attr("graph", dpi=f"{72 * scale:g}")

    def __repr__(self) -> str:
        return f"<drawing of {self.graph.title}: {len(self.view.nodes)} nodes, {len(self.view.edges)} edges>"

    def _repr_svg_(self) -> str:
        with TemporaryFolder() as folder:
            return self.save(folder.path / "graph.svg").read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        """Return the picture in an iframe that is at most as wide as the notebook.

        In an iframe, links work, and the names in the SVG do not clash with the names in other pictures.
        """
        svg = self._repr_svg_()
        svg = svg[svg.index("<svg") :]
        size = re.match(r'<svg width="([\d.]+)\w*" height="([\d.]+)', svg)
        height = min(_NOTEBOOK_PX, math.ceil(float(size[2]) * 4 / 3) + 24) if size else _NOTEBOOK_PX
        html = f"<!doctype html><style>svg{{max-width:100%;height:auto}}</style>{svg}"
        return framed(html, repr(self), height_px=height)


_TEXTS: dict[str, Callable[[Drawing], str]] = {
    ".json": lambda drawing: json.dumps(drawing.graph.to_json()),
    ".mmd": lambda drawing: to_mermaid(drawing.view),
}


@with_replacements(_TORCHVIEW)
def draw(
    model: nn.Module | Graph,
    input_data: Any = None,
    input_size: Any = None,
    graph_name: str = "",
    depth: float | None = None,
    device: torch.device | str | None = None,
    dtypes: Any = None,
    mode: Literal["train", "eval"] | None = None,
    *,
    input_kwargs: Mapping[str, Any] | None = None,
    expand_nested: bool = True,
    graph_dir: Direction | None = "TB",
    hide_module_functions: bool = True,
    hide_inner_tensors: bool = True,
    parameters: bool | None = None,
    shapes: bool = False,
    all: bool = False,  # noqa: A002 - the word that users expect
    roll: bool = False,
    fold: bool = True,
    max_nodes: int | None = 150,
    unused: bool = False,
    show_shapes: bool = True,
    legend: bool = False,
    link: str | None = SOURCE_LINK,
    style: Literal["screen", "paper"] = "screen",
    styler: GraphvizStyler | None = None,
) -> Drawing:
    """Run a model once and return a picture of its graph.

    By default, :class:`~lightning_recorder.GraphRecorder` draws the same picture.

    Args:
        model: The model, a recorded graph, or a view of a graph. The state of a model is restored afterwards; see
            :func:`record`. For a graph or a view, the arguments about running the model are ignored.
        input_data: The arguments of the model, as for :func:`record`.
        input_size: Shapes of generated inputs, as ``input_shapes`` of :func:`record`.
        graph_name: The name of the graph in the picture; by default the class of the model.
        depth: The depth down to which module calls are opened. 0 draws the model as one box, ``float("inf")`` opens all
            calls. By default, as many calls are opened as ``max_nodes`` allows.
        device: ``"meta"`` to compute only shapes, or the device of the model, as for :func:`record`.
        dtypes: As for :func:`record`.
        mode: As for :func:`record`.
        input_kwargs: Further keyword arguments of the model.
        expand_nested: Draw a frame around the contents of an open module call.
        graph_dir: The direction of the data flow: ``"TB"`` (down the page), ``"LR"``, ``"BT"`` or ``"RL"``. ``None``
            means ``"TB"``.
        hide_module_functions: Draw a module that calls no other module as one node; otherwise show its functions.
        hide_inner_tensors: Leave out the tensors between functions.
        parameters: Show the parameters and buffers of open calls: all of them, none of them, or by default those of
            modules that call other modules, such as a position embedding.
        shapes: Show the functions that only change shapes or types, such as ``view`` and ``to``. By default, edges lead
            past these functions, and the caption counts them.
        all: Show the functions of ``shapes``, the functions whose results reach neither an output nor the loss, the
            keys and values that are returned for a later call, functions that compute one number only from numbers, and
            each of several functions that compute a constant, such as a table of positions, or a sum.
        roll: Draw a module that is called several times once, with the number of calls.
        fold: Draw equal siblings once, with their number.
        max_nodes: Reduce the view until it has at most this many nodes, by the rules of :func:`fit_view`. ``None`` or
            ``depth=float("inf")`` sets no limit.
        unused: Show the modules that were never called. If parameters are shown, also show parameters that got no
            gradient; see :func:`show_unused`.
        show_shapes: Write shapes into the nodes.
        legend: Add a legend that explains the colors and shapes of the nodes.
        link: The address that a node of an SVG opens, as for :class:`GraphvizStyler`. By default VS Code opens the line
            of code. Ignored if there is a ``styler``.
        style: ``"screen"`` for colors, or ``"paper"`` for black and white. Ignored if there is a ``styler``.
        styler: The styler that decides how nodes and edges look.

    Raises:
        ArgumentError: If an argument is invalid, or the styler colors by costs that were not measured. For arguments
            about running the model, the error is an :class:`InputError`.
        UnknownArgumentError: If an argument does not exist. For an argument of torchview's ``draw_graph``, the message
            has the code to write instead.
        ForwardError: If the model raises. The error names the module and holds the graph recorded so far.

    Example:
        >>> from torch import nn
        >>> drawing = draw(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), input_size=(1, 2))
        >>> [node.name or node.type_name for node in drawing.view.nodes]
        ['Sequential', 'input', '0', '1', 'output']
        >>> len(drawing.view.edges)
        3
    """
    limit = checked_depth("depth", depth)
    if max_nodes is not None:
        check_integer("max_nodes", max_nodes, 1)
    direction: Direction = "TB" if graph_dir is None else graph_dir
    check_direction(direction, "graph_dir")
    if isinstance(model, Graph):
        graph = replace(model, name=graph_name or model.name)
    else:
        check_model(model)
        sizes = _sizes(input_size, input_data, input_kwargs)
        graph = record(
            model, graph_name, sizes, input_data, input_kwargs=input_kwargs, dtypes=dtypes, device=device, mode=mode
        )
    options: dict[str, Any] = {"fold": fold, "leaves": hide_module_functions, "parameters": parameters}
    options |= {"shapes": shapes, "all": all}
    whole = rolled(graph) if roll else graph
    if style not in ("screen", "paper"):
        raise ArgumentError(f"style must be 'screen' or 'paper', got {style!r}")
    shown: Shapes = "nodes" if show_shapes else "none"
    styler = styler or GraphvizStyler(shapes=shown, link=link, paper=style == "paper")
    check_measured(getattr(styler, "color_by", None), graph)
    if limit == 0 or max_nodes is None or depth == math.inf:
        view = view_at_depth(whole, limit, **options)
    else:
        view = fit_view(whole, max_nodes, limit, **options)
    view = view if hide_inner_tensors else show_tensors(view)
    view = show_unused(view) if unused else view
    renderer = GraphvizRenderer(view, styler, direction=direction, frames=expand_nested, legend=legend)
    return Drawing(graph, view, renderer.render())


def _sizes(input_size: Any, input_data: Any, input_kwargs: Mapping[str, Any] | None) -> Any:
    """Return the shapes of the inputs to generate, or None if data are given."""
    if input_size is None:
        if input_data is None and input_kwargs is None:
            raise InputError("give either input_size or input_data, got neither")
        return None
    if input_data is not None:
        raise InputError("give either input_size or input_data, got both")
    return shapes_in(input_size, "input_size")


def _write(dot: Digraph, path: Path, timeout_s: float = 60.0) -> Path:
    suffix = path.suffix[1:]
    if not suffix:
        raise ArgumentError(f"the name of a picture must end with its format, such as graph.svg; got {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder() as folder:
        document = folder.path / "graph.dot"
        document.write_text(dot.source, encoding="utf-8")
        (picture,) = Layout(document, (suffix.lower(),), timeout_s).finish()
        copy_whole(picture, path)
    return path
