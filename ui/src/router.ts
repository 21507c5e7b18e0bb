/** The view by the part of the address after #, which browsers send to no server. */

import { Store } from "./store";

export interface Route {
  view: string;
  rest: string;
}

function read(): Route {
  const text = location.hash.replace(/^#\/?/, "");
  const cut = text.indexOf("/");
  const view = cut < 0 ? text : text.slice(0, cut);
  return { view: view || "playground", rest: cut < 0 ? "" : decode(text.slice(cut + 1)) };
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const route = new Store<Route>(read());

addEventListener("hashchange", () => route.set(read()));

export const link = (view: string, rest = ""): string =>
  rest === "" ? `#/${view}` : `#/${view}/${encodeURIComponent(rest)}`;

export function goTo(view: string, rest = ""): void {
  location.hash = link(view, rest);
}
