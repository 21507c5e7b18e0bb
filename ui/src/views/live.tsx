/** The engine at a glance, from one stream of changes. */

import { useLoaded } from "../parts/load";
import { get } from "../api";
import { bytes, count, moment, ms, rate, share } from "../format";
import { connection, history, live, moves, type HostSample, type HostState, type Move, type Percentiles, type Sample, type Tier } from "../live";
import { Empty, Loading } from "../parts/basics";
import { LineChart, StackedBar } from "../parts/charts";
import { useStore } from "../store";

interface EngineReport {
  model: string;
  device: string;
  gpu_name: string | null;
  dtype: string;
  page_bytes: number;
  max_sequences: number;
  image?: EngineReport;
}

export function Live() {
  const state = useStore(live);
  const link = useStore(connection);
  const samples = useStore(history);
  const moved = useStore(moves);
  const found = useLoaded((signal) => get<EngineReport>("/v1/stats", signal), [state?.restarts]);
  if (link === "forbidden") {
    return (
      <Empty title="This key may not see the engine">
        The live view needs the scope metrics or admin, and a key that is not bound to a tenant.
      </Empty>
    );
  }
  if (state === null) return <Loading what="the live view" />;
  const times = samples.map((one) => one.time);
  return (
    <section class="live">
      <div class="toolbar">
        <h1>Live</h1>
        <span class="spacer" />
        <span class="muted" role="status">
          {link === "open" ? `as of ${moment(state.time)}` : "reconnecting…"}
        </span>
      </div>
      <HostView state={state} report={found.value} samples={samples} times={times} />
      {state.image !== undefined && (
        <HostView
          state={state.image}
          report={found.value?.image ?? null}
          samples={samples.flatMap((one) => (one.image === null ? [] : [one.image]))}
          times={samples.flatMap((one) => (one.image === null ? [] : [one.time]))}
        />
      )}
      <Moves samples={samples} times={times} moved={moved} />
    </section>
  );
}

interface HostProps {
  state: HostState;
  report: EngineReport | null;
  samples: readonly HostSample[];
  times: readonly number[];
}

function HostView({ state, report, samples, times }: HostProps) {
  const isText = state.modality === "text";
  const newest = samples[samples.length - 1];
  const charts = { samples, times };
  return (
    <section aria-label={isText ? "Text model" : "Image model"}>
      <h2 class="model">
        {isText ? "Text" : "Images"}{" "}
        {report !== null && (
          <span class="muted">
            {report.model} on {report.gpu_name ?? report.device}, {report.dtype}
          </span>
        )}
      </h2>
      <dl class="tiles">
        <Tile name={isText ? "Tokens/s" : "Image tokens/s"} value={rate(newest?.tokens ?? null)} />
        <Tile name="Running" value={count(state.running)} of={report?.max_sequences} />
        <Tile name="Waiting" value={count(state.waiting)} />
        <Tile
          name={isText ? "First token p50" : "First step p50"}
          value={ms(lastOf(samples, (one) => one.ttft)?.p50)}
        />
        {isText && <Tile name="Between tokens p50" value={ms(lastOf(samples, (one) => one.interToken)?.p50)} />}
        {isText && <Tile name="Prefix cache" value={share(state.prefix_hit_tokens, state.prefix_query_tokens)} />}
        <Tile name="Requests" value={count(state.requests)} />
        <Tile name="Restarts" value={count(state.restarts)} />
      </dl>
      {state.pages.total > 0 && <PageMap state={state} pageBytes={report?.page_bytes ?? 0} />}
      <div class="two charts">
        <Rates {...charts} title={isText ? "Tokens per second" : "Image tokens per second"} />
        <Load {...charts} />
        <Latency
          {...charts}
          title={isText ? "Time to first token" : "Time to first step"}
          read={(one) => one.ttft}
        />
        {isText && <Latency {...charts} title="Between tokens" read={(one) => one.interToken} />}
      </div>
      <div class="two">
        <Mix state={state} />
        <Queue state={state} />
      </div>
      {state.tiers.length > 0 && <Tiers tiers={state.tiers} />}
    </section>
  );
}

