/** Numbers as text. */

export function bytes(count: number): string {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return `${unit === "B" ? size : size.toPrecision(3)} ${unit}`;
    size /= 1024;
  }
  return `${size.toPrecision(3)} TiB`;
}

export function count(value: number): string {
  return value.toLocaleString("en-US");
}

export function ms(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  return value < 10_000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

export function rate(value: number | null): string {
  if (value === null) return "–";
  return value < 100 ? value.toFixed(1) : count(Math.round(value));
}

export function share(part: number, whole: number): string {
  return whole === 0 ? "–" : `${((100 * part) / whole).toFixed(1)} %`;
}

export function age(sinceS: number | null, nowS = Date.now() / 1000): string {
  if (sinceS === null) return "never";
  const passed = Math.max(0, nowS - sinceS);
  if (passed < 120) return `${Math.round(passed)} s ago`;
  if (passed < 7200) return `${Math.round(passed / 60)} min ago`;
  if (passed < 172_800) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86_400)} d ago`;
}

export function moment(seconds: number): string {
  return new Date(seconds * 1000).toLocaleString("en-GB", { hour12: false });
}

/** The time of today, or the day and the time. */
export function when(seconds: number): string {
  const at = new Date(seconds * 1000);
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? at.toLocaleTimeString("en-GB", { hour12: false }) : moment(seconds);
}

export function shortCid(cid: string): string {
  return cid.replace(/^cidv1:sha256:/, "").slice(0, 12);
}
