/** One prompt, up to six columns of text, all in one batch. */

import { useState } from "preact/hooks";
import type { CallerReport } from "../api";
import { Field, NumberField } from "../parts/basics";
import { Store, useStore } from "../store";
import { TextColumn } from "./column";
import { Bench } from "./bench";
import { Columns, type Column } from "./columns";
import type { ModelSet } from "./models";
import { asCurl, asPython, bodyOf, NOTHING, runColumn, type Output, type Parameters } from "./run";

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
const columns = new Columns<Output>();

export function TextPlayground({ caller, models }: { caller: CallerReport; models: ModelSet }) {
  const given = useStore(parameters);
  const found = useStore(columns.outputs);
  const list = useStore(columns.list) ?? [];
  const [isDiff, setDiff] = useState(false);
  const reference = list.find((column) => column.parts.length === 0) ?? list[0];
  const base = models.base ?? caller.base;
  const set = (change: Partial<Parameters>) => parameters.set({ ...given, ...change });
  const bodyFor = (column: Column) => bodyOf(column.parts, base, given);
  return (
    <Bench
      columns={columns}
      models={models}
      mayUseBase={caller.may_use_base}
      ask={(column) => {
        const body = bodyFor(column);
        return (signal, show) => runColumn(body, signal, show);
      }}
      code={(column) => [
        ["curl", asCurl(bodyFor(column))],
        ["Python", asPython(bodyFor(column))],
      ]}
      options={
        <label class="check">
          <input type="checkbox" checked={isDiff} onChange={(event) => setDiff(event.currentTarget.checked)} />
          Differences to the base
        </label>
      }
      column={(column, frame) => (
        <TextColumn
          {...frame}
          key={column.id}
          base={base}
          output={found[column.id] ?? NOTHING}
          compared={
            isDiff && reference !== undefined && reference.id !== column.id ? (found[reference.id] ?? NOTHING) : null
          }
        />
      )}
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
        <NumberField label="Temperature" value={given.temperature} set={(temperature) => set({ temperature })} min={0} max={2} step="any" />
        <NumberField label="top_p" value={given.topP} set={(topP) => set({ topP })} min={0.01} max={1} step="any" />
        <NumberField label="Max tokens" value={given.maxTokens} set={(maxTokens) => set({ maxTokens })} min={1} />
        <NumberField label="Seed" value={given.seed} set={(seed) => set({ seed })} />
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
    </Bench>
  );
}
