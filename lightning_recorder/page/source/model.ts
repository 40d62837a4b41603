/** The data of the page: types of `schema.json`, decoding, and lookups by module and step. */

export interface Finding {
  rule: string; severity: "critical" | "warning" | "note"; module: string; path: string;
  first_step: number; last_step: number; records: number;
  verdict: string; why: string; next: string; usual: string;
  numbers: Record<string, number | string>; others: string[]; consequences: string[];
  trace: { recorder: string; statistic: string; steps: number[]; values: (number | string)[]; module?: string } | null;
  strip: RankStripData | null; parts?: number[];
  measured: string; needs: string[];  // the number beside the usual ones, and the groups of records and other data that the rule reads
}
/** How far each rank is from the others: one column a tensor, one row a rank. */
export interface RankStripData {
  ranks: number[]; names: string[]; kinds: ("parameter" | "gradient" | "buffer" | "state")[];
  parts: number[][]; groups: number[][]; distances: (number | string)[][]; compared: number; step: number;
}
export interface SiteData { module: string; path: string; shape: number[]; dtype: string; ofLoss?: boolean }
export interface HistogramData { first: number; rows: number; least: number; counts: string }
export interface RecorderData {
  label: string; group: string; stage: string; loader: number | null; steps: number[]; records: number; joined: number;
  sites: SiteData[]; statistics: Record<string, string>;
  histograms: { steps: number[]; sites: (HistogramData | null)[] };
  vectors?: { steps: number[]; sites: Record<string, Record<string, string>> };
}
/** All records of one site, which the server sends when its panel opens. */
export interface SiteRecords { format: string; steps: number[]; statistics: Record<string, string> }
export interface NodeData {
  id: number; kind: string; name: string; parent: number | null; form: number;
  type_name?: string; call?: number; parameters?: number; inputs?: string[]; outputs?: string[];
  arguments?: [string, string][]; source?: string; note?: string; duration_ms?: number; flops?: number;
  saved_bytes?: number; bytes?: number; tied?: string[]; failed?: boolean; scope?: string; link?: string;
}
export type EdgeData = [source: number, target: number, count: number, tensor: string, side?: "" | "added" | "removed"];
export interface GraphData {
  title: string; parameters: number; unused: string[]; neverCalled: string[]; nodes: NodeData[]; edges: EdgeData[];
  sites: Record<string, number>;  // the node of each function, by its name in the records
}
export interface CurveData { name: string; steps: number[]; values: string; logged: boolean }
export interface Answer {
  question: string; asks: string; verdict: string; text: string; expected: string;
  numbers: Record<string, number | string>; module: string; line: string;
}
export interface CheckData { steps: number; seconds: number; answers: Answer[] }
export interface RunData {
  name: string; folder: string; healthy: boolean | null; verdict: string; findings: Finding[]; notExamined: string[];
  curves: CurveData[]; recorders: RecorderData[]; graph: GraphData | null; check: CheckData | null;
}
export interface Comparison { same: boolean; sentence: string; step: number | null; module: string }
export interface RunRow {
  name: string; folder: string; healthy: boolean | null; verdict: string; finding: string;
  settings: Record<string, string>; metrics: Record<string, string>;
  strip: { steps: number[]; values: string; statistic: string } | null;
}
export interface PageData {
  format: string; runs: RunData[]; table?: RunRow[]; comparison?: Comparison | null; live?: boolean; version?: string; available?: string[];
}

export const FORMAT = "lightning_recorder.page/1";

function bytesOf(text: string): Uint8Array<ArrayBuffer> {
  const native = (Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array<ArrayBuffer> }).fromBase64;
  if (native) return native.call(Uint8Array, text);
  // A loop, since `Uint8Array.from` with a function takes several times as long.
  const plain = atob(text), bytes = new Uint8Array(plain.length);
  for (let at = 0; at < plain.length; at++) bytes[at] = plain.charCodeAt(at);
  return bytes;
}

export function floats(text: string): Float32Array { return new Float32Array(bytesOf(text).buffer); }

