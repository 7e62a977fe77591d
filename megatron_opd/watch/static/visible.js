// Shows text that a model wrote. What a reader could not see, or what would change how the rest of
// the page reads (control characters, terminal escapes, bidirectional and invisible characters),
// is shown as its code point in a box.

import { make } from "./dom.js";

const MARKED = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\ud800-\udfff]|[\u{e0000}-\u{e0fff}]/u;
const NAMES = new Map([
  [0x00, "NUL"], [0x07, "BEL"], [0x08, "BS"], [0x0d, "CR"], [0x1b, "ESC"], [0x7f, "DEL"],
  [0x200b, "ZWSP"], [0x200c, "ZWNJ"], [0x200d, "ZWJ"], [0x200e, "LRM"], [0x200f, "RLM"],
  [0x202a, "LRE"], [0x202b, "RLE"], [0x202c, "PDF"], [0x202d, "LRO"], [0x202e, "RLO"],
  [0x2066, "LRI"], [0x2067, "RLI"], [0x2068, "FSI"], [0x2069, "PDI"], [0xfeff, "BOM"],
]);

export function codePoint(character) {
  const code = character.codePointAt(0);
  const hex = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  return NAMES.has(code) ? `${NAMES.get(code)} ${hex}` : hex;
}

// The nodes of `text`. lines: line breaks and tabs stay what they are, with a sign in front.
export function visible(text, { lines = true } = {}) {
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  for (const character of text) {
    if (character === "\n" || character === "\t") {
      flush();
      nodes.push(make("span", { class: "mark line-end", "aria-label": character === "\n" ? "line break" : "tab" }, character === "\n" ? "↵" : "→"));
      if (lines) plain = character;
    } else if (MARKED.test(character)) {
      flush();
      nodes.push(make("span", { class: "mark" }, codePoint(character)));
    } else {
      plain += character;
    }
  }
  flush();
  return nodes;
}
