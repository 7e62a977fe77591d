"use strict";
// Draws the time line: a lane for each server and stage, with what it did in every moment.

opd.LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
opd.STAGES = { student: 0, teacher: 2, learner: 1, "weight sync": 4, evaluation: 3 };

opd.Lanes = class {
  constructor(timeline, view) {
    Object.assign(this, { timeline, view, range: null });
    this.canvas = opd.element("canvas", { role: "img", "aria-label": "time line of the stages" });
    this.place = opd.element("div", { class: "lanes" }, this.canvas);
    this.tip = opd.tip(this.place);
    this.root = opd.element("div", {}, this.place, this.key());
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.tip.hide());
    this.canvas.addEventListener("pointerdown", (event) => { this.from = this.time(event.offsetX); });
    this.canvas.addEventListener("pointerup", (event) => this.select(this.time(event.offsetX)));
    this.canvas.addEventListener("dblclick", () => { this.range = null; this.draw(); });
  }

  key() {
    const items = [["student server", "c0"], ["paused", "paused"], ["teacher", "c2"], ["learner", "c1"],
      ["weight sync", "c4"]];
    if (this.timeline.lanes.some((lane) => lane.stage === "evaluation")) items.push(["evaluation", "c3"]);
    if (this.timeline.drops.length) items.push(["sample dropped", "dropped"]);
    return opd.element("div", { class: "legend" }, ...items.map(([text, name]) => (
      opd.element("span", {}, opd.element("i", { class: name }), text))));
  }

  // Names take a third of a phone's width at most; lanes of many servers have none.
  sizes() {
    const count = this.timeline.lanes.length, width = this.view.paper ? 690 : this.place.clientWidth;
    const students = this.timeline.lanes.filter((lane) => lane.stage === "student").length;
    const height = count <= 24 ? 20 : Math.max(3, Math.min(14, 480 / students));
    return { width, left: Math.min(190, width * 0.32), height, named: height >= 12 };
  }

  tops() {
    const { height } = this.sizes();
    let top = 4;
    return this.timeline.lanes.map((lane) => {
      const own = lane.stage === "student" ? height : 20;
      top += own;
      return [top - own, own];
    });
  }

  draw() {
    const { width, left, named } = this.sizes(), tops = this.tops();
    const [lastTop, lastHeight] = tops[tops.length - 1];
    const below = lastTop + lastHeight, ratio = window.devicePixelRatio || 1;
    const height = below + 24;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    const [from, to] = this.range || [0, this.timeline.stop];
    Object.assign(this, { left, inner: width - left - 8, from0: from, span: Math.max(1e-9, to - from) });
    this.timeline.lanes.forEach((lane, index) => {
      const [top, own] = tops[index], gap = own > 6 ? 2 : 0;
      ctx.fillStyle = opd.style("--lane");
      ctx.fillRect(left, top, this.inner, own - gap);
      this.fill(ctx, lane.busy, opd.color(opd.STAGES[lane.stage]), top, own - gap);
      if (lane.paused) this.fill(ctx, lane.paused, opd.style("--paused"), top, own - gap);
      if (own >= 12 && (named || lane.stage !== "student")) this.name(ctx, lane, top + own / 2);
    });
    if (!named) this.name(ctx, { name: "student servers", stage: "stage" }, 12);
    this.ticks(ctx, below);
    this.drops(ctx, below);
  }

  name(ctx, lane, middle) {
    ctx.fillStyle = opd.style("--text");
    let text = lane.stage === "student" ? lane.name.replace(/^https?:\/\//, "") : lane.name;
    while (text.length > 3 && ctx.measureText(text).width > this.left - 8) text = `${text.slice(0, -2)}…`;
    ctx.textAlign = "right";
    ctx.fillText(text, this.left - 6, middle);
  }

  x(time) {
    return this.left + (this.inner * (time - this.from0)) / this.span;
  }

  time(x) {
    const at = this.from0 + (this.span * (x - this.left)) / this.inner;
    return Math.min(this.from0 + this.span, Math.max(this.from0, at));
  }

  fill(ctx, busy, color, top, height) {
    const right = this.left + this.inner;
    ctx.fillStyle = color;
    const rect = (start, stop) => {
      const x = Math.max(this.left, this.x(start)), end = Math.min(right, this.x(stop));
      if (end > x) ctx.fillRect(x, top, Math.max(0.6, end - x), height);
    };
    if (typeof busy !== "string") {
      for (let i = 0; i < busy.length; i += 2) rect(busy[i], busy[i + 1]);
      return;
    }
    const width = this.timeline.stop / busy.length;
    for (let i = 0; i < busy.length; i += 1) {
      ctx.globalAlpha = opd.LEVELS.indexOf(busy[i]) / 63;
      if (ctx.globalAlpha > 0) rect(i * width, (i + 1.05) * width);
    }
    ctx.globalAlpha = 1;
  }

  ticks(ctx, top) {
    ctx.fillStyle = opd.style("--muted");
    const count = Math.max(2, Math.floor(this.inner / 110));
    for (let i = 0; i <= count; i += 1) {
      ctx.textAlign = i === 0 ? "left" : i === count ? "right" : "center";
      const time = this.from0 + (this.span * i) / count;
      ctx.fillText(opd.seconds(+time.toPrecision(4)), this.left + (this.inner * i) / count, top + 13);
    }
  }

  drops(ctx, below) {
    ctx.fillStyle = opd.style("--bad");
    for (const at of this.timeline.drops) {
      if (at >= this.from0 && at <= this.from0 + this.span) ctx.fillRect(this.x(at) - 0.5, 2, 1, below - 2);
    }
  }

  select(to) {
    const range = [Math.min(this.from, to), Math.max(this.from, to)];
    if (range[1] - range[0] < 0.01 * this.span) return;
    this.range = range;
    this.draw();
  }

  share(busy, time) {
    if (!busy) return 0;
    if (typeof busy === "string") {
      const part = time / this.timeline.stop;
      return opd.LEVELS.indexOf(busy[Math.min(busy.length - 1, Math.floor(part * busy.length))]) / 63;
    }
    for (let i = 0; i < busy.length; i += 2) if (busy[i] <= time && time <= busy[i + 1]) return 1;
    return 0;
  }

  point(event) {
    const index = this.tops().findIndex(([top, own]) => event.offsetY >= top && event.offsetY < top + own);
    if (index < 0 || event.offsetX < this.left) return this.tip.hide();
    const lane = this.timeline.lanes[index], time = this.time(event.offsetX);
    const busy = this.share(lane.busy, time), paused = this.share(lane.paused, time);
    const binned = typeof lane.busy === "string";
    let state = busy ? "busy" : "idle";
    if (paused) state = "paused";
    if (binned) state = `busy ${Math.round(100 * busy)} %` + (paused ? `, paused ${Math.round(100 * paused)} %` : "");
    return this.tip.show(event.offsetX, event.offsetY + 14,
      opd.element("em", {}, `${lane.stage === "student" ? lane.name : lane.stage}`),
      opd.element("div", {}, `${opd.seconds(+time.toPrecision(4))}: `, opd.element("b", {}, state)));
  }
};