function Tile({ name, value, of }: { name: string; value: string; of?: number | undefined }) {
  return (
    <div class="card tile">
      <dt>{name}</dt>
      <dd>
        {value}
        {of !== undefined && <small> of {count(of)}</small>}
      </dd>
    </div>
  );
}

function lastOf(samples: readonly HostSample[], read: (one: HostSample) => Percentiles | null): Percentiles | null {
  for (let i = samples.length - 1; i >= Math.max(0, samples.length - 30); i--) {
    const found = read(samples[i] as HostSample);
    if (found !== null) return found;
  }
  return null;
}

const COLUMNS = 64;
const KINDS = ["kv", "prefixes", "adapters", "free"] as const;
type Kind = (typeof KINDS)[number];
const KIND_NAMES = { kv: "KV cache", prefixes: "prefixes", adapters: "adapters", free: "free" };
const LETTERS: Record<string, Kind> = { k: "kv", p: "prefixes", a: "adapters", ".": "free" };

/** A cell for each range of pages, in the order of their addresses; only counts of an image model. */
function PageMap({ state, pageBytes }: { state: HostState; pageBytes: number }) {
  const { pages, map } = state;
  const isText = state.modality === "text";
  const kinds = KINDS.filter((kind) => isText || kind === "adapters" || kind === "free");
  const first = (cell: number): number => Math.floor((pages.total * cell) / map.length);
  return (
    <div class="card">
      <div class="toolbar">
        <h2>{isText ? "Page pool" : "Memory for adapters"}</h2>
        <span class="muted">
          {count(pages.total)} pages
          {pageBytes > 0 && ` of ${bytes(pageBytes)}, ${bytes(pages.total * pageBytes)}`}
          {map.length > 0 && map.length < pages.total && `; a cell is ${round(pages.total / map.length)} pages`}
        </span>
        <ul class="legends">
          {kinds.map((kind) => (
            <li key={kind}>
              <i class={`swatch page-${kind}`} aria-hidden="true" />
              {KIND_NAMES[kind]} <b>{count(pages[kind])}</b>
            </li>
          ))}
        </ul>
      </div>
      {map.length > 0 && <svg
        class="map"
        viewBox={`0 0 ${COLUMNS * 10} ${Math.max(1, Math.ceil(map.length / COLUMNS)) * 10}`}
        role="img"
        aria-label={`Page pool: ${KINDS.map((kind) => `${KIND_NAMES[kind]} ${pages[kind]}`).join(", ")} pages`}
      >
        {Array.from(map, (letter, cell) => {
          const kind = LETTERS[letter] ?? "free";
          return (
            <rect
              key={cell}
              class={`page-${kind}`}
              x={(cell % COLUMNS) * 10 + 0.5}
              y={Math.floor(cell / COLUMNS) * 10 + 0.5}
              width={9}
              height={9}
              rx={1.5}
            >
              <title>{`${rangeText(first(cell), first(cell + 1) - 1)}: ${KIND_NAMES[kind]}`}</title>
            </rect>
          );
        })}
      </svg>}
    </div>
  );
}

const rangeText = (from: number, to: number): string => (to <= from ? `page ${from}` : `pages ${from} to ${to}`);

interface ChartProps {
  samples: readonly HostSample[];
  times: readonly number[];
}

const round = (value: number): string => (value < 10 ? value.toFixed(1) : count(Math.round(value)));

function Rates({ title, samples, times }: ChartProps & { title: string }) {
  return (
    <div class="card">
      <LineChart
        title={title}
        unit=""
        times={times}
        series={[
          { name: "generated", colour: "c1", values: samples.map((one) => one.tokens) },
          { name: "prompt", colour: "c2", values: samples.map((one) => one.prompts) },
        ]}
        format={round}
      />
    </div>
  );
}

function Load({ samples, times }: ChartProps) {
  return (
    <div class="card">
      <LineChart
        title="Requests"
        unit=""
        times={times}
        series={[
          { name: "running", colour: "c1", values: samples.map((one) => one.running) },
          { name: "waiting", colour: "c3", values: samples.map((one) => one.waiting) },
        ]}
        format={(value) => count(Math.round(value))}
      />
    </div>
  );
}

