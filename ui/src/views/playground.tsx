/** One prompt, up to six columns, all in one batch. */

import { useEffect, useRef, useState } from "preact/hooks";
import { get, type CallerReport } from "../api";
import { connection, start, stop } from "../live";
import { Copied, Field } from "../parts/basics";
import { Dialog } from "../parts/dialog";
import { useLoaded } from "../parts/load";
import { Store, useStore } from "../store";
import { ColumnCard } from "./column";
import { asCurl, asPython, bodyOf, NOTHING, runColumn, type Output, type Parameters, type Part } from "./run";

const MAX_COLUMNS = 6;

interface Column {
  id: number;
  parts: Part[];
}

const EXAMPLE: Parameters = {
  system: "",
  prompt: "What is the capital of France?",
  temperature: "0",
  topP: "1",
  maxTokens: "64",
  seed: "0",
  schema: "",
};

// Kept while another view is open.
const parameters = new Store<Parameters>(EXAMPLE);
const columns = new Store<readonly Column[] | null>(null);
const outputs = new Store<Readonly<Record<number, Output>>>({});
let nextId = 1;
let runningRun: AbortController | null = null;

export interface ModelName {
  id: string;
  parent: string | null;
}

const newColumn = (name: string | null): Column => ({
  id: nextId++,
  parts: name === null ? [] : [{ name, weight: 1 }],
});

