/** The live view's stream: one for the page, with a history of 15 minutes. */

import { ApiError, address, stream } from "./api";
import { Store } from "./store";

export const HISTORY_S = 900;

export interface Percentiles {
  p50: number;
  p90: number;
  p99: number;
}

export interface Tier {
  tier: string;
  budget_bytes: number;
  used_bytes: number;
  adapters: number;
  hits: number;
  misses: number;
  loads: number;
  evictions: number;
  failures: number;
  load_seconds: number;
}

type Counts = Record<string, number>;

/** The state of one model's engine. */
export interface HostState {
  modality: "text" | "image";
  status: string;
  restarts: number;
  running: number;
  waiting: number;
  preemptions: number;
  pages: { total: number; free: number; adapters: number; prefixes: number; kv: number };
  /** A letter for each range of pages, in the order of their addresses; empty: not known yet. */
  map: string;
  requests: number;
  prompt_tokens: number;
  generation_tokens: number;
  prefix_query_tokens: number;
  prefix_hit_tokens: number;
  loads: number;
  evictions: number;
  tiers: Tier[];
  batch: Counts;
  queue: Counts;
  tenants: Counts;
  ttft: Percentiles | null;
  inter_token: Percentiles | null;
  traffic: Counts;
}

/** The state of the first model, and that of an image model beside it. */
export interface LiveState extends HostState {
  time: number;
  image?: HostState;
  loaded?: string[];
  evicted?: string[];
}

/** One second of one model; rates are null after a gap. */
export interface HostSample {
  tokens: number | null;
  prompts: number | null;
  running: number;
  waiting: number;
  ttft: Percentiles | null;
  interToken: Percentiles | null;
  loads: number;
  evictions: number;
}

export interface Sample extends HostSample {
  time: number;
  image: HostSample | null;
  /** Of all models. */
  traffic: Counts;
}

export interface Move {
  time: number;
  kind: "loaded" | "evicted";
  name: string;
}

export type Connection = "off" | "connecting" | "open" | "lost" | "forbidden";

export const connection = new Store<Connection>("off");
export const live = new Store<LiveState | null>(null);
export const history = new Store<readonly Sample[]>([]);
export const moves = new Store<readonly Move[]>([]);
/** The engine's state by the stream, or by /health where the stream is not allowed. */
export const engine = new Store<string>("");

const MAX_MOVES = 500;
const RETRY_MS = [500, 1000, 2000, 5000];
let running: AbortController | null = null;

export function start(): void {
  if (running !== null) return;
  running = new AbortController();
  void follow(running.signal);
}

/** Gives the connection back: a browser has six for a server. */
export function stop(): void {
  running?.abort();
  running = null;
  connection.set("off");
}

async function follow(signal: AbortSignal): Promise<void> {
  for (let attempt = 0; !signal.aborted; attempt++) {
    connection.set("connecting");
    try {
      const [, events] = await stream("/v1/live", { signal });
      for await (const event of events) {
        if (signal.aborted) return;
        connection.set("open");
        attempt = 0;
        take(event.name, JSON.parse(event.data) as Partial<LiveState>);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && (error.status === 403 || error.status === 401)) {
        connection.set("forbidden");
        return;
      }
    }
    if (signal.aborted) return;
    connection.set("lost");
    void readHealth();
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(attempt, 3)]));
  }
}

function take(kind: string, sent: Partial<LiveState>): void {
  const before = live.value;
  const isNew = kind === "state" || before === null;
  const { loaded, evicted, ...changed } = sent;
  const now = { ...(isNew ? {} : before), ...changed } as LiveState;
  record(now, before !== null && now.time - before.time < 5 ? before : null);
  for (const [moveKind, names] of [["loaded", loaded], ["evicted", evicted]] as const) {
    if (names === undefined) continue;
    const added = names.map((name) => ({ time: now.time, kind: moveKind, name }));
    moves.set([...moves.value, ...added].slice(-MAX_MOVES));
  }
  live.set(now);
  engine.set(now.image === undefined || now.status !== "ready" ? now.status : now.image.status);
}

function record(now: LiveState, before: LiveState | null): void {
  const seconds = before === null ? 0 : now.time - before.time;
  const sample: Sample = {
    ...sampleOf(now, before, seconds),
    time: now.time,
    image: now.image === undefined ? null : sampleOf(now.image, before?.image ?? null, seconds),
    traffic: { ...now.traffic, ...now.image?.traffic },
  };
  const oldest = now.time - HISTORY_S;
  history.set([...history.value.filter((one) => one.time >= oldest), sample]);
}

function sampleOf(now: HostState, before: HostState | null, seconds: number): HostSample {
  const isCurrent = before !== null && before.restarts === now.restarts;
  const grown = (read: (state: HostState) => number): number =>
    isCurrent ? Math.max(0, read(now) - read(before)) : 0;
  const perSecond = (read: (state: HostState) => number): number | null =>
    isCurrent && seconds > 0 ? grown(read) / seconds : null;
  return {
    tokens: perSecond((state) => state.generation_tokens),
    prompts: perSecond((state) => state.prompt_tokens),
    running: now.running,
    waiting: now.waiting,
    ttft: now.ttft,
    interToken: now.inter_token,
    loads: grown((state) => state.loads),
    evictions: grown((state) => state.evictions),
  };
}

/** The open route /health: 200 or 503, both with a status. */
export async function readHealth(): Promise<void> {
  try {
    const answer = await fetch(address("/health"), { credentials: "omit", cache: "no-store" });
    const { status } = (await answer.json()) as { status: string };
    engine.set(status);
  } catch {
    engine.set("unreachable");
  }
}
