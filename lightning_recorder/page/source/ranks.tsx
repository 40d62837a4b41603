/** The strip of a finding about ranks that differ: one row a rank, one column a tensor, and the same in words. */

import { inkOn, NOT_FINITE, Scale, sharedPrefix, shortened, format, toNumber, type RankStripData } from "./model";

const KINDS = { parameter: "parameters", gradient: "gradients", buffer: "buffers", state: "optimizer states" };
const LETTERED = 13;  // pixels of a cell that has room for the name of its group
const LABEL = 12;  // pixels between two labels
const LEFT = 58, TOP = 18, NAMES = 150, WIDTH = 640;  // pixels
const LONGEST = 22;  // letters of a name beneath its column
const MOST_LINES = 6, MOST_NAMES = 4;

/** A, B, … for the groups of ranks with equal values, with the number of the shard if there are several. */
function groupOf(strip: RankStripData, column: number, row: number): string {
  const group = strip.groups[column]![row]!, part = strip.parts[column]!;
  const letter = group < 26 ? String.fromCharCode(65 + group) : `${group + 1}`;
  return part.some((each) => each > 0) ? `${part[row]}${letter}` : letter;
}

/** The ranks with equal values of a tensor, in words. */
function partition(strip: RankStripData, column: number): string {
  const found = new Map<string, number[]>();
  strip.ranks.forEach((rank, row) => {
    if (strip.parts[column]![row]! < 0) return;
    const group = groupOf(strip, column, row);
    found.set(group, [...found.get(group) ?? [], rank]);
  });
  return [...found].sort(([one], [other]) => one < other ? -1 : 1).map(([group, ranks]) => `${group} = ${ranks.length > 1 ? "ranks" : "rank"} ${ranks.slice(0, 8).join(", ")}${ranks.length > 8 ? `, and ${ranks.length - 8} more` : ""}`).slice(0, 8).join("; ") + (found.size > 8 ? `; and ${found.size - 8} more groups` : "");
}

function count(number: number, noun: string): string { return `${number} ${noun}${number === 1 ? "" : "s"}`; }

/** What the colors say, one line for all tensors with the same groups. */
function Words(props: { strip: RankStripData; id: string }) {
  const { strip } = props, lines = new Map<string, number[]>();
  strip.names.forEach((_, column) => {
    if (!strip.groups[column]!.some(Boolean)) return;
    const text = partition(strip, column);
    lines.set(text, [...lines.get(text) ?? [], column]);
  });
  const differing = [...lines.values()].flat().length, hidden = strip.compared - strip.names.length;
  const far = (columns: number[]): number => Math.max(...columns.flatMap((column) => strip.distances[column]!.map(toNumber)));
  return <ul id={props.id}>
    {[...lines].slice(0, MOST_LINES).map(([text, columns]) => <li>
      <b>{columns.slice(0, MOST_NAMES).map((column) => strip.names[column]).join(", ")}{columns.length > MOST_NAMES && ` and ${columns.length - MOST_NAMES} more`}</b>: {text}; {far(columns) ? `up to ${format(far(columns))} × their size apart` : "too little apart to be measured"}</li>)}
    {lines.size > MOST_LINES && <li>{count(lines.size - MOST_LINES, "further grouping")} of the ranks</li>}
    {strip.names.length > differing && <li>{count(strip.names.length - differing, "tensor")} of the strip equal on all ranks</li>}
    {hidden > 0 && <li>{count(hidden, "compared tensor")} without a column</li>}
  </ul>;
}

