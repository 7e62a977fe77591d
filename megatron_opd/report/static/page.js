"use strict";
// Puts charts and time lines on the page, and redraws them when a control or the screen changes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const reset = opd.element("button", { hidden: "", onclick: () => view.zoom(null) }, "whole run");
  const visible = new Set();
  const charts = [], lanes = [];

  const view = {
    axis: "update", smooth: false, paper: false, range: null, runsHidden: new Set(),
    zoom(range) {
      view.range = range;
      reset.hidden = range === null;
      redraw();
    },
  };

  const redraw = () => {
    for (const chart of charts) {
      if (visible.has(chart.root)) chart.draw();
      else chart.stale = true;
    }
    lanes.forEach((each, index) => {
      each.root.hidden = view.runsHidden.has(each.run);
      if (!each.root.hidden) each.lanes.draw();
    });
  };

  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = charts.find((each) => each.root === target);
      if (!isIntersecting) {
        visible.delete(target);
      } else {
        visible.add(target);
        if (chart.stale) chart.draw();
        chart.stale = false;
      }
    }
  }, { rootMargin: "300px" });

  const addCharts = (place, specs) => {
    const grid = opd.element("div", { class: "grid" });
    place.append(grid);
    for (const spec of specs) {
      const chart = new opd.Chart(spec, data, view);
      chart.stale = true;
      charts.push(chart);
      grid.append(chart.root);
      watcher.observe(chart.root);
    }
  };

  const choice = (name, label, values, chosen) => opd.element(
    "fieldset", {}, opd.element("legend", {}, label),
    ...values.map(([value, text], index) => {
      const input = opd.element("input", { type: "radio", name, value, onchange: () => chosen(value) });
      input.checked = index === 0;
      return opd.element("label", {}, input, text);
    }),
  );

  const smooth = opd.element("input", {
    type: "checkbox", onchange: () => { view.smooth = smooth.checked; redraw(); },
  });
  smooth.checked = view.smooth = data.runs.some((run) => run.tables.main.update.length > 200);
  document.getElementById("controls").append(
    choice("axis", "x axis", [["update", "updates"], ["time", "wall clock"]], (value) => {
      view.axis = value;
      view.zoom(null);
    }),
    opd.element("label", {}, smooth, "smooth"), reset,
  );

  for (const button of document.querySelectorAll("button.run")) {
    if (data.runs.length === 1) {
      button.disabled = true;
      continue;
    }
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!view.runsHidden.delete(run)) view.runsHidden.add(run);
      button.setAttribute("aria-pressed", String(!view.runsHidden.has(run)));
      redraw();
    });
  }

  const curves = document.getElementById("curves");
  for (const section of data.sections) {
    const part = opd.element("section", {});
    if (section.folded) {
      const details = opd.element("details", {}, opd.element("summary", {}, section.title));
      part.append(details);
      addCharts(details, section.charts);
    } else {
      part.append(opd.element("h2", {}, section.title));
      addCharts(part, section.charts);
    }
    curves.append(part);
  }

  const place = document.getElementById("lanes");
  data.timelines.forEach((timeline, run) => {
    if (!timeline) return;
    const each = new opd.Lanes(timeline, view);
    if (data.runs.length > 1) each.root.prepend(opd.element("h3", {}, data.runs[run].name));
    place.append(each.root);
    lanes.push({ root: each.root, lanes: each, run });
    each.draw();
  });

  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's address bar came or went
    width = window.innerWidth;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Browsers lay a page out for paper only after this event, so widths are those of a sheet (A4).
  const onPaper = (printing) => {
    view.paper = printing;
    document.documentElement.classList.toggle("paper", printing);
    for (const chart of charts) if (chart.root.offsetParent) chart.draw(); // also those not yet seen
    for (const each of lanes) if (!each.root.hidden) each.lanes.draw();
  };
  window.addEventListener("beforeprint", () => onPaper(true));
  window.addEventListener("afterprint", () => onPaper(false));
})();