export function Playground({ caller }: { caller: CallerReport }) {
  const given = useStore(parameters);
  const shown = useStore(columns);
  const found = useStore(outputs);
  const [isRunning, setRunning] = useState(runningRun !== null);
  const [isDiff, setDiff] = useState(false);
  const [code, setCode] = useState<Column | null>(null);
  const [fault, setFault] = useState("");
  const models = useLoaded(
    (signal) => get<{ data: ModelName[] }>("/v1/models", signal).then(({ data }) => data),
    [],
  );
  const names = (models.value ?? []).filter((one) => one.parent !== null).map((one) => one.id);
  useEffect(() => {
    if (columns.value === null && models.value !== null) {
      const first = caller.may_use_base || names.length === 0 ? [newColumn(null)] : [];
      columns.set([...first, ...names.slice(0, 3 - first.length).map(newColumn)]);
    }
  }, [models.value]);
  const form = useRef<HTMLFormElement>(null);
  const list = shown ?? [newColumn(null)];
  const reference = list.find((column) => column.parts.length === 0) ?? list[0];

  const set = (change: Partial<Parameters>) => parameters.set({ ...given, ...change });
  const change = (column: Column) =>
    columns.set(list.map((one) => (one.id === column.id ? column : one)));
  const bodyFor = (column: Column) => bodyOf(column.parts, caller.base, given);

  async function run(wanted: readonly Column[]) {
    setFault("");
    let bodies;
    try {
      bodies = wanted.map((column) => [column.id, bodyFor(column)] as const);
    } catch (error) {
      setFault(`The JSON schema is not valid JSON: ${(error as Error).message}`);
      return;
    }
    const run = (runningRun = new AbortController());
    setRunning(true);
    outputs.set(wanted === list ? {} : outputs.value);
    // A browser opens six connections to a server: the live view's is needed.
    const pausesLive = wanted.length === MAX_COLUMNS && connection.value === "open";
    if (pausesLive) stop();
    await Promise.all(
      bodies.map(([id, body]) =>
        runColumn(body, run.signal, (output) => outputs.set({ ...outputs.value, [id]: output })),
      ),
    );
    if (runningRun === run) runningRun = null;
    if (pausesLive) start();
    setRunning(false);
  }

  function onKeyDown(event: KeyboardEvent) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !isRunning) {
      event.preventDefault();
      form.current?.requestSubmit();
    }
    if (event.key === "Escape" && isRunning) runningRun?.abort();
  }

  return (
    <section class="playground" onKeyDown={onKeyDown}>
      <form
        ref={form}
        class="card prompt"
        onSubmit={(event) => {
          event.preventDefault();
          void run(list);
        }}
      >
        <Field label="Prompt">
          <textarea
            rows={3}
            required
            value={given.prompt}
            onInput={(event) => set({ prompt: event.currentTarget.value })}
          />
        </Field>
        <div class="numbers">
          <NumberField label="Temperature" name="temperature" min={0} max={2} step={0.1} given={given} set={set} />
          <NumberField label="top_p" name="topP" min={0.01} max={1} step={0.01} given={given} set={set} />
          <NumberField label="Max tokens" name="maxTokens" min={1} step={1} given={given} set={set} />
          <NumberField label="Seed" name="seed" step={1} given={given} set={set} />
        </div>
        <details>
          <summary>System prompt and JSON schema</summary>
          <div class="two">
            <Field label="System prompt">
              <textarea
                rows={4}
                value={given.system}
                onInput={(event) => set({ system: event.currentTarget.value })}
              />
            </Field>
            <Field label="JSON schema" hint="the answer must match it">
              <textarea
                rows={4}
                class="mono"
                spellcheck={false}
                placeholder='{"type": "object", "properties": {"city": {"type": "string"}}}'
                value={given.schema}
                onInput={(event) => set({ schema: event.currentTarget.value })}
              />
            </Field>
          </div>
        </details>
        {fault !== "" && (
          <p class="fault" role="alert">
            {fault}
          </p>
        )}
        <div class="bar">
          {isRunning ? (
            <button type="button" class="danger" onClick={() => runningRun?.abort()}>
              Stop
            </button>
          ) : (
            <button type="submit" class="primary">
              Run {list.length === 1 ? "1 column" : `${list.length} columns`}
            </button>
          )}
          <span class="muted hint">Ctrl + Enter runs, Escape stops</span>
          <label class="check">
            <input type="checkbox" checked={isDiff} onChange={(event) => setDiff(event.currentTarget.checked)} />
            Differences to the base
          </label>
          <button
            type="button"
            disabled={list.length >= MAX_COLUMNS}
            onClick={() => columns.set([...list, newColumn(names[list.length - 1] ?? null)])}
          >
            Add a column
          </button>
        </div>
      </form>
      <datalist id="model-names">
        {names.map((name) => (
          <option key={name} value={name} />
        ))}
      </datalist>
      {models.value !== null && names.length === 0 && (
        <p class="note">This server has no adapters yet: columns can ask the base only.</p>
      )}
      <div class={`columns columns-${list.length}`}>
        {list.map((column, index) => (
          <ColumnCard
            key={column.id}
            number={index + 1}
            base={caller.base}
            parts={column.parts}
            output={found[column.id] ?? NOTHING}
            compared={
              isDiff && reference !== undefined && reference.id !== column.id
                ? (found[reference.id] ?? NOTHING)
                : null
            }
            onParts={(parts) => change({ ...column, parts })}
            onRemove={list.length > 1 ? () => columns.set(list.filter((one) => one !== column)) : null}
            onCode={() => setCode(column)}
            onRetry={isRunning ? null : () => void run([column])}
          />
        ))}
      </div>
      {code !== null && <CodeDialog body={() => bodyFor(code)} onClose={() => setCode(null)} />}
    </section>
  );
}

interface NumberFieldProps {
  label: string;
  name: "temperature" | "topP" | "maxTokens" | "seed";
  min?: number;
  max?: number;
  step: number;
  given: Parameters;
  set: (change: Partial<Parameters>) => void;
}

function NumberField({ label, name, min, max, step, given, set }: NumberFieldProps) {
  return (
    <Field label={label}>
      <input
        type="number"
        inputMode="decimal"
        min={min}
        max={max}
        step={step}
        value={given[name]}
        onInput={(event) => set({ [name]: event.currentTarget.value })}
      />
    </Field>
  );
}

function CodeDialog({ body, onClose }: { body: () => ReturnType<typeof bodyOf>; onClose: () => void }) {
  let texts: [string, string][];
  try {
    texts = [
      ["curl", asCurl(body())],
      ["Python", asPython(body())],
    ];
  } catch {
    texts = [["", "The JSON schema is not valid JSON."]];
  }
  return (
    <Dialog title="The call of this column" onClose={onClose}>
      {texts.map(([name, text]) => (
        <div key={name} class="code">
          <div class="bar">
            <strong>{name}</strong>
            <Copied text={text} />
          </div>
          <pre tabIndex={0}>{text}</pre>
        </div>
      ))}
    </Dialog>
  );
}
