/** Pushes an adapter into the registry, with the progress of its download. */

import { useState } from "preact/hooks";
import { ApiError, errorOf, stream, type CallerReport } from "../api";
import { bytes } from "../format";
import { Failure, Field } from "../parts/basics";
import { Dialog } from "../parts/dialog";

interface Progress {
  received_bytes: number;
  total_bytes: number | null;
}

interface PushDialogProps {
  caller: CallerReport;
  reference?: string;
  /** The full name of the pushed version, or null. */
  onClose: (pushed: string | null) => void;
}

export function PushDialog({ caller, reference: given = "", onClose }: PushDialogProps) {
  const [reference, setReference] = useState(given);
  const [source, setSource] = useState("");
  const [progress, setProgress] = useState<Progress | null>(null);
  const [isRunning, setRunning] = useState(false);
  const [error, setError] = useState<unknown>(null);

  async function push(event: Event) {
    event.preventDefault();
    setError(null);
    setRunning(true);
    setProgress({ received_bytes: 0, total_bytes: null });
    try {
      onClose(await pushed(reference.trim(), source.trim(), setProgress));
    } catch (failed) {
      setError(failed);
      setRunning(false);
      setProgress(null);
    }
  }

  return (
    <Dialog title="Push an adapter" onClose={() => onClose(null)}>
      <form onSubmit={(event) => void push(event)}>
        <Field label="Name" hint="tenant/name@1.4.2; without a version, the next free one">
          <input
            required
            value={reference}
            placeholder={`${caller.tenant}/my-adapter@1.0.0`}
            spellcheck={false}
            autocomplete="off"
            onInput={(event) => setReference(event.currentTarget.value)}
          />
        </Field>
        <Field
          label="Source"
          hint={caller.allows_folders ? "a folder under the allowed roots, hf:owner/name, s3://…" : "hf:owner/name[@revision], s3://bucket/folder, https://…"}
        >
          <input
            required
            value={source}
            placeholder="hf:owner/name"
            spellcheck={false}
            autocomplete="off"
            onInput={(event) => setSource(event.currentTarget.value)}
          />
        </Field>
        {progress !== null && <ProgressLine progress={progress} />}
        {error !== null && <Failure error={error} />}
        <footer>
          <button type="button" onClick={() => onClose(null)}>
            {isRunning ? "Leave it running" : "Cancel"}
          </button>
          <button type="submit" class="primary" disabled={isRunning}>
            {isRunning ? "Pushing…" : "Push"}
          </button>
        </footer>
      </form>
    </Dialog>
  );
}

function ProgressLine({ progress }: { progress: Progress }) {
  const { received_bytes: received, total_bytes: total } = progress;
  const isStoring = total !== null && received >= total;
  return (
    <div class="progress" role="status">
      <progress max={total ?? 1} {...(total === null || isStoring ? {} : { value: received })} />
      <span>
        {received === 0
          ? "Asking the source…"
          : isStoring
            ? `${bytes(received)} are here; checking and storing…`
            : `${bytes(received)}${total === null ? "" : ` of ${bytes(total)}`}`}
      </span>
    </div>
  );
}

async function pushed(
  reference: string,
  source: string,
  show: (progress: Progress) => void,
): Promise<string> {
  const [, events] = await stream("/v1/adapters", { method: "POST", body: { reference, source } });
  for await (const event of events) {
    if (event.name === "progress") show(JSON.parse(event.data) as Progress);
    else if (event.name === "done") return (JSON.parse(event.data) as { id: string }).id;
    else throw errorOf(event.data, 500, null);
  }
  throw new ApiError(0, "The answer broke off. The push may go on: look for the version in a moment.");
}
