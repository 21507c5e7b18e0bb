/** Loads a value for a component, and drops answers that come too late. */

import { useCallback, useEffect, useRef, useState } from "preact/hooks";

export interface Loaded<T> {
  value: T | null;
  error: unknown;
  isLoading: boolean;
  reload: () => void;
}

/** `load` null: nothing is loaded. A reload keeps the old value until the new one is there. */
export function useLoaded<T>(
  load: ((signal: AbortSignal) => Promise<T>) | null,
  inputs: readonly unknown[],
): Loaded<T> {
  const [value, setValue] = useState<T | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [isLoading, setLoading] = useState(load !== null);
  const [turn, setTurn] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const wanted = latest.current;
    if (wanted === null) {
      setLoading(false);
      return;
    }
    const abort = new AbortController();
    setLoading(true);
    wanted(abort.signal)
      .then((found) => {
        if (abort.signal.aborted) return;
        setValue(() => found);
        setError(null);
        setLoading(false);
      })
      .catch((failed: unknown) => {
        if (abort.signal.aborted) return;
        setError(failed);
        setLoading(false);
      });
    return () => abort.abort();
  }, [...inputs, turn]);
  return { value, error, isLoading, reload: useCallback(() => setTurn((now) => now + 1), []) };
}
