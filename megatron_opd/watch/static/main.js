// Asks for the run's state every two seconds while the page is seen, and tells the view in front.

import { ask } from "./api.js";
import { at } from "./dom.js";
import { curves } from "./curves.js";
import { engines } from "./engines.js";
import { notice, showHead } from "./head.js";
import { rollouts } from "./rollouts.js";

const VIEWS = { curves, engines, rollouts };
const EVERY_MS = 2000;
const tabs = Object.keys(VIEWS).map((name) => at(`tab-${name}`));
let front = null;
let state = null;

function chosen() {
  const name = location.hash.slice(1).split("/")[0];
  return name in VIEWS ? name : "curves";
}

function show() {
  front = chosen();
  document.body.dataset.front = front;
  for (const name of Object.keys(VIEWS)) {
    const here = name === front;
    at(name).hidden = !here;
    at(`tab-${name}`).setAttribute("aria-selected", String(here));
    at(`tab-${name}`).tabIndex = here ? 0 : -1;
  }
  if (state !== null) tell();
}

function tell() {
  Promise.resolve(VIEWS[front].show(state)).catch(complain);
}

function complain(error) {
  if (error.name === "AbortError") return;
  notice(error.status === 403 ? "This page's token is of an earlier start of opd watch: open the address that it prints now." : `No answer from opd watch: ${error.message}`);
}

async function poll() {
  if (!document.hidden) {
    try {
      state = await ask("/api/state");
      notice(state.problem ? `The run's files cannot be read: ${state.problem}` : state.reading ? "Reading the run's files …" : "");
      showHead(state);
      at("count").textContent = state.counts.rollouts.toLocaleString("en");
      tell();
    } catch (error) {
      complain(error);
    }
  }
  setTimeout(poll, state?.reading ? 400 : EVERY_MS);
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => { location.hash = tab.id.slice(4); });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    location.hash = next.id.slice(4);
    next.focus();
  });
}
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden && state !== null) tell(); });
for (const view of Object.values(VIEWS)) view.start(complain);
show();
poll();