const COUNTS = ["nan_count", "inf_count"];

/** The module that is marked: the one with the values that are shown if it is inside of the module at fault, a block. */
export function layerOf(finding: Finding): string {
  const inner = finding.trace?.module ?? "";
  return finding.module && inner.startsWith(`${finding.module}.`) ? inner : finding.module;
}

/** Numbers that JSON cannot express arrive as words. */
export function toNumber(value: number | string): number {
  if (typeof value === "number") return value;
  return value === "nan" ? NaN : value === "inf" ? Infinity : -Infinity;
}

/** The records of one recorder in one stage. A table holds one row a step and one column a site. */
export class Recorder {
  readonly label: string; readonly group: string; readonly steps: number[]; readonly sites: SiteData[];
  readonly statistics: string[];
  readonly title: string;
  private bad: Uint8Array | null = null;
  private readonly tables = new Map<string, Float32Array>();
  private readonly vectorTables = new Map<string, Float32Array>();
  private readonly columns = new Map<string, number[]>();

  constructor(readonly data: RecorderData) {
    this.label = data.label; this.group = data.group; this.steps = data.steps; this.sites = data.sites;
    this.statistics = Object.keys(data.statistics);
    const loader = data.loader === null ? "" : ` ${data.loader}`;
    this.title = data.stage === "train" ? data.label : `${data.label} (${data.stage}${loader})`;
    data.sites.forEach((site, column) => {
      const known = this.columns.get(site.module);
      if (known) known.push(column); else this.columns.set(site.module, [column]);
    });
  }

  table(statistic: string): Float32Array {
    let found = this.tables.get(statistic);
    if (!found) {
      found = floats(this.data.statistics[statistic] ?? "");
      this.tables.set(statistic, found);
    }
    return found;
  }

  value(statistic: string, row: number, column: number): number {
    return this.table(statistic)[row * this.sites.length + column] ?? NaN;
  }

  /** False if a site is not in a record; one whose values are NaN is in it. Of finite values, a statistic that is not finite was not
   * measured, such as a ratio to a weight of zero. */
  seen(row: number, column: number, statistic = ""): boolean {
    if (this.group === "costs") return !Number.isNaN(this.value(statistic, row, column));
    if (this.statistics.includes("nan_count") && statistic && !Number.isFinite(this.value(statistic, row, column)) && !this.isBad(row, column)) return false;
    const counted = ["count", "nan_count"].find((each) => this.statistics.includes(each));
    return counted === undefined || !Number.isNaN(this.value(counted, row, column));
  }

  /** A value for a color: not finite if the tensor has NaN or infinities, which most statistics leave out. */
  shown(statistic: string, row: number, column: number): number {
    return this.isBad(row, column) && !COUNTS.includes(statistic) ? NaN : this.value(statistic, row, column);
  }

  private isBad(row: number, column: number): boolean {
    if (!this.bad) {
      // The strip asks for every value of a statistic, so the counts are looked at once.
      this.bad = new Uint8Array(this.steps.length * this.sites.length);
      for (const each of COUNTS) if (this.statistics.includes(each)) this.table(each).forEach((count, at) => { if (count > 0) this.bad![at] = 1; });
    }
    return this.bad[row * this.sites.length + column] === 1;
  }

  history(statistic: string, column: number): number[] {
    const table = this.table(statistic), width = this.sites.length;
    return this.steps.map((_, row) => table[row * width + column] ?? NaN);
  }

  /** The records that have a tensor, and its values in them: what was not recorded is no NaN. */
  recorded(statistic: string, column: number): { steps: number[]; values: number[] } {
    const rows = this.steps.map((_, row) => row).filter((row) => this.seen(row, column, statistic));
    return { steps: rows.map((row) => this.steps[row]!), values: rows.map((row) => this.value(statistic, row, column)) };
  }

  /** The columns of a module's tensors: the whole output or the weight first. */
  /** The columns of a module, or of an input, which the model itself has. */
  columnsOf(module: string): number[] {
    return this.columns.get(module) ?? (this.columns.get("") ?? []).filter((each) => this.sites[each]!.path === module);
  }

