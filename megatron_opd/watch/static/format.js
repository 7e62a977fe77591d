// Writes numbers as people read them. null and undefined become a dash.

export function figure(value, digits = 4) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value === 0) return "0"; // -0 too
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

// Words of a column's name without its unit: reverse_kl_nats is "reverse KL".
const UNITS = new Set(["nats", "s", "bytes", "versions", "pct", "fraction"]);
const SPELLED = { kl: "KL", lr: "learning rate", eos: "EOS" };

export function words(column) {
  const [base, ...names] = column.split("/");
  const parts = base.split("_");
  const rate = parts.at(-1) === "s" && parts.at(-2) === "per";
  if (parts.length > 1 && UNITS.has(parts.at(-1))) parts.pop();
  if (rate) parts.push("second");
  return [parts.map((part) => SPELLED[part] ?? part).join(" "), ...names].join(" · ");
}

export function count(number, word) {
  return `${figure(number)} ${word}${number === 1 ? "" : "s"}`;
}