function Latency({ title, samples, times, read }: ChartProps & {
  title: string;
  read: (one: HostSample) => Percentiles | null;
}) {
  return (
    <div class="card">
      <LineChart
        title={title}
        unit=""
        times={times}
        series={(["p50", "p90", "p99"] as const).map((name, index) => ({
          name,
          colour: `c${index + 1}`,
          values: samples.map((one) => read(one)?.[name] ?? null),
        }))}
        format={ms}
      />
    </div>
  );
}

function Mix({ state }: { state: HostState }) {
  const named = Object.values(state.batch).reduce((sum, one) => sum + one, 0);
  const bars = Object.entries(state.batch).map(([name, value], index) => ({
    name,
    value,
    colour: `m${index % 8}`,
  }));
  const base = Math.max(0, state.running - named);
  if (base > 0) bars.push({ name: "base and others", value: base, colour: "m8" });
  return (
    <div class="card">
      <h2>Batch by adapter</h2>
      {bars.length === 0 ? (
        <p class="muted">Nothing runs now.</p>
      ) : (
        <StackedBar label="Batch by adapter" bars={bars} format={count} />
      )}
    </div>
  );
}

function Queue({ state }: { state: HostState }) {
  const tenants = Object.entries(state.tenants);
  const most = Math.max(1, ...tenants.map(([, waiting]) => waiting));
  return (
    <div class="card">
      <h2>Queue by tenant</h2>
      {tenants.length === 0 ? (
        <p class="muted">Nothing waits.</p>
      ) : (
        <ul class="plain bars">
          {tenants.map(([tenant, waiting]) => (
            <li key={tenant}>
              <span class="who">{tenant === "" ? "no tenant" : tenant}</span>
              <span class="bar-track">
                <span class="part c3" style={{ width: `${(100 * waiting) / most}%` }} />
              </span>
              <b>{count(waiting)}</b>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

/** Of all models. */
function Moves({ samples, times, moved }: {
  samples: readonly Sample[];
  times: readonly number[];
  moved: readonly Move[];
}) {
  return (
    <div class="card">
      <LineChart
        title="Loads and evictions"
        unit="a second"
        times={times}
        series={[
          { name: "loads", colour: "c1", values: samples.map((one) => one.loads + (one.image?.loads ?? 0)) },
          { name: "evictions", colour: "c4", values: samples.map((one) => one.evictions + (one.image?.evictions ?? 0)) },
        ]}
        format={(value) => count(Math.round(value))}
      />
      {moved.length > 0 && (
        <ol class="plain moves" aria-label="Newest loads and evictions">
          {moved
            .slice(-12)
            .reverse()
            .map((move, index) => (
              <li key={`${move.time}${move.name}${index}`}>
                <time>{new Date(move.time * 1000).toLocaleTimeString("en-GB")}</time>{" "}
                <span class={`chip move-${move.kind}`}>{move.kind}</span> {move.name}
              </li>
            ))}
        </ol>
      )}
    </div>
  );
}

function Tiers({ tiers }: { tiers: readonly Tier[] }) {
  return (
    <div class="card">
      <h2>Tiers</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Tiers">
        <table class="plain-table">
          <thead>
            <tr>
              <th>Tier</th>
              <th>Adapters</th>
              <th>Bytes</th>
              <th>Budget</th>
              <th>Hits</th>
              <th>Loads</th>
              <th>Each</th>
              <th>Evicted</th>
              <th>Failed</th>
            </tr>
          </thead>
          <tbody>
            {tiers.map((tier) => (
              <tr key={tier.tier}>
                <th scope="row">{tier.tier}</th>
                <td>{count(tier.adapters)}</td>
                <td>{bytes(tier.used_bytes)}</td>
                <td>{tier.budget_bytes === 0 ? "–" : bytes(tier.budget_bytes)}</td>
                <td>{count(tier.hits)}</td>
                <td>{count(tier.loads)}</td>
                <td>{tier.loads === 0 ? "–" : ms((1000 * tier.load_seconds) / tier.loads)}</td>
                <td>{count(tier.evictions)}</td>
                <td>{count(tier.failures)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}
