/** One prompt and one seed, up to six images side by side, denoised in one batch. */

import { Field, NumberField } from "../parts/basics";
import { Store, useStore } from "../store";
import { Bench } from "./bench";
import { Columns, type Column } from "./columns";
import { ImageColumn } from "./image_column";
import {
  asCurl,
  asPython,
  bodyOf,
  forget,
  MAX_PARTIAL,
  NOTHING,
  runImage,
  type ImageOutput,
  type ImageParameters,
} from "./image_run";
import type { ModelSet } from "./models";

const EXAMPLE: ImageParameters = {
  prompt: "a fox on a yellow background",
  negative: "",
  seed: "1",
  size: "",
  steps: "",
  guidance: "",
  trueGuidance: "",
  partial: String(MAX_PARTIAL),
};

// Kept while another view is open.
const parameters = new Store<ImageParameters>(EXAMPLE);
const columns = new Columns<ImageOutput>(forget);

interface ImagePlaygroundProps {
  base: string;
  models: ModelSet;
  mayUseBase: boolean;
}

export function ImagePlayground({ base, models, mayUseBase }: ImagePlaygroundProps) {
  const given = useStore(parameters);
  const found = useStore(columns.outputs);
  const set = (change: Partial<ImageParameters>) => parameters.set({ ...given, ...change });
  const bodyFor = (column: Column) => bodyOf(column.parts, base, given);
  return (
    <Bench
      columns={columns}
      models={models}
      mayUseBase={mayUseBase}
      ask={(column) => {
        const body = bodyFor(column);
        return (signal, show) => runImage(body, signal, show);
      }}
      code={(column) => [
        ["curl", asCurl(bodyFor(column))],
        ["Python", asPython(bodyFor(column))],
      ]}
      column={(column, frame) => (
        <ImageColumn
          {...frame}
          key={column.id}
          base={base}
          prompt={given.prompt}
          words={wordsOf(models, column)}
          output={found[column.id] ?? NOTHING}
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
        <NumberField label="Seed" value={given.seed} set={(seed) => set({ seed })} min={0} />
        <Field label="Size">
          <input
            value={given.size}
            placeholder="default"
            pattern="[0-9]+x[0-9]+"
            title="width x height, such as 1024x768"
            autocomplete="off"
            onInput={(event) => set({ size: event.currentTarget.value.trim() })}
          />
        </Field>
        <NumberField label="Steps" value={given.steps} set={(steps) => set({ steps })} min={1} />
        <NumberField
          label="Guidance"
          value={given.guidance}
          set={(guidance) => set({ guidance })}
          min={0}
          step="any"
        />
        <NumberField
          label="Partial images"
          value={given.partial}
          set={(partial) => set({ partial })}
          min={0}
          max={MAX_PARTIAL}
        />
      </div>
      <details>
        <summary>Negative prompt</summary>
        <div class="two">
          <Field label="Negative prompt" hint="what the image should not show">
            <textarea
              rows={2}
              value={given.negative}
              onInput={(event) => set({ negative: event.currentTarget.value })}
            />
          </Field>
          <NumberField
            label="True CFG scale"
            hint="of FLUX.1 and Qwen-Image, with a negative prompt"
            value={given.trueGuidance}
            set={(trueGuidance) => set({ trueGuidance })}
            min={0}
            step="any"
          />
        </div>
      </details>
    </Bench>
  );
}

function wordsOf(models: ModelSet, column: Column): string[] {
  const used = models.adapters.filter(({ id }) => column.parts.some((part) => part.name === id));
  return used.flatMap((adapter) => adapter.trigger_words ?? []);
}
