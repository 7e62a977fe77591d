// A list of any length of which only the rows in sight exist. Rows are asked for a page at a time.

import { make } from "./dom.js";

const PAGE = 100;
const SPARE = 6; // rows made above and below what is in sight

export class VirtualList {
  // box: the element that scrolls. rowHeight: px. load(offset, limit): a promise of rows.
  // build(row): the element of a row. chosen(row): called when a row is clicked or entered.
  constructor(box, { rowHeight, load, build, chosen, failed }) {
    Object.assign(this, { box, rowHeight, load, build, chosen, failed });
    this.sizer = make("div", { class: "sizer" });
    this.box.append(this.sizer);
    this.reset(0, []);
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("keydown", (event) => this.key(event));
  }

  // Begin a list of `total` rows, of which the first ones are known.
  reset(total, rows, { keepPlace = false } = {}) {
    this.total = total;
    this.generation = (this.generation ?? 0) + 1;
    this.pages = new Map([[0, rows]]);
    this.asked = new Set([0]);
    this.made?.forEach((element) => element.remove());
    this.made = new Map();
    this.at = -1;
    this.sizer.style.height = `${total * this.rowHeight}px`;
    if (!keepPlace) this.box.scrollTop = 0;
    this.draw();
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - SPARE);
    const seen = Math.ceil(this.box.clientHeight / this.rowHeight) + 2 * SPARE;
    const stop = Math.min(this.total, first + seen);
    for (const [index, element] of this.made) {
      if (index < first || index >= stop) { element.remove(); this.made.delete(index); }
    }
    for (let page = Math.floor(first / PAGE); page * PAGE < stop; page += 1) this.want(page);
    for (let index = first; index < stop; index += 1) {
      const row = this.row(index);
      if (row !== undefined && !this.made.has(index)) this.put(index, row);
    }
  }

  put(index, row) {
    const element = this.build(row);
    element.id = `row-${index}`;
    element.setAttribute("role", "option");
    element.setAttribute("aria-posinset", index + 1);
    element.setAttribute("aria-setsize", this.total);
    element.style.transform = `translateY(${index * this.rowHeight}px)`;
    element.addEventListener("click", () => this.choose(index));
    element.setAttribute("aria-selected", String(index === this.at));
    this.made.set(index, element);
    this.box.append(element);
  }

  async want(page) {
    if (this.asked.has(page)) return;
    this.asked.add(page);
    const generation = this.generation;
    try {
      const rows = await this.load(page * PAGE, PAGE);
      if (generation !== this.generation) return;
      this.pages.set(page, rows);
      this.draw();
      if (this.awaited && this.row(this.at) !== undefined) this.choose(this.at);
    } catch (error) {
      if (generation === this.generation) this.asked.delete(page);
      this.failed(error);
    }
  }

  // Mark a row as chosen without calling `chosen`.
  mark(index) {
    this.made.get(this.at)?.setAttribute("aria-selected", "false");
    this.at = index;
    this.made.get(index)?.setAttribute("aria-selected", "true");
    if (index >= 0) this.box.setAttribute("aria-activedescendant", `row-${index}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  choose(index) {
    this.mark(index);
    const row = this.row(index);
    if (row !== undefined) this.chosen(row);
    this.awaited = row === undefined; // chosen once it is there
  }

  // Choose the row that is `step` further, and bring it into sight.
  move(step) {
    if (this.total === 0) return;
    const index = Math.min(this.total - 1, Math.max(0, this.at + step));
    const top = index * this.rowHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    const over = top + this.rowHeight - this.box.clientHeight;
    if (over > this.box.scrollTop) this.box.scrollTop = over;
    this.draw();
    this.choose(index);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.rowHeight) - 1);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter" && this.at >= 0) this.choose(this.at);
    if (step === undefined) return;
    event.preventDefault();
    this.move(step);
  }
}
