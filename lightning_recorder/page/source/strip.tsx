/** The strip of all layers over steps, or over heads or experts: one row a tensor, or one row a block if there are many. */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { format, isShare, median, oddness, Parts, Recorder, Scale, shortened, wildcard, type SiteData } from "./model";

export const TALLEST_ROW = 28;
export const AXIS = 18;  // pixels beneath the strip
const LABELED_ROW = 14;  // pixels of a row whose label does not touch the next one
const MOST_ODD = 8;
export const MOST_LABELED = 64;  // rows that all have a label, even if the page becomes longer than the screen
const LEAST_DRAG = 12;  // pixels; a shorter one is a click
const ROOM = 36;  // letters beside the strip
const WIDEST_PART = 48;  // pixels of a head or an expert
const MOST_NUMBERED = 32;  // heads or experts that all have their number beneath the strip
const FARTHEST = 4;  // octaves from the other blocks that have a color
const FARTHEST_SHARE = 0.5;  // the same for a share: 0.0001 is many times 0.000001, and yet both are almost nothing

/** The distance from the other blocks that has the last color. */
function farthest(statistic: string): number { return isShare(statistic) ? FARTHEST_SHARE : FARTHEST; }

/** How much larger a value is than that of the other blocks, in octaves, or as a difference of shares; 0 without others. */
function distance(statistic: string, value: number, usual: number): number {
  if (Number.isNaN(usual) || value === usual) return 0;
  const far = isShare(statistic) ? value - usual : Math.log2(Math.abs(value) / Math.abs(usual)), limit = farthest(statistic);
  return Math.min(limit, Math.max(-limit, far));
}

/** The words at the ends of the scale relative to the other blocks. */
export function relativeEnds(statistic: string): [string, string] {
  return isShare(statistic) ? [`${FARTHEST_SHARE} less`, `${FARTHEST_SHARE} more than the others`] : [`1/${2 ** FARTHEST} ×`, `${2 ** FARTHEST} × the others`];
}

/** The scale of a strip relative to the other blocks. */
export function relativeScale(statistic: string): Scale { return new Scale([-farthest(statistic), farthest(statistic)], "", true); }

/** The tensors that have a row in the strip: those of layers, but only one of the parameters of each module. */
export function stripColumns(recorder: Recorder): number[] {
  return recorder.sites.map((_, at) => at).filter((at) => !recorder.sites[at]!.ofLoss && (recorder.group !== "parameters" || recorder.column(recorder.sites[at]!.module) === at));
}

/** All values of a statistic that have a color, in the strip or in the graph. */
export function shownValues(recorder: Recorder, statistic: string): Float32Array | number[] {
  if (recorder instanceof Parts) return recorder.values(statistic);
  const columns = stripColumns(recorder), found = new Float32Array(recorder.steps.length * columns.length);
  return found.map((_, at) => recorder.shown(statistic, Math.floor(at / columns.length), columns[at % columns.length]!));
}

/** A row: one tensor, or all tensors of a block, of which the one that stands out most gives the color. */
interface Row { name: string; columns: number[]; isGroup: boolean; isOpen: boolean; depth: number }

interface Part { path: string; own: number[]; parts: Map<string, Part>; first: number }

const FEWEST_ROWS = 8;  // a strip with fewer shows more layers, even if their rows are thin

/** The tree of the names of modules, in the order of execution. */
function partsOf(recorder: Recorder, columns: number[]): Part {
  const root: Part = { path: "", own: [], parts: new Map(), first: 0 };
  for (const column of columns) {
    let part = root;
    for (const word of recorder.sites[column]!.module.split(".").filter(Boolean)) {
      let inner = part.parts.get(word);
      if (!inner) part.parts.set(word, inner = { path: part.path ? `${part.path}.${word}` : word, own: [], parts: new Map(), first: column });
      part = inner;
    }
    part.own.push(column);
  }
  return root;
}

function columnsIn(part: Part): number[] { return [...part.own, ...[...part.parts.values()].flatMap(columnsIn)]; }

