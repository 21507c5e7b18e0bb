/** Columns of a playground, and the run that asks all of them at once. */

import { connection, start, stop } from "../live";
import { Store } from "../store";

// A browser opens six connections to a server.
export const MAX_COLUMNS = 6;

export interface Part {
  name: string;
  weight: number;
}

export interface Column {
  id: number;
  /** The adapters whose sum answers; none: the base. */
  parts: readonly Part[];
}

let nextId = 1;

export const newColumn = (part: Part | null): Column => ({
  id: nextId++,
  parts: part === null ? [] : [part],
});

export type Ask<Output> = (signal: AbortSignal, show: (output: Output) => void) => Promise<void>;

/** Kept while another view is open. */
export class Columns<Output> {
  readonly list = new Store<readonly Column[] | null>(null);
  readonly outputs = new Store<Readonly<Record<number, Output>>>({});
  readonly isRunning = new Store(false);
  private current = new AbortController();

  /** `forget`: is told the outputs that disappear. */
  constructor(private readonly forget: (output: Output) => void = () => undefined) {}

  /** The columns at first: the base, and up to two adapters. */
  begin(parts: readonly Part[], hasBase: boolean): void {
    if (this.list.value !== null) return;
    const first = hasBase || parts.length === 0 ? [newColumn(null)] : [];
    this.list.set([...first, ...parts.slice(0, 3 - first.length).map(newColumn)]);
  }

  change(column: Column): void {
    this.list.set((this.list.value ?? []).map((one) => (one.id === column.id ? column : one)));
  }

  add(part: Part | null): void {
    this.list.set([...(this.list.value ?? []), newColumn(part)]);
  }

  remove(column: Column): void {
    this.list.set((this.list.value ?? []).filter((one) => one.id !== column.id));
    this.drop([column.id]);
  }

  /** Asks these columns at once; the outputs of other columns stay. */
  async run(asked: readonly (readonly [number, Ask<Output>])[]): Promise<void> {
    this.drop(asked.map(([id]) => id));
    this.current = new AbortController();
    this.isRunning.set(true);
    const { signal } = this.current;
    const pausesLive = asked.length === MAX_COLUMNS && connection.value === "open";
    if (pausesLive) stop();
    await Promise.all(asked.map(([id, ask]) => ask(signal, (output) => this.show(id, output))));
    if (pausesLive) start();
    this.isRunning.set(false);
  }

  stop(): void {
    this.current.abort();
  }

  private show(id: number, output: Output): void {
    const isThere = (this.list.value ?? []).some((column) => column.id === id);
    if (isThere) this.outputs.set({ ...this.outputs.value, [id]: output });
    else this.forget(output);
  }

  private drop(ids: readonly number[]): void {
    const rest = { ...this.outputs.value };
    for (const id of ids) {
      const output = rest[id];
      if (output !== undefined) this.forget(output);
      delete rest[id];
    }
    this.outputs.set(rest);
  }
}
