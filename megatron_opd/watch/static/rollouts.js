// The list of recorded rollouts with its filters, and beside it the one that is read.

import { ask } from "./api.js";
import { at, later, make, options } from "./dom.js";
import { figure, signed } from "./format.js";
import { showRollout, closeRollout } from "./detail.js";
import { visible } from "./visible.js";
import { VirtualList } from "./virtual_list.js";

const ROW = 66; // px, as in rollouts.css
const FIRST = 100;
let list = null;
let query = {};
let upto = null; // rows that the server knew when the list was made
let epoch = null;
let known = null; // the number of the chosen rollout
let busy = null; // stops the request of an earlier query
let report = () => {};

function parameters() {
  const found = {};
  for (const [name, value] of new FormData(at("filters"))) found[name] = value.trim();
  if (found.outcome?.startsWith("drop:")) {
    found.drop_reason = found.outcome.slice(5);
    found.outcome = "";
  }
  return found;
}

function build(row) {
  const reward = row.reward === null ? null
    : make("span", { class: `tag ${row.reward >= 0.5 ? "right" : "wrong"}` }, `reward ${figure(row.reward, 3)}`);
  const drop = row.drop_reason === null ? null : make("span", { class: "tag drop" }, "dropped: ", ...visible(row.drop_reason, { lines: false }));
  const facts = [
    `update ${row.update}`, `${row.tokens} tokens`,
    row.staleness === null ? null : `${row.staleness} stale`,
    row.gap === null ? null : `gap ${signed(row.gap)}`,
    row.finish_reason === "length" ? "cut off" : null,
  ].filter((fact) => fact !== null);
  const meta = make("div", { class: "meta" }, reward, drop, ...facts.map((fact) => make("span", {}, fact)));
  return make("div", { class: "row" }, meta,
    make("div", { class: "line asked" }, ...visible(row.prompt, { lines: false })),
    make("div", { class: "line" }, ...visible(row.response, { lines: false })));
}

async function load({ keepPlace = false } = {}) {
  busy?.abort();
  busy = new AbortController();
  query = parameters();
  const found = await ask("/api/rollouts", { ...query, offset: 0, limit: FIRST }, busy.signal);
  upto = found.upto;
  list.reset(found.total, found.rows, { keepPlace });
  if (known !== null) list.mark(found.rows.findIndex((row) => row.number === known));
  at("newer").hidden = true;
  const all = found.total === found.upto;
  at("found").textContent = all ? `${figure(found.total)} rollouts` : `${figure(found.total)} of ${figure(found.upto)} rollouts`;
  const given = Object.entries(query).filter(([name, value]) => value && !["sort", "order", "text"].includes(name));
  at("active").textContent = given.length ? `(${given.length} set)` : "";
  for (const input of at("filters").querySelectorAll("input")) input.classList.remove("bad");
  at("filters").dataset.query = JSON.stringify(query); // what the list shows now
}

function refused(error) {
  if (error.name === "AbortError") return;
  if (error.status !== 400) return report(error);
  at("found").textContent = error.message;
  for (const input of at("filters").querySelectorAll("input")) {
    input.classList.toggle("bad", error.message.startsWith(input.name) && input.value !== "");
  }
}

async function open(row) {
  known = row.number;
  try {
    const whole = await ask(`/api/rollouts/${row.number}`);
    if (known === row.number) showRollout(at("detail"), whole, row, (step) => list.move(step));
  } catch (error) {
    report(error);
  }
}

function showChoices(state) {
  const reasons = state.drop_reasons.map((reason) => [`drop:${reason}`, `dropped: ${reason}`]);
  const entries = [["", "any"], ["trained", "trained on"], ["dropped", "dropped"], ...reasons];
  if (at("f-outcome").options.length !== entries.length) options(at("f-outcome"), entries, at("f-outcome").value);
  const teachers = [["", "any"], ...state.teachers.filter(Boolean).map((name) => [name, name])];
  if (at("f-teacher").options.length !== teachers.length) options(at("f-teacher"), teachers, at("f-teacher").value);
  at("l-teacher").hidden = teachers.length < 3;
}

export const rollouts = {
  start(complain) {
    report = complain;
    list = new VirtualList(at("list"), {
      rowHeight: ROW, build, chosen: open, failed: complain,
      load: async (offset, limit) => (await ask("/api/rollouts", { ...query, upto, offset, limit })).rows,
    });
    const again = () => load().catch(refused);
    const soon = later(again, 50);
    // a choice is made at once; what is typed may go on
    at("filters").addEventListener("input", (event) => (event.target.tagName === "SELECT" ? again() : soon()));
    at("filters").addEventListener("submit", (event) => { event.preventDefault(); again(); });
    at("filters").addEventListener("reset", () => setTimeout(again));
    at("newer").addEventListener("click", again);
    matchMedia("(min-width: 721px)").addEventListener("change", () => list.draw());
    at("more").open = matchMedia("(min-width: 721px)").matches;
    closeRollout(at("detail"));
  },
  async show(state) {
    showChoices(state);
    const replaced = epoch !== null && epoch !== state.epochs[2];
    if (upto === null || replaced) {
      epoch = state.epochs[2];
      if (replaced) { known = null; closeRollout(at("detail")); }
      await load().catch(refused);
      return;
    }
    epoch = state.epochs[2];
    const more = state.counts.rollouts - upto;
    if (more <= 0) return;
    // who reads the top of the newest sees new ones come; nobody else's list moves
    if (at("list").scrollTop < ROW / 2 && query.sort === "update" && query.order === "descending") {
      await load({ keepPlace: true }).catch(refused);
    } else {
      at("newer").hidden = false;
      at("newer").textContent = `show ${figure(more)} new`;
    }
  },
};