/** The rows: blocks are opened from the outside in, all alike ones together, as long as there is room, and those that were clicked. */
function rowsOf(recorder: Recorder, columns: number[], room: number, toggled: Set<string>): Row[] {
  const single = (column: number, depth: number): Row => ({ name: recorder.sites[column]!.module, columns: [column], isGroup: false, isOpen: false, depth });
  if (columns.length <= MOST_LABELED) return columns.map((column) => single(column, 0));
  const opened = new Set<Part>();
  const root = partsOf(recorder, columns);
  let level = [root], count = 1;
  while (level.length) {
    const cohorts = new Map<string, Part[]>();
    for (const part of level) if (part.parts.size) cohorts.set(wildcard(part.path), [...cohorts.get(wildcard(part.path)) ?? [], part]);
    const next: Part[] = [];
    for (const cohort of cohorts.values()) {
      const more = cohort.reduce((sum, part) => sum + part.own.length + part.parts.size - 1, 0);
      if (count + more > room && count >= FEWEST_ROWS) continue;
      count += more;
      for (const part of cohort) { opened.add(part); next.push(...part.parts.values()); }
    }
    level = next;
  }
  const rows: Row[] = [];
  const add = (part: Part, depth: number): void => {
    const inside = columnsIn(part);
    if (inside.length === 1) { rows.push(single(inside[0]!, depth)); return; }
    const byClick = toggled.has(part.path) && !opened.has(part);
    if (!opened.has(part)) rows.push({ name: part.path, columns: inside, isGroup: true, isOpen: byClick, depth });
    if (!opened.has(part) && !byClick) return;
    const inner = byClick ? depth + 1 : depth;
    const items: [number, () => void][] = [
      ...part.own.map((column): [number, () => void] => [column, () => rows.push(single(column, inner))]),
      ...[...part.parts.values()].map((each): [number, () => void] => [each.first, () => add(each, inner)]),
    ];
    items.sort((one, other) => one[0] - other[0]).forEach(([, put]) => put());
  };
  add(root, 0);
  return rows;
}

/** The value of each tensor among those at the same place of other blocks, `[steps, sites]`: their median. */
function usualOf(recorder: Recorder, statistic: string, columns: number[]): (at: number, column: number) => number {
  const cohorts = new Map<string, number[]>();
  for (const column of columns) {
    const site = recorder.sites[column]!, key = `${wildcard(site.module)} ${site.path}`;
    cohorts.set(key, [...cohorts.get(key) ?? [], column]);
  }
  const known = new Map<number, Float32Array>();
  for (const cohort of cohorts.values()) {
    if (cohort.length < 3) continue;
    const found = Float32Array.from(recorder.steps, (_, at) => median(cohort.map((column) => recorder.shown(statistic, at, column))));
    for (const column of cohort) known.set(column, found);
  }
  return (at, column) => known.get(column)?.[at] ?? NaN;
}

/** The first number and the length of each row of numbers without a gap, of those within limits: each has one frame. */
function together(numbers: Set<number> | undefined, from: number, until: number): [number, number][] {
  const found: [number, number][] = [];
  for (const each of [...numbers ?? []].filter((one) => one >= from && one < until).sort((one, other) => one - other)) {
    const last = found[found.length - 1];
    if (last && last[0] + last[1] === each) last[1]++; else found.push([each, 1]);
  }
  return found;
}

/** The path of a tensor behind the name of its module, unless it is the only one of its kind. */
function suffix(site: SiteData): string { return ["", "out", "weight"].includes(site.path) ? "" : ` ${site.path}`; }

