/** The boxes of the graph that are visible, the edges between them, and their places. */

import { Graphviz } from "@hpcc-js/wasm-graphviz";
import type { EdgeData, GraphData, NodeData } from "./model";

/** A box: one node, or a run of equal siblings of which none is open. */
export interface Box {
  id: string; nodes: NodeData[]; open: boolean; children: Box[]; title: string; detail: string;
  width: number; height: number;
}
/** Nodes that are drawn as one box, and the functions between equal modules that the box contains. */
export interface Part { nodes: NodeData[]; between: NodeData[] }
export interface Line { source: string; target: string; count: number; tensor: string; back: boolean; side: Side }
/** The run that alone has an edge: this one, the other one, or neither. */
export type Side = "" | "added" | "removed";
/** How a node differs from the other run's; `added` are those that only this run has. */
export type Change = "added" | "removed" | "altered";
export interface View { root: Box; boxes: Map<string, Box>; lines: Line[] }
export interface Placed { x: number; y: number; width: number; height: number }
export interface Layout { width: number; height: number; places: Map<string, Placed>; paths: { line: Line; path: string; label: { text: string; x: number; y: number } | null }[] }

const LEAST_GROUP = 3;
const MANY_PARTS = 60;  // of one module; then functions between equal modules do not keep them apart
const MANY_LINES = 1000;  // of which Graphviz would move the boxes for minutes
export const CELL = 11;
export const CELLS = 16;  // in a row
const SIGN = 16;  // pixels for the sign that opens or closes a box
const TITLE = "600 12px sans-serif";
const ZERO = 7;  // points of a zero in the 14 points of the font of Graphviz

function append<Value>(to: Map<number, Value[]>, key: number, value: Value): void {
  const known = to.get(key);
  if (known) known.push(value); else to.set(key, [value]);
}

export class Tree {
  readonly byId = new Map<number, NodeData>();
  readonly children = new Map<number, NodeData[]>();
  readonly root: NodeData;
  private readonly names = new Map<string, NodeData>();
  private readonly sites = new Map<number, string>();
  private readonly after = new Map<number, number[]>();
  private readonly before = new Map<number, number[]>();

  constructor(readonly data: GraphData) {
    for (const node of data.nodes) {
      this.byId.set(node.id, node);
      if (node.parent !== null) append(this.children, node.parent, node);
    }
    this.root = data.nodes[0]!;
    for (const [from, to] of data.edges) { append(this.after, from, to); append(this.before, to, from); }
    for (const [name, id] of Object.entries(data.sites)) { this.sites.set(id, name); this.names.set(name, this.byId.get(id)!); }
    // Of the calls of a module, and of functions that are not recorded, the first one has the name.
    for (const kind of ["module", "input", "op"]) for (const node of data.nodes) {
      const name = kind === "op" ? this.nameOf(node) : node.name;
      if (node.kind === kind && !this.names.has(name)) this.names.set(name, node);
    }
  }

  /** The node of a module, an input or a function, by the name in the records. */
  find(name: string): NodeData | undefined { return this.names.get(name); }

  /** The name by which `find` has a node. A module that is made where it is called has the name of its function. */
  nameOf(node: NodeData): string {
    const site = this.sites.get(node.id), around = node.kind === "op" ? this.around(node)?.name : "";
    return site !== undefined && !(node.kind === "module" && site.startsWith(`${node.name}.`)) ? site : [around, node.name].filter(Boolean).join(".");
  }

  /** The module whose code calls a function. */
  around(node: NodeData): NodeData | undefined { return [...this.above(node)].find((each) => each.kind === "module"); }

  inside(node: NodeData): NodeData[] { return this.children.get(node.id) ?? []; }

  *below(node: NodeData): Generator<NodeData> {
    for (const child of this.inside(node)) { yield child; yield* this.below(child); }
  }

  *above(node: NodeData): Generator<NodeData> {
    let parent = node.parent;
    while (parent !== null) {
      const found = this.byId.get(parent)!;
      yield found;
      parent = found.parent;
    }
  }

  /** The modules from which a module gets its inputs, or those that get its outputs, through operations between them. */
  beside(module: NodeData, forward: boolean): string[] {
    const own = new Set([module.id, ...[...this.below(module)].map((each) => each.id)]), around = new Set([...this.above(module)].map((each) => each.id));
    const queue = [...own], seen = new Set(queue), found = new Set<string>(), next = forward ? this.after : this.before;
    for (const id of queue) for (const to of next.get(id) ?? []) {
      if (seen.has(to)) continue;
      seen.add(to);
      const node = this.byId.get(to)!;
      const owner = [node, ...this.above(node)].find((each) => each.kind === "module" && !around.has(each.id));
      if (owner) found.add(owner.name); else queue.push(to);
    }
    return [...found];
  }

