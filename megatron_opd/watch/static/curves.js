// Charts of the figures of every update, drawn by uPlot.

import { ask } from "./api.js";
import { at, make, options } from "./dom.js";
import { duration, figure, words } from "./format.js";

// Charts that are there from the start, if the run has a column of them.
const SHOWN = [
  ["loss"], ["reverse_kl_nats"], ["reward_mean"], ["staleness_mean_versions", "staleness_max_versions"],
  ["tokens_per_s"], ["response_tokens_mean"], ["entropy_nats"], ["grad_norm"],
  ["probs_diff_mean", "probs_diff_max"], ["ratio_p99"],
  ["window_learner_idle_ratio", "window_sampler_idle_ratio"], ["dropped_samples"],
  ["turns_mean"], ["turn_sampling_s_mean", "turn_waiting_s_mean", "environment_s_mean"], ["tool_calls_mean"],
  ["tool_call_error_fraction"], ["given_tokens_mean"], ["turn_cached_fraction"],
];
// Figures of evaluations; all but the first are there with an environment alone.
const EVALUATED = [
  ["accuracy_pct", "Held-out problems answered correctly.", "%"],
  ["mean_reward", "Reward of held-out problems' trajectories.", ""],
  ["mean_turns", "The student's turns in held-out problems' trajectories.", ""],
  ["mean_tool_calls", "Tool calls in held-out problems' trajectories.", ""],
];
const charts = new Map();
const added = [];
let stamp = "";

function colours() {
  const style = getComputedStyle(document.documentElement);
  const probe = make("span");
  document.body.append(probe);
  const found = ["--accent", "--second", "--good", "--bad", "--dim", "--line"].map((name) => {
    probe.style.color = style.getPropertyValue(name);
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return found;
}

class Chart {
  // described: what the catalogue says of the first column, see Watched.state.
  constructor(names, described, remove) {
    this.names = names;
    this.described = described;
    this.value = make("output");
    this.last = "";
    const unit = described.unit ? make("small", { class: "dim" }, ` ${described.unit}`) : null;
    const head = make("div", { class: "head" }, make("h2", {}, names.map(words).join(", "), unit), this.value);
    if (remove) {
      const button = make("button", { type: "button", "aria-label": `remove ${names[0]}` }, "×");
      button.addEventListener("click", remove);
      head.append(button);
    }
    this.place = make("div");
    this.warning = make("p", { class: "about warning", hidden: true });
    const about = described.text ? make("p", { class: "about" }, described.text) : null;
    this.card = make("div", { class: "chart", role: "group", "aria-label": names.map(words).join(", ") }, head, this.place, this.warning, about);
    this.plot = null;
    new ResizeObserver(() => this.resize()).observe(this.card);
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: 170 });
  }

  // Say what to do when the last value is not where a healthy run's is.
  warn(value) {
    const { low, high, action } = this.described;
    const outside = typeof value === "number" && ((low !== null && value < low) || (high !== null && value > high));
    this.warning.hidden = !outside;
    const usual = low !== null && high !== null ? `${figure(low)} to ${figure(high)}` : low !== null ? `at least ${figure(low)}` : `at most ${figure(high)}`;
    this.warning.textContent = outside ? `Usually ${usual}. ${action}` : "";
  }

  // Show the values under the pointer, in all charts at once, and the last ones without it.
  point(plot, write) {
    const i = plot.cursor.idx;
    if (i === null || i === undefined) this.value.textContent = this.last;
    else this.value.textContent = `${write(plot.data[0][i])}: ${this.names.map((_, k) => figure(plot.data[k + 1][i])).join(" · ")}`;
  }

  draw(xs, series, byTime) {
    const last = series.map((values) => values.findLast((value) => value !== null));
    this.last = last.map((value) => figure(value)).join(" · ");
    this.value.textContent = this.last;
    this.warn(last[0]);
    const data = [xs, ...series];
    if (this.plot && this.byTime === byTime) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.byTime = byTime;
    const [first, second, third, fourth, dim, line] = colours();
    const strokes = [first, second, third, fourth];
    const axis = { stroke: dim, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
    const write = (value) => (byTime ? duration(value) : figure(value));
    this.plot = new window.uPlot({
      width: Math.max(200, this.place.clientWidth), height: 170,
      scales: { x: { time: false } },
      legend: { show: this.names.length > 1, live: false },
      padding: [8, 8, 0, 0],
      cursor: { sync: { key: "opd" } },
      hooks: { setCursor: [(plot) => this.point(plot, write)] },
      axes: [{ ...axis, size: 30, values: (_, ticks) => ticks.map(write) }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => figure(tick, 3)) }],
      series: [
        {},
        ...this.names.map((name, i) => ({ label: words(name), stroke: strokes[i % 4], width: 1.5, spanGaps: true, points: { show: xs.length < 40 } })),
      ],
    }, data, this.place);
  }
}

