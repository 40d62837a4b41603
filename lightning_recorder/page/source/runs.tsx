/** The table of runs: verdict, settings that differ, last metrics, and a small strip of each. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Legend } from "./charts";
import { floats, Scale, shortNames, type RunRow } from "./model";

const WIDTH = 120, HEIGHT = 40;  // pixels of a strip

/** The layers of a run over steps; all runs have the same scale of colors. */
function SmallStrip(props: { row: RunRow; scale: Scale }) {
  const holder = useRef<HTMLCanvasElement>(null);
  const strip = props.row.strip, columns = strip?.steps.length ?? 0;
  const values = useMemo(() => strip ? floats(strip.values) : new Float32Array(), [strip]);
  const rows = columns ? values.length / columns : 0;
  useEffect(() => {
    const context = holder.current?.getContext("2d");
    if (!context || !rows) return;
    const image = context.createImageData(columns, rows), pixels = new Uint32Array(image.data.buffer), color = props.scale.pixels();
    values.forEach((value, at) => { pixels[at] = color(value, true); });
    context.putImageData(image, 0, 0);
  }, [values, props.scale]);
  if (!strip) return null;
  return <canvas ref={holder} class="small" width={columns} height={rows} style={{ width: `${WIDTH}px`, height: `${HEIGHT}px` }} role="img"
    aria-label={`${strip.statistic} of ${props.row.name} over steps ${strip.steps[0]} to ${strip.steps[columns - 1]}`} />;
}

/** Numbers before words, and numbers by their size. */
function compare(one: string, other: string): number {
  const [a, b] = [Number(one || NaN), Number(other || NaN)];
  if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1;
  return Number.isNaN(a) ? one.localeCompare(other) : a - b;
}

export function RunsView(props: { rows: RunRow[]; onShow: (names: string[]) => void }) {
  const { rows } = props;
  const [chosen, setChosen] = useState<string[]>([]);
  const [order, setOrder] = useState<{ by: string; isDown: boolean }>({ by: "", isDown: false });
  const scale = useMemo(() => {
    // Beside the values of a run that diverged, all others would have one color, so values beyond those of healthy runs have the last one.
    const healthy = rows.filter((each) => each.healthy);
    return new Scale((healthy.length ? healthy : rows).flatMap((each) => each.strip ? [...floats(each.strip.values)] : []));
  }, [rows]);
  const settings = [...new Set(rows.flatMap((each) => Object.keys(each.settings)))], metrics = [...new Set(rows.flatMap((each) => Object.keys(each.metrics)))];
  const sorted = useMemo(() => {
    const read = (row: RunRow): string => order.by === "run" ? row.name : order.by === "verdict" ? row.verdict : row.settings[order.by] ?? row.metrics[order.by] ?? "";
    const found = order.by ? [...rows].sort((one, other) => compare(read(one), read(other))) : rows;
    return order.isDown ? [...found].reverse() : found;
  }, [rows, order]);
  const head = (name: string) => <th aria-sort={order.by === name ? order.isDown ? "descending" : "ascending" : "none"}>
    <button type="button" onClick={() => setOrder({ by: name, isDown: order.by === name && !order.isDown })}>{name}{order.by === name && (order.isDown ? " ↓" : " ↑")}</button></th>;
  const short = useMemo(() => new Map(shortNames(rows.map((each) => each.name)).map((each, at) => [rows[at]!.name, each])), [rows]);
  const statistic = rows.find((each) => each.strip)?.strip?.statistic;
  return (
    <section class="runs" aria-label="runs">
      <div class="bar">
        <button type="button" disabled={chosen.length !== 2} onClick={() => props.onShow(chosen)}>lay two over each other</button>
        {statistic && <Legend scale={scale} label={statistic} hasFindings={false} />}</div>
      <div class="wide"><table>
        <thead><tr><td />{head("run")}{head("verdict")}{settings.map(head)}{metrics.map(head)}{statistic && <th>{statistic}</th>}</tr></thead>
        <tbody>{sorted.map((row) => (
          <tr key={row.name}>
            <td><input type="checkbox" aria-label={`choose ${row.name}`} checked={chosen.includes(row.name)}
              onChange={(event) => setChosen(event.currentTarget.checked ? [...chosen, row.name].slice(-2) : chosen.filter((each) => each !== row.name))} /></td>
            <th><button type="button" class="link" title={row.folder} onClick={() => props.onShow([row.name])}>{short.get(row.name)}</button></th>
            <td class={row.healthy === null ? "" : row.healthy ? "healthy" : "unhealthy"}>{row.healthy === null ? "" : row.healthy ? "✓ " : "⚠ "}{row.verdict}{row.finding && <small>{row.finding}</small>}</td>
            {settings.map((each) => <td>{row.settings[each] ?? ""}</td>)}
            {metrics.map((each) => <td class={row.metrics[each] && !Number.isFinite(Number(row.metrics[each])) ? "bad" : ""}>{row.metrics[each] ?? ""}</td>)}
            {statistic && <td><SmallStrip row={row} scale={scale} /></td>}
          </tr>))}</tbody>
      </table></div>
    </section>
  );
}