  /** Open modules from the outside in, as long as the number of boxes stays below a limit. */
  initial(limit: number): Set<number> {
    const open = new Set([this.root.id]);
    let level = [this.root];
    let count = this.parts(this.root, open).length;
    while (level.length) {
      const next: NodeData[] = [];
      for (const node of level) for (const part of this.parts(node, open)) {
        // A run of equal modules stays closed: its cells show each of them.
        if (part.nodes.length > 1) continue;
        const child = part.nodes[0]!, inner = this.inside(child);
        if (!inner.length) continue;
        const more = this.parts(child, open).length - 1;
        if (count + more > limit) continue;
        open.add(child.id); count += more; next.push(child);
      }
      level = next;
    }
    return open;
  }

  /** The children of a node; consecutive equal modules that are closed are one part. */
  parts(node: NodeData, open: Set<number>): Part[] {
    const parts = this.runs(this.inside(node), open, false);
    return parts.length > MANY_PARTS ? this.runs(this.inside(node), open, true) : parts;
  }

  /** Join equal modules that are closed, also across the same functions if `across`, such as those of a sum. */
  private runs(inside: NodeData[], open: Set<number>, across: boolean): Part[] {
    const parts: Part[] = [], joins = (one: NodeData, other: NodeData): boolean =>
      one.kind === "module" && other.kind === "module" && one.form === other.form && !open.has(one.id) && !open.has(other.id);
    let run: Part | null = null, gap: NodeData[] = [], usual: string | null = null;
    const single = (nodes: NodeData[]): void => nodes.forEach((each) => parts.push({ nodes: [each], between: [] }));
    const flush = (): void => {
      if (run && run.nodes.length >= LEAST_GROUP) parts.push(run);
      else if (run) single([...run.nodes, ...run.between].sort((one, other) => inside.indexOf(one) - inside.indexOf(other)));
      single(gap);
      run = null; gap = []; usual = null;
    };
    for (const child of inside) {
      if (across && run && child.kind === "op") { gap.push(child); continue; }
      const names = gap.map((each) => each.name).join();
      if (run && joins((run as Part).nodes[0]!, child) && (usual === null || usual === names)) {
        (run as Part).nodes.push(child); (run as Part).between.push(...gap);
        usual = names; gap = [];
      } else { flush(); run = { nodes: [child], between: [] }; }
    }
    flush();
    return parts;
  }
}

const canvas = document.createElement("canvas").getContext("2d")!;
function textWidth(text: string, font: string): number { canvas.font = font; return canvas.measureText(text).width; }

export function shortName(name: string): string { return name.slice(name.lastIndexOf(".") + 1); }

/** The name of a module or its tensor relative to the call around it, with the number of the call if that is another one. */
function ownName(node: NodeData, around: NodeData | undefined): string {
  const outer = around?.name ? `${around.name}.` : "";
  const call = (node.call ?? 1) > 1 && node.call !== around?.call ? ` (call ${node.call})` : "";
  return (node.name.startsWith(outer) ? node.name.slice(outer.length) : node.name) + call;
}

function box(id: string, nodes: NodeData[], open: boolean, root: boolean, hasParts: boolean, tree: Tree): Box {
  const first = nodes[0]!, last = nodes[nodes.length - 1]!, around = tree.byId.get(first.parent ?? -1);
  let title = root ? tree.data.title : first.kind === "module" || first.kind === "parameter" || first.kind === "buffer"
    ? ownName(first, around) : first.name || first.kind;
  if (nodes.length > 1) title = `${ownName(first, around)} … ${shortName(last.name)}  ×${nodes.length}`;
  const tensors = first.outputs ?? [];
  const shape = tensors.length ? tensors[0]!.split(" ")[0]! + (tensors.length > 1 ? ` +${tensors.length - 1}` : "") : "";
  const dilations = nodes.map((each) => each.arguments?.find(([name]) => name === "dilation")?.[1].replace(/[()]|,\)/g, "") ?? "1");
  const differ = new Set(dilations).size > 1 ? `dilation ${dilations.slice(0, 3).join(", ")}${nodes.length > 4 ? ", …" : ""}${nodes.length > 3 ? `, ${dilations[nodes.length - 1]}` : ""}` : "";
  const detail = [first.type_name, shape, differ].filter(Boolean).join(" · ");
  const cells = nodes.length > 1 ? Math.ceil(nodes.length / CELLS) : 0;
  // The title is in the middle, so the sign at the right takes its room on both sides.
  const sign = hasParts && nodes.length === 1 ? 2 * SIGN : 0;
  const width = Math.max(textWidth(title, TITLE) + sign, textWidth(detail, "11px sans-serif"),
    Math.min(nodes.length > 1 ? nodes.length : 0, CELLS) * CELL, 30) + 22;
  return { id, nodes, open, children: [], title, detail, width, height: (detail ? 38 : 24) + cells * (CELL + 1) + (cells ? 4 : 0) };
}

