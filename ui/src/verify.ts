/** Verifies the Ed25519 signature of a receipt, here and not on the server. */

import { hashes, verify } from "@noble/ed25519";
import { sha256, sha512 } from "@noble/hashes/sha2.js";
import { canonical, type Json } from "./canonical";

// Not WebCrypto: browsers offer it only to pages from https and from this machine.
hashes.sha512 = sha512;

export type Verdict = "valid" | "unsigned" | "other key" | "changed";

const PEM = /-----BEGIN PUBLIC KEY-----([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----/;
/** The DER header of an Ed25519 public key; its 32 bytes follow. */
const HEADER = "302a300506032b6570032100";

export function readPem(pem: string): Uint8Array {
  const found = PEM.exec(pem);
  const der = found === null ? new Uint8Array() : fromBase64((found[1] as string).replace(/\s/g, ""));
  if (der.length !== 44 || hex(der.slice(0, 12)) !== HEADER) {
    throw new Error("This is not an Ed25519 public key in PEM form.");
  }
  return der.slice(12);
}

export const keyIdOf = (publicKey: Uint8Array): string => hex(sha256(publicKey)).slice(0, 16);

export function verifyReceipt(receipt: { [name: string]: Json }, publicKey: Uint8Array): Verdict {
  const { signature, ...signed } = receipt;
  if (typeof signature !== "string") return "unsigned";
  if (receipt.key_id !== keyIdOf(publicKey)) return "other key";
  const text = new TextEncoder().encode(canonical(signed));
  try {
    return verify(fromBase64(signature), text, publicKey) ? "valid" : "changed";
  } catch {
    return "changed";
  }
}

function fromBase64(text: string): Uint8Array {
  try {
    return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  } catch {
    return new Uint8Array();
  }
}

const hex = (data: Uint8Array): string =>
  [...data].map((byte) => byte.toString(16).padStart(2, "0")).join("");
