/** The page: the verdict first, then all layers over steps, the graph, and the history of one layer. */

import { render, type ComponentChildren } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { Bars, Channels, COLORS, Histogram, Legend, Lines, Spark, type Curve } from "./charts";
import { graphviz, Tree, united, type Change } from "./graph";
import { GraphView, type Paint } from "./GraphView";
import { CheckLine, CheckView } from "./check";
import { decode, floats, format, isShare, layerOf, median, oddness, Parts, Recorder, Run, Scale, sharedPrefix, shortRuns, toNumber, usual, wildcard, type Finding, type NodeData, type PageData, type SiteRecords } from "./model";
import { RankStrip } from "./ranks";
import { RunsView } from "./runs";
import { AXIS, MOST_LABELED, relativeEnds, relativeScale, shownValues, Strip, stripColumns, TALLEST_ROW } from "./strip";

const COSTS: Record<string, [string, (node: NodeData) => number]> = {
  "time (ms)": ["duration_ms", (node) => node.duration_ms ?? NaN], "FLOPs": ["flops", (node) => node.flops ?? NaN],
  "saved memory (bytes)": ["saved_bytes", (node) => node.saved_bytes ?? NaN], "parameters": ["parameters", (node) => node.parameters ?? NaN],
};
const COST = "cost of a call";

const UNCHANGED: Map<number, Change> = new Map();

const TABS = ["runs", "overview", "graph", "check"] as const;

/** The layer is null if the panel is closed; "" is the model itself. */
interface State { tab: typeof TABS[number]; layer: string | null; step: number; recorder: string; statistic: string; run: number; other: number }

const ONE_MOVE = 1000;  // milliseconds; changes of the step that follow each other faster are one entry of the history

/** The last parts of a folder's path, which tell runs apart. */
function folderOf(run: Run): string {
  const parts = run.data.folder.split(/[\\/]/).filter(Boolean);
  return parts.slice(-2).join("/") || run.data.name;
}

function readHash(): Partial<State> {
  const given = new URLSearchParams(location.hash.slice(1));
  const found: Partial<State> = {};
  // An address without a layer is one of a closed panel.
  if ([...given.keys()].length) found.layer = null;
  if (given.has("tab")) found.tab = TABS.find((each) => each === given.get("tab")) ?? "overview";
  if (given.has("layer")) found.layer = given.get("layer")!;
  if (given.has("step") && Number.isFinite(Number(given.get("step")))) found.step = Number(given.get("step"));
  if (given.has("show")) {
    const [recorder, statistic] = given.get("show")!.split("/");
    found.recorder = recorder!; if (statistic) found.statistic = statistic;
  }
  return found;
}

/** The step that shows a finding: the first one of NaN, since later everything is NaN, or else the last one. */
function stepOf(finding: Finding): number { return finding.rule === "non-finite" ? finding.first_step : finding.last_step; }

