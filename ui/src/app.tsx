/** The frame of all views: navigation, the state of the engine, and the question for a key. */

import { useEffect, useState } from "preact/hooks";
import { get, hasKey, needsKey, changeKey, type CallerReport } from "./api";
import { connection, engine, readHealth, start } from "./live";
import { Failure, Field, Loading } from "./parts/basics";
import { useLoaded } from "./parts/load";
import { link, route } from "./router";
import { useStore } from "./store";
import { AdapterPage } from "./views/adapter";
import { Adapters } from "./views/adapters";
import { Live } from "./views/live";
import { Playground } from "./views/playground";
import { ReceiptPage } from "./views/receipt";
import { Receipts } from "./views/receipts";

const VIEWS = [
  ["playground", "Playground"],
  ["adapters", "Adapters"],
  ["live", "Live"],
  ["receipts", "Receipts"],
] as const;

const HEALTH_MS = 3000;

export function App() {
  const isLocked = useStore(needsKey);
  const caller = useLoaded((signal) => get<CallerReport>("/v1/caller", signal), []);
  const at = useStore(route);
  useEffect(() => {
    document.title = `${VIEWS.find(([view]) => view === at.view)?.[1] ?? "loramux"} · loramux`;
  }, [at]);
  useEffect(() => {
    if (caller.value !== null) start();
  }, [caller.value]);
  if (isLocked) return <KeyPrompt />;
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        Skip to content
      </a>
      <Header caller={caller.value} view={at.view} />
      <EngineBanner onReady={caller.reload} />
      <main id="main" tabIndex={-1}>
        {caller.error !== null && <Failure error={caller.error} retry={caller.reload} />}
        {caller.value === null && caller.error === null && <Loading what="the page" />}
        {caller.value !== null && <View caller={caller.value} />}
      </main>
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function View({ caller }: { caller: CallerReport }) {
  const { view, rest } = useStore(route);
  switch (view) {
    case "adapters":
      return rest === "" ? <Adapters caller={caller} /> : <AdapterPage key={rest} caller={caller} id={rest} />;
    case "live":
      return <Live />;
    case "receipts":
      if (rest === "" || rest.startsWith("adapter:")) {
        return <Receipts caller={caller} preset={rest.replace(/^adapter:/, "")} />;
      }
      return <ReceiptPage key={rest} caller={caller} id={rest} />;
    default:
      return <Playground caller={caller} />;
  }
}

function Header({ caller, view }: { caller: CallerReport | null; view: string }) {
  const state = useStore(engine);
  return (
    <header class="top">
      <a class="brand" href={link("playground")}>
        <img src="./icon.svg" alt="" width="22" height="22" /> loramux
      </a>
      <nav aria-label="Views">
        {VIEWS.map(([name, title]) => (
          <a key={name} href={link(name)} aria-current={view === name ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      <span class="spacer" />
      {caller !== null && (
        <span class="who" title={`loramux ${caller.version}`}>
          {caller.base}
          {caller.key_id !== null && <span class="muted"> · key {caller.key_id}</span>}
        </span>
      )}
      {state !== "" && (
        <span class={`engine engine-${state}`} role="status">
          <span class="dot" aria-hidden="true" />
          {state}
        </span>
      )}
      {hasKey() && (
        <button type="button" class="quiet" onClick={() => changeKey(null)}>
          Forget key
        </button>
      )}
    </header>
  );
}

const TEXTS: Record<string, string> = {
  starting: "The engine is starting. Requests are answered in a moment.",
  restarting: "The engine ended and is restarting. Open answers were cut off; new requests work again in a moment.",
  draining: "The server is shutting down and takes no new requests.",
  stopped: "The server has stopped.",
  unreachable: "The server cannot be reached. The page tries again by itself.",
};

function EngineBanner({ onReady }: { onReady: () => void }) {
  const state = useStore(engine);
  const followed = useStore(connection);
  const [wasAway, setAway] = useState(false);
  const text = TEXTS[state];
  useEffect(() => {
    // The stream says it where it is allowed and open.
    if (followed === "open") return;
    const ask = () => {
      if (document.visibilityState === "visible") void readHealth();
    };
    if (followed !== "off") ask();
    const timer = setInterval(ask, HEALTH_MS);
    return () => clearInterval(timer);
  }, [followed]);
  useEffect(() => {
    if (text !== undefined) setAway(true);
    else if (wasAway && state === "ready") {
      setAway(false);
      onReady();
    }
  }, [state]);
  if (text === undefined) return null;
  return (
    <div class="banner" role="status">
      {text}
    </div>
  );
}

function KeyPrompt() {
  const [key, setKey] = useState("");
  return (
    <main class="lock">
      <form
        class="card"
        onSubmit={(event) => {
          event.preventDefault();
          if (key.trim() !== "") changeKey(key.trim());
        }}
      >
        <h1>loramux</h1>
        <p>
          {hasKey()
            ? "The server does not accept the key: it is wrong, has expired or was revoked."
            : "This server asks for an API key."}
        </p>
        <Field label="API key">
          <input
            type="password"
            autocomplete="off"
            required
            value={key}
            onInput={(event) => setKey(event.currentTarget.value)}
          />
        </Field>
        <p class="muted">It is kept for this tab only, and sent in a header, never in an address.</p>
        <footer>
          {hasKey() && (
            <button type="button" onClick={() => changeKey(null)}>
              Forget the old key
            </button>
          )}
          <button type="submit" class="primary">
            Use this key
          </button>
        </footer>
      </form>
    </main>
  );
}
