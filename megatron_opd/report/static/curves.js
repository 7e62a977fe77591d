"use strict";
// Draws the charts with uPlot. A chart is made when it comes into view, and again when what it
// shows changes (x axis, smoothing, colours, runs); all charts share one range of x.

opd.DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
// Columns whose null means "no number", which must stay visible as a gap.
opd.GAPS = new Set(["loss", "reverse_kl_nats", "forward_kl_nats", "grad_norm"]);

// Weighted mean of what came before: half of the weight lies on the last `half` points.
opd.smoothed = (values, half) => {
  const keep = 0.5 ** (1 / half);
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    total = keep * total + value;
    weight = keep * weight + 1;
    return total / weight;
  });
};

// Put curves with x axes of their own on the union of these; undefined: no point there.
opd.joined = (curves) => {
  const all = new Set();
  for (const curve of curves) for (const x of curve.x) if (x !== null) all.add(x);
  const x = [...all].sort((a, b) => a - b);
  const at = new Map(x.map((value, index) => [value, index]));
  const columns = curves.map((curve) => {
    const column = new Array(x.length);
    curve.x.forEach((value, index) => {
      const y = curve.y[index];
      if (value !== null && (y !== null || curve.gaps)) column[at.get(value)] = y;
    });
    return column;
  });
  return [x, ...columns];
};