  /** The column that stands for a module where only one value has room. */
  column(module: string): number {
    const all = this.columnsOf(module);
    return all.find((each) => ["out", "weight"].includes(this.sites[each]!.path)) ?? all[0] ?? -1;
  }

  get modules(): string[] { return [...this.columns.keys()]; }

  /** The row of the last record at or before a step. */
  rowAt(step: number): number {
    let row = 0;
    for (let place = 0; place < this.steps.length; place++) if (this.steps[place]! <= step) row = place;
    return row;
  }

  /** A statistic with a value for each channel, head or expert of a tensor, one row a step. */
  parts(column: number, statistic: string): Float32Array {
    const key = `${column} ${statistic}`, found = this.vectorTables.get(key) ?? floats(this.data.vectors?.sites[column]?.[statistic] ?? "");
    this.vectorTables.set(key, found);
    return found;
  }

  /** The statistics with a value for each channel, head or expert: a table with one row a step. */
  vectors(column: number): { statistic: string; steps: number[]; values: Float32Array }[] {
    const found = this.data.vectors?.sites[column] ?? {};
    return Object.keys(found).map((statistic) => ({ statistic, steps: this.data.vectors!.steps, values: this.parts(column, statistic) }));
  }

  histogram(column: number): { steps: number[]; first: number; rows: number; least: number; counts: Float32Array } | null {
    const found = this.data.histograms.sites[column];
    return found ? { steps: this.data.histograms.steps, ...found, counts: floats(found.counts) } : null;
  }
}

const FIRST = ["update_ratio", "rms", "mean_abs", "std", "mean"];  // the statistic shown first

/** The statistic that is shown first, of one tensor or of all; only parameters themselves have an update ratio. */
export function usual(recorder: Recorder, column?: number): string {
  const preferred = (recorder.group === "parameters" ? FIRST : FIRST.slice(1)).filter((each) => recorder.statistics.includes(each));
  const found = column === undefined ? preferred[0] : preferred.find((each) => recorder.history(each, column).some(Number.isFinite)) ?? preferred[preferred.length - 1];
  return found ?? recorder.statistics[0] ?? "";
}

const PARTS: [prefix: string, part: string, title: string][] = [["attention_", "head", "heads of attention"], ["router_", "expert", "experts of routers"]];

/** The heads of attention or the experts of routers at one step: a recorder with one row a part, instead of a step, and one column a layer. */
export class Parts extends Recorder {
  private readonly at: number;  // the place of the record among those with values for each part

  constructor(readonly all: Recorder, readonly part: string, title: string, readonly layers: number[], private readonly names: string[], step: number) {
    const sites = layers.map((each) => ({ ...all.sites[each]!, ofLoss: false })), kept = all.data.vectors!.steps;
    const parts = Math.max(...layers.map((each) => all.parts(each, names[0]!).length / kept.length));
    super({ ...all.data, label: title, sites, statistics: Object.fromEntries(names.map((each) => [each, ""])), steps: Array.from({ length: parts }, (_, at) => at) });
    this.at = Math.max(0, kept.findLastIndex((each) => each <= step));
  }

  /** The step whose values are shown. */
  get step(): number { return this.all.data.vectors!.steps[this.at]!; }

  override value(statistic: string, row: number, column: number): number {
    const found = this.all.parts(this.layers[column]!, statistic), count = found.length / this.all.data.vectors!.steps.length;
    return row < count ? found[this.at * count + row]! : NaN;
  }

  override shown(statistic: string, row: number, column: number): number { return this.value(statistic, row, column); }

  /** False for what does not apply, such as the share of the padding without any: the first statistic is there nevertheless. */
  override seen(row: number, column: number): boolean {
    return !Number.isFinite(this.value(this.names[0]!, row, column)) && this.names.some((each) => Number.isFinite(this.value(each, row, column)));
  }

  /** The values of all steps, so that the colors of two steps can be compared. */
  values(statistic: string): number[] { return this.layers.flatMap((each) => [...this.all.parts(each, statistic)]); }