function App(props: { data: PageData }) {
  const [data, setData] = useState(props.data);
  const runs = useMemo(() => {
    const labels = shortRuns(data.runs.map((each) => each.name));
    return data.runs.map((each, at) => new Run(each, labels[at]));
  }, [data]);
  const first = runs[0]!;
  const [state, setState] = useState<State>(() => {
    const bad = first.data.findings.filter((each) => each.severity !== "note"), worst = bad[0];
    const shown = first.quantity(bad) ?? { recorder: COST, statistic: "" };
    return { tab: props.data.table?.length ? "runs" : "overview", other: props.data.runs.length === 2 ? 1 : -1, layer: null, step: worst?.rule === "non-finite" ? stepOf(worst) : first.steps[first.steps.length - 1] ?? 0, ...shown, run: 0, ...readHash() };
  });
  const [query, setQuery] = useState(""), [missed, setMissed] = useState(false);
  const [playing, setPlaying] = useState(false);
  const search = useRef<HTMLInputElement>(null);
  const run = runs[Math.min(state.run, runs.length - 1)]!;
  const other = runs.length === 2 ? runs[(state.run + 1) % 2]! : state.other === state.run ? null : runs[state.other] ?? null;
  const table = data.table ?? [];
  const tab = (state.tab === "graph" && !run.data.graph) || (state.tab === "check" && !run.data.check) || (state.tab === "runs" && !table.length) ? "overview" : state.tab;
  const change = useCallback((part: Partial<State>) => setState((now) => ({ ...now, ...part })), []);

  useEffect(() => { document.title = `${folderOf(run)}: ${run.data.verdict}`; }, [run]);
  const shownBefore = useRef<State & { at: number } | null>(null);
  // A layout effect runs before the page is painted, so that no key and no address is missed.
  useLayoutEffect(() => {
    const parts = new URLSearchParams({ tab: state.tab, step: String(state.step), show: `${state.recorder}/${state.statistic}` });
    if (state.layer !== null) parts.set("layer", state.layer);
    const before = shownBefore.current, now = performance.now();
    // Back leads to the tab, layer or step before; a slider that moves through many steps is one entry.
    const isMove = before !== null && before.tab === state.tab && before.layer === state.layer && before.recorder === state.recorder && now - before.at < ONE_MOVE;
    shownBefore.current = { ...state, at: now };
    if (location.hash === `#${parts}`) return;
    try {
      if (before === null || isMove || playing) history.replaceState(null, "", `#${parts}`); else history.pushState(null, "", `#${parts}`);
    } catch { /* a frame inside a notebook has no address */ }
  }, [state]);
  useLayoutEffect(() => {
    const follow = (): void => change(readHash());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);

  // The server answers 204 while there is nothing new.
  const [wanted, setWanted] = useState<string[]>([]);
  useEffect(() => {
    if (!props.data.live) return;
    let version = wanted.length ? "" : data.version ?? "", ended = false;
    const ask = async (): Promise<void> => {
      try {
        const address = new URL("data", location.href);
        for (const name of wanted) address.searchParams.append("run", name);
        address.searchParams.set("after", version);
        const answer = await fetch(address);
        if (answer.status === 200) {
          const next = await decode(await answer.text());
          version = next.version ?? "";
          const newest = (each: PageData): number => Math.max(0, ...each.runs.flatMap((one) => one.recorders.flatMap((part) => part.steps)));
          setData((now) => {
            setState((place) => place.step >= newest(now) ? { ...place, step: newest(next) } : place);
            return next;
          });
        }
      } catch { /* the server has ended; the page keeps what it has */ }
      if (!ended) timer = setTimeout(ask, 2000);
    };
    let timer = setTimeout(ask, wanted.length ? 0 : 2000);
    return () => { ended = true; clearTimeout(timer); };
  }, [wanted]);

  const show = (names: string[]): void => {
    const [at, beside] = names.map((each) => data.runs.findIndex((one) => one.name === each));
    if (props.data.live) setWanted(names);
    change({ tab: "overview", layer: null, ...(props.data.live ? {} : { run: at!, other: beside ?? -1, step: runs[at!]!.steps[runs[at!]!.steps.length - 1] ?? 0 }) });
  };
  useEffect(() => {
    if (!playing) return;
    let frame = 0, last = 0;
    const go = (now: number): void => {
      if (now - last > 80) {
        last = now;
        setState((place) => {
          const steps = run.steps, at = steps.findIndex((each) => each > place.step);
          return { ...place, step: at < 0 ? steps[0] ?? 0 : steps[at]! };
        });
      }
      frame = requestAnimationFrame(go);
    };
    frame = requestAnimationFrame(go);
    return () => cancelAnimationFrame(frame);
  }, [playing, run]);

  const move = (by: number): void => setState((now) => {
    const steps = run.steps, at = Math.max(0, steps.findIndex((each) => each >= now.step));
    return { ...now, step: steps[Math.min(steps.length - 1, Math.max(0, at + by))] ?? 0 };
  });
  useLayoutEffect(() => {
    const press = (event: KeyboardEvent): void => {
      const target = event.target as HTMLElement;
      if (target.isContentEditable || ["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) { if (event.key === "Escape") target.blur(); return; }
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/") { event.preventDefault(); search.current?.focus(); }
      else if (event.key === "Escape") change({ layer: null });
      else if (event.key === "ArrowLeft") move(-1);
      else if (event.key === "ArrowRight") move(1);
      else if (event.key === "g") change({ tab: "graph" });
      else if (event.key === "o") change({ tab: "overview" });
      else if (event.key === "c" && run.data.check) change({ tab: "check" });
      else if (event.key === "p") setPlaying((now) => !now);
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [run]);

  const parts = useMemo(() => run.parts(state.step), [run, state.step]);
  // A node of the graph has one color, so that it has no place for heads and experts.
  const recorder = (tab === "graph" ? undefined : parts.find((each) => each.title === state.recorder)) ?? run.recorder(state.recorder) ?? (parts.some((each) => each.title === state.recorder) ? run.recorders[0] : undefined);
  const statistic = recorder && !recorder.statistics.includes(state.statistic) ? usual(recorder) : state.statistic;
  const both = useMemo(() => run.data.graph && other?.data.graph ? united(run.data.graph, other.data.graph) : null, [run, other]);
  const tree = useMemo(() => run.data.graph ? new Tree(both?.graph ?? run.data.graph) : null, [run, both]);
  const scale = useMemo(() => recorder ? new Scale(shownValues(recorder, statistic), statistic) : null, [recorder instanceof Parts ? recorder.all : recorder, recorder?.title, statistic]);
  const prefix = useMemo(() => sharedPrefix(run.recorders.flatMap((each) => each.modules)), [run]);
  const sick = useMemo(() => new Set(run.data.findings.filter((each) => each.severity !== "note").map((each) => layerOf(each) || nameOf(placeOf(each, tree), tree)).filter(Boolean)), [run, tree]);
  // A module without tensors of its own is marked at those inside it.
  const marked = useMemo(() => {
    const names = recorder?.modules ?? [], known = new Set(names);
    return new Set([...sick].flatMap((each) => known.has(each) ? [each] : names.filter((name) => name.startsWith(`${each}.`))));
  }, [recorder, sick]);
  const costs = useMemo(() => tree ? Object.keys(COSTS).filter((name) => tree.data.nodes.some((each) => each.kind === "module" && COSTS[name]![1](each) > 0)) : [], [tree]);
  const cost = costs.includes(state.statistic) ? state.statistic : costs[0] ?? "";
  const painted = useMemo((): { paint: Paint; scale: Scale } | null => {
    if (recorder instanceof Parts) return null;
    if (recorder && scale) {
      const row = recorder.rowAt(state.step);
      const values = new Map(recorder.modules.filter((module) => recorder.seen(row, recorder.column(module), statistic)).map((module) => [module, recorder.value(statistic, row, recorder.column(module))]));
      const middle = median([...values.values()]);
      const value = (module: string): number => values.get(module) ?? NaN;
      const shown = (module: string): number => recorder.shown(statistic, row, recorder.column(module));
      return { scale, paint: { value, color: (module) => scale.color(shown(module)), odd: (module) => values.has(module) ? oddness(shown(module), middle, scale) : -1 } };
    }
    if (!tree || !cost) return null;
    const get = COSTS[cost]![1];
    const values = new Map(tree.data.nodes.filter((each) => each.kind === "module" && each.parent !== null && !tree.inside(each).some((inner) => inner.kind === "module")).map((each) => [each.name, get(each)]));
    const whole = new Scale([...values.values()].filter((each) => each > 0));
    const value = (module: string): number => values.get(module) ?? NaN;
    return { scale: whole, paint: { value, color: (module) => whole.color(value(module)), odd: (module) => values.get(module) ?? -1 } };
  }, [recorder, scale, statistic, state.step, tree, cost]);
  const changed = both?.changes ?? UNCHANGED;
  // Hundreds of elements that never change must not be compared for each step of the slider.
  const choices = useMemo(() => <datalist id="modules">{[...new Set(run.recorders.flatMap((each) => each.modules))].map((each) => <option value={each} />)}</datalist>, [run]);

  const chooser = (
    <span class="choose">
      <label>paint <select aria-label="recorder" value={recorder ? recorder.title : COST} onChange={(event) => {
        const chosen = [...run.recorders, ...parts].find((each) => each.title === event.currentTarget.value);
        change({ recorder: event.currentTarget.value, statistic: chosen ? (chosen.statistics.includes(statistic) ? statistic : usual(chosen)) : costs[0] ?? "" });
      }}>
        {[...run.recorders, ...(tab === "graph" ? [] : parts)].map((each) => <option>{each.title}</option>)}
        {costs.length > 0 && state.tab === "graph" && <option>{COST}</option>}
      </select></label>
      <label><select aria-label="statistic" value={recorder ? statistic : cost} onChange={(event) => change({ statistic: event.currentTarget.value })}>
        {(recorder ? recorder.statistics : costs).map((each) => <option>{each}</option>)}
      </select></label>
    </span>
  );
  const colors = painted?.scale ?? scale;
  const legend = colors && <Legend scale={colors} label={recorder ? statistic : cost} hasFindings={sick.size > 0} />;
  const graph = (sideways: boolean): ComponentChildren => <GraphView key={`${run.data.name} ${other?.data.name ?? ""}`} tree={tree!} paint={painted?.paint ?? null}
    layer={state.layer} query={query} sick={sick} unused={run.data.graph?.unused ?? []} changed={changed} sideways={sideways} onPick={(layer) => change({ layer })} />;
  return (
    <div class="page">
      <header>
        {tab === "runs" ? <h1 class="verdict">{table.length} runs, {table.filter((each) => each.healthy).length} healthy</h1>
        : <h1 class={`verdict ${run.data.healthy === null ? "" : run.data.healthy ? "healthy" : "unhealthy"}`}>{run.data.healthy === null ? "" : run.data.healthy ? "✓ " : "⚠ "}{run.data.verdict}</h1>}
        <span class="run" title={run.data.folder}>
          {(data.available?.length ?? 0) > 1 ? <>
            <select aria-label="run" value={run.data.name} onChange={(event) => setWanted([event.currentTarget.value, ...(other ? [other.data.name] : [])])}>{data.available!.map((each) => <option>{each}</option>)}</select>
            <select aria-label="compare with" value={other?.data.name ?? ""} onChange={(event) => setWanted([run.data.name, event.currentTarget.value].filter(Boolean))}>
              <option value="">compare with …</option>{data.available!.filter((each) => each !== run.data.name).map((each) => <option>{each}</option>)}
            </select></>
          : runs.length > 1 ? <select aria-label="run" value={state.run} onChange={(event) => change({ run: Number(event.currentTarget.value) })}>{runs.map((each, at) => <option value={at}>{each.label}</option>)}</select> : folderOf(run)}
        </span>
        <span role="status">{wanted.length > 0 && wanted.join() !== data.runs.map((each) => each.name).join() && "loading …"}</span>
        <CopyLink live={data.live === true} />
        <nav role="tablist">
          {table.length > 0 && <button type="button" role="tab" aria-selected={tab === "runs"} onClick={() => change({ tab: "runs" })}>Runs</button>}
          <button type="button" role="tab" aria-selected={tab === "overview"} onClick={() => change({ tab: "overview" })}>Overview</button>
          <button type="button" role="tab" aria-selected={tab === "graph"} disabled={!tree} onClick={() => change({ tab: "graph" })}>Graph</button>
          {run.data.check && <button type="button" role="tab" aria-selected={tab === "check"} onClick={() => change({ tab: "check" })}>Check</button>}
        </nav>
        <span class="search"><input ref={search} type="search" placeholder="search layers ( / )" aria-label="search layers" list="modules" value={query}
          onInput={(event) => { setQuery(event.currentTarget.value); setMissed(false); }}
          onKeyDown={(event) => {
            if (event.key !== "Enter") return;
            const names = run.modules, text = query.toLowerCase();
            const match = names.find((each) => each.toLowerCase() === text) ?? names.find((each) => each.toLowerCase().includes(text));
            if (match) change({ layer: match }); else setMissed(true);
          }} /><span role="status">{missed && "no module matches"}</span></span>
        {choices}
        <span class="slider">
          <button type="button" aria-label={playing ? "pause" : "play the steps"} onClick={() => setPlaying(!playing)}>{playing ? "❚❚" : "▶"}</button>
          <input type="range" aria-label="step" min={0} max={Math.max(0, run.steps.length - 1)} value={Math.max(0, nearest(run.steps, state.step))}
            onInput={(event) => change({ step: run.steps[Number(event.currentTarget.value)] ?? 0 })} />
          <output>step {state.step}</output>
        </span>
      </header>
      <div class="body">
        <main>
          {tab === "runs" && <RunsView rows={table} onShow={show} />}
          {tab === "check" && run.data.check && <CheckView check={run.data.check} known={(module) => run.modules.includes(module)} onPick={(layer) => change({ layer })} />}
          {tab === "overview" && <Overview run={run} other={other} data={data} state={{ ...state, statistic }} change={change} prefix={prefix} sick={marked} recorder={recorder ?? run.recorders[0]} scale={scale} chooser={chooser} legend={legend} tree={tree} graph={tree && graph(true)} differing={tree ? differing(tree, changed) : []} />}
          {tab === "graph" && tree && (
            <section class="graphs" aria-label="graph">
              <div class="bar">{chooser}{legend}{changed.size > 0 && <span class="key">
                <b class="altered" /> differs <b class="added" /> only in {run.label} <b class="removed" /> only in {other!.label}</span>}</div>
              {graph(false)}
            </section>)}
        </main>
        {state.layer !== null && tab !== "runs" && <Layer run={run} other={other} module={state.layer} step={state.step} tree={tree} live={data.live === true} change={change} />}
      </div>
    </div>
  );
}

function nearest(steps: number[], step: number): number {
  let found = 0;
  steps.forEach((each, at) => { if (each <= step) found = at; });
  return found;
}

/** The outermost nodes that differ between two graphs. */
function differing(tree: Tree, changed: Map<number, Change>): NodeData[] {
  return tree.data.nodes.filter((node) => node.kind === "module" && changed.has(node.id) && !(node.parent !== null && changed.get(node.parent) === changed.get(node.id) && changed.get(node.id) !== "altered"));
}

const FINDINGS = "named by a finding";
const LEAST_GRAPH = 170;  // pixels
const MOST_NEVER = 8;  // modules in the list of those that were never called

function Overview(props: {
  run: Run; other: Run | null; data: PageData; state: State; change: (part: Partial<State>) => void; prefix: string; sick: Set<string>;
  recorder: Recorder | undefined; scale: Scale | null; chooser: ComponentChildren; legend: ComponentChildren; tree: Tree | null; graph: ComponentChildren; differing: NodeData[];
}) {
  const { run, other, state, change, recorder } = props;
  const names = [...new Set(run.curves.filter((each) => !each.logged).map((each) => each.name))];
  const holder = useRef<HTMLDivElement>(null), above = useRef<HTMLDivElement>(null);
  const [wanted, setWanted] = useState(""), [byUser, setRelative] = useState<boolean | null>(null), [smoothing, setSmoothing] = useState(0);
  const logged = <Logged run={run} other={other} smoothing={smoothing} step={state.step} onStep={(step) => change({ step })} />;
  const kinds = useMemo(() => new Map((props.tree?.data.nodes ?? []).filter((each) => each.kind === "module").map((each) => [each.name, each.type_name ?? ""])), [props.tree]);
  const present = useMemo(() => [...new Set((recorder?.modules ?? []).map((each) => kinds.get(each) ?? "").filter(Boolean))].sort(), [recorder, kinds]);
  const chosen = wanted === FINDINGS ? (props.sick.size ? wanted : "") : present.includes(wanted) ? wanted : "";
  const only = useCallback((module: string) => chosen === "" || (chosen === FINDINGS ? props.sick.has(module) : kinds.get(module) === chosen), [chosen, props.sick, kinds]);
  // The steps that the watch has left out, or at which it has gone back or lowered the learning rate.
  const acted = useMemo(() => run.data.findings.flatMap((each) => each.rule === "acted" ? each.trace?.steps ?? [] : []), [run]);
  // Beneath one finding there is room for what was logged.
  const hasRoom = run.data.findings.filter((each) => each.severity !== "note").length < 2;
  const hasBlocks = useMemo(() => {
    const counts = new Map<string, number>();
    if (!(recorder instanceof Parts)) for (const each of recorder?.modules ?? []) counts.set(wildcard(each), (counts.get(wildcard(each)) ?? 0) + 1);
    return [...counts.values()].some((each) => each > 2);
  }, [recorder]);
  // A block has layers of all kinds, whose values cannot be compared: the strip of blocks compares each with its equals.
  const relative = hasBlocks && (byUser ?? (recorder !== undefined && recorder.group !== "costs" && stripColumns(recorder).length > MOST_LABELED));
  const named = useMemo(() => recorder instanceof Parts ? recorder.named(run.data.findings) : new Map<string, Set<number>>(), [recorder, run]);
  const [room, setRoom] = useState(0);
  const never = run.data.graph?.neverCalled ?? [];
  const free = room - 14 - AXIS - (never.length ? 24 : 0) - TALLEST_ROW * (recorder ? stripColumns(recorder).length : 0);
  useEffect(() => {
    const measure = (): void => { if (holder.current) setRoom(Math.max(160, innerHeight - holder.current.getBoundingClientRect().top - 24)); };
    measure();
    // The findings and the charts above get their heights later.
    const watch = new ResizeObserver(measure);
    watch.observe(above.current!);
    addEventListener("resize", measure);
    return () => { watch.disconnect(); removeEventListener("resize", measure); };
  }, []);
  return (
    <section class="overview">
      <div class="top" ref={above}>
        <div class="findings" aria-label="findings">
          {other && <p class="comparison">{props.data.comparison?.sentence ?? `compared with ${other.data.name}`}{" "}
            {props.data.comparison?.module && <button type="button" onClick={() => change({ layer: props.data.comparison!.module, step: props.data.comparison!.step ?? state.step })}>show where</button>}{" "}
            <button type="button" onClick={() => change({ run: props.data.runs.indexOf(other.data), other: props.data.runs.indexOf(run.data), layer: null })}>{other.label}: {other.data.verdict}</button></p>}
          {props.differing.length > 0 && <p class="differing">The graphs differ in {props.differing.slice(0, 8).map((each) => <button type="button" onClick={() => change({ layer: each.name, tab: "graph" })}>{each.name || "(model)"}</button>)}{props.differing.length > 8 && ` and ${props.differing.length - 8} more modules`}</p>}
          {run.data.check && <CheckLine check={run.data.check} onOpen={() => change({ tab: "check" })} />}
          {run.data.notExamined.map((each) => <p class="none">{each}</p>)}
          {run.data.findings.length === 0 && run.data.healthy && <p class="none"><b>No findings.</b> Nothing that was recorded looks wrong: {run.recorders.length} recorders, {Math.max(0, ...run.recorders.map((each) => each.data.records))} records, steps {run.steps[0] ?? 0} to {run.steps[run.steps.length - 1] ?? 0}.</p>}
          <ol>{run.data.findings.map((each) => <FindingRow finding={each} run={run} tree={props.tree} change={change} />)}</ol>
          {run.data.findings.every((each) => each.severity === "note") && <Extremes run={run} change={change} />}
          {hasRoom && logged}
        </div>
        <div class="curves" role="region" aria-label="curves" tabIndex={0}>
          {names.map((name) => {
            const curves: Curve[] = [run, ...(other ? [other] : [])].flatMap((each, at) => each.curves.filter((curve) => curve.name === name && !curve.logged).map((curve) => ({ label: each.label, steps: curve.steps, values: curve.values, color: COLORS[at]!, dashed: at > 0 })));
            return <Lines title={name} curves={smoothing ? curves.flatMap((each) => smoothed(each, smoothing)) : curves} step={state.step} height={names.length > 1 ? 110 : 180} onStep={(step) => change({ step })} acted={acted} />;
          })}
          {run.curves.some((each) => each.steps.length >= LEAST_SMOOTHED) && <label class="smoothing">smoothing <select aria-label="smoothing" value={smoothing} onChange={(event) => setSmoothing(Number(event.currentTarget.value))}>
            {[0, 0.6, 0.9, 0.98].map((each) => <option value={each}>{each || "none"}</option>)}</select></label>}
          {!hasRoom && logged}
          {names.length === 0 && <p class="none">Neither the loss nor gradients of parameters were recorded.</p>}
        </div>
      </div>
      {recorder && props.scale && <>
        <div class="bar"><h2>All layers over {recorder instanceof Parts ? `${recorder.title}, step ${recorder.step}` : "steps"}</h2>{props.chooser}
          {(present.length > 1 || props.sick.size > 0) && <label>layers <select aria-label="layers" value={chosen} onChange={(event) => setWanted(event.currentTarget.value)}>
            <option value="">all</option>{props.sick.size > 0 && <option>{FINDINGS}</option>}{present.map((each) => <option>{each}</option>)}
          </select></label>}
          {hasBlocks && <label><input type="checkbox" checked={relative} onChange={(event) => setRelative(event.currentTarget.checked)} /> relative to the other blocks</label>}
          {relative ? <Legend scale={relativeScale(state.statistic)} label={`${state.statistic} relative to the other blocks`} hasFindings={props.sick.size > 0} ends={relativeEnds(state.statistic)} /> : props.legend}</div>
        <div ref={holder} class="stripes">
          <Strip key={recorder instanceof Parts ? recorder.title : ""} recorder={recorder} named={named} statistic={state.statistic} scale={props.scale} step={state.step} marked={props.sick} prefix={props.prefix} layer={state.layer} height={room || 300} only={only} relative={relative}
            onPick={(layer, step) => change({ layer, step })} />
        </div>
        {never.length > 0 && <p class="never"><b>Never called:</b> {never.slice(0, MOST_NEVER).join(", ")}{never.length > MOST_NEVER && `, and ${never.length - MOST_NEVER} more`}</p>}
        {props.graph && free >= LEAST_GRAPH && <div class="beneath" style={{ height: `${free}px` }}>{props.graph}</div>}
      </>}
    </section>
  );
}

const SPLIT = /^(?:(train|training|val|valid|validation|test)[_/.])?(.+?)(?:[_/.](step|epoch))?$/;

const GROWING = /loss|rate|lr|norm|perplexity/i;  // metrics whose powers matter

/** The user's own metrics and the learning rates; training and validation of the same name are in one chart. */
function Logged(props: { run: Run; other: Run | null; smoothing: number; step: number; onStep: (step: number) => void }) {
  const { run, other, smoothing } = props;
  const charts = new Map<string, { name: string; curves: Curve[] }>();
  [run, ...(other ? [other] : [])].forEach((each, at) => {
    for (const { name, steps, values, logged } of each.curves) {
      if (!logged) continue;
      const [, part, rest, when] = SPLIT.exec(name)!;
      // Two runs have two colors, so that there is none left for the parts of a name.
      const chart = charts.get(other ? name : rest!) ?? { name, curves: [] };
      // The charts of the loss have the whole names.
      const label = other ? each.label.replace(/:.*/, "") : [part, when].filter(Boolean).join(" ") || name;
      chart.curves.push({ label, steps, values, color: COLORS[(other ? at : chart.curves.length) % COLORS.length]!, dashed: at > 0 });
      charts.set(other ? name : rest!, chart);
    }
  });
  if (!charts.size) return null;
  return <div class="logged"><h2>Logged metrics</h2><div>{[...charts].map(([title, { name, curves }]) => (
    <Lines title={curves.length > 1 ? title : name} curves={smoothing ? curves.flatMap((each) => smoothed(each, smoothing)) : curves} step={props.step} height={96} onStep={props.onStep} linear={!GROWING.test(name)} />))}</div></div>;
}

const LEAST_SMOOTHED = 20;  // points of a curve

/** A curve, faint, and its exponential moving average with this weight of the past, as in TensorBoard. */
function smoothed(curve: Curve, weight: number): Curve[] {
  let mean = 0, share = 0;
  const values = curve.values.map((value) => {
    if (!Number.isFinite(value)) return value;
    mean = weight * mean + (1 - weight) * value; share = weight * share + (1 - weight);
    return mean / share;
  });
  return [{ ...curve, color: `${curve.color}55`, label: "" }, { ...curve, values }];
}

/** The module before or after another one, as links. */
function Beside(props: { names: string[]; onPick: (module: string) => void }) {
  return <>{props.names.slice(0, 3).map((each) => <button type="button" class="link" onClick={() => props.onPick(each)}>{each || "(model)"}</button>)}{props.names.length > 3 && <small>and {props.names.length - 3} more</small>}</>;
}

/** The way of the values through a module or a function: what is before it, the node itself, and what is after it. */
function Chain(props: { tree: Tree; node: NodeData | undefined; onPick: (module: string) => void; onOpen: (name: string) => void }) {
  const { tree, node } = props;
  const ends = useMemo(() => node ? [tree.beside(node, false), tree.beside(node, true)] : [[], []], [tree, node]);
  if (!node || ends.every((each) => !each.length)) return null;
  const name = tree.nameOf(node);
  return <p class="chain"><Beside names={ends[0]!} onPick={props.onPick} />{ends[0]!.length > 0 && " → "}{node.kind === "module" ? <b>{name}</b> : <Beside names={[name]} onPick={props.onOpen} />}{ends[1]!.length > 0 && " → "}<Beside names={ends[1]!} onPick={props.onPick} /></p>;
}

/** The node that a finding is about. Without a module, it is the function that the sentence names with its line of code, or the batch. */
function placeOf(finding: Finding, tree: Tree | null): NodeData | undefined {
  if (finding.module || !tree) return finding.module ? tree?.find(finding.module) : undefined;
  const words = finding.verdict.split(/[^\w.:/\\]+/), is = (name: string, each: NodeData): boolean => words.includes(name) && words.includes(each.source ?? "");
  // What gets the output of a function is the one at fault, such as a loss behind a softmax.
  return tree.data.nodes.findLast((each) => is(each.kind === "op" ? each.name : tree.nameOf(each).replace(/^.*\.|#\d+$/g, ""), each))
    ?? (finding.needs.includes("data") ? tree.data.nodes.find((each) => each.kind === "input") : undefined);
}

function nameOf(node: NodeData | undefined, tree: Tree | null): string { return node && tree ? tree.nameOf(node) : ""; }

const MOST_EXTREME = 3;

/** The three layers that are farthest from the usual value of their kind, in a run without findings but notes: those of each recorder in turn. */
function Extremes(props: { run: Run; change: (part: Partial<State>) => void }) {
  const found = useMemo(() => {
    const lists = props.run.recorders.filter((each) => each.data.stage === "train" && each.steps.length > 0).map((recorder) => {
      const statistic = usual(recorder), columns = stripColumns(recorder), row = recorder.steps.length - 1;
      const values = columns.map((column) => recorder.value(statistic, row, column)), middle = median(values), scale = new Scale(values, statistic);
      const odd = columns.map((column, at) => ({ recorder, statistic, middle, module: recorder.sites[column]!.module, value: values[at]!, odd: oddness(values[at]!, middle, scale) }));
      return odd.filter((each) => Number.isFinite(each.odd)).sort((one, other) => other.odd - one.odd).slice(0, MOST_EXTREME ** 2);
    });
    const turns = Array.from({ length: MOST_EXTREME ** 2 }, (_, rank) => lists.flatMap((each) => each[rank] ?? [])).flat();
    return turns.filter((each, at) => turns.findIndex((other) => other.module === each.module) === at).slice(0, MOST_EXTREME);
  }, [props.run]);
  if (!found.length) return null;
  return <div class="extremes"><p class="none">The most extreme layers, all within the usual range:</p><ul>{found.map((each) => (
    <li><button type="button" class="link" onClick={() => props.change({ layer: each.module, recorder: each.recorder.title, statistic: each.statistic })}>{each.module || "(model)"}</button>{" "}
      <small>{each.recorder.title}: {each.statistic} {format(each.value)}, the median of all layers is {format(each.middle)}</small></li>))}</ul></div>;
}

/** The address of what is shown. In TensorBoard it is that of the tab, which has the place on the page. */
function address(): string {
  try {
    // The page is in a frame of the tab, which is a frame of TensorBoard.
    const tensorboard = parent.parent.location;
    if (tensorboard.hash.startsWith("#lightning_recorder")) return tensorboard.href;
  } catch {
    // The frame is in a page of another origin.
  }
  return location.href;
}

/** A button that copies the address of what is shown. */
function CopyLink(props: { live: boolean }) {
  const [said, setSaid] = useState("");
  const isFile = location.protocol === "file:";
  // A frame of a notebook has no address of its own.
  if (!isFile && !props.live) return null;
  const what = isFile ? "copied; it opens this file on this machine" : "copied; it works while the server runs";
  return <span class="copy"><button type="button" onClick={() => {
    navigator.clipboard.writeText(address()).then(() => setSaid(what), () => setSaid("copy the address of this page"));
    setTimeout(() => setSaid(""), 4000);
  }}>copy link</button><span role="status">{said}</span></span>;
}

function FindingRow(props: { finding: Finding; run: Run; tree: Tree | null; change: (part: Partial<State>) => void }) {
  const { finding, run, change } = props;
  const trace = finding.trace, place = useMemo(() => placeOf(finding, props.tree), [finding, props.tree]), others = finding.others.filter((each) => each !== nameOf(place, props.tree));
  const open = (): void => {
    // Without a curve, what an earlier finding showed would stay.
    change({ layer: layerOf(finding) || nameOf(place, props.tree) || (finding.path ? "" : null), step: stepOf(finding), ...run.quantity([finding]) });
  };
  return (
    <li class={finding.severity}>
      <button type="button" onClick={open}>
        <span class="mark">{finding.severity}</span>
        <span class="text">{finding.verdict}</span>
        {trace && <Spark steps={trace.steps} values={trace.values.map(toNumber)} width={110} height={28} />}
      </button>
      {finding.severity !== "note" && <>
        <p>{finding.measured && <><b>Measured</b> {finding.measured}. </>}{finding.usual && <><b>Usual</b> {finding.usual}. </>}<b>Why</b> {finding.why} <b>Try</b> {finding.next}</p>
        {finding.strip && <RankStrip strip={finding.strip} id={`ranks-${finding.first_step}`} />}
        {props.tree && <Chain tree={props.tree} node={place} onPick={(layer) => change({ layer })} onOpen={(layer) => change({ layer, tab: "graph" })} />}
        {others.length > 0 && <p class="others"><b>Also affected</b> {others.slice(0, MOST_OTHERS).map((each) => <button type="button" class="link" onClick={() => change({ layer: each })}>{each || "(model)"}</button>)}{others.length > MOST_OTHERS && `and ${others.length - MOST_OTHERS} more`}</p>}
      </>}
    </li>
  );
}

const MOST_OTHERS = 8;

/** All records of the sites of a module, asked from the server if the page has only some of them. */
function useAllRecords(run: Run, module: string, live: boolean): Map<string, SiteRecords> {
  const [found, setFound] = useState<Map<string, SiteRecords>>(new Map());
  useEffect(() => {
    setFound(new Map());
    if (!live) return;
    let current = true;
    for (const recorder of run.recorders.filter((each) => each.data.joined > 1 && each.group !== "costs")) for (const column of recorder.columnsOf(module)) {
      const address = new URL("site", location.href), { label, stage, loader } = recorder.data, site = recorder.sites[column]!;
      address.search = String(new URLSearchParams({ run: run.data.name, recorder: label, stage, loader: String(loader ?? ""), module: site.module, path: site.path }));
      void fetch(address).then(async (answer) => {
        if (!answer.ok) return;
        const records = await decode<SiteRecords>(await answer.text());
        if (current) setFound((now) => new Map(now).set(`${recorder.title} ${column}`, records));
      }).catch(() => { /* the server has ended; the joined records stay */ });
    }
    return () => { current = false; };
  }, [run, module, live]);
  return found;
}

const FOLDER = "lightning_recorder.folder";

/** The line of code: a link, or, if this machine does not know the file, a field for its folder. */
function Code(props: { node: NodeData }) {
  const { source, link } = props.node;
  const [folder, setFolder] = useState(() => { try { return localStorage.getItem(FOLDER) ?? ""; } catch { return ""; } });
  const address = link ?? (folder ? `vscode://file/${encodeURI(`${folder.replace(/[\\/]+$/, "").replace(/^\/+/, "")}/${source}`)}` : "");
  return (
    <>
      {address ? <a href={address}>{source}</a> : source}
      {!link && !source!.startsWith("<") && <input class="folder" aria-label="folder of the code" placeholder="folder of the code, for a link" value={folder} onChange={(event) => {
        setFolder(event.currentTarget.value);
        try { localStorage.setItem(FOLDER, event.currentTarget.value); } catch { /* a frame without storage */ }
      }} />}
    </>
  );
}

const OF_OPTIMIZER = /\.(?!grad$)\w+$/;

/** The tensors of a module beside each other: one row each, with the values at a step and a trend. */
function Tensors(props: { run: Run; module: string; step: number; more: boolean; onStatistic: (recorder: Recorder, statistic: string) => void }) {
  const rows = props.run.recorders.filter((each) => !["watch", "costs"].includes(each.group) && each.data.stage === "train").flatMap((recorder) => recorder.columnsOf(props.module).filter((column) => props.more || !OF_OPTIMIZER.test(recorder.sites[column]!.path)).slice(0, props.more ? 40 : 12).map((column) => ({ recorder, column })));
  const shown = ["rms", "min", "max", "zero_fraction", "update_ratio"].filter((name) => rows.some((each) => each.recorder.statistics.includes(name)));
  if (!rows.length) return null;
  return (
    <table class="tensors">
      <thead><tr><th>tensor</th>{shown.map((each) => <th>{{ zero_fraction: "zeros", update_ratio: "update" }[each] ?? each}</th>)}<th class="trend">over steps</th></tr></thead>
      <tbody>{rows.map(({ recorder, column }) => {
        const site = recorder.sites[column]!, row = recorder.rowAt(props.step), main = usual(recorder, column);
        const kind = { activations: "output", gradients: "gradient of", parameters: "" }[recorder.group] ?? recorder.label;
        const trend = <Spark {...recorder.recorded(main, column)} width={70} height={18} />;
        return <tr>
          <th title={`${recorder.title} ${site.shape.join("×")} ${site.dtype}`}>{kind === "output" && /^(in|batch)/.test(site.path) ? "input" : kind} {site.path}<span class="beneath-name">{trend}</span></th>
          {shown.map((each) => {
            const value = recorder.statistics.includes(each) ? recorder.value(each, row, column) : NaN;
            return <td class={Number.isFinite(value) || !recorder.statistics.includes(each) || each === "update_ratio" ? "" : "bad"}>
              {recorder.statistics.includes(each) && !(Number.isNaN(value) && each === "update_ratio") ? <button type="button" onClick={() => props.onStatistic(recorder, each)}>{each === "zero_fraction" ? `${format(Math.round(value * 1000) / 10)}%` : format(value)}</button> : ""}</td>;
          })}
          <td class="trend">{trend}</td>
        </tr>;
      })}</tbody>
    </table>
  );
}

/** The modules at the same place in other blocks, and the value of each over the depth. */
function Depth(props: { run: Run; module: string; step: number; onPick: (module: string) => void }) {
  const { run, module } = props;
  const recorder = run.recorders.find((each) => each.columnsOf(module).length > 0);
  if (!recorder) return null;
  const statistic = usual(recorder), row = recorder.rowAt(props.step);
  const order = recorder.modules.filter((each) => each === module || recorder.seen(row, recorder.column(each), statistic));
  const at = order.indexOf(module);
  const alike = order.filter((each) => wildcard(each) === wildcard(module)), place = alike.indexOf(module);
  const near = alike.length > 2 ? alike.slice(Math.max(0, place - 2), place + 3) : order.slice(Math.max(0, at - 2), at + 3);
  const value = (name: string): number => recorder.value(statistic, row, recorder.column(name));
  return (
    <section>
      <h3>{alike.length > 2 ? `the same layer in ${alike.length} blocks` : "neighbors in depth"}</h3>
      {alike.length > 2 && <Bars names={alike} values={alike.map(value)} chosen={place} label={`${statistic} at step ${props.step}`} onPick={props.onPick} />}
      <ul class="neighbors">{near.filter((each) => each !== module).map((each) => (
        <li><button type="button" onClick={() => props.onPick(each)}>{each || "(model)"}</button><Spark {...recorder.recorded(statistic, recorder.column(each))} width={90} height={20} />
          <small>{statistic} {format(value(each))}</small></li>))}</ul>
    </section>
  );
}

/** What was recorded inside a module without tensors of its own. */
function Inside(props: { run: Run; module: string; step: number; onPick: (module: string) => void }) {
  const { run, module } = props;
  if (run.recorders.some((each) => each.columnsOf(module).length > 0)) return null;
  const recorder = run.recorders.find((each) => each.modules.some((name) => module === "" || name.startsWith(`${module}.`)));
  if (!recorder) return <p class="none">Nothing was recorded for it.</p>;
  const inside = recorder.modules.filter((name) => module === "" || name.startsWith(`${module}.`));
  return (
    <section>
      <h3>inside</h3>
      <ul class="neighbors">{inside.slice(0, 24).map((each) => {
        const column = recorder.column(each), statistic = usual(recorder, column);
        return <li><button type="button" onClick={() => props.onPick(each)}>{module ? each.slice(module.length + 1) : each}</button><Spark {...recorder.recorded(statistic, column)} width={90} height={20} />
          <small>{statistic} {format(recorder.value(statistic, recorder.rowAt(props.step), column))}</small></li>;
      })}</ul>
      {inside.length > 24 && <small>and {inside.length - 24} more</small>}
    </section>
  );
}

/** A panel with everything that is known of one module. */
function Layer(props: { run: Run; other: Run | null; module: string; step: number; tree: Tree | null; live: boolean; change: (part: Partial<State>) => void }) {
  const { run, other, module, step, tree, change } = props;
  const [more, setMore] = useState(false);
  const [wanted, setWanted] = useState("");
  useEffect(() => setWanted(""), [module]);
  const node = tree?.find(module);
  const findings = useMemo(() => {
    const named = run.byModule.get(module) ?? [];
    return [...named, ...run.data.findings.filter((each) => module && !each.module && !named.includes(each) && placeOf(each, tree) === node)];
  }, [run, module, tree, node]);
  const records = useAllRecords(run, module, props.live);
  const onStep = (chosen: number): void => change({ step: chosen });
  return (
    <aside class="layer" aria-label={`layer ${module}`}>
      <div class="head">
        <h2>{module || "(model)"}</h2>
        <button type="button" aria-label="close the panel" onClick={() => change({ layer: null })}>✕</button>
      </div>
      <p class="facts">{[node?.type_name, node?.parameters ? `${node.parameters.toLocaleString("en")} parameters` : "", node?.note].filter(Boolean).join(" · ")}</p>
      {node && <dl>
        {node.inputs && <><dt>inputs</dt><dd>{node.inputs.join(", ")}</dd></>}
        {node.outputs && <><dt>outputs</dt><dd>{node.outputs.join(", ")}</dd></>}
        {node.arguments && <><dt>arguments</dt><dd>{node.arguments.map(([name, value]) => name ? `${name}=${value}` : value).join(", ")}</dd></>}
        {node.duration_ms !== undefined && <><dt>time</dt><dd>{format(node.duration_ms)} ms</dd></>}
        {node.flops !== undefined && <><dt>FLOPs</dt><dd>{format(node.flops)}</dd></>}
        {node.source && <><dt>code</dt><dd><Code node={node} /></dd></>}
      </dl>}
      {findings.map((each) => <p class={`finding ${each.severity}`}><b>{each.severity}</b> {each.verdict} <br /><b>Why</b> {each.why} <br /><b>Try</b> {each.next}</p>)}
      <Tensors run={run} module={module} step={step} more={more} onStatistic={(recorder, statistic) => { setWanted(statistic); change({ recorder: recorder.title, statistic }); }} />
      <Inside run={run} module={module} step={step} onPick={(layer) => change({ layer })} />
      {run.recorders.map((recorder) => recorder.columnsOf(module).slice(0, more ? 40 : 4).map((column) => {
        const site = recorder.sites[column]!;
        const asked = [usual(recorder, column), "rms", "zero_fraction", wanted, ...findings.flatMap((one) => one.trace?.recorder === recorder.label ? [one.trace.statistic] : [])];
        const shown = more || recorder.group === "costs" ? recorder.statistics : recorder.statistics.filter((each) => asked.includes(each));
        const twin = other?.recorder(recorder.title);
        const twinColumn = twin?.sites.findIndex((each) => each.module === site.module && each.path === site.path) ?? -1;
        const all = records.get(`${recorder.title} ${column}`);
        return (
          <section>
            <h3>{recorder.title}{site.path && ` · ${site.path}`} <small>{site.shape.join("×")} {site.dtype}{recorder.data.joined > 1 && !all ? ` · one point for ${recorder.data.joined} records` : ""}</small></h3>
            {[...new Set(shown)].map((statistic) => {
              const full = all?.statistics[statistic], found = full ? { steps: all!.steps, values: [...floats(full)] } : recorder.recorded(statistic, column);
              if (found.values.every((each) => Number.isNaN(each))) return null;
              const curves: Curve[] = [{ label: run.label, ...found, color: COLORS[0]! }];
              if (twin && twinColumn >= 0 && twin.statistics.includes(statistic)) curves.push({ label: other!.label, ...twin.recorded(statistic, twinColumn), color: COLORS[1]!, dashed: true });
              return <Lines title={`${statistic}: ${format(recorder.value(statistic, recorder.rowAt(step), column))} at step ${recorder.steps[recorder.rowAt(step)] ?? step}`} curves={curves} step={step} height={84} onStep={onStep} share={isShare(statistic)} />;
            })}
            {recorder.vectors(column).map((each) => <Channels {...each} step={step} onStep={onStep} />)}
            <Histogram recorder={recorder} column={column} step={step} onStep={onStep} />
          </section>);
      }))}
      {tree && <Chain tree={tree} node={node} onPick={(layer) => change({ layer })} onOpen={(layer) => change({ layer, tab: "graph" })} />}
      <Depth run={run} module={module} step={step} onPick={(layer) => change({ layer })} />
      <button type="button" class="more" onClick={() => setMore(!more)}>{more ? "fewer statistics" : "all statistics and tensors"}</button>
    </aside>
  );
}

async function start(): Promise<void> {
  const holder = document.getElementById("app")!;
  try {
    const data = await decode(document.getElementById("data")!.textContent!);
    holder.replaceChildren();  // preact keeps text that is already there
    render(<App data={data} />, holder);
    void graphviz();
  } catch (error) {
    holder.textContent = `The page cannot show these data: ${error instanceof Error ? error.message : String(error)}`;
  }
}

void start();
