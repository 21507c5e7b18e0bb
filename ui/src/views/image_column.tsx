/** One column of the playground for images: the image as it forms, its time and its receipt. */

import { ms } from "../format";
import { Failure } from "../parts/basics";
import { ColumnFooter, ColumnFrame, titleOf, type ColumnProps } from "./column_frame";
import type { ImageOutput } from "./image_run";

interface ImageColumnProps extends ColumnProps<ImageOutput> {
  prompt: string;
  /** Words that the trainers of the adapters noted; they are not added to the prompt. */
  words: readonly string[];
}

export function ImageColumn({ output, prompt, words, onRetry, ...frame }: ImageColumnProps) {
  const title = titleOf(frame.parts, frame.base);
  return (
    <ColumnFrame {...frame}>
      {words.length > 0 && <p class="muted words">Trigger words: {words.join(", ")}</p>}
      <figure class="image" aria-busy={output.phase === "drawing"}>
        {output.url !== null ? (
          <img src={output.url} alt={`${title}: ${prompt}`} class={isSmall(output.size) ? "pixels" : ""} />
        ) : (
          <div class="canvas" aria-hidden="true" />
        )}
        <figcaption>
          {output.phase === "drawing" && <span class="spinner" aria-hidden="true" />}
          <span role="status">{stateOf(output)}</span>
          {output.phase === "done" && output.url !== null && (
            <a href={output.url} download={`${title.replace(/[^\w.+-]+/g, "_")}.png`}>
              Save
            </a>
          )}
        </figcaption>
      </figure>
      {output.warnings.map((text) => (
        <p key={text} class="note" role="note">
          {text}
        </p>
      ))}
      {output.phase === "failed" &&
        (onRetry === null ? <Failure error={output.error} /> : <Failure error={output.error} retry={onRetry} />)}
      <ColumnFooter
        facts={[
          ["time", ms(output.totalMs)],
          ["first image", ms(output.firstMs)],
          ["size", output.size ?? "–"],
          ["tokens", output.tokens === null ? "–" : String(output.tokens)],
        ]}
        receipt={output.receipt}
      />
    </ColumnFrame>
  );
}

const isSmall = (size: string | null): boolean => Number(size?.split("x")[0] ?? 0) < 256;

function stateOf({ phase, numPartial }: ImageOutput): string {
  if (phase === "idle") return "No image yet.";
  if (phase === "drawing") return numPartial === 0 ? "Drawing…" : `Partial image ${numPartial}`;
  return phase === "done" ? "Finished." : phase === "stopped" ? "Stopped by you." : "Failed.";
}
