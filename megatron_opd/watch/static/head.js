// The head of the page: which run, how far, and its last figures.

import { at, make } from "./dom.js";
import { duration, figure } from "./format.js";

const TILES = [
  ["loss", "loss", figure], ["reverse_kl_nats", "reverse KL", figure],
  ["reward_mean", "reward", figure], ["tokens_per_s", "tokens/s", (v) => figure(v, 3)],
  ["staleness_mean_versions", "staleness", (v) => figure(v, 3)],
  ["response_tokens_mean", "tokens each", (v) => figure(v, 3)],
];

export function showHead(state) {
  document.title = `${state.run}: opd watch`;
  at("run").textContent = state.run;
  at("state").textContent = state.state;
  at("state").className = `badge ${state.state}`;
  at("why").textContent = state.why;
  const models = [state.student, state.objective, state.schedule].filter(Boolean);
  at("facts").textContent = [...models, lastWritten(state)].join(" · ");
  showProgress(state);
  const last = state.last;
  const tiles = TILES.filter(([column]) => typeof last[column] === "number");
  const rows = tiles.map(([column, name, write]) => [name, write(last[column])]);
  if (typeof last.time_s === "number") {
    rows.push(["elapsed", duration(last.time_s)]);
    const done = last.update + 1;
    if (state.state === "running" && state.max_updates > done) {
      rows.push(["left, about", duration((last.time_s / done) * (state.max_updates - done))]);
    }
  }
  at("tiles").replaceChildren(...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function showProgress(state) {
  const known = typeof state.max_updates === "number" && typeof state.last.update === "number";
  at("progress").hidden = !known;
  if (!known) return;
  at("bar").max = state.max_updates;
  at("bar").value = state.last.update + 1;
  at("done").textContent = `update ${figure(state.last.update + 1)} of ${figure(state.max_updates)}`;
}

function lastWritten(state) {
  if (typeof state.written_s !== "number") return "nothing written yet";
  return `last written ${duration(Date.now() / 1000 - state.written_s)} ago`;
}

export function notice(text) {
  at("notice").hidden = !text;
  at("notice").textContent = text ?? "";
}
