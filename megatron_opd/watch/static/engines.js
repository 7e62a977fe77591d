// One lane for each engine and stage: how much was in progress over time, and when it was paused.

import { ask } from "./api.js";
import { at, make } from "./dom.js";
import { duration, figure } from "./format.js";

const HEIGHT = 34;
let seconds = null; // of the window; null: the whole run
let end = null; // of the window; null: the run's present end
let drawn = null;
let latest = null;
let stamp = "";
let report = () => {};

function label(name) {
  return name.replace(/^student /, "").replace(/^https?:\/\//, "");
}

function lane(found) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const most = Math.max(...found.open, 0);
  const mean = found.open.reduce((sum, value) => sum + value, 0) / Math.max(1, found.open.length);
  const row = make("div", { class: "lane" },
    make("span", { class: "name", title: found.name }, label(found.name)), canvas,
    make("span", { class: "most", title: "in progress at once" }, `mean ${figure(mean, 2)} · most ${figure(most, 2)}`));
  canvas.addEventListener("pointermove", (event) => point(found, canvas, event));
  return { row, canvas, found, most };
}

function paint({ canvas, found, most }) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = width * scale;
  canvas.height = HEIGHT * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  // whole pixels: parts of one that overlap would look like stripes
  const left = (i) => Math.round((width * scale * i) / found.open.length) / scale;
  const bar = (i, height) => context.fillRect(left(i), HEIGHT - height, Math.max(left(i + 1) - left(i), 1 / scale), height);
  if (found.paused) {
    context.fillStyle = getComputedStyle(document.querySelector(".swatch.paused")).backgroundColor;
    found.paused.forEach((share, i) => {
      context.globalAlpha = Math.min(1, 0.25 + 0.75 * share);
      if (share > 0) bar(i, HEIGHT);
    });
    context.globalAlpha = 1;
  }
  context.fillStyle = getComputedStyle(document.querySelector(".swatch.busy")).backgroundColor;
  found.open.forEach((value, i) => bar(i, most > 0 ? (HEIGHT - 4) * (value / most) : 0));
}

function point(found, canvas, event) {
  const { from_s, to_s } = drawn.answer;
  const share = event.offsetX / canvas.clientWidth;
  const bin = Math.min(found.open.length - 1, Math.max(0, Math.floor(share * found.open.length)));
  const paused = found.paused?.[bin] > 0 ? `, paused ${Math.round(100 * found.paused[bin])}% of it` : "";
  at("under").textContent = `${label(found.name)} at ${duration(from_s + share * (to_s - from_s))}: ${figure(found.open[bin], 3)} in progress${paused}`;
}

async function draw() {
  const from = seconds === null ? null : Math.max(0, (end ?? latest.end_s) - seconds);
  const to = seconds === null ? null : end;
  const bins = Math.max(100, Math.min(1200, Math.round(at("lanes").clientWidth * 0.7)));
  const key = JSON.stringify([latest.end_s, latest.epochs, from, to, bins]);
  if (key === stamp) return;
  stamp = key;
  const answer = await ask("/api/lanes", { from_s: from, to_s: to, bins });
  const rows = answer.lanes.map(lane);
  drawn = { answer, rows };
  at("no-lanes").hidden = rows.length > 0;
  at("lanes").hidden = rows.length === 0;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => make("span", {}, duration(answer.from_s + share * (answer.to_s - answer.from_s))));
  const time = make("div", { class: "lane time" }, make("span"), make("div", { class: "ticks" }, ...ticks), make("span"));
  at("lanes").replaceChildren(...rows.map(({ row }) => row), time);
  rows.forEach(paint);
  at("window").textContent = `${duration(answer.from_s)} to ${duration(answer.to_s)} of ${duration(answer.end_s)}`;
  at("earlier").disabled = seconds === null || answer.from_s <= 0;
  at("later").disabled = seconds === null || end === null;
}

function move(step) {
  const now = Math.min(end ?? latest.end_s, latest.end_s) + step * seconds;
  end = now >= latest.end_s ? null : Math.max(seconds, now);
  draw().catch(report);
}

export const engines = {
  start(complain) {
    report = complain;
    at("span").addEventListener("change", () => {
      seconds = at("span").value ? Number(at("span").value) : null;
      end = null;
      if (latest) draw().catch(complain);
    });
    at("earlier").addEventListener("click", () => move(-0.5));
    at("later").addEventListener("click", () => move(0.5));
    new ResizeObserver(() => { drawn?.rows.forEach(paint); }).observe(at("lanes"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn?.rows.forEach(paint));
  },
  show(state) {
    latest = state;
    return draw();
  },
};