  /** The parts that a finding of the run names, by layer; all of a layer if it names none of them. */
  named(findings: Finding[]): Map<string, Set<number>> {
    const found = new Map<string, Set<number>>();
    for (const each of findings) {
      if (each.severity === "note" || !each.trace || !this.statistics.includes(each.trace.statistic)) continue;
      for (const module of each.parts?.length ? [each.module] : [each.module, ...each.others]) {
        found.set(module, new Set([...found.get(module) ?? [], ...each.parts?.length ? each.parts : this.steps]));
      }
    }
    return found;
  }
}

/** Names of runs without the folders that all of them share. */
export function shortNames(names: string[]): string[] {
  if (names.length < 2) return names;
  const parts = names.map((each) => each.split(/[\\/]/));
  const shared = (at: (each: string[]) => string | undefined): boolean => parts.every((each) => each.length > 1 && at(each) === at(parts[0]!));
  while (shared((each) => each[0])) parts.forEach((each) => each.shift());
  while (shared((each) => each[each.length - 1])) parts.forEach((each) => each.pop());
  return parts.map((each) => each.join("/"));
}

/** The same with a letter as in the sentence about the difference. */
export function shortRuns(names: string[]): string[] {
  return names.length < 2 ? names : shortNames(names).map((each, at) => `${String.fromCharCode(65 + at)}: ${each}`);
}

export class Run {
  readonly recorders: Recorder[];
  readonly curves: { name: string; steps: number[]; values: number[]; logged: boolean }[];
  readonly steps: number[];
  readonly byModule = new Map<string, Finding[]>();
  readonly modules: string[];  // those with records, and those of the graph

  constructor(readonly data: RunData, readonly label = data.name) {
    this.recorders = data.recorders.map((each) => new Recorder(each));
    this.curves = data.curves.map((each) => ({ ...each, values: [...floats(each.values)] }));
    this.steps = [...new Set(this.recorders.flatMap((each) => each.steps))].sort((one, other) => one - other);
    this.modules = [...new Set([...this.recorders.flatMap((each) => each.modules), ...(data.graph?.nodes.filter((each) => each.kind === "module").map((each) => each.name) ?? [])])];
    for (const finding of data.findings) {
      for (const module of new Set([finding.module, layerOf(finding), ...finding.others])) {
        const known = this.byModule.get(module);
        if (known) known.push(finding); else this.byModule.set(module, [finding]);
      }
    }
  }

  /** What shows the quantity that failed in the first finding that has one: that of its curve, or the usual statistic of the group that its
   * rule reads, if that group has its layer. Otherwise, the usual statistic of the activations. */
  quantity(findings: Finding[]): { recorder: string; statistic: string } | null {
    const whole = this.recorders.find((each) => each.group === "activations") ?? this.recorders[0];
    for (const finding of findings) {
      const own = finding.trace ? this.recorder(finding.trace.recorder) : this.ofGroup(finding);
      const found = finding.trace && finding.rule !== "non-finite" ? this.shows(finding.trace) : own ? { recorder: own.title, statistic: usual(own) } : null;
      if (found) return found;
      // With the usual statistic, NaN and infinities have a color of their own.
      if (finding.rule === "non-finite") break;
    }
    return whole ? { recorder: whole.title, statistic: usual(whole) } : null;
  }

  private ofGroup(finding: Finding): Recorder | undefined {
    const has = (module: string): boolean => module === finding.module || (finding.module !== "" && module.startsWith(`${finding.module}.`));
    if (!finding.module && !finding.path) return undefined;
    return this.recorders.find((each) => finding.needs[0] === each.group && each.data.stage === "train" && each.modules.some(has));
  }

  /** The recorder that shows the statistic of a trace, if there is one. */
  shows(trace: NonNullable<Finding["trace"]>): { recorder: string; statistic: string } | null {
    const recorder = this.recorder(trace.recorder);
    const found = [recorder, ...this.parts(0).filter((each) => each.all === recorder)].find((each) => each?.statistics.includes(trace.statistic));
    return found ? { recorder: found.title, statistic: trace.statistic } : null;
  }

