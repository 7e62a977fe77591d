// Writes numbers as people read them. null and undefined become a dash.

export function figure(value, digits = 4) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function signed(value) {
  return typeof value === "number" && value > 0 ? `+${figure(value)}` : figure(value);
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(s % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function percent(value) {
  return typeof value === "number" ? `${(100 * value).toFixed(value < 0.1 ? 2 : 1)}%` : "–";
}

// Words of a column's name: reverse_kl_nats is "reverse KL (nats)".
export function words(column) {
  const units = { nats: "nats", s: "s", bytes: "bytes", versions: "versions", pct: "%", fraction: "share" };
  const parts = column.split("/")[0].split("_");
  const rest = column.includes("/") ? ` · ${column.slice(column.indexOf("/") + 1)}` : "";
  const unit = parts.length > 1 ? units[parts.at(-1)] : undefined;
  const name = (unit === undefined ? parts : parts.slice(0, -1)).join(" ").replace(/\bkl\b/g, "KL").replace(/\blr\b/g, "learning rate");
  return name + (unit === undefined ? "" : ` (${unit})`) + rest;
}
