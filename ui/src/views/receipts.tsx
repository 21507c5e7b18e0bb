/** Search of receipts by adapter and tenant: the newest, the slowest or the failed ones. */

import { useEffect, useState } from "preact/hooks";
import { get, type CallerReport } from "../api";
import { ms, when } from "../format";
import { Empty, Failure, Loading } from "../parts/basics";
import { useLoaded } from "../parts/load";
import { PhaseLegend, phasesOf, ReceiptBar } from "../parts/receipt_bar";
import { sorted, Table, type Column, type Order } from "../parts/table";
import { goTo } from "../router";
import { Store, useStore } from "../store";
import type { Receipt } from "./call";

const LIMIT = 500;
type Which = "newest" | "slowest" | "failed";

interface Search {
  adapter: string;
  tenant: string;
  which: Which;
}

const search = new Store<Search>({ adapter: "", tenant: "", which: "newest" });

interface Served {
  cid: string;
  name?: string | null;
  tenant?: string | null;
  version?: string | null;
}

export function servedBy(receipt: Receipt): string {
  const adapters = (receipt.adapters ?? []) as unknown as Served[];
  if (adapters.length === 0) return receipt.asked === undefined ? "base" : String(receipt.asked);
  return adapters
    .map(({ cid, name, tenant, version }) => {
      if (!name) return cid.slice(0, 25);
      return `${tenant ? `${tenant}/` : ""}${name}${version ? `@${version}` : ""}`;
    })
    .join(" + ");
}

const COLUMNS: readonly Column<Receipt>[] = [
  { id: "time", title: "Time", width: "minmax(5rem, 11.5rem)", key: (one) => Number(one.time), cell: (one) => when(Number(one.time)) },
  { id: "adapter", title: "Adapter", width: "minmax(8rem, 2fr)", key: servedBy, cell: (one) => <b>{servedBy(one)}</b> },
  { id: "tenant", title: "Tenant", width: "minmax(5rem, 1fr)", isMinor: true, key: (one) => String(one.tenant), cell: (one) => String(one.tenant) },
  {
    id: "status",
    title: "Status",
    width: "6.5rem",
    isMinor: true,
    key: (one) => String(one.status),
    cell: (one) => <span class={`chip status-${String(one.status)}`}>{String(one.status)}</span>,
  },
  { id: "line", title: "Time line", width: "minmax(6rem, 3fr)", isMinor: true, cell: (one) => <ReceiptBar receipt={one} isCompact /> },
  {
    id: "ttft",
    title: "First token",
    width: "6.5rem",
    isNumber: true,
    isMinor: true,
    key: (one) => phasesOf(one).decode,
    cell: (one) => (one.ttft_ms === null ? "–" : ms(Number(one.ttft_ms))),
  },
  { id: "latency", title: "Latency", width: "5.5rem", isNumber: true, key: (one) => Number(one.latency_ms), cell: (one) => ms(Number(one.latency_ms)) },
  {
    id: "tokens",
    title: "Tokens",
    width: "6rem",
    isNumber: true,
    isMinor: true,
    key: (one) => Number(one.completion_tokens),
    cell: (one) => `${String(one.prompt_tokens)} → ${String(one.completion_tokens)}`,
  },
];

function queryOf({ adapter, tenant, which }: Search): string {
  const query = new URLSearchParams({ limit: String(LIMIT) });
  if (adapter !== "") query.set("adapter", adapter);
  if (tenant !== "") query.set("tenant", tenant);
  if (which === "slowest") query.set("slow_ms", "0");
  if (which === "failed") query.set("status", "failed,refused,aborted");
  return query.toString();
}

export function Receipts({ caller, preset }: { caller: CallerReport; preset: string }) {
  const given = useStore(search);
  const [asked, setAsked] = useState(given);
  const [order, setOrder] = useState<Order | null>(null);
  useEffect(() => {
    if (preset !== "") search.set({ ...search.value, adapter: preset });
  }, [preset]);
  useEffect(() => {
    const timer = setTimeout(() => setAsked(given), 300);
    return () => clearTimeout(timer);
  }, [given]);
  const found = useLoaded(
    caller.has_registry
      ? (signal) => get<{ data: Receipt[] }>(`/v1/receipts?${queryOf(asked)}`, signal).then(({ data }) => data)
      : null,
    [asked, caller.has_registry],
  );
  const rows = sorted(found.value ?? [], COLUMNS, order);
  const set = (change: Partial<Search>) => search.set({ ...given, ...change });
  return (
    <section class="fill">
      <div class="toolbar">
        <h1>Receipts</h1>
        <input
          type="search"
          aria-label="Adapter"
          placeholder="tenant/name, name@version or CID"
          value={given.adapter}
          spellcheck={false}
          onInput={(event) => set({ adapter: event.currentTarget.value.trim() })}
        />
        <input
          type="search"
          aria-label="Tenant"
          placeholder="Tenant"
          class="short"
          value={given.tenant}
          spellcheck={false}
          onInput={(event) => set({ tenant: event.currentTarget.value.trim() })}
        />
        <fieldset class="choice">
          <legend class="hidden">Order</legend>
          {(["newest", "slowest", "failed"] as const).map((which) => (
            <label key={which}>
              <input
                type="radio"
                name="which"
                checked={given.which === which}
                onChange={() => set({ which })}
              />
              <span>{which}</span>
            </label>
          ))}
        </fieldset>
        <button type="button" onClick={found.reload}>
          Reload
        </button>
        <span class="muted" role="status">
          {found.value === null ? "" : `${rows.length}${rows.length === LIMIT ? ", more exist" : ""}`}
        </span>
      </div>
      {rows.length > 0 && <PhaseLegend />}
      {!caller.has_registry && (
        <Empty title="This server keeps no receipts">Start it with --registry to store one for each request.</Empty>
      )}
      {found.error !== null && <Failure error={found.error} retry={found.reload} />}
      {found.value === null && found.isLoading && <Loading what="receipts" />}
      {found.error === null && found.value?.length === 0 && (
        <Empty title="No receipt matches">Requests leave one when they end.</Empty>
      )}
      {found.error === null && rows.length > 0 && (
        <Table
          label="Receipts"
          rows={rows}
          columns={COLUMNS}
          rowKey={(one) => String(one.id)}
          order={order}
          onOrder={setOrder}
          onOpen={(one) => goTo("receipts", String(one.id))}
        />
      )}
    </section>
  );
}