opd.Chart = class {
  constructor(spec, data, view) {
    Object.assign(this, { spec, data, view, log: false, hidden: new Set(), plot: null });
    this.place = opd.element("div", { class: "plot" });
    this.legend = opd.element("div", { class: "legend" });
    this.logButton = opd.element(
      "button", { "aria-pressed": "false", title: "logarithmic scale", onclick: () => this.turn() },
      "log",
    );
    const unit = spec.unit && spec.unit !== "share" ? opd.element("small", {}, spec.unit) : "";
    this.root = opd.element(
      "figure", { class: "chart", title: spec.text },
      opd.element("figcaption", {}, opd.element("span", {}, spec.title, " ", unit), this.logButton),
      this.place, this.legend,
    );
    this.tip = opd.tip(this.place);
  }

  turn() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.draw();
  }

  curves() {
    const found = [];
    this.data.runs.forEach((run, index) => {
      if (this.view.runsHidden.has(index)) return;
      this.spec.curves.forEach((curve, nth) => {
        const table = run.tables[curve.table];
        if (!table || !table[curve.column] || this.hidden.has(nth)) return;
        const several = this.data.runs.length > 1;
        const label = several
          ? run.name + (this.spec.curves.length > 1 ? `: ${curve.label}` : "") : curve.label;
        found.push({
          label, nth, color: several ? index : nth, dash: several ? opd.DASHES[nth % 4] : [],
          x: table[this.view.axis], y: table[curve.column], gaps: opd.GAPS.has(curve.column),
          bars: this.spec.bars ? table[this.spec.bars] : null,
        });
      });
    });
    return found;
  }

  draw() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    const curves = this.curves();
    const raw = opd.joined(curves);
    const positive = raw.slice(1).every((ys) => ys.every((y) => y === null || y === undefined || y > 0));
    this.logButton.hidden = !positive;
    const half = Math.max(2, (raw[0].length / Math.max(1, curves.length)) / 40);
    const smooth = this.view.smooth && raw[0].length > 8;
    const data = smooth ? [...raw, ...raw.slice(1).map((ys) => opd.smoothed(ys, half))] : raw;
    const series = curves.map((curve) => this.series(curve, smooth ? 0.28 : 1, smooth ? 1 : 1.6));
    if (smooth) series.push(...curves.map((curve) => this.series(curve, 1, 2)));
    this.shown = { curves, first: smooth ? curves.length : 0 };
    this.drawLegend();
    if (!curves.length || !raw[0].length) return;
    const self = this;
    this.plot = new uPlot({
      width: this.view.paper ? 318 : Math.max(240, this.place.clientWidth), height: 190, legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: {
        y: false, points: { size: 6 }, drag: { x: true, y: false, dist: 6, setScale: false },
        dataIdx: (plot, index, near) => self.nearest(plot.data[index], near),
        bind: { dblclick: () => () => { self.view.zoom(null); return null; } },
      },
      scales: {
        x: { time: false, range: (plot, low, high) => self.rangeX(low, high) },
        y: this.log && positive ? { distr: 3 } : { range: (plot, low, high) => self.rangeY(low, high) },
      },
      axes: this.axes(),
      series: [{}, ...series],
      hooks: {
        setSelect: [(plot) => self.selected(plot)],
        setCursor: [(plot) => self.point(plot)],
        drawClear: [(plot) => self.healthy(plot)],
        draw: [(plot) => self.errors(plot)],
      },
    }, data, this.place);
  }

  series(curve, alpha, width) {
    const color = opd.color(curve.color);
    const few = curve.y.filter((y) => y !== null).length < 40;
    return {
      label: curve.label, stroke: color, alpha, width, dash: curve.dash,
      points: { show: few && alpha === 1, size: 4, fill: color },
    };
  }

  axes() {
    const stroke = opd.style("--muted"), line = opd.style("--line"), font = "11px system-ui, sans-serif";
    const common = { stroke, font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, size: 4 } };
    const written = this.view.axis === "time" ? opd.seconds : opd.number;
    const wide = (plot, texts) => (texts ? 14 + 6.4 * Math.max(...texts.map((t) => t.length)) : 40);
    return [
      { ...common, size: 28, space: 70, values: (plot, ticks) => ticks.map(written) },
      {
        ...common, size: wide, space: 28,
        values: (plot, ticks) => ticks.map((y) => (y === null ? "" : opd.written(y, this.spec.unit))),
      },
    ];
  }

  rangeX(low, high) {
    if (this.view.range) return this.view.range;
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  rangeY(low, high) {
    if (low === null) return [0, 1];
    if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * low)];
    return uPlot.rangeNum(low, high, 0.08, true);
  }

  nearest(values, index) {
    if (!values) return index;
    for (let away = 0; away < values.length; away += 1) {
      for (const at of [index - away, index + away]) {
        if (at >= 0 && at < values.length && values[at] !== null && values[at] !== undefined) return at;
      }
    }
    return index;
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 6) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.view.zoom(range);
  }

  point(plot) {
    const { left, idx, idxs } = plot.cursor;
    if (left < 0 || idx === null || idx === undefined) return this.tip.hide();
    const { curves, first } = this.shown;
    const rows = curves.map((curve, index) => {
      const at = idxs[index + 1];
      return opd.element(
        "div", {}, opd.element("i", { class: `c${curve.color % 8}` }), `${curve.label} `,
        opd.element("b", {}, opd.written(plot.data[index + 1][at], this.spec.unit)),
      );
    });
    const at = idxs[first + 1] ?? idx;
    const x = plot.data[0][at];
    const where = this.view.axis === "time" ? opd.seconds(x) : `update ${opd.number(Math.round(x))}`;
    return this.tip.show(left + plot.over.offsetLeft, 4, opd.element("em", {}, where), ...rows);
  }

  // Dashed lines at the ends of the range that the catalogue of metrics calls healthy.
  healthy(plot) {
    if (!this.spec.healthy) return;
    const { ctx, bbox } = plot, { min, max } = plot.scales.y;
    ctx.save();
    ctx.strokeStyle = opd.style("--healthy");
    ctx.setLineDash([3, 4]);
    for (const bound of this.spec.healthy) {
      if (bound === null || bound <= min || bound >= max) continue;
      const top = plot.valToPos(bound, "y", true);
      ctx.beginPath();
      ctx.moveTo(bbox.left, top);
      ctx.lineTo(bbox.left + bbox.width, top);
      ctx.stroke();
    }
    ctx.restore();
  }

  // Bars of one standard error around the points of curves that have one.
  errors(plot) {
    const { ctx } = plot;
    ctx.save();
    for (const { x, y, bars, color } of this.shown.curves) {
      ctx.strokeStyle = opd.color(color);
      for (let i = 0; bars && i < y.length; i += 1) {
        if (y[i] === null || !bars[i]) continue;
        const at = plot.valToPos(x[i], "x", true);
        ctx.beginPath();
        ctx.moveTo(at, plot.valToPos(y[i] - bars[i], "y", true));
        ctx.lineTo(at, plot.valToPos(y[i] + bars[i], "y", true));
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  drawLegend() {
    if (this.spec.curves.length < 2) return;
    const several = this.data.runs.length > 1;
    this.legend.replaceChildren(...this.spec.curves.map((curve, nth) => {
      const mark = several
        ? opd.element("i", { class: `dash d${nth % 4}` }) : opd.element("i", { class: `c${nth % 8}` });
      return opd.element("button", {
        "aria-pressed": String(!this.hidden.has(nth)),
        onclick: () => {
          if (!this.hidden.delete(nth)) this.hidden.add(nth);
          this.draw();
        },
      }, mark, curve.label);
    }));
  }
};