/** All sites × steps, or × heads or experts, for one statistic, in the order of execution. A click opens the layer, one on the name of a block the block. */
export function Strip(props: {
  recorder: Recorder; statistic: string; scale: Scale; step: number; marked: Set<string>; named: Map<string, Set<number>>; prefix: string; layer: string | null;
  height: number; only: (module: string) => boolean; relative: boolean; onPick: (module: string, step: number) => void;
}) {
  const { recorder, statistic, marked, named, prefix } = props, parts = recorder instanceof Parts ? recorder : null;
  const [cursor, setCursor] = useState<[number, number] | null>(null);  // the row and the record that the keys have reached
  const holder = useRef<HTMLCanvasElement>(null), hint = useRef<HTMLSpanElement>(null);
  const [tip, setTip] = useState<{ x: number; y: number; text: string } | null>(null);
  const [toggled, setToggled] = useState<Set<string>>(new Set());
  const [span, setSpan] = useState<[number, number] | null>(null);  // the first and the last record that are shown
  const drag = useRef<{ x: number; place: number } | null>(null), dragged = useRef(false);
  // The tooltip is at the right of the pointer if it fits there, or else at the left.
  useLayoutEffect(() => {
    const element = hint.current;
    if (!tip || !element) return;
    const width = element.offsetWidth, room = element.closest(".strip")!.getBoundingClientRect().right - holder.current!.getBoundingClientRect().left;
    const fits = tip.x + 12 + width <= room;
    element.style.left = `${fits ? tip.x + 12 : tip.x - 8 - width}px`;
  }, [tip]);
  const all = useMemo(() => stripColumns(recorder), [recorder]);
  const columns = useMemo(() => all.filter((column) => props.only(recorder.sites[column]!.module)), [all, props.only]);
  const room = Math.floor((props.height - AXIS) / LABELED_ROW);
  const rows = useMemo(() => rowsOf(recorder, columns, room, toggled), [recorder, columns, room, toggled]);
  const usual = useMemo(() => rows.some((each) => each.isGroup) || props.relative ? usualOf(recorder, statistic, all) : () => NaN, [recorder, statistic, all, props.relative, rows]);
  const shown = (at: number, column: number): number => {
    const value = recorder.shown(statistic, at, column);
    return props.relative && Number.isFinite(value) ? distance(statistic, value, usual(at, column)) : value;
  };
  const scale = useMemo(() => props.relative ? relativeScale(statistic) : props.scale, [props.relative, props.scale, statistic]);
  /** The tensor of a row that stands out most in a record. */
  const worst = (at: number, row: Row): number => {
    if (row.columns.length === 1) return row.columns[0]!;
    if (recorder.group === "costs" && recorder.column(row.name) >= 0) return recorder.column(row.name);  // it has all costs inside of it
    let found = row.columns[0]!, most = -1;
    const whole = median(row.columns.map((column) => shown(at, column)));
    for (const column of row.columns) {
      const value = shown(at, column);
      if (Number.isNaN(value) && !recorder.seen(at, column, statistic)) continue;
      const beside = props.relative ? 0 : usual(at, column);
      const odd = oddness(value, Number.isNaN(beside) ? whole : beside, scale);
      if (odd > most) { most = odd; found = column; }
    }
    return found;
  };
  const least = rows.length <= MOST_LABELED || rows.length < columns.length ? LABELED_ROW : 1;
  const rowHeight = Math.max(least, Math.min(TALLEST_ROW, (props.height - AXIS) / Math.max(1, rows.length)));
  const height = Math.max(rowHeight * rows.length, 20);
  const from = span ? Math.max(0, Math.min(span[0], recorder.steps.length - 1)) : 0;
  const steps = span ? recorder.steps.slice(from, span[1] + 1) : recorder.steps;
  useEffect(() => {
    if (!rows.length) return;
    const element = holder.current!;
    const context = element.getContext("2d")!;
    const image = context.createImageData(steps.length, rows.length);
    const pixels = new Uint32Array(image.data.buffer), color = scale.pixels();
    rows.forEach((row, place) => {
      for (let at = 0; at < steps.length; at++) {
        const column = worst(from + at, row), value = shown(from + at, column);
        pixels[place * steps.length + at] = color(value, Number.isFinite(value) || recorder.seen(from + at, column, statistic));
      }
    });
    context.putImageData(image, 0, 0);
  }, [recorder, statistic, rows, scale, steps.length, from]);
  const labels: { y: number; text: string; kind: string; row: Row }[] = [];
  const free = (y: number): boolean => labels.every((each) => Math.abs(each.y - y) >= LABELED_ROW - 0.1);
  // The function that computes the scores has the same name in all layers, unless a module calls several.
  const short = rows.map((row) => row.name.replace(/\.[^.]*$/, "")), isAlone = (name: string): boolean => short.indexOf(name) === short.lastIndexOf(name);
  const inner = (name: string): string => { const found = name.replace(/\.[^.]*$/, ""); return parts && isAlone(found) ? found : name; };
  const label = (row: Row, module: (name: string) => string): string => {
    if (row.isGroup) return `${row.isOpen ? "▾" : "▸"} ${module(row.name)} (${row.columns.length})`;
    const site = recorder.sites[row.columns[0]!]!;
    return (module(inner(site.module)) || "(model)") + (parts ? "" : suffix(site));
  };
  const fits = rows.every((row) => label(row, (each) => each).length <= ROOM);
  const name = (row: Row): string => label(row, (each) => fits ? each : shortened(each, prefix, row.isGroup ? ROOM - 6 : ROOM));
  const has = (row: Row, test: (module: string) => boolean): boolean => (!row.isGroup || !row.isOpen) && row.columns.some((column) => test(recorder.sites[column]!.module));
  const add = (place: number, kind: string): void => {
    const y = Math.max(LABELED_ROW / 2, Math.min(height - LABELED_ROW / 2, (place + 0.5) * rowHeight));
    if (free(y)) labels.push({ y, text: name(rows[place]!), kind, row: rows[place]! });
  };
  rows.forEach((row, place) => { if (has(row, (module) => module === props.layer)) add(place, "chosen"); });
  rows.forEach((row, place) => { if (has(row, (module) => marked.has(module))) add(place, "sick"); });
  // If not all labels fit, the rows that differ most from the others have theirs.
  const last = recorder.rowAt(props.step), ends = rows.map((row) => shown(last, worst(last, row))), middle = median(ends);
  const odd = ends.map((value, place) => [Number.isNaN(value) ? 0 : oddness(value, middle, scale), place] as const).filter(([far]) => far > 0.2).sort((one, other) => other[0] - one[0]);
  odd.slice(0, MOST_ODD).forEach(([, place]) => add(place, ""));
  if (rows.length) [0, rows.length - 1].forEach((place) => add(place, ""));
  rows.forEach((_, place) => add(place, ""));
  const at = (event: MouseEvent): [number, number] => {
    const area = holder.current!.getBoundingClientRect();
    const place = Math.min(steps.length - 1, Math.max(0, Math.floor((event.clientX - area.left) / area.width * steps.length)));
    return [from + place, worst(from + place, rows[Math.min(rows.length - 1, Math.max(0, Math.floor((event.clientY - area.top) / area.height * rows.length)))]!)];
  };
  const toggle = (path: string): void => setToggled((now) => {
    const next = new Set(now);
    if (!next.delete(path)) next.add(path);
    return next;
  });
  const about = (place: number, column: number): string => {
    const beside = usual(place, column), site = recorder.sites[column]!;
    const value = recorder.value(statistic, place, column), shown = Number.isNaN(value) && !recorder.seen(place, column, statistic) ? "not recorded" : format(value);
    return `${parts ? `${parts.part} ${place} of ${site.module}` : site.module + suffix(site)}: ${statistic} ${shown}${Number.isNaN(beside) ? "" : ` (${format(beside)} in other blocks)`} at step ${parts ? parts.step : recorder.steps[place]}`
      + (named.get(site.module)?.has(place) ? ", named by a finding" : "");
  };
  const chosen = parts ? -1 : recorder.rowAt(props.step);
  const marks = parts && steps.length <= MOST_NUMBERED ? steps.map((_, at) => at) : [...new Set([0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * (steps.length - 1))))];
  const width = parts ? { maxWidth: `${WIDEST_PART * steps.length}px` } : {};
  const pick = (place: number, column: number): void => props.onPick(recorder.sites[column]!.module, parts ? props.step : recorder.steps[place]!);
  /** The arrows lead to a cell, whose text is read aloud, and Enter opens its layer. */
  const go = (event: KeyboardEvent): void => {
    const now = cursor ?? [0, Math.max(0, chosen - from)], by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter") pick(from + now[1], worst(from + now[1], rows[now[0]]!));
    if (!by) return;
    event.preventDefault(); event.stopPropagation();
    const next = (at: number, count: number): number => Math.min(count - 1, Math.max(0, now[at]! + (cursor ? by[at]! : 0)));
    const row = next(0, rows.length), place = next(1, steps.length), area = holder.current!;
    setCursor([row, place]);
    setTip({ x: (place + 0.5) / steps.length * area.clientWidth, y: (row + 1) * rowHeight, text: about(from + place, worst(from + place, rows[row]!)) });
  };
  const cell = (row: number, place: number, count = 1): Record<string, string> => ({ left: `${(place - from) / steps.length * 100}%`, width: `${count / steps.length * 100}%`, top: `${row * rowHeight}px`, height: `${rowHeight}px` });
  if (!rows.length) return <p class="none">No layer matches.</p>;
  return (<>
    <div class="strip">
      <div class="names" style={{ height: `${height}px` }}>
        {labels.map((each) => (
          <button type="button" class={each.kind} style={{ top: `${each.y - 8}px`, paddingRight: `${each.row.depth * 10}px` }} title={each.row.name || "(model)"} {...(each.row.isGroup ? { "aria-expanded": each.row.isOpen } : {})}
            onClick={() => each.row.isGroup ? toggle(each.row.name) : props.onPick(each.row.name, props.step)}>{each.text}</button>))}
      </div>
      <div class="cells" style={{ height: `${height}px`, ...width }} onMouseLeave={() => setTip(null)}
        role="application" tabIndex={0} aria-label={`${statistic} of each layer: the arrows lead to a cell, Enter opens its layer`} onKeyDown={go} onBlur={() => { setCursor(null); setTip(null); }}
        onMouseMove={(event) => {
          const [place, column] = at(event);
          const area = event.currentTarget.getBoundingClientRect();
          setTip({ x: event.clientX - area.left, y: event.clientY - area.top, text: about(place, column) });
        }}
        onPointerDown={(event) => { drag.current = { x: event.clientX, place: at(event)[0] }; dragged.current = false; }}
        onPointerUp={(event) => {
          const [place] = at(event), start = drag.current;
          drag.current = null;
          if (!start || Math.abs(event.clientX - start.x) < LEAST_DRAG || place === start.place) return;
          dragged.current = true;
          setSpan([Math.min(place, start.place), Math.max(place, start.place)]);
        }}
        onClick={(event) => { if (!dragged.current) { setTip(null); pick(...at(event)); } }}>
        <canvas ref={holder} width={steps.length} height={rows.length} role="img"
          aria-label={`${statistic} of ${columns.length} ${parts ? "layers" : "tensors"} over ${steps.length} ${parts ? `${parts.part}s` : "records"}`} />
        {rows.map((row, place) => row.columns.map((column) => together(named.get(recorder.sites[column]!.module), from, from + steps.length).map(([each, count]) => <i class="named" style={cell(place, each, count)} />)))}
        {cursor && <i class="cursor" style={cell(cursor[0], from + cursor[1])} />}
        {chosen >= from && chosen < from + steps.length && <i class="now" style={{ left: `${(chosen - from + 0.5) / steps.length * 100}%` }} />}
        <span role="status">{tip && <span ref={hint} class="tip" style={{ top: `${tip.y}px` }}>{tip.text}</span>}</span>
      </div>
    </div>
    {span && <button type="button" class="whole" onClick={() => setSpan(null)}>show all {parts ? `${parts.part}s` : "steps"}</button>}
    <div class="steps" style={{ height: `${AXIS}px`, ...width }} aria-hidden="true">
      {parts && <span style={{ right: "100%", paddingRight: "6px" }}>{parts.part}</span>}
      {marks.map((each, at) => <span style={parts ? { left: `${(each + 0.5) / steps.length * 100}%`, transform: "translateX(-50%)" } : at === 0 ? { left: 0 } : at === marks.length - 1 ? { right: 0 } : { left: `${(each + 0.5) / steps.length * 100}%`, transform: "translateX(-50%)" }}>{at || parts ? steps[each] : `step ${steps[each]}`}</span>)}
    </div>
  </>);
}