/** Return the visible boxes and the edges between them. */
export function view(tree: Tree, open: Set<number>): View {
  const boxes = new Map<string, Box>();
  const owner = new Map<number, string>();
  const claim = (node: NodeData, id: string): void => {
    owner.set(node.id, id);
    for (const each of tree.below(node)) owner.set(each.id, id);
  };
  const build = ({ nodes, between }: Part): Box => {
    const first = nodes[0]!, isRoot = first === tree.root;
    const isOpen = nodes.length === 1 && open.has(first.id) && tree.inside(first).length > 0;
    const made = box(`n${first.id}`, nodes, isOpen, isRoot, !isRoot && tree.inside(first).length > 0, tree);
    boxes.set(made.id, made);
    if (isOpen) { owner.set(first.id, made.id); made.children = tree.parts(first, open).map(build); }
    else for (const node of [...nodes, ...between]) claim(node, made.id);
    return made;
  };
  const root = build({ nodes: [tree.root], between: [] });
  const lines = new Map<string, Line>();
  const order = new Map([...boxes.keys()].map((id, place) => [id, place]));
  for (const [from, to, count, tensor, side = ""] of tree.data.edges) {
    const source = owner.get(from), target = owner.get(to);
    if (source === undefined || target === undefined || source === target) continue;
    const key = `${source}>${target}`;
    const known = lines.get(key);
    if (known) { known.count += count; if (known.side !== side) known.side = ""; }
    else lines.set(key, { source, target, count, tensor, side, back: order.get(source)! > order.get(target)! });
  }
  return { root, boxes, lines: [...lines.values()] };
}

/** Return a graph with the nodes and the edges of two runs, and how the nodes differ. */
export function united(one: GraphData, other: GraphData): { graph: GraphData; changes: Map<number, Change> } {
  const keys = (graph: GraphData): Map<number, string> => {
    const found = new Map<number, string>(), counts = new Map<string, number>();
    for (const node of graph.nodes) {
      const around = node.parent === null ? "" : found.get(node.parent) ?? "";
      const label = node.parent === null ? "" : `${around}\n${node.kind} ${node.name || node.type_name} ${node.call ?? 1}`;
      const number = counts.get(label) ?? 0;
      counts.set(label, number + 1);
      found.set(node.id, number ? `${label} #${number}` : label);
    }
    return found;
  };
  const own = keys(one), theirs = keys(other);
  const byKey = new Map([...own].map(([id, key]) => [key, id])), known = new Set(theirs.values());
  const nodeOf = new Map(other.nodes.map((node) => [theirs.get(node.id)!, node]));
  const changes = new Map<number, Change>(), about = (node: NodeData): string => JSON.stringify([node.type_name, node.arguments, node.outputs, node.parameters]);
  for (const node of one.nodes) {
    const twin = nodeOf.get(own.get(node.id)!);
    if (!known.has(own.get(node.id)!)) changes.set(node.id, "added");
    else if (node.parent !== null && twin && about(twin) !== about(node)) changes.set(node.id, "altered");
  }
  const first = Math.max(...one.nodes.map((node) => node.id)) + 1, mapped = new Map<number, number>();
  const nodes = [...one.nodes];
  let last = 0;  // a node that only the other run has comes after the one before it
  for (const node of other.nodes) {
    const id = byKey.get(theirs.get(node.id)!);
    if (id !== undefined) { mapped.set(node.id, id); last = nodes.findIndex((each) => each.id === id); continue; }
    mapped.set(node.id, first + node.id);
    changes.set(first + node.id, "removed");
    nodes.splice(++last, 0, { ...node, id: first + node.id, parent: mapped.get(node.parent!)!, form: node.form < 0 ? -1 : first + node.form });
  }
  const has = new Set(one.edges.map(([from, to]) => `${from}>${to}`));
  const there = new Set(other.edges.map(([from, to]) => `${mapped.get(from)}>${mapped.get(to)}`));
  const edges: EdgeData[] = one.edges.map(([from, to, count, tensor]) => [from, to, count, tensor, there.has(`${from}>${to}`) ? "" : "added"]);
  for (const [from, to, count, tensor] of other.edges) {
    const [source, target] = [mapped.get(from)!, mapped.get(to)!];
    if (!has.has(`${source}>${target}`)) edges.push([source, target, count, tensor, "removed"]);
  }
  const sites = { ...Object.fromEntries(Object.entries(other.sites).map(([name, id]) => [name, mapped.get(id)!])), ...one.sites };
  return { graph: { ...one, nodes, edges, sites }, changes };
}