/** The distance of each rank from the largest group of equal ranks, for each compared tensor. */
export function RankStrip(props: { strip: RankStripData; id: string }) {
  const { strip, id } = props, rows = strip.ranks.length, columns = strip.names.length;
  const wide = Math.max(4, Math.min(28, Math.floor((WIDTH - LEFT) / columns))), high = rows > 32 ? 6 : rows > 16 ? 9 : 18;
  const cells = strip.distances.map((each) => each.map(toNumber));
  const scale = new Scale(cells.flat().filter((each) => each > 0));
  const color = (column: number, row: number): string => cells[column]![row] === Infinity ? NOT_FINITE : scale.color(Math.max(cells[column]![row]!, scale.low || 0));
  const differs = (column: number): boolean => strip.groups[column]!.some(Boolean);
  const prefix = sharedPrefix(strip.names);
  // If not all names fit, those of the tensors that differ have theirs.
  const named = strip.names.map((_, column) => column).sort((one, other) => Number(differs(other)) - Number(differs(one)) || one - other)
    .reduce<number[]>((kept, column) => kept.every((each) => Math.abs(each - column) * wide >= LABEL) ? [...kept, column] : kept, []);
  const sections = strip.kinds.flatMap((kind, column) => kind === strip.kinds[column - 1] ? [] : [{ kind, from: column, to: strip.kinds.lastIndexOf(kind) + 1 }]);
  const bottom = TOP + rows * high;
  return <figure class="ranks">
    <div tabIndex={0} role="region" aria-label="ranks and tensors">
      <svg width={LEFT + columns * wide + 8} height={bottom + NAMES} role="img" aria-label={`distance of ${rows} ranks from the largest group of equal ranks, for ${columns} tensors`} aria-describedby={id}>
        {sections.map((each) => <g>
          <line class="section" x1={LEFT + each.from * wide + 1} x2={LEFT + each.to * wide - 1} y1={TOP - 3} y2={TOP - 3} />
          {(each.to - each.from) * wide > 30 && <text x={LEFT + each.from * wide + 1} y={TOP - 7}>{(each.to - each.from) * wide > 6 * KINDS[each.kind].length ? KINDS[each.kind] : KINDS[each.kind].split(" ").pop()!.slice(0, Math.floor((each.to - each.from) * wide / 6))}</text>}
        </g>)}
        {strip.ranks.map((rank, row) => row % Math.ceil(LABEL / high) === 0 && <text class="rank" x={LEFT - 5} y={TOP + (row + 0.5) * high + 4}>rank {rank}</text>)}
        {strip.names.map((name, column) => strip.ranks.map((rank, row) => {
          if (strip.parts[column]![row]! < 0) return null;
          const isEqual = strip.groups[column]![row] === 0, fill = isEqual ? "" : color(column, row), x = LEFT + column * wide, y = TOP + row * high;
          return <g>
            <rect class={isEqual ? "equal" : ""} x={x + 0.5} y={y + 0.5} width={wide - 1} height={high - 1} {...(fill ? { fill } : {})}>
              <title>{`${name}, rank ${rank}: group ${groupOf(strip, column, row)}${isEqual ? differs(column) ? ", the largest one" : ", equal on all ranks" : `, ${format(cells[column]![row]!)} × its size from group ${groupOf(strip, column, strip.groups[column]!.findIndex((group, at) => group === 0 && strip.parts[column]![at] === strip.parts[column]![row])) }`}`}</title>
            </rect>
            {differs(column) && wide >= LETTERED && high >= LETTERED && <text class="group" x={x + wide / 2} y={y + high / 2 + 4} {...(fill ? { style: { fill: inkOn(fill) } } : {})}>{groupOf(strip, column, row)}</text>}
          </g>;
        }))}
        {named.map((column) => <text class={differs(column) ? "name differs" : "name"} transform={`translate(${LEFT + (column + 0.5) * wide + 4} ${bottom + 5}) rotate(-90)`}>{shortened(strip.names[column]!, prefix, LONGEST)}</text>)}
      </svg>
    </div>
    <figcaption>After step {strip.step}: distance from the largest group of equal ranks, relative to the size of the values: <span class="scale"><b class="equal" /> equal
      {Number.isFinite(scale.low) && <> {format(scale.low)}<i style={{ background: `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map((each) => scale.at(scale.high > scale.low ? each : 0)).join(", ")})` }} />{format(scale.high)}{scale.kind === "log" && " (log)"}</>}
      {cells.flat().includes(Infinity) && <><b style={{ background: NOT_FINITE }} /> NaN or ∞</>}</span>. Letters name groups with equal values.</figcaption>
    <Words strip={strip} id={id} />
  </figure>;
}
