/** The time line of a request as a bar: queue, load, prefill and decode. */

import { ms } from "../format";
import type { Json } from "../canonical";

export interface Phases {
  queue: number;
  load: number;
  prefill: number;
  decode: number;
}

const number = (value: Json | undefined): number => (typeof value === "number" ? value : 0);

/** A load runs while the request waits; what is left of the wait is the queue. */
export function phasesOf(receipt: { [name: string]: Json }): Phases {
  const total = number(receipt.latency_ms);
  const first = typeof receipt.ttft_ms === "number" ? receipt.ttft_ms : total;
  const waited = Math.min(number(receipt.queue_ms), first);
  const load = Math.min(number(receipt.load_ms), waited);
  return {
    queue: waited - load,
    load,
    prefill: Math.max(0, first - waited),
    decode: Math.max(0, total - first),
  };
}

const NAMES = ["queue", "load", "prefill", "decode"] as const;

export function PhaseLegend() {
  return (
    <ul class="legends phases" aria-label="Colours of the time lines">
      {NAMES.map((name) => (
        <li key={name}>
          <i class={`swatch phase-${name}`} aria-hidden="true" />
          {name}
        </li>
      ))}
    </ul>
  );
}

export function ReceiptBar({ receipt, isCompact = false }: {
  receipt: { [name: string]: Json };
  isCompact?: boolean;
}) {
  const phases = phasesOf(receipt);
  const total = NAMES.reduce((sum, name) => sum + phases[name], 0);
  const text = NAMES.map((name) => `${name} ${ms(phases[name])}`).join(", ");
  return (
    <div class={`stack${isCompact ? " compact" : ""}`}>
      <div class="track" role="img" aria-label={`Time line: ${text}`} title={text}>
        {NAMES.map((name) =>
          phases[name] > 0 ? (
            <span key={name} class={`part phase-${name}`} style={{ width: `${(100 * phases[name]) / total}%` }} />
          ) : null,
        )}
      </div>
      {!isCompact && (
        <ul class="legends">
          {NAMES.map((name) => (
            <li key={name}>
              <i class={`swatch phase-${name}`} aria-hidden="true" />
              {name} <b>{ms(phases[name])}</b>
            </li>
          ))}
          <li>
            total <b>{ms(total)}</b>
          </li>
        </ul>
      )}
    </div>
  );
}
