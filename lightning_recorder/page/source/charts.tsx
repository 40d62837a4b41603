/** Charts: lines over steps, small trends, histograms over steps, and the strip of all layers. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { format, FOUND, isShare, NOT_FINITE, NOT_RECORDED, Recorder, Scale } from "./model";

export interface Curve { label: string; steps: number[]; values: number[]; color: string; dashed?: boolean }

export const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
/** The same, on a dark page. */
const LIGHTER: Record<string, string> = { "#0072b2": "#56b4e9", "#d55e00": "#ff9457", "#009e73": "#35d0a0", "#cc79a7": "#e9a5c8", "#e69f00": "#ffc857", "#56b4e9": "#b9e0ff" };
const DARK = matchMedia("(prefers-color-scheme: dark)");

/** Returns the color that a color has in the theme of the page; it may end with an opacity. */
function useTheme(): (color: string) => string {
  const [dark, setDark] = useState(DARK.matches);
  useEffect(() => {
    const update = (): void => setDark(DARK.matches);
    DARK.addEventListener("change", update);
    return () => DARK.removeEventListener("change", update);
  }, []);
  return (color) => dark ? (LIGHTER[color.slice(0, 7)] ?? color.slice(0, 7)) + color.slice(7) : color;
}

export function save(name: string, type: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name.replace(/[^\w.-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function quoted(text: string): string {
  // A name that begins like a formula must stay text in a spreadsheet.
  return `"${(/^[=+\-@]/.test(text) ? "'" : "") + text.replace(/"/g, '""')}"`;
}

export function saveCsv(title: string, curves: Curve[]): void {
  const rows = curves.flatMap((curve) => curve.steps.map((step, at) => `${quoted(curve.label)},${step},${curve.values[at]}`));
  save(`${title}.csv`, "text/csv", ["series,step,value", ...rows].join("\n"));
}

export function saveSvg(title: string, curves: Curve[]): void {
  const all = curves.flatMap((each) => each.values).filter(Number.isFinite), steps = curves.flatMap((each) => each.steps);
  const [low, high] = [Math.min(...all), Math.max(...all)], [left, right] = [Math.min(...steps), Math.max(...steps)];
  const x = (step: number): number => 60 + 520 * (step - left) / (right - left || 1);
  const y = (value: number): number => 180 - 150 * (value - low) / (high - low || 1);
  const escape = (text: string): string => text.replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);
  const paths = curves.map((curve) => {
    const points = curve.steps.map((step, at) => [step, curve.values[at]!] as const).filter((each) => Number.isFinite(each[1]));
    const path = points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    return `<path d="${path}" fill="none" stroke="${curve.color}" stroke-width="1.5"/>`;
  });
  const label = (at: number, up: number, anchor: string, text: string): string =>
    `<text x="${at}" y="${up}" text-anchor="${anchor}" font-size="12" font-family="sans-serif">${escape(text)}</text>`;
  save(`${title}.svg`, "image/svg+xml", `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 210">${paths.join("")}`
    + label(55, 184, "end", format(low)) + label(55, 34, "end", format(high)) + label(60, 200, "start", `step ${left}`)
    + label(580, 200, "end", String(right)) + label(320, 18, "middle", title) + "</svg>");
}

/** The ends of the axis of values: 0 and 1 for shares, 0 for a constant count, close to the value of another constant, or null for those of the data. */
function ends(values: number[], share: boolean, count: boolean): [number, number] | null {
  const finite = values.filter(Number.isFinite), low = Math.min(...finite), high = Math.max(...finite);
  if (share && low >= 0 && high <= 1) return [0, 1];
  if (count && low === high && low >= 0) return [0, low * 1.25 || 1];
  const around = Math.abs(low) * 0.05 || 1;
  return low === high ? [low - around, low + around] : null;
}

// A step is a whole number.
const STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat();

/** The ends of the axis of steps if there is one: like any other axis, it ends with the last step. */
function onlyStep(step: number): [number, number] { return step > 0 ? [0, step] : [step, step + 1]; }

/** The marks of the axis of steps: multiples of a number, and the last step. */
function stepMarks(low: number, high: number, by: number): number[] {
  const first = Math.ceil(low / by), count = Math.max(0, Math.floor((high - 0.6 * by) / by) - first + 1);
  const marks = Array.from({ length: count }, (_, at) => (first + at) * by);
  return Number.isInteger(high) ? [...marks, high] : marks;
}

const TICK = 15;  // pixels between two labels of an axis of values

/** The labels of an axis of values: at least two, unless the axis is a few pixels high, as many as do not touch. */
function ticks(low: number, high: number, height: number, log: boolean): number[] {
  const [from, to] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  // The largest of 1, 2, 5, 10, … of which two fit into the axis.
  const wide = (to - from) / 2, power = 10 ** Math.floor(Math.log10(wide));
  const unit = log ? 1 : power * ([5, 2, 1].find((each) => each * power <= wide) ?? 1);
  const first = Math.ceil(from / unit - 1e-9), last = Math.floor(to / unit + 1e-9);
  const by = Math.max(1, Math.min(last - first, Math.ceil(TICK / (height * unit / (to - from)))));
  // Through its text, since a product such as 3 * 0.1 is not exact.
  return Array.from({ length: Math.floor((last - first) / by) + 1 }, (_, at) => Number(log ? `1e${first + at * by}` : ((first + at * by) * unit).toPrecision(12)));
}

/** Lines over steps, with a mark at the chosen step, and at those where the watch has acted. A click chooses a step. */
export function Lines(props: {
  title: string; curves: Curve[]; step: number; height: number; onStep?: (step: number) => void; share?: boolean; linear?: boolean; acted?: number[];
}) {
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const chosen = useRef(props.step), inTheme = useTheme();
  const key = JSON.stringify([props.title, props.curves.map((each) => [each.label, each.steps.length, each.values[each.values.length - 1]]), props.acted]);
  useEffect(() => {
    const element = holder.current!;
    const tables = props.curves.map((each) => [each.steps, each.values] as uPlot.AlignedData);
    const steps = new Set(props.curves.flatMap((each) => each.steps));
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[]];
    const values = props.curves.flatMap((each) => each.values), fixed = ends(values, props.share === true, /count/.test(props.title));
    const finite = values.filter((each) => Number.isFinite(each) && each !== 0);
    const log = !fixed && !props.linear && (finite.length > 0 && finite.every((each) => each > 0) && Math.max(...finite) / Math.min(...finite) > 50);
    const color = getComputedStyle(element).color;
    const axis = { stroke: color, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884", width: 1 }, font: "11px sans-serif" };
    const made = new uPlot({
      width: element.clientWidth || 300, height: props.height, legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false, ...(steps.size === 1 ? { range: onlyStep([...steps][0]!) } : {}) }, y: fixed ? { range: fixed } : log ? { distr: 3 } : {} },
      axes: [{ ...axis, size: 26, incrs: STEPS, splits: (_, __, low, high, by) => stepMarks(low, high, by), space: (_, __, ___, high) => Math.max(50, 24 + 6.5 * high.toLocaleString("en").length), values: (_, found) => { element.dataset.steps = found.join(" "); return found.map((each) => each.toLocaleString("en")); } }, { ...axis, size: 68, splits: (self, _, low, high) => fixed ? [low, (low + high) / 2, high] : ticks(low, high, self.bbox.height / devicePixelRatio, log), filter: (_, found) => found, values: (_, found) => { element.dataset.values = found.join(" "); return new Set(found.map(format)).size < found.length ? found.map(String) : found.map(format); } }],
      series: [{}, ...props.curves.map((each) => ({
        label: each.label, stroke: inTheme(each.color), width: 1.5, spanGaps: true, ...(each.dashed ? { dash: [5, 4] } : {}),
        points: { show: each.steps.length < 2 },
      }))],
      hooks: {
        draw: [(self) => {
          element.dataset.axis = `${self.scales.y!.min} ${self.scales.y!.max}`;
          self.ctx.save(); self.ctx.fillStyle = NOT_FINITE; self.ctx.globalAlpha = 0.4;
          for (const each of props.curves) each.values.forEach((value, place) => {
            if (!Number.isFinite(value)) self.ctx.fillRect(self.valToPos(each.steps[place]!, "x", true) - 1.5, self.bbox.top, 3, self.bbox.height);
          });
          self.ctx.globalAlpha = 1; self.ctx.fillStyle = FOUND;
          for (const step of props.acted ?? []) self.ctx.fillRect(self.valToPos(step, "x", true) - 1, self.bbox.top, 2, self.bbox.height);
          self.ctx.restore();
          const at = self.valToPos(chosen.current, "x", true);
          if (at < self.bbox.left || at > self.bbox.left + self.bbox.width) return;
          self.ctx.save(); self.ctx.strokeStyle = "#888"; self.ctx.setLineDash([3, 3]); self.ctx.beginPath();
          self.ctx.moveTo(at, self.bbox.top); self.ctx.lineTo(at, self.bbox.top + self.bbox.height); self.ctx.stroke(); self.ctx.restore();
        }],
      },
    }, log ? [data[0], ...data.slice(1).map((each) => Array.from(each as number[], (value) => value > 0 ? value : null))] as uPlot.AlignedData : data, element);
    made.over.addEventListener("click", () => {
      const index = made.cursor.idx;
      if (index !== null && index !== undefined) props.onStep?.(made.data[0]![index]!);
    });
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: props.height }));
    watch.observe(element);
    return () => { watch.disconnect(); made.destroy(); };
  }, [key, props.height, inTheme(COLORS[0]!)]);
  useEffect(() => { chosen.current = props.step; plot.current?.redraw(false); }, [props.step]);
  const last = props.curves.map((each) => `${each.label} ${format(each.values[each.values.length - 1] ?? NaN)}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>
        <span>{props.title}</span>
        <span class="legend">{props.curves.length > 1 && props.curves.filter((each) => each.label).map((each) => (
          <span><i style={{ background: inTheme(each.color) }} />{each.label}</span>))}
          {props.acted && props.acted.length > 0 && <span><i style={{ background: FOUND }} />the watch acted</span>}</span>
        <span class="save">
          <button type="button" onClick={() => saveSvg(props.title, props.curves)} aria-label={`save ${props.title} as SVG`}>SVG</button>
          <button type="button" onClick={() => saveCsv(props.title, props.curves)} aria-label={`save ${props.title} as CSV`}>CSV</button>
        </span>
      </figcaption>
      <div ref={holder} role="img" aria-label={`${props.title} over steps; last: ${last}${props.acted?.length ? `; the watch acted at ${props.acted.join(", ")}` : ""}`} />
    </figure>
  );
}

/** A trend without axes. */
export function Spark(props: { steps: number[]; values: number[]; width: number; height: number }) {
  const finite = props.values.filter(Number.isFinite);
  if (!props.values.length) return null;
  const low = Math.min(...finite), high = Math.max(...finite), first = props.steps[0]!, last = props.steps[props.steps.length - 1]!;
  const x = (step: number): number => 2 + (props.width - 4) * (step - first) / (last - first || 1);
  const y = (value: number): number => high > low ? props.height - 3 - (props.height - 6) * (value - low) / (high - low) : props.height / 2;
  let path = "", pen = "M";
  props.values.forEach((value, at) => {
    if (Number.isFinite(value)) { path += `${pen}${x(props.steps[at]!).toFixed(1)} ${y(value).toFixed(1)}`; pen = "L"; } else pen = "M";
  });
  const bad = props.values.flatMap((value, at) => Number.isFinite(value) ? [] : [x(props.steps[at]!)]);
  return (
    <svg class="spark" width={props.width} height={props.height} role="img"
      aria-label={`from ${format(props.values[0]!)} to ${format(props.values[props.values.length - 1]!)}`}>
      <path d={path} fill="none" stroke="currentColor" stroke-width="1.5" />
      {bad.map((at) => <rect x={at - 1} y={0} width={2} height={props.height} fill={NOT_FINITE} />)}
    </svg>
  );
}

/** The histogram of one tensor over steps: one column a record, one row a power of two. */
export function Histogram(props: { recorder: Recorder; column: number; step: number; onStep: (step: number) => void }) {
  const holder = useRef<HTMLCanvasElement>(null);
  const found = props.recorder.histogram(props.column);
  const width = 330, height = 130;
  useEffect(() => {
    const element = holder.current;
    if (!element || !found) return;
    const context = element.getContext("2d")!;
    context.clearRect(0, 0, width, height);
    const cellWidth = width / found.steps.length, cellHeight = height / found.rows;
    const scale = new Scale([0, 1]);
    found.steps.forEach((_, at) => {
      const row = found.counts.subarray(at * found.rows, (at + 1) * found.rows);
      const most = Math.max(...row) || 1;
      row.forEach((count, place) => {
        if (!count) return;
        context.fillStyle = scale.at(Math.sqrt(count / most));
        context.fillRect(at * cellWidth, height - (place + 1) * cellHeight, Math.ceil(cellWidth), Math.ceil(cellHeight));
      });
    });
  }, [found?.counts, props.column]);
  if (!found) return null;
  if (found.first === 0 && found.rows === 1) {
    // Row 0 also holds what is too small for a normal number.
    const zero = ["min", "max"].every((each) => props.recorder.statistics.includes(each) && props.recorder.history(each, props.column).every((value) => value === 0 || Number.isNaN(value)));
    return <p class="none">{zero ? "All values are 0 in every record." : `All values are 0 or closer to 0 than ${format(2 ** -126)}.`}</p>;
  }
  // Row n holds the n-th octave above the least one, and row 0 what is smaller.
  const edge = (row: number): number => Math.sign(row) * 2 ** (found.least + Math.abs(row) - 1 - 127);
  const highest = found.first + found.rows - 1, top = highest >= 0 ? edge(highest + 1) : edge(highest);
  const bottom = found.first <= 0 ? edge(found.first - 1) : edge(found.first);
  const steps = found.steps;
  return (
    <figure class="chart">
      <figcaption><span>values over steps (powers of two)</span></figcaption>
      <div class="histogram">
        <div class="ends"><span>{format(top)}</span>
          {found.first < 0 && highest > 0 && <span class="zero" style={{ top: `${(highest + 0.5) / found.rows * 100}%` }}>0</span>}<span>{format(bottom)}</span></div>
        <canvas ref={holder} width={width} height={height} role="img"
          aria-label={`values between ${format(bottom)} and ${format(top)}`}
          onClick={(event) => props.onStep(steps[Math.min(steps.length - 1, Math.floor(event.offsetX / event.currentTarget.clientWidth * steps.length))]!)} />
      </div>
      <div class="ends steps"><span>step {steps[0]}</span><span>{steps[steps.length - 1]}</span></div>
    </figure>
  );
}

/** A statistic with a value for each channel, head or expert: one row each, one column a record. */
export function Channels(props: { statistic: string; steps: number[]; values: Float32Array; step: number; onStep: (step: number) => void }) {
  const { statistic, steps, values } = props;
  const holder = useRef<HTMLCanvasElement>(null);
  const [tip, setTip] = useState("");
  const count = values.length / steps.length, scale = useMemo(() => new Scale(values), [values]);
  useEffect(() => {
    const context = holder.current?.getContext("2d");
    if (!context) return;  // a few channels are lines
    const image = context.createImageData(steps.length, count), pixels = new Uint32Array(image.data.buffer), color = scale.pixels();
    for (let at = 0; at < steps.length; at++) for (let row = 0; row < count; row++) pixels[row * steps.length + at] = color(values[at * count + row]!, false);
    context.putImageData(image, 0, 0);
  }, [values]);
  const curves = Array.from({ length: Math.min(count, 6) }, (_, row): Curve => ({ label: String(row), steps, values: steps.map((_, at) => values[at * count + row]!), color: COLORS[row]! }));
  if (count <= 6 && steps.length > 1) return <Lines title={`${statistic}, each of ${count}`} curves={curves} step={props.step} height={84} onStep={props.onStep} share={isShare(statistic)} />;
  return (
    <figure class="chart">
      <figcaption><span>{statistic}, each of {count}</span><small>{tip || scale.range}</small></figcaption>
      <canvas ref={holder} class="channels" style={{ height: `${Math.min(160, Math.max(40, count * 6))}px` }} width={steps.length} height={count} role="img"
        aria-label={`${statistic} of ${count} channels: ${scale.range}`}
        onMouseMove={(event) => {
          const area = event.currentTarget, at = Math.min(steps.length - 1, Math.floor(event.offsetX / area.clientWidth * steps.length)), row = Math.min(count - 1, Math.floor(event.offsetY / area.clientHeight * count));
          setTip(`${row}: ${format(values[at * count + row]!)} at step ${steps[at]}`);
        }}
        onMouseLeave={() => setTip("")}
        onClick={(event) => props.onStep(steps[Math.min(steps.length - 1, Math.floor(event.offsetX / event.currentTarget.clientWidth * steps.length))]!)} />
    </figure>
  );
}

/** One bar for each of some modules, in their order; a bar for NaN or ∞ is full and marked. */
export function Bars(props: { names: string[]; values: number[]; chosen: number; label: string; onPick: (name: string) => void }) {
  const { names, values } = props, width = 380, height = 54, each = width / names.length, inTheme = useTheme();
  const finite = values.filter(Number.isFinite), most = Math.max(...finite.map(Math.abs), 0);
  return (
    <figure class="chart">
      <figcaption><span>{props.label}</span><small>up to {format(most)}</small></figcaption>
      <svg class="bars" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={`${props.label}: ${names.map((name, at) => `${name} ${format(values[at]!)}`).join(", ").slice(0, 400)}`}>
        {names.map((name, at) => {
          const bad = !Number.isFinite(values[at]!), tall = bad ? height : Math.max(1.5, (height - 2) * Math.abs(values[at]!) / (most || 1));
          return <rect x={at * each + 0.5} y={height - tall} width={Math.max(1, each - 1)} height={tall} fill={bad ? NOT_FINITE : inTheme(COLORS[at === props.chosen ? 1 : 0]!)} onClick={() => props.onPick(name)}>
            <title>{`${name}: ${format(values[at]!)}`}</title></rect>;
        })}
      </svg>
    </figure>
  );
}

export function Legend(props: { scale: Scale; label: string; hasFindings: boolean; ends?: [string, string] }) {
  const { scale } = props, many = scale.high > scale.low;
  const stops = Array.from({ length: 11 }, (_, at) => scale.at(many ? at / 10 : 0)).join(", ");
  return (
    <span class="scale" role="img" aria-label={`colors of ${props.label}: ${scale.range}`}>
      <span>{props.ends ? props.ends[0] : many ? format(scale.low) : scale.range}<i style={{ background: `linear-gradient(to right, ${stops})` }} />{props.ends ? props.ends[1] : many && format(scale.high)}{scale.kind === "log" && <small> (log)</small>}</span>
      <span><b style={{ background: NOT_FINITE }} /> NaN or ∞</span> <span><b style={{ background: NOT_RECORDED }} /> not recorded</span>
      {props.hasFindings && <span><b style={{ border: `2px solid ${FOUND}` }} /> named by a finding</span>}
    </span>
  );
}
