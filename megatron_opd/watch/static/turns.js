// The turns of a trajectory: what was given, what the student said, the tools it called, what the
// environment answered and gave for it, and where the time went.

import { make } from "./dom.js";
import { duration, figure, signed } from "./format.js";
import { visible } from "./visible.js";

const LONG = 1200; // characters of given text that are shown at once

const sum = (turns, of) => turns.reduce((total, turn) => total + of(turn), 0);

function given(text, turns, number) {
  const turn = turns[number];
  const anew = number > 0 && turn.sequence !== turns[number - 1].sequence;
  const by = number > 0 ? turns[number - 1].answered_by : "";
  const who = anew ? `given: the history of sequence ${turn.sequence + 1} (${turn.branch || "another"})` : `given by ${by || "the environment"}`;
  const body = make("div", { class: "said" }, ...visible(text));
  if (!anew && text.length <= LONG) return make("section", { class: "given" }, make("h4", {}, who), body);
  return make("section", { class: "given" }, make("details", {}, make("summary", {}, `${who}, ${figure(text.length)} characters`), body));
}

function call([name, args, error]) {
  const made = make("code", {}, ...visible(name || "unreadable call", { lines: false }), ...(name ? ["(", ...visible(args, { lines: false }), ")"] : []));
  const why = error === null ? null : make("span", { class: "why" }, "error: ", ...visible(error, { lines: false }));
  return make("div", { class: error === null ? "call" : "call wrong" }, make("b", {}, "calls "), made, why);
}

function versions(row, start, stop) {
  const own = row.spans.filter(([, from, to]) => from < stop && to > start).map(([version]) => version);
  return own.length > 1 ? `versions ${own[0]} to ${own.at(-1)}` : `version ${own[0] ?? "?"}`;
}

// The turns of a row as blocks. elements: one for each token.
export function turnBlocks(row, elements) {
  const before = new Map(row.given);
  return row.turns.flatMap((turn, number) => {
    const stop = row.turns[number + 1]?.start ?? elements.length;
    const facts = [
      versions(row, turn.start, stop), `${stop - turn.start} tokens`, `sampled in ${duration(turn.sampling_s)}`,
      turn.answered_by ? `answered in ${duration(turn.environment_s)}` : null,
      turn.cached ? `${figure(turn.cached)} cached before it` : null,
    ].filter(Boolean);
    const kind = turn.reward > 0 ? "right" : turn.reward < 0 ? "wrong" : "";
    const reward = turn.reward === null ? null : make("span", { class: `tag ${kind}` }, `reward ${signed(turn.reward)}`);
    const head = make("h4", {}, `student, turn ${number + 1}`, reward, make("small", {}, facts.join(" · ")));
    const own = make("section", { class: "turn" }, head, make("div", { class: "said" }, ...elements.slice(turn.start, stop)), ...turn.calls.map(call));
    const text = before.get(turn.start);
    return text === undefined ? [own] : [given(text, row.turns, number), own];
  });
}

// A bar of what a trajectory's time was spent on; nothing without turns.
export function timeBar(row) {
  if (!row.turns?.length || !row.played_s) return [];
  const waiting = sum(row.turns, (turn) => turn.waiting_s);
  const parts = [
    ["sampling", sum(row.turns, (turn) => turn.sampling_s) - waiting],
    ["environment", sum(row.turns, (turn) => turn.environment_s)],
    ["waiting", waiting],
  ];
  parts.push(["other", Math.max(0, row.played_s - sum(parts, ([, seconds]) => seconds))]);
  const words = parts.map(([name, seconds]) => `${name} ${duration(seconds)}`);
  const bar = make("div", { class: "times", role: "img", "aria-label": `${duration(row.played_s)}: ${words.join(", ")}` });
  const key = make("p", { class: "times-key" }, `${duration(row.played_s)}: `);
  parts.forEach(([name, seconds], i) => {
    const part = make("span", { class: name, title: words[i] });
    part.style.flexGrow = seconds;
    bar.append(part);
    key.append(make("span", { class: `box ${name}`, "aria-hidden": "true" }), `${words[i]} `);
  });
  return [make("h3", {}, "Time"), bar, key];
}
