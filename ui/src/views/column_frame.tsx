/** What all columns of a playground have: a number, adapters with weights, and buttons. */

import type { ComponentChildren } from "preact";
import { ReceiptBar } from "../parts/receipt_bar";
import { link } from "../router";
import type { Receipt } from "./call";
import type { Part } from "./columns";
import { MAX_WEIGHT } from "./models";

export interface ColumnProps<Output> {
  number: number;
  base: string;
  parts: readonly Part[];
  output: Output;
  onParts: (parts: Part[]) => void;
  onRemove: (() => void) | null;
  onCode: () => void;
  /** Asks this column alone again; null: answers are under way. */
  onRetry: (() => void) | null;
}

const MAX_PARTS = 8;
export const MODEL_NAMES = "model-names";

type FrameProps = Omit<ColumnProps<unknown>, "output" | "onRetry"> & { children: ComponentChildren };

export const titleOf = (parts: readonly Part[], base: string): string =>
  parts.length === 0 ? base : parts.map((part) => part.name).join(" + ");

export function ColumnFrame({ number, base, parts, onParts, onRemove, onCode, children }: FrameProps) {
  const change = (index: number, part: Partial<Part>) =>
    onParts(parts.map((one, at) => (at === index ? { ...one, ...part } : one)));
  return (
    <article class="card column" aria-label={`Column ${number}: ${titleOf(parts, base)}`}>
      <header>
        <strong class="number">{number}</strong>
        {parts.length === 0 && (
          <span class="name">
            {base} <span class="muted">base</span>
          </span>
        )}
        <span class="spacer" />
        <button type="button" class="quiet" onClick={onCode}>
          Code
        </button>
        {onRemove !== null && (
          <button type="button" class="quiet" aria-label={`Remove column ${number}`} onClick={onRemove}>
            ✕
          </button>
        )}
      </header>
      {parts.map((part, index) => (
        <div key={index} class="part-row">
          <input
            list={MODEL_NAMES}
            class="adapter"
            aria-label={`Column ${number}, adapter ${index + 1}`}
            placeholder="adapter, tenant/name or name@version"
            value={part.name}
            spellcheck={false}
            autocomplete="off"
            onChange={(event) => change(index, { name: event.currentTarget.value.trim() })}
          />
          <input
            type="range"
            min={0}
            max={MAX_WEIGHT}
            step={0.05}
            aria-label={`Column ${number}, weight of ${part.name || "the adapter"}`}
            value={part.weight}
            onInput={(event) => change(index, { weight: Number(event.currentTarget.value) })}
          />
          <output class="weight">{part.weight.toFixed(2)}</output>
          <button
            type="button"
            class="quiet"
            aria-label={`Column ${number}: remove ${part.name || "the adapter"}`}
            onClick={() => onParts(parts.filter((_, at) => at !== index))}
          >
            ✕
          </button>
        </div>
      ))}
      {parts.length < MAX_PARTS && (
        <button type="button" class="small add" onClick={() => onParts([...parts, { name: "", weight: 1 }])}>
          {parts.length === 0 ? "Use an adapter" : "Add another adapter"}
        </button>
      )}
      {children}
    </article>
  );
}

interface ColumnFooterProps {
  facts: readonly (readonly [string, string])[];
  receipt: Receipt | null;
}

export function ColumnFooter({ facts, receipt }: ColumnFooterProps) {
  return (
    <footer>
      <dl class="facts">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {receipt !== null && (
        <div class="receipt-line">
          <ReceiptBar receipt={receipt} isCompact />
          <a href={link("receipts", String(receipt.id))}>Receipt</a>
        </div>
      )}
    </footer>
  );
}
