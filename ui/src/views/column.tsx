/** One column of the playground for text: the answer, and its differences to another one. */

import { useMemo } from "preact/hooks";
import { diffWords } from "../diff";
import { ms, rate } from "../format";
import { Failure } from "../parts/basics";
import { ColumnFooter, ColumnFrame, type ColumnProps } from "./column_frame";
import type { Output } from "./run";

interface TextColumnProps extends ColumnProps<Output> {
  /** The output of the base's column, if differences are shown. */
  compared: Output | null;
}

export function TextColumn({ output, compared, onRetry, ...frame }: TextColumnProps) {
  return (
    <ColumnFrame {...frame}>
      <Answer output={output} compared={compared} onRetry={onRetry} />
      <ColumnFooter
        facts={[
          ["tokens/s", rate(output.perSecond)],
          ["first token", ms(output.ttftMs)],
          ["tokens", output.tokens === null ? "–" : String(output.tokens)],
          ["ended by", output.finish ?? (output.phase === "stopped" ? "you" : "–")],
        ]}
        receipt={output.receipt}
      />
    </ColumnFrame>
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
