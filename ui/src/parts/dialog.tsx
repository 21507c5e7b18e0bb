/** A modal dialog: the browser's own, which keeps the focus and closes with Escape. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Failure } from "./basics";

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
}

export function Dialog({ title, onClose, children }: DialogProps) {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = element.current;
    if (dialog === null) return;
    if (!dialog.open) dialog.showModal();
    return () => dialog.close();
  }, []);
  return (
    <dialog ref={element} onCancel={onClose} aria-labelledby="dialog-title">
      <header>
        <h2 id="dialog-title">{title}</h2>
        <button type="button" class="quiet" aria-label="Close" onClick={onClose}>
          ✕
        </button>
      </header>
      {children}
    </dialog>
  );
}

interface ActionProps {
  title: string;
  verb: string;
  /** To be typed before a change that cannot be undone. */
  confirmation?: string;
  run: () => Promise<unknown>;
  onClose: (done: boolean) => void;
  children?: ComponentChildren;
}

/** A form that runs one change of the server, and shows why it failed. */
export function Action({ title, verb, confirmation, run, onClose, children }: ActionProps) {
  const [typed, setTyped] = useState("");
  const [error, setError] = useState<unknown>(null);
  const [isRunning, setRunning] = useState(false);
  async function submit(event: Event) {
    event.preventDefault();
    setRunning(true);
    setError(null);
    try {
      await run();
      onClose(true);
    } catch (failed) {
      setError(failed);
      setRunning(false);
    }
  }
  const isBlocked = isRunning || (confirmation !== undefined && typed !== confirmation);
  return (
    <Dialog title={title} onClose={() => onClose(false)}>
      <form onSubmit={(event) => void submit(event)}>
        {children}
        {confirmation !== undefined && (
          <label class="field">
            <span>
              This cannot be undone. Type <code>{confirmation}</code> to confirm.
            </span>
            <input
              value={typed}
              autocomplete="off"
              onInput={(event) => setTyped(event.currentTarget.value)}
            />
          </label>
        )}
        {error !== null && <Failure error={error} />}
        <footer>
          <button type="button" onClick={() => onClose(false)}>
            Cancel
          </button>
          <button
            type="submit"
            class={confirmation === undefined ? "primary" : "danger"}
            disabled={isBlocked}
          >
            {isRunning ? "Working…" : verb}
          </button>
        </footer>
      </form>
    </Dialog>
  );
}
