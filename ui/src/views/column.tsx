/** One column of the playground: what answers, the answer, and its receipt. */

import { useMemo } from "preact/hooks";
import { diffWords } from "../diff";
import { ms, rate } from "../format";
import { Failure } from "../parts/basics";
import { ReceiptBar } from "../parts/receipt_bar";
import { link } from "../router";
import type { Output, Part } from "./run";

interface ColumnCardProps {
  number: number;
  base: string;
  parts: readonly Part[];
  output: Output;
  /** The output of the base's column, if differences are shown. */
  compared: Output | null;
  onParts: (parts: Part[]) => void;
  onRemove: (() => void) | null;
  onCode: () => void;
  /** Asks this column alone again; null: answers are under way. */
  onRetry: (() => void) | null;
}

const MAX_PARTS = 8;

export function ColumnCard(props: ColumnCardProps) {
  const { number, base, parts, output, onParts } = props;
  const change = (index: number, part: Partial<Part>) =>
    onParts(parts.map((one, at) => (at === index ? { ...one, ...part } : one)));
  const title = parts.length === 0 ? base : parts.map((part) => part.name).join(" + ");
  return (
    <article class="card column" aria-label={`Column ${number}: ${title}`}>
      <header>
        <strong class="number">{number}</strong>
        {parts.length === 0 && (
          <span class="name">
            {base} <span class="muted">base</span>
          </span>
        )}
        <span class="spacer" />
        <button type="button" class="quiet" onClick={props.onCode}>
          Code
        </button>
        {props.onRemove !== null && (
          <button type="button" class="quiet" aria-label={`Remove column ${number}`} onClick={props.onRemove}>
            ✕
          </button>
        )}
      </header>
      {parts.map((part, index) => (
        <div key={index} class="part-row">
          <input
            list="model-names"
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
            max={1.5}
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
      <Answer output={output} compared={props.compared} onRetry={props.onRetry} />
      <footer>
        <dl class="facts">
          <div>
            <dt>tokens/s</dt>
            <dd>{rate(output.perSecond)}</dd>
          </div>
          <div>
            <dt>first token</dt>
            <dd>{ms(output.ttftMs)}</dd>
          </div>
          <div>
            <dt>tokens</dt>
            <dd>{output.tokens ?? "–"}</dd>
          </div>
          <div>
            <dt>ended by</dt>
            <dd>{output.finish ?? (output.phase === "stopped" ? "you" : "–")}</dd>
          </div>
        </dl>
        {output.receipt !== null && (
          <div class="receipt-line">
            <ReceiptBar receipt={output.receipt} isCompact />
            <a href={link("receipts", String(output.receipt.id))}>Receipt</a>
          </div>
        )}
      </footer>
    </article>
  );
}

interface AnswerProps {
  output: Output;
  compared: Output | null;
  onRetry: (() => void) | null;
}

function Answer({ output, compared, onRetry }: AnswerProps) {
  if (output.phase === "failed") {
    return (
      <>
        {output.text !== "" && <p class="answer">{output.text}</p>}
        {onRetry === null ? <Failure error={output.error} /> : <Failure error={output.error} retry={onRetry} />}
      </>
    );
  }
  if (output.phase === "idle") return <p class="answer muted">No answer yet.</p>;
  // A table of all words: not for each token of a stream.
  if (compared !== null && hasEnded(compared) && hasEnded(output)) {
    return <Differences before={compared.text} after={output.text} />;
  }
  return (
    <p class="answer" aria-live="polite" aria-busy={output.phase === "waiting" || output.phase === "streaming"}>
      {output.text}
      {(output.phase === "waiting" || output.phase === "streaming") && <span class="caret" aria-hidden="true" />}
    </p>
  );
}

const hasEnded = (output: Output): boolean => output.phase === "done" || output.phase === "stopped";

function Differences({ before, after }: { before: string; after: string }) {
  const pieces = useMemo(() => diffWords(before, after), [before, after]);
  return (
    <p class="answer" aria-live="polite">
      {pieces.map((piece, index) =>
        piece.kind === "same" ? (
          <span key={index}>{piece.text}</span>
        ) : piece.kind === "added" ? (
          <ins key={index}>{piece.text}</ins>
        ) : (
          <del key={index}>{piece.text}</del>
        ),
      )}
    </p>
  );
}