let engine: Promise<Graphviz> | null = null;
export function graphviz(): Promise<Graphviz> { return engine ??= Graphviz.load(); }

/** Zeros as wide as a text that the page writes itself. */
function zeros(width: number): string { return "0".repeat(Math.ceil(width / ZERO)); }

/** Place the boxes with Graphviz. No name from the model gets into the document, only numbers and sizes. */
export async function layout(shown: View, sideways = false, shapes = false): Promise<Layout> {
  const quick = shown.lines.length > MANY_LINES ? "nslimit=1 nslimit1=1 mclimit=0.1 splines=line " : "";
  const text: string[] = [
    `digraph g { graph [compound=true ${sideways ? "rankdir=LR " : ""}${quick}nodesep=0.22 ranksep=0.3 margin=0.1]`,
    'node [shape=box fixedsize=true label=""] edge [arrowsize=0.6 label=""]',
  ];
  const write = (each: Box): void => {
    if (each.open && each.children.length) {
      text.push(`subgraph cluster_${each.id} { margin=10 label="${zeros(textWidth(each.title, TITLE) + 2 * SIGN)}" labeljust=l fontsize=14`);
      each.children.forEach(write);
      text.push("}");
    } else text.push(`${each.id} [width=${(each.width / 72).toFixed(3)} height=${(each.height / 72).toFixed(3)}]`);
  };
  if (shown.root.open) shown.root.children.forEach(write); else write(shown.root);
  shown.lines.forEach((each, place) => {
    const source = anchor(shown, each.source, true), target = anchor(shown, each.target, false);
    if (source && target && source !== target) {
      // Zeros take the room of the label, which the page writes.
      const label = shapes ? ` label="${"0".repeat(shapeOf(each).length + 2)}" fontsize=14` : "";
      text.push(each.back ? `${target} -> ${source} [dir=back id="e${place}"${label}]` : `${source} -> ${target} [id="e${place}"${label}]`);
    }
  });
  text.push("}");
  const out = JSON.parse((await graphviz()).layout(text.join("\n"), "json", "dot")) as {
    bb: string; objects?: { name: string; pos?: string; width?: string; height?: string; bb?: string }[];
    edges?: { id: string; pos: string; lp?: string }[];
  };
  const [, , right, top] = out.bb.split(",").map(Number) as [number, number, number, number];
  const places = new Map<string, Placed>();
  for (const each of out.objects ?? []) {
    if (each.bb && each.name.startsWith("cluster_")) {
      const [x1, y1, x2, y2] = each.bb.split(",").map(Number) as [number, number, number, number];
      places.set(each.name.slice(8), { x: x1, y: top - y2, width: x2 - x1, height: y2 - y1 });
    } else if (each.pos) {
      const [x, y] = each.pos.split(",").map(Number) as [number, number];
      const width = Number(each.width) * 72, height = Number(each.height) * 72;
      places.set(each.name, { x: x - width / 2, y: top - y - height / 2, width, height });
    }
  }
  const paths = (out.edges ?? []).map((each) => {
    const line = shown.lines[Number(each.id.slice(1))]!;
    const [x, y] = (each.lp ?? "").split(",").map(Number) as [number, number], written = shapes && each.lp ? shapeOf(line) : "";
    return { line, path: spline(each.pos, top), label: written ? { text: written, x, y: top - y } : null };
  });
  return { width: right, height: top, places, paths };
}

/** The shape of the tensor of an edge, without its dtype. */
function shapeOf(line: Line): string { return line.tensor.split(" ")[0]! + (line.count > 1 ? ` ×${line.count}` : ""); }

/** An edge of an open box ends at one of its contents. */
function anchor(shown: View, id: string, last: boolean): string | null {
  let found = shown.boxes.get(id);
  while (found?.open && found.children.length) found = found.children[last ? found.children.length - 1 : 0];
  return found ? found.id : null;
}

function spline(text: string, top: number): string {
  let start = "", end = "";
  const points: [number, number][] = [];
  const point = (each: string): [number, number] => {
    const [x, y] = each.split(",").map(Number) as [number, number];
    return [x, top - y];
  };
  for (const part of text.split(" ")) {
    if (part.startsWith("s,")) start = part.slice(2);
    else if (part.startsWith("e,")) end = part.slice(2);
    else points.push(point(part));
  }
  const pair = ([x, y]: [number, number]): string => `${x.toFixed(1)} ${y.toFixed(1)}`;
  let path = `M${pair(start ? point(start) : points[0]!)}${start ? `L${pair(points[0]!)}` : ""}`;
  for (let at = 1; at + 2 < points.length; at += 3) path += `C${pair(points[at]!)} ${pair(points[at + 1]!)} ${pair(points[at + 2]!)}`;
  return path + (end ? `L${pair(point(end))}` : "");
}
