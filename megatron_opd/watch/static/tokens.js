// A response, one element a token, coloured by how far student and teacher are apart. The token
// under the pointer, or the one that the arrow keys reached, is described in full.

import { make } from "./dom.js";
import { figure, signed } from "./format.js";
import { turnBlocks } from "./turns.js";
import { visible } from "./visible.js";

const STEPS = [0.1, 0.5, 1.5, 4]; // nats of difference
const SURE = [0.05, 0.5, 1.5, 4]; // nats of surprise
const NEXT = 1.5; // nats that the keys n and p stop at

const steps = (size, limits) => limits.filter((limit) => size >= limit).length;

const COLOURS = {
  difference: (view, i) => {
    const by = view.difference(i);
    if (by === null) return "";
    const step = steps(Math.abs(by), STEPS);
    return step ? `${by < 0 ? "low" : "high"}${step}` : "";
  },
  student: (view, i) => surprise(view.row.sampler_logp[i]),
  teacher: (view, i) => (view.score(i) === null ? "" : surprise(view.score(i))),
  version: (view, i) => `v${view.spanOf(i) % 2}`,
};

function surprise(logp) {
  const step = steps(-logp, SURE);
  return step ? `low${step}` : "";
}

export class TokenView {
  constructor(row) {
    this.row = row;
    this.at = -1;
    this.inspect = make("div", { class: "inspect", role: "status" });
    this.box = make("div", { class: "text tokens", tabindex: "0", role: "group", dir: "auto", "aria-label": "response; arrow keys move between tokens, n and p between large differences" });
    this.elements = row.tokens.map((text, i) => {
      const element = make("span", { class: "t" }, ...(text === "" ? [make("span", { class: "mark" }, "part")] : visible(text)));
      element.dataset.i = i;
      return element;
    });
    const begins = new Set(row.spans.slice(1).map(([, start]) => start));
    this.begins = begins;
    // what an environment said stands before the token that follows it, and is no token
    const given = new Map(row.given);
    this.box.append(...(row.turns?.length ? turnBlocks(row, this.elements) : this.elements.flatMap((element, i) =>
      given.has(i) ? [make("span", { class: "given", title: "given, not sampled" }, ...visible(given.get(i))), element] : [element])));
    this.by = make("select", { "aria-label": "colour tokens by" },
      ...[["difference", "teacher − student"], ["student", "student's surprise"], ["teacher", "teacher's surprise"], ["version", "version"]]
        .filter(([value]) => value !== "difference" || row.teacher_logp)
        .filter(([value]) => value !== "teacher" || (row.teacher_logp && !row.chunked))
        .map(([value, text]) => make("option", { value }, text)));
    this.scale = make("span", { class: "scale" });
    this.by.addEventListener("change", () => this.colour());
    this.box.addEventListener("pointerover", (event) => this.hover(event));
    this.box.addEventListener("click", (event) => this.hover(event));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.colour();
    this.describe(-1);
    this.parts = [make("div", { class: "scale" }, make("label", {}, "colour ", this.by), this.scale), this.inspect, this.box];
  }

  // null: no teacher was asked, or one of another tokenizer has no score of this token
  score(i) {
    return this.row.teacher_logp?.[i] ?? null;
  }

  difference(i) {
    return this.score(i) === null ? null : this.score(i) - this.row.sampler_logp[i];
  }

  spanOf(i) {
    return this.row.spans.findIndex(([, start, stop]) => start <= i && i < stop);
  }

  colour() {
    const colour = COLOURS[this.by.value];
    this.elements.forEach((element, i) => {
      element.className = `t ${colour(this, i)}${this.begins.has(i) ? " begins" : ""}${i === this.at ? " at" : ""}`;
    });
    const boxes = (kinds) => make("span", { class: "boxes", "aria-hidden": "true" }, ...kinds.map((kind) => make("span", { class: kind })));
    const low = [4, 3, 2, 1].map((n) => `low${n}`);
    const high = [1, 2, 3, 4].map((n) => `high${n}`);
    const scales = {
      difference: ["teacher: less likely", boxes(low), boxes([""]), boxes(high), "more likely"],
      version: ["one colour for each version in turn"],
    };
    this.scale.replaceChildren(...(scales[this.by.value] ?? ["expected", boxes(["", ...low.toReversed()]), "surprising"]));
  }

  hover(event) {
    const element = event.target.closest(".t");
    if (element) this.choose(Number(element.dataset.i));
  }

  choose(i) {
    this.elements[this.at]?.classList.remove("at");
    this.at = i;
    this.elements[i].classList.add("at");
    this.describe(i);
  }

  describe(i) {
    if (i < 0) {
      this.inspect.replaceChildren(make("span", { class: "dim" }, "Point at a token, or focus the response and use the arrow keys; n and p jump between large differences."));
      return;
    }
    const { tokens, sampler_logp: student, teacher_logp: teacher, spans, chunked } = this.row;
    const chance = (logp) => `${figure(logp)} nats (${figure(100 * Math.exp(logp), 3)}%)`;
    const parts = [make("b", {}, "student "), chance(student[i])];
    if (this.score(i) !== null) {
      if (!chunked) parts.push(make("b", {}, "  teacher "), chance(teacher[i]));
      parts.push(make("b", {}, chunked ? "  teacher − student, of its chunk " : "  teacher − student "), signed(this.difference(i)));
    } else if (teacher) parts.push(make("b", {}, "  teacher "), "no token of the same bytes here");
    const text = tokens[i] === "" ? "part of a character that a later token completes" : null;
    const what = make("div", {}, `token ${i + 1} of ${tokens.length}, version ${spans[this.spanOf(i)]?.[0] ?? "?"}: `,
      make("span", { class: "what" }, ...(text ? [text] : visible(tokens[i], { lines: false }))));
    this.inspect.replaceChildren(what, make("div", {}, ...parts));
  }

  key(event) {
    const last = this.elements.length - 1;
    const far = (step) => {
      for (let i = this.at + step; i >= 0 && i <= last; i += step) {
        if (Math.abs(this.difference(i) ?? 0) >= NEXT) return i;
      }
      return this.at;
    };
    const moves = {
      ArrowRight: () => this.at + 1, ArrowLeft: () => this.at - 1, ArrowDown: () => this.at + 1, ArrowUp: () => this.at - 1,
      Home: () => 0, End: () => last, n: () => far(1), p: () => far(-1),
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const i = Math.min(last, Math.max(0, moves[event.key]()));
    this.choose(i);
    this.elements[i].scrollIntoView({ block: "nearest" });
  }
}
