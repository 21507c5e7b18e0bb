/** One receipt: its time line, its fields, and its signature, verified here. */

import { useState } from "preact/hooks";
import { ApiError, get, type CallerReport } from "../api";
import { moment, ms } from "../format";
import { Copied, Failure, Loading } from "../parts/basics";
import { useLoaded } from "../parts/load";
import { ReceiptBar } from "../parts/receipt_bar";
import { link } from "../router";
import { keyIdOf, readPem, verifyReceipt, type Verdict } from "../verify";
import { servedBy } from "./receipts";
import type { Receipt } from "./call";

interface ReceiptKey {
  key_id: string;
  public_key: string;
}

export function ReceiptPage({ caller, id }: { caller: CallerReport; id: string }) {
  const found = useLoaded((signal) => get<Receipt>(`/v1/receipts/${encodeURIComponent(id)}`, signal), [id]);
  const receipt = found.value;
  if (found.error !== null) return <Failure error={found.error} retry={found.reload} />;
  if (receipt === null) return <Loading what="the receipt" />;
  const text = JSON.stringify(receipt, null, 2);
  return (
    <section class="receipt-page">
      <p class="crumbs">
        <a href={link("receipts")}>Receipts</a> <span aria-hidden="true">/</span>
      </p>
      <div class="toolbar">
        <h1>{servedBy(receipt)}</h1>
        <span class={`chip status-${String(receipt.status)}`}>{String(receipt.status)}</span>
      </div>
      <div class="card">
        <h2>Time line</h2>
        <ReceiptBar receipt={receipt} />
        {receipt.reason !== undefined && <p class="note">{String(receipt.reason)}</p>}
      </div>
      <div class="card">
        <dl class="facts wide">
          {factsOf(receipt).map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
      </div>
      <Images receipt={receipt} />
      <Signature caller={caller} receipt={receipt} />
      <details class="card">
        <summary>The receipt as JSON</summary>
        <Copied text={text} />
        <pre tabIndex={0}>{text}</pre>
      </details>
    </section>
  );
}

interface ServedImage {
  seed: number;
  size: string;
  steps: number;
  pixel_digest: string;
  num_pauses?: number;
}

/** What was drawn, where the request was for images. */
function Images({ receipt }: { receipt: Receipt }) {
  const images = (receipt.images ?? []) as unknown as ServedImage[];
  if (images.length === 0) return null;
  return (
    <div class="card">
      <h2>Images</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Images">
        <table class="plain-table">
          <thead>
            <tr>
              <th>Seed</th>
              <th>Size</th>
              <th>Steps</th>
              <th>Pauses</th>
              <th>Digest of the pixels</th>
            </tr>
          </thead>
          <tbody>
            {images.map((image) => (
              <tr key={image.seed}>
                <td>{image.seed}</td>
                <td>{image.size}</td>
                <td>{image.steps}</td>
                <td>{image.num_pauses ?? 0}</td>
                <td>
                  <code class="long">{image.pixel_digest}</code>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}

function factsOf(receipt: Receipt): [string, string][] {
  const text = (name: string): string => String(receipt[name] ?? "–");
  return [
    ["Time", moment(Number(receipt.time))],
    ["Tenant", text("tenant")],
    ["Base", text("base_model")],
    ["Found in", text("tier_found")],
    ["First token", receipt.ttft_ms === null ? "–" : ms(Number(receipt.ttft_ms))],
    ["Latency", ms(Number(receipt.latency_ms))],
    ["Tokens in / out", `${text("prompt_tokens")} / ${text("completion_tokens")}`],
    ["Reused tokens", text("reused_tokens")],
    ["Queue at arrival", text("queue_depth")],
    ["Adapters in the batch", text("distinct_adapters")],
    ["Server", text("pool_id")],
    ["API key", text("api_key_id")],
  ];
}

const MEANING: Record<Verdict, string> = {
  valid: "The signature is valid: no field was changed.",
  unsigned: "This receipt is not signed: the server has no --receipt-key.",
  "other key": "The receipt is signed with another key than this one.",
  changed: "The signature does not fit: the receipt was changed after it was signed.",
};

function Signature({ caller, receipt }: { caller: CallerReport; receipt: Receipt }) {
  const [pem, setPem] = useState("");
  const served = useLoaded(
    caller.signs_receipts ? (signal) => get<ReceiptKey>("/v1/receipts/key", signal) : null,
    [caller.signs_receipts],
  );
  const used = pem.trim() === "" ? (served.value?.public_key ?? "") : pem;
  let verdict: Verdict | null = null;
  let fault = "";
  let keyId = "";
  if (typeof receipt.signature !== "string") verdict = "unsigned";
  else if (used !== "") {
    try {
      const key = readPem(used);
      keyId = keyIdOf(key);
      verdict = verifyReceipt(receipt, key);
    } catch (error) {
      fault = (error as Error).message;
    }
  }
  return (
    <div class="card signature">
      <h2>Signature</h2>
      {verdict !== null && (
        <p class={verdict === "valid" ? "good" : verdict === "unsigned" ? "muted" : "fault"} role="status">
          {MEANING[verdict]}
        </p>
      )}
      {keyId !== "" && (
        <p class="line">
          <span class="muted">Verified in this browser with key</span> <code>{keyId}</code>{" "}
          <span class="muted">{pem.trim() === "" ? "that this server publishes" : "that you gave"}</span>
        </p>
      )}
      {served.error instanceof ApiError && served.error.status !== 404 && <Failure error={served.error} />}
      {fault !== "" && (
        <p class="fault" role="alert">
          {fault}
        </p>
      )}
      <details>
        <summary>Verify with a key that you have</summary>
        <textarea
          class="mono"
          rows={4}
          aria-label="Public key in PEM form"
          placeholder="-----BEGIN PUBLIC KEY-----"
          spellcheck={false}
          value={pem}
          onInput={(event) => setPem(event.currentTarget.value)}
        />
      </details>
    </div>
  );
}