  /** The heads of attention and the experts of routers at a step. */
  parts(step: number): Parts[] {
    return this.recorders.flatMap((all) => PARTS.flatMap(([prefix, part, title]) => {
      const names = (column: number): string[] => Object.keys(all.data.vectors?.sites[column] ?? {}).filter((each) => each.startsWith(prefix));
      const layers = all.sites.map((_, column) => column).filter((column) => names(column).length > 0);
      return layers.length ? [new Parts(all, part, title, layers, names(layers[0]!), step)] : [];
    }));
  }

  recorder(label: string): Recorder | undefined {
    return this.recorders.find((each) => each.title === label) ?? this.recorders.find((each) => each.label === label);
  }
}

/** Decode the data: gzip in base64, as in the file, or plain JSON, as from the server. */
export async function decode<Data extends { format: string } = PageData>(text: string): Promise<Data> {
  const stream = new Blob([bytesOf(text.trim())]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = JSON.parse(await new Response(stream).text()) as Data;
  if (data.format !== FORMAT) throw new Error(`this page reads ${FORMAT}, not ${data.format}`);
  return data;
}

/** A number with three or four significant digits, as short as possible. */
export function format(value: number): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en").replace("-", "−");
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−").replace("e−", "e-").replace("e+", "e");
}

/** True for statistics between 0 and 1. */
export function isShare(statistic: string): boolean { return statistic.endsWith("fraction"); }

const VIRIDIS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const DIVERGING = ["#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b"];
export const NOT_FINITE = "#d6008b";
export const NOT_RECORDED = "#a0a4aa";  // far from all colors of both scales, for the color-blind, too
export const FOUND = "#e3000f";  // the frame of a layer that a finding names, as in the pictures

const LEAST_SHARE = 1e-8;  // of the largest value; smaller ones have the first color of a scale of powers

/** Maps values to colors; every value of the run counts, so that colors of two steps can be compared. */
export class Scale {
  readonly kind: "linear" | "log" | "diverging";
  readonly low: number; readonly high: number;

  /** With `isEven`, equal differences of values that may be negative have equal differences of color. */
  constructor(values: Float32Array | number[], statistic = "", private readonly isEven = false) {
    let least = Infinity, most = -Infinity, smallest = Infinity;
    for (const each of values) {
      if (!Number.isFinite(each)) continue;
      if (each < least) least = each;
      if (each > most) most = each;
    }
    // Values that are almost zero beside the largest one must not take the whole range.
    for (const each of values) if (each >= most * LEAST_SHARE && each > 0 && each < smallest) smallest = each;
    if (most < least) least = most = NaN;
    if (least < 0) {
      this.kind = "diverging";
      this.high = Math.max(-least, most) || 1; this.low = -this.high;
    } else if (isShare(statistic)) {
      this.kind = "linear"; this.low = 0; this.high = 1;
    } else if (most / smallest > 50) {
      this.kind = "log";
      this.high = most; this.low = smallest;
    } else {
      this.kind = "linear"; this.low = least; this.high = most;
    }
  }

  private get soft(): number { return this.isEven ? 1e3 : 1e-4; }

  /** The values of the first and the last color, in words. */
  get range(): string {
    if (Number.isNaN(this.low)) return "no finite values";
    return this.low === this.high ? format(this.low) : `${format(this.low)} to ${format(this.high)}`;
  }

  /** The place of a value between 0 and 1. */
  place(value: number): number {
    if (this.kind === "log") {
      const share = Math.log(Math.max(value, this.low) / this.low) / Math.log(this.high / this.low);
      return Math.min(1, Math.max(0, share));
    }
    if (this.kind === "diverging") {
      const limit = this.high, soft = limit * this.soft;
      const size = Math.log1p(Math.abs(value) / soft) / Math.log1p(limit / soft);
      return 0.5 + Math.sign(value) * size / 2;
    }
    return this.high > this.low ? Math.min(1, Math.max(0, (value - this.low) / (this.high - this.low))) : 0;
  }

