/** The graph: modules that open and close, painted with a statistic at the chosen step. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { save } from "./charts";
import { CELL, CELLS, layout, shortName, Tree, view, type Box, type Change, type Layout, type View } from "./graph";
import { format, inkOn, NOT_FINITE, NOT_RECORDED, type NodeData } from "./model";

const SVG = "http://www.w3.org/2000/svg";
const LARGE = 300;  // nodes
const KINDS: Record<string, string> = {
  op: "#eef1f5", input: "#fff4d6", output: "#fff4d6", parameter: "#e9e2f5", buffer: "#e9e2f5", tensor: "#eee",
  backward: "#fbe3d6", optimizer: "#dff0df", module: "#fff",
};

export interface Paint { color: (module: string) => string; value: (module: string) => number; odd: (module: string) => number }

function make(parent: Element, name: string, attributes: Record<string, string | number>, text?: string): SVGElement {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

export function GraphView(props: {
  tree: Tree; paint: Paint | null; layer: string | null; query: string; sick: Set<string>; unused: string[];
  changed: Map<number, Change>; onPick: (module: string) => void; sideways?: boolean;
}) {
  const { tree } = props;
  const holder = useRef<SVGSVGElement>(null);
  // A large model opens with few boxes, since nobody can read all of them.
  const first = props.sideways ? 16 : tree.data.nodes.length > LARGE ? 24 : 60;
  const [open, setOpen] = useState<Set<number>>(() => tree.initial(first));
  const [drawn, setDrawn] = useState<{ shown: View; placed: Layout } | null>(null);
  const [at, setAt] = useState({ x: 0, y: 0, zoom: 1 });
  const [focus, setFocus] = useState<string | null>(null);
  const fitted = useRef(at), shownAt = useRef(at);
  shownAt.current = at;
  const anchor = useRef<{ id: string; x: number; y: number } | null>(null);
  const moved = useRef(false);
  const [shapes, setShapes] = useState(false);

  useEffect(() => {
    let current = true;
    const shown = view(tree, open);
    void layout(shown, props.sideways, shapes).then((placed) => {
      if (!current || !holder.current) return;
      setDrawn({ shown, placed });
      const kept = anchor.current && placed.places.get(anchor.current.id);
      if (kept) {
        // The box that was opened stays where it is on the screen.
        setAt((now) => ({ ...now, x: anchor.current!.x - kept.x * now.zoom, y: anchor.current!.y - kept.y * now.zoom }));
      } else fit(placed, shown);
      anchor.current = null;
    });
    return () => { current = false; };
  }, [tree, open, shapes]);

  // Text must be readable, so a large graph shows the part around the first finding, or else its begin.
  const fit = (placed: Layout, shown: View): void => {
    const element = holder.current!, { clientWidth: width, clientHeight: height } = element;
    const zoom = Math.min(1.2, Math.max(1, Math.min((width - 30) / placed.width, (height - 30) / placed.height)));
    const boxes = [...shown.boxes.values()].filter((each) => !each.open && placed.places.has(each.id));
    const bad = boxes.find((each) => each.nodes.some((node) => namesInside(tree, node).some((name) => props.sick.has(name))));
    const place = placed.places.get((bad ?? boxes[0])?.id ?? "");
    const middle = (size: number, room: number, at: number): number => size * zoom < room - 20 ? (room - size * zoom) / 2 : Math.min(15, Math.max(room - 15 - size * zoom, room / 2 - at * zoom));
    setAt(fitted.current = { zoom, x: middle(placed.width, width, place ? place.x + place.width / 2 : 0), y: !props.sideways && placed.height * zoom < height - 20 ? 15 : middle(placed.height, height, bad && place ? place.y : 0) });
  };

  // The room is known only after what is above has its height; a graph that was moved stays.
  useEffect(() => {
    if (!drawn) return;
    const watch = new ResizeObserver(() => { if (holder.current && shownAt.current === fitted.current) fit(drawn.placed, drawn.shown); });
    watch.observe(holder.current!);
    return () => watch.disconnect();
  }, [drawn]);

  const toggle = (box: Box, node: NodeData): void => {
    const place = drawn?.placed.places.get(box.id);
    if (place) anchor.current = { id: `n${node.id}`, x: place.x * at.zoom + at.x, y: place.y * at.zoom + at.y };
    setOpen((now) => {
      const next = new Set(now);
      if (next.has(node.id)) {
        next.delete(node.id);
      } else {
        next.add(node.id);
        // A module with one part tells nothing by itself.
        let inner = tree.inside(node);
        while (inner.length === 1 && tree.inside(inner[0]!).length) { next.add(inner[0]!.id); inner = tree.inside(inner[0]!); }
      }
      return next;
    });
  };

  // The nodes of the SVG are made by hand: repainting three hundred of them must take less than a frame.
  const update = useRef({ paint: (): void => undefined, mark: (): void => undefined });
  const latest = useRef(props);
  latest.current = props;
  useEffect(() => {
    if (!drawn) return;
    const { shown, placed } = drawn;
    const layer = holder.current!.querySelector("g")!;
    layer.replaceChildren();
    const frames = make(layer, "g", {}), edges = make(layer, "g", { class: "edges" }), nodes = make(layer, "g", {});
    for (const { line, path, label } of placed.paths) {
      const target = shown.boxes.get(line.target)!, source = shown.boxes.get(line.source)!;
      const made = make(edges, "path", { d: path, class: `${line.back ? "back" : ""} ${line.side}`, "marker-end": "url(#arrow)" });
      if (label) make(edges, "text", { x: label.x, y: label.y + 4, "text-anchor": "middle" }, label.text);
      made.dataset.source = line.source; made.dataset.target = line.target;
      make(made, "title", {}, `${source.title} → ${target.title}${line.tensor ? `: ${line.tensor}` : ""}${line.count > 1 ? ` ×${line.count}` : ""}`);
    }
    const paints: (() => void)[] = [], marks: ((chosen: NodeData | undefined) => void)[] = [];
    for (const box of shown.boxes.values()) {
      const place = placed.places.get(box.id);
      if (!place) continue;
      const node = box.nodes[0]!, isModule = node.kind === "module";
      const group = make(box.open ? frames : nodes, "g", { class: box.open ? "frame" : `node ${node.kind}`, tabindex: 0, role: "button" });
      group.dataset.id = box.id;
      const rectangle = make(group, "rect", { x: place.x, y: place.y, width: place.width, height: place.height, rx: box.open ? 6 : 4 });
      const title = make(group, "text", { x: box.open ? place.x + 8 : place.x + place.width / 2, y: place.y + (box.open ? 15 : box.detail ? 16 : place.height / 2 + 4), class: "title", "text-anchor": box.open ? "start" : "middle" }, box.title);
      const detail = !box.open && box.detail ? make(group, "text", { x: place.x + place.width / 2, y: place.y + 30, class: "detail", "text-anchor": "middle" }, box.detail) : null;
      const tip = make(group, "title", {});
      const cells = box.nodes.length > 1 ? box.nodes.map((each, order) => {
        const row = Math.floor(order / CELLS), count = Math.min(CELLS, box.nodes.length - row * CELLS);
        const cell = make(group, "rect", {
          x: place.x + place.width / 2 - count * CELL / 2 + (order % CELLS) * CELL, y: place.y + 36 + row * (CELL + 1), width: CELL - 1, height: CELL, class: "cell",
        });
        make(cell, "title", {}, each.name);
        cell.addEventListener("click", (event) => { event.stopPropagation(); if (!moved.current) { latest.current.onPick(each.name); toggle(box, each); } });
        return cell;
      }) : [];
      const names = box.nodes.map((each) => each.name);
      const insides = box.nodes.map((each) => modulesInside(tree, each)), all = insides.flat();
      const within = box.nodes.map((each) => namesInside(tree, each));
      const ids = box.nodes.map((each) => [each.id, ...[...tree.below(each)].map((inner) => inner.id)]);
      const put = (element: Element | null, key: string, value: string): void => {
        if (element && element.getAttribute(key) !== value) element.setAttribute(key, value);
      };
      paints.push(() => {
        const { paint } = latest.current;
        let fill = box.open ? "" : KINDS[node.kind] ?? "#fff", worst: string | null = null;
        if (isModule && paint && !box.open) {
          worst = worstOf(all, paint);
          fill = worst === null ? NOT_RECORDED : paint.color(worst);
        }
        cells.forEach((cell, order) => {
          const inner = paint && worstOf(insides[order]!, paint);
          put(cell, "fill", inner ? paint!.color(inner) : NOT_RECORDED);
        });
        if (!box.open) {
          put(rectangle, "fill", fill);
          const ink = inkOn(fill.length === 4 ? "#ffffff" : fill);
          put(title, "fill", ink); put(detail, "fill", ink);
        }
        const number = worst !== null && paint ? `\n${format(paint.value(worst))}${names.includes(worst) ? "" : ` in ${worst}`}` : "";
        const about = `${names.join(", ").slice(0, 300) || tree.data.title}\n${[node.type_name, ...(node.outputs ?? [])].filter(Boolean).join(" ")}${number}`;
        if (tip.textContent !== about) tip.textContent = about;
        if (tree.inside(node).length) put(group, "aria-expanded", String(box.open));
      });
      marks.push((chosen) => {
        const { query, sick, unused, changed } = latest.current;
        within.forEach((inside, order) => cells[order]?.classList.toggle("sick", inside.some((name) => sick.has(name))));
        group.classList.toggle("sick", (box.open ? names : within.flat()).some((name) => sick.has(name)));
        group.classList.toggle("chosen", chosen !== undefined && box.nodes.includes(chosen));
        const own = box.nodes.map((each) => changed.get(each.id)), below = ids.map((inside) => inside.some((id) => changed.has(id)));
        const change = own.every((each) => each === own[0]) && own[0] ? own[0] : !box.open && below.some(Boolean) ? "altered" : "";
        for (const kind of ["added", "removed", "altered"]) group.classList.toggle(kind, kind === change);
        cells.forEach((cell, order) => cell.classList.toggle("altered", below[order]));
        group.classList.toggle("unused", unused.some((name) => names.includes(name)));
        const text = query.toLowerCase();
        group.classList.toggle("found", text !== "" && (names.some((name) => name.toLowerCase().includes(text)) || (node.type_name ?? "").toLowerCase().includes(text)));
      });
      const pick = (): void => { if (isModule || node.kind === "input") latest.current.onPick(tree.nameOf(node)); setFocus(box.id); };
      const change = (): void => { if (tree.inside(node).length && node !== tree.root) { if (box.nodes.length === 1) toggle(box, node); else toggle(box, box.nodes[0]!); } };
      group.addEventListener("click", (event) => { event.stopPropagation(); if (!moved.current) pick(); });
      group.addEventListener("dblclick", (event) => { event.stopPropagation(); change(); });
      group.addEventListener("keydown", (event) => {
        const key = (event as KeyboardEvent).key;
        if (key === "Enter") pick(); else if (key === " ") { event.preventDefault(); change(); }
      });
      if (isModule && box.nodes.length === 1 && tree.inside(node).length && node !== tree.root) {
        const sign = make(group, "g", { class: "sign" });
        const x = place.x + place.width - 9, y = place.y + 9;
        make(sign, "circle", { cx: x, cy: y, r: 7 });
        make(sign, "path", { d: `M${x - 4} ${y}h8${box.open ? "" : `M${x} ${y - 4}v8`}` });
        sign.addEventListener("click", (event) => { event.stopPropagation(); change(); });
      }
    }
    update.current = { paint: () => paints.forEach((each) => each()), mark: () => { const { layer } = latest.current, chosen = layer === null ? undefined : tree.find(layer); marks.forEach((each) => each(chosen)); } };
    update.current.paint();
    update.current.mark();
  }, [drawn]);
  useEffect(() => update.current.paint(), [props.paint]);
  useEffect(() => update.current.mark(), [props.layer, props.query, props.sick, props.changed]);

  // What comes before and after the chosen box.
  useEffect(() => {
    if (!drawn) return;
    const near = new Set<string>();
    if (focus && drawn.shown.boxes.has(focus)) for (const forward of [true, false]) {
      const queue = [focus];
      for (const id of queue) for (const each of drawn.shown.lines) {
        const [from, to] = forward ? [each.source, each.target] : [each.target, each.source];
        if (from === id && !each.back && !queue.includes(to)) queue.push(to);
      }
      queue.forEach((each) => near.add(each));
    }
    holder.current!.classList.toggle("focused", near.size > 0);
    holder.current!.querySelectorAll<SVGElement>(".node").forEach((each) => each.classList.toggle("near", near.has(each.dataset.id!)));
    holder.current!.querySelectorAll<SVGElement>(".edges path").forEach((each) => each.classList.toggle("near", near.has(each.dataset.source!) && near.has(each.dataset.target!)));
  }, [focus, drawn]);

  // A layer chosen elsewhere is opened up to itself and brought into sight, once: it may be closed again.
  const sought = useRef<string | null>(null);
  useEffect(() => { sought.current = props.layer; }, [props.layer]);
  useEffect(() => {
    const node = sought.current === null ? undefined : tree.find(sought.current);
    if (!node) return;
    const hidden = [...tree.above(node)].filter((each) => !open.has(each.id));
    if (hidden.length) { setOpen(new Set([...open, ...hidden.map((each) => each.id)])); return; }
    const box = [...drawn?.shown.boxes.values() ?? []].find((each) => each.nodes.includes(node));
    const place = box && drawn!.placed.places.get(box.id);
    const element = holder.current!;
    if (place) {
      sought.current = null;
      const x = place.x * at.zoom + at.x, y = place.y * at.zoom + at.y;
      if (x < 0 || y < 0 || x > element.clientWidth - 40 || y > element.clientHeight - 30) {
        setAt((now) => ({ ...now, x: element.clientWidth / 2 - (place.x + place.width / 2) * now.zoom, y: element.clientHeight / 2 - place.y * now.zoom }));
      }
    }
  }, [props.layer, drawn]);

  const drag = useRef<{ x: number; y: number } | null>(null);
  const zoomBy = (factor: number, x: number, y: number): void => setAt((now) => {
    const zoom = Math.min(4, Math.max(0.05, now.zoom * factor)), real = zoom / now.zoom;
    return { zoom, x: x - (x - now.x) * real, y: y - (y - now.y) * real };
  });
  const buttons = useMemo(() => [
    ["+", "zoom in", () => zoomBy(1.3, 300, 200)], ["−", "zoom out", () => zoomBy(1 / 1.3, 300, 200)],
    ["fit", "fit: show the whole graph", () => {
      const placed = drawn?.placed, element = holder.current!;
      if (placed) { const zoom = Math.min(1.2, (element.clientWidth - 20) / placed.width, (element.clientHeight - 20) / placed.height); setAt({ zoom, x: (element.clientWidth - placed.width * zoom) / 2, y: 10 }); }
    }],
    ["SVG", "SVG: save the graph", () => { if (drawn) save(`${tree.data.title}.svg`, "image/svg+xml", pictureOf(holder.current!, drawn.placed)); }],
    ["close all", "close all modules", () => setOpen(tree.initial(1))], ["reset", "reset: open the modules that fit", () => setOpen(tree.initial(first))],
    ["shapes", "show the shapes of tensors at the edges", () => setShapes((now) => !now)],
  ] as [string, string, () => void][], [drawn, tree, first]);

  return (
    <div class="graph">
      <div class="tools">{buttons.map(([text, label, action]) => <button type="button" aria-label={label} title={label} onClick={action}>{text}</button>)}</div>
      <svg ref={holder} aria-label={`graph of ${tree.data.title}`}
        onWheel={(event) => {
          event.preventDefault();
          const area = event.currentTarget.getBoundingClientRect();
          if (event.ctrlKey || event.metaKey) zoomBy(Math.exp(-event.deltaY / 300), event.clientX - area.left, event.clientY - area.top);
          else setAt((now) => ({ ...now, x: now.x - event.deltaX, y: now.y - event.deltaY }));
        }}
        onPointerDown={(event) => { drag.current = { x: event.clientX, y: event.clientY }; moved.current = false; }}
        onPointerMove={(event) => {
          if (!drag.current) return;
          const x = event.clientX - drag.current.x, y = event.clientY - drag.current.y;
          if (Math.abs(x) + Math.abs(y) < 4 && !moved.current) return;
          moved.current = true; drag.current = { x: event.clientX, y: event.clientY };
          setAt((now) => ({ ...now, x: now.x + x, y: now.y + y }));
        }}
        onPointerUp={() => { drag.current = null; }} onPointerLeave={() => { drag.current = null; }}
        onClick={() => { if (!moved.current) setFocus(null); }}>
        <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"><path d="M0 0.8L8 4L0 7.2z" /></marker></defs>
        <g transform={`translate(${at.x} ${at.y}) scale(${at.zoom})`} />
      </svg>
    </div>
  );
}

/** The whole graph as a file of its own, with the rules and the colors that the page gives it. */
function pictureOf(shown: SVGSVGElement, placed: Layout): string {
  const copy = shown.cloneNode(true) as SVGSVGElement;
  const [width, height] = [Math.ceil(placed.width + 20), Math.ceil(placed.height + 20)];
  for (const [key, value] of Object.entries({ xmlns: SVG, width, height, viewBox: `-10 -10 ${width} ${height}` })) copy.setAttribute(key, String(value));
  copy.querySelector("g")!.removeAttribute("transform");
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.cssText)
    .filter((text) => /^\.(node|frame|edges|sign|cell|sick|chosen|found|altered|added|removed|unused)|^#arrow|^:root/.test(text));
  const style = document.createElementNS(SVG, "style");
  style.textContent = rules.join("\n").replace(/:root/g, "svg");
  copy.prepend(style);
  return new XMLSerializer().serializeToString(copy);
}

/** The names of a node and all that is inside of it. */
function namesInside(tree: Tree, node: NodeData): string[] { return [node, ...tree.below(node)].map((each) => tree.nameOf(each)); }

function modulesInside(tree: Tree, node: NodeData): string[] {
  return [node, ...tree.below(node)].filter((each) => each.kind === "module").map((each) => each.name);
}

/** The module whose value is farthest from the usual one. */
function worstOf(modules: string[], paint: Paint): string | null {
  let worst: string | null = null, most = -1;
  for (const name of modules) {
    const odd = paint.odd(name);
    if (odd > most) { most = odd; worst = name; }
  }
  return worst;
}

export { shortName, NOT_FINITE };
