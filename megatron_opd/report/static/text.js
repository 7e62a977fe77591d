"use strict";
// Small helpers of the page: elements and numbers. All text goes in as text, never as markup.
const opd = {};

opd.element = (tag, props = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
};

opd.number = (value) => {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (value === 0 || (Number.isInteger(value) && size < 1e6)) return value.toLocaleString("en");
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
};

opd.bytes = (value) => {
  if (value === null || value === undefined) return "-";
  for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= factor) return `${opd.number(+(value / factor).toPrecision(4))} ${unit}`;
  }
  return `${opd.number(value)} B`;
};

opd.seconds = (value) => {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size < 120) return `${+value.toPrecision(3)} s`;
  const part = (number) => String(Math.floor(number)).padStart(2, "0");
  if (size < 7200) return `${Math.floor(value / 60)}:${part(value % 60)} min`;
  if (size < 172800) return `${Math.floor(value / 3600)}:${part((value % 3600) / 60)} h`;
  return `${+(value / 86400).toPrecision(3)} d`;
};

opd.written = (value, unit) => {
  if (unit === "bytes") return opd.bytes(value);
  if (unit === "s") return opd.seconds(value);
  if (unit === "share" && value !== null && value !== undefined) {
    return `${+(100 * value).toPrecision(3)} %`;
  }
  return opd.number(value);
};

opd.style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
opd.color = (index) => opd.style(`--c${index % 8}`);

// A box that follows the pointer inside `host`, which must be positioned.
opd.tip = (host) => {
  const box = opd.element("div", { class: "tip", hidden: "" });
  host.append(box);
  return {
    hide() {
      box.hidden = true;
    },
    show(left, top, ...children) {
      box.replaceChildren(...children);
      box.hidden = false;
      const beyond = left + box.offsetWidth + 24 > host.clientWidth;
      box.style.left = `${Math.max(0, beyond ? left - box.offsetWidth - 12 : left + 12)}px`;
      box.style.top = `${Math.max(0, top)}px`;
    },
  };
};