  value(place: number): number {
    if (this.kind === "log") return this.low * Math.pow(this.high / this.low, place);
    if (this.kind === "diverging") {
      const soft = this.high * this.soft, size = Math.abs(place - 0.5) * 2;
      return Math.sign(place - 0.5) * soft * Math.expm1(size * Math.log1p(this.high / soft));
    }
    return this.low + place * (this.high - this.low);
  }

  color(value: number): string {
    return Number.isNaN(value) || !Number.isFinite(value) ? NOT_FINITE : this.at(this.place(value));
  }

  at(place: number): string {
    const table = this.kind === "diverging" ? DIVERGING : VIRIDIS;
    const spot = place * (table.length - 1), lower = Math.min(table.length - 2, Math.floor(spot));
    return mixed(table[lower]!, table[lower + 1]!, spot - lower);
  }

  /** The colors as numbers for the pixels of an image. */
  pixels(): (value: number, seen: boolean) => number {
    const table = Uint32Array.from({ length: 512 }, (_, at) => pixel(this.at(at / 511)));
    const missing = pixel(NOT_RECORDED), bad = pixel(NOT_FINITE);
    return (value, seen) => Number.isFinite(value) ? table[Math.round(this.place(value) * 511)]! : seen ? bad : missing;
  }
}

function pixel(color: string): number {
  const [red, green, blue] = channels(color);
  return (0xff000000 | blue! << 16 | green! << 8 | red!) >>> 0;
}

function channels(color: string): number[] { return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)); }

function mixed(one: string, other: string, share: number): string {
  const [a, b] = [channels(one), channels(other)];
  return "#" + a.map((each, at) => Math.round(each + (b[at]! - each) * share).toString(16).padStart(2, "0")).join("");
}

/** Black or white, whichever is easier to read on a color. */
export function inkOn(color: string): string {
  const [red, green, blue] = channels(color).map((each) => {
    const part = each / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red! + 0.7152 * green! + 0.0722 * blue! > 0.18 ? "#111" : "#fff";
}

/** The dotted parts that all names share at the start; what follows never begins with a number, which says nothing alone. */
export function sharedPrefix(names: string[]): string {
  const parts = names.filter(Boolean).map((each) => each.split("."));
  const first = parts[0];
  if (!first || parts.length < 2) return "";
  let count = 0;
  while (count < first.length - 1 && parts.every((each) => each.length > count + 1 && each[count] === first[count])) count++;
  while (count && parts.some((each) => /^\d+$/.test(each[count]!))) count--;
  return count ? first.slice(0, count).join(".") + "." : "";
}

/** A name of a module without the numbers of blocks: `blocks.3.norm1` and `block3.norm1` keep the number of their norm. */
export function wildcard(name: string): string {
  const words = name.split("."), first = words.findIndex((word) => /\d/.test(word));
  return words.map((word, at) => at === first || /^\d+$/.test(word) ? word.replace(/\d+/g, "#") : word).join(".");
}

export function median(values: number[]): number {
  const finite = values.filter(Number.isFinite).sort((one, other) => one - other);
  return finite.length ? finite[Math.floor(finite.length / 2)]! : NaN;
}

/** How far a value is from the usual one, for choosing the worst: NaN and infinities first. */
export function oddness(value: number, usual: number, scale: Scale): number {
  if (!Number.isFinite(value)) return Infinity;
  return Math.abs(scale.place(value) - scale.place(usual));
}

/** Names without what all of them share; long ones keep their end and the first letters of what is before. */
export function shortened(name: string, prefix: string, room: number): string {
  const short = name.startsWith(prefix) ? name.slice(prefix.length) : name;
  const parts = short.split(".");
  for (let at = 0; at < parts.length - 1 && parts.join(".").length > room; at++) {
    if (!/^\d+$/.test(parts[at]!)) parts[at] = parts[at]!.slice(0, 1);
  }
  return parts.join(".");
}
