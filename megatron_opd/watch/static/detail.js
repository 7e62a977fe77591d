// One rollout: its figures, prompt, and response token by token.

import { make } from "./dom.js";
import { count, figure, signed } from "./format.js";
import { TokenView } from "./tokens.js";
import { timeBar } from "./turns.js";
import { visible } from "./visible.js";

export function closeRollout(place) {
  place.classList.remove("open");
  place.replaceChildren(make("p", { class: "empty" }, "Choose a rollout to read it token by token."));
}

function versions(row) {
  const names = [...new Set(row.spans.map(([version]) => version))];
  if (!names.length) return null;
  return names.length === 1 ? `${names[0]}` : `${names[0]} to ${names.at(-1)}`;
}

function figures(row, summary) {
  const facts = [
    ["reward", row.reward === null ? null : figure(row.reward)],
    ["gap to the teacher", summary.gap === null ? null : `${signed(summary.gap)} nats a token`],
    ["turns", row.turns?.length ? String(row.turns.length) : null],
    ["tokens", String(row.tokens.length)],
    ["sampled by version", versions(row)],
    ["trained in version", row.version === null ? null : String(row.version)],
    ["staleness", row.staleness_versions === null ? null : count(row.staleness_versions, "version")],
    ["finished by", row.finish_reason === "length" ? "the length limit" : row.finish_reason],
    ["teacher", row.teacher || null],
    ["engine", row.engine || null],
    ["recorded", new Date(1000 * row.unix_time_s).toLocaleString()],
  ];
  return make("dl", { class: "figures" }, ...facts.filter(([, value]) => value !== null).map(
    ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, ...visible(String(value), { lines: false })))));
}

function spanBar(row) {
  if (row.spans.length < 2) return null;
  const parts = row.spans.map(([version, start, stop], i) => {
    const part = make("span", { class: `v${i % 2}`, title: `version ${version}: tokens ${start} to ${stop - 1}` }, `v${version}`);
    part.style.flexGrow = stop - start;
    part.style.flexBasis = "0";
    return part;
  });
  return make("div", { class: "spans", role: "img", "aria-label": `sampled by versions ${row.spans.map(([version]) => version).join(", ")}` }, ...parts);
}

// move(step): show the rollout before (-1) or after (1) in the list.
export function showRollout(place, row, summary, move) {
  const step = (text, label, by) => {
    const button = make("button", { type: "button", "aria-label": label, title: label }, text);
    button.addEventListener("click", () => move(by));
    return button;
  };
  const back = make("button", { type: "button", class: "back" }, "← list");
  back.addEventListener("click", () => place.classList.remove("open"));
  const dropped = row.drop_reason === null ? null
    : make("p", { class: "notice" }, "dropped: ", ...visible([row.drop_reason, row.drop_detail].filter(Boolean).join(": "), { lines: false }));
  const prompt = row.prompt === null
    ? make("p", { class: "dim" }, "not known: the run was resumed since")
    : make("div", { class: "text prompt", dir: "auto", tabindex: "0", role: "region", "aria-label": "prompt" }, ...visible(row.prompt));
  const head = make("div", { class: "head" }, make("h2", {}, `Sample ${row.uid}, update ${row.update}`),
    make("span", { class: "moves" }, step("‹", "previous rollout", -1), step("›", "next rollout", 1), back));
  const taught = row.teacher_prompt === null ? []
    : [make("h3", {}, "Prompt of the teacher"), make("div", { class: "text prompt", dir: "auto", tabindex: "0", role: "region", "aria-label": "prompt of the teacher" }, ...visible(row.teacher_prompt))];
  const parts = [head, dropped, figures(row, summary), spanBar(row), ...timeBar(row), make("h3", {}, "Prompt"), prompt, ...taught, make("h3", {}, "Response")];
  const view = row.tokens.length ? new TokenView(row) : null;
  place.replaceChildren(...parts.filter(Boolean), ...(view ? view.parts : [make("p", { class: "dim" }, "none was sampled")]));
  place.scrollTop = 0;
  place.classList.add("open");
}
