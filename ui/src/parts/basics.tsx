/** Small parts of all views. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ApiError } from "../api";

const TIER_NAMES: Record<string, string> = {
  device: "device",
  host: "host",
  disk: "disk",
  source: "source",
  loading: "loading",
};

export function TierChip({ tier, pinned = false }: { tier: string; pinned?: boolean }) {
  return (
    <span class={`chip tier-${TIER_NAMES[tier] ?? "source"}`}>
      <span class="dot" aria-hidden="true" />
      {tier}
      {pinned && <span class="pin"> · pinned</span>}
    </span>
  );
}

export function StateChip({ state }: { state: string }) {
  return <span class={`chip state-${state}`}>{state}</span>;
}

const TITLES: Record<number, string> = {
  0: "Server unreachable",
  401: "A key is needed",
  403: "Not allowed",
  404: "Not found",
  408: "Timed out",
  409: "Changed meanwhile",
  422: "Adapter refused",
  429: "Too many requests",
  502: "Source failed",
  503: "Not available now",
  507: "Store full",
};

export function Failure({ error, retry }: { error: unknown; retry?: () => void }) {
  const status = error instanceof ApiError ? error.status : -1;
  const message = error instanceof Error ? error.message : String(error);
  return (
    <div class="failure" role="alert">
      <strong>
        {TITLES[status] ?? "That failed"}
        {status > 0 && <span class="muted"> · {status}</span>}
      </strong>
      <p>{message}</p>
      {error instanceof ApiError && error.reason !== null && <code>{error.reason}</code>}
      {retry !== undefined && <Retry error={error} retry={retry} />}
    </div>
  );
}

/** Retries by itself where the server says when. */
function Retry({ error, retry }: { error: unknown; retry: () => void }) {
  const given = error instanceof ApiError ? error.retryAfterS : null;
  const [left, setLeft] = useState(given);
  useEffect(() => {
    if (left === null) return;
    if (left <= 0) {
      retry();
      return;
    }
    const timer = setTimeout(() => setLeft(left - 1), 1000);
    return () => clearTimeout(timer);
  }, [left]);
  return (
    <button type="button" onClick={retry}>
      {left === null || left <= 0 ? "Try again" : `Try again (in ${left} s)`}
    </button>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <strong>{title}</strong>
      {children !== undefined && <p>{children}</p>}
    </div>
  );
}

export function Loading({ what }: { what: string }) {
  return (
    <div class="empty" role="status">
      <span class="spinner" aria-hidden="true" /> Loading {what}…
    </div>
  );
}

interface FieldProps {
  label: string;
  hint?: string;
  children: ComponentChildren;
}

export function Field({ label, hint, children }: FieldProps) {
  return (
    <label class="field">
      <span>
        {label}
        {hint !== undefined && <small> {hint}</small>}
      </span>
      {children}
    </label>
  );
}

interface NumberFieldProps {
  label: string;
  hint?: string;
  /** As text; empty: the server's default. */
  value: string;
  set: (value: string) => void;
  min?: number;
  max?: number;
  step?: number | "any";
}

export function NumberField({ label, hint, value, set, min, max, step = 1 }: NumberFieldProps) {
  return (
    <Field label={label} {...(hint === undefined ? {} : { hint })}>
      <input
        type="number"
        inputMode="decimal"
        placeholder="default"
        min={min}
        max={max}
        step={step}
        value={value}
        onInput={(event) => set(event.currentTarget.value)}
      />
    </Field>
  );
}

export function Copied({ text }: { text: string }) {
  const [done, setDone] = useState(false);
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } catch {
      // Only pages from https and from this machine may write to the clipboard.
    }
  }
  if (!window.isSecureContext) return null;
  return (
    <button type="button" class="small" onClick={() => void copy()}>
      {done ? "Copied" : "Copy"}
    </button>
  );
}