function wanted(columns) {
  const start = SHOWN.map((names) => names.filter((name) => columns.includes(name))).filter((names) => names.length);
  return [...start, ...added.filter((name) => columns.includes(name)).map((name) => [name])];
}

async function draw(state) {
  const columns = state.columns.map((column) => column.name);
  const described = new Map(state.columns.map((column) => [column.name, column]));
  const byTime = at("axis").value === "time_s";
  const key = JSON.stringify([state.counts.updates, state.counts.evaluations, state.epochs, added, byTime]);
  if (key === stamp) return;
  const groups = wanted(columns);
  const [found, evaluations] = await Promise.all([
    ask("/api/curves", { columns: groups.flat().join(",") }), ask("/api/evaluations"),
  ]);
  stamp = key;
  at("no-curves").hidden = columns.length > 0;
  const seen = new Set();
  for (const names of groups) {
    const id = names.join(",");
    seen.add(id);
    if (!charts.has(id)) {
      const own = added.includes(names[0]) && names.length === 1;
      const remove = own ? () => { added.splice(added.indexOf(names[0]), 1); stamp = ""; draw(state); } : null;
      charts.set(id, new Chart(names, described.get(names[0]), remove));
    }
    const chart = charts.get(id);
    at("charts").append(chart.card);
    chart.draw(byTime ? found.time_s : found.update, names.map((name) => found.columns[name] ?? []), byTime);
  }
  const played = evaluations.some((row) => typeof row.mean_turns === "number");
  for (const [name, text, unit] of EVALUATED.slice(0, played ? EVALUATED.length : 1).reverse()) {
    drawEvaluations(name, { text, unit, low: null, high: null }, evaluations, byTime, seen);
  }
  for (const [id, chart] of charts) {
    if (!seen.has(id)) { chart.plot?.destroy(); chart.card.remove(); charts.delete(id); }
  }
  const others = columns.filter((name) => !groups.flat().includes(name));
  options(at("add"), [["", `${others.length} more …`], ...others.map((name) => [name, words(name)])], "");
}

// One chart of a figure of all held-out sets that were evaluated during the run.
function drawEvaluations(name, described, rows, byTime, seen) {
  const usable = rows.filter((row) => typeof row[name] === "number" && typeof row.update === "number");
  if (!usable.length) return;
  const sets = [...new Set(usable.map((row) => String(row.set)))];
  const x = (row) => (byTime ? row.time_s : row.update);
  const xs = [...new Set(usable.map(x))].sort((a, b) => a - b);
  const names = sets.map((set) => `${name}/${set}`);
  const id = names.join(",");
  seen.add(id);
  if (!charts.has(id)) charts.set(id, new Chart(names, described, null));
  const place = new Map(xs.map((value, i) => [value, i]));
  const series = sets.map(() => xs.map(() => null));
  for (const row of usable) series[sets.indexOf(String(row.set))][place.get(x(row))] = row[name];
  at("charts").prepend(charts.get(id).card);
  charts.get(id).draw(xs, series, byTime);
}

let latest = null;
export const curves = {
  start(complain) {
    const again = () => { stamp = ""; if (latest) draw(latest).catch(complain); };
    at("axis").addEventListener("change", again);
    at("add").addEventListener("change", () => { if (at("add").value) { added.push(at("add").value); again(); } });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of charts.values()) { chart.plot?.destroy(); chart.plot = null; }
      again();
    });
  },
  show(state) {
    latest = state;
    return draw(state);
  },
};
