/** What the playgrounds for text and for images share: the form, and the columns that answer it. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { useStore } from "../store";
import { CodeDialog } from "./code";
import { MODEL_NAMES, type ColumnProps } from "./column_frame";
import { MAX_COLUMNS, type Ask, type Column, type Columns } from "./columns";
import { partOf, type ModelSet } from "./models";

type Frame = Omit<ColumnProps<unknown>, "output" | "base">;

interface BenchProps<Output> {
  columns: Columns<Output>;
  models: ModelSet;
  mayUseBase: boolean;
  /** Raises an error for parameters that cannot be sent. */
  ask: (column: Column) => Ask<Output>;
  code: (column: Column) => [string, string][];
  column: (column: Column, frame: Frame) => ComponentChildren;
  /** Beside the buttons. */
  options?: ComponentChildren;
  /** The fields of the form. */
  children: ComponentChildren;
}

export function Bench<Output>(props: BenchProps<Output>) {
  const { columns, models } = props;
  const list = useStore(columns.list) ?? [];
  const isRunning = useStore(columns.isRunning);
  const [code, setCode] = useState<Column | null>(null);
  const [fault, setFault] = useState("");
  const form = useRef<HTMLFormElement>(null);
  const adapters = models.adapters;
  useLayoutEffect(() => columns.begin(adapters.map(partOf), props.mayUseBase), [columns, models]);

  function run(wanted: readonly Column[]) {
    setFault("");
    try {
      void columns.run(wanted.map((column) => [column.id, props.ask(column)] as const));
    } catch (error) {
      setFault((error as Error).message);
    }
  }

  function onKeyDown(event: KeyboardEvent) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !isRunning) {
      event.preventDefault();
      form.current?.requestSubmit();
    }
    if (event.key === "Escape" && isRunning) columns.stop();
  }

  function add() {
    const next = adapters[list.length - 1];
    columns.add(next === undefined ? null : partOf(next));
  }

  return (
    <div onKeyDown={onKeyDown}>
      <form
        ref={form}
        class="card prompt"
        onSubmit={(event) => {
          event.preventDefault();
          run(list);
        }}
      >
        {props.children}
        {fault !== "" && (
          <p class="fault" role="alert">
            {fault}
          </p>
        )}
        <div class="bar">
          {/* Two elements: one that became a submit button within its click would submit the form. */}
          {isRunning ? (
            <button key="stop" type="button" class="danger" onClick={() => columns.stop()}>
              Stop
            </button>
          ) : (
            <button key="run" type="submit" class="primary">
              Run {list.length === 1 ? "1 column" : `${list.length} columns`}
            </button>
          )}
          <span class="muted hint">Ctrl + Enter runs, Escape stops</span>
          {props.options}
          <button type="button" disabled={list.length >= MAX_COLUMNS} onClick={add}>
            Add a column
          </button>
        </div>
      </form>
      <datalist id={MODEL_NAMES}>
        {adapters.map(({ id }) => (
          <option key={id} value={id} />
        ))}
      </datalist>
      {adapters.length === 0 && (
        <p class="note">This server has no adapters yet: columns can ask the base only.</p>
      )}
      <div class={`columns columns-${list.length}`}>
        {list.map((column, index) =>
          props.column(column, {
            number: index + 1,
            parts: column.parts,
            onParts: (parts) => columns.change({ ...column, parts }),
            onRemove: list.length > 1 ? () => columns.remove(column) : null,
            onCode: () => setCode(column),
            onRetry: isRunning ? null : () => run([column]),
          }),
        )}
      </div>
      {code !== null && <CodeDialog texts={() => props.code(code)} onClose={() => setCode(null)} />}
    </div>
  );
}
