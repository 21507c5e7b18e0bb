/** The newest receipts of one adapter, as time lines. */

import { get, type CallerReport } from "../api";
import { moment, ms } from "../format";
import { Failure } from "../parts/basics";
import { useLoaded } from "../parts/load";
import { ReceiptBar } from "../parts/receipt_bar";
import { link } from "../router";
import type { Receipt } from "./call";

const NUM_SHOWN = 12;

export function ReceiptRows({ caller, cid }: { caller: CallerReport; cid: string }) {
  const mayRead = caller.scopes.includes("receipts") || caller.scopes.includes("admin");
  const found = useLoaded(
    mayRead
      ? (signal) => {
          const query = new URLSearchParams({ adapter: cid, limit: String(NUM_SHOWN) });
          return get<{ data: Receipt[] }>(`/v1/receipts?${query}`, signal).then(({ data }) => data);
        }
      : null,
    [cid, mayRead],
  );
  if (!mayRead) return null;
  return (
    <div class="card">
      <div class="toolbar">
        <h2>Receipts</h2>
        <span class="spacer" />
        <a href={link("receipts", `adapter:${cid}`)}>All of this adapter</a>
      </div>
      {found.error !== null && <Failure error={found.error} retry={found.reload} />}
      {found.value?.length === 0 && <p class="muted">No request was served with it yet.</p>}
      <ul class="plain receipt-rows">
        {(found.value ?? []).map((receipt) => (
          <li key={String(receipt.id)}>
            <a href={link("receipts", String(receipt.id))}>{moment(Number(receipt.time))}</a>
            <span class={`chip status-${String(receipt.status)}`}>{String(receipt.status)}</span>
            <ReceiptBar receipt={receipt} isCompact />
            <span class="number">{ms(Number(receipt.latency_ms))}</span>
          </li>
        ))}
      </ul>
    </div>
  );
}
