"use strict";
// Curves. One step is looked at by all charts and the heatmap: `look(step)` moves every crosshair.

const data = JSON.parse(document.getElementById("data").textContent);
const MARGIN = { left: 62, right: 14, top: 10, bottom: 22 };
const HEIGHT = { loss: 330, grad: 210, update: 190, speed: 170, lr: 140, stalls: 190, val: 210, apart: 190, memory: 150, top1: 150 };
const STRIP = 20; // height of the parity ticks below the loss chart
const VERDICT = {
  agreed: ["--good", "agreed"], disagreed: ["--bad", "disagreed"], could_not: ["--skip", "could not tell"], skipped: ["--skip", "skipped"],
};

// What is heard outside the page's parts is heard until these are made anew (live.js).
const life = new AbortController(), alive = { signal: life.signal };
const listeners = [];
let lookedAt = null, pinned = null;
function look(step, by = null) {
  lookedAt = step ?? pinned;
  for (const listen of listeners) listen(lookedAt, by);
}
function pin(step, more = "") {
  pinned = step;
  try {
    history.replaceState(null, "", step === null ? location.pathname : `#step=${step}${more}`);
  } catch { /* a page without a history of its own */ }
}

const number = v => (typeof v === "string" ? Number(v.replace("inf", "Infinity")) : v ?? NaN);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const group = v => String(v).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
const trim = s => (s.includes(".") ? s.replace(/\.?0+$/, "") : s);
function exact(v, digits = 6) {
  if (Number.isNaN(v)) return "NaN";
  if (!Number.isFinite(v)) return v > 0 ? "∞" : "-∞";
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size < 1e-3 || size >= 1e9) {
    const [m, e] = v.toExponential(digits - 1).split("e");
    return `${trim(m)}e${Number(e)}`;
  }
  const [whole, rest] = trim(v.toPrecision(digits).includes("e") ? String(Math.round(v)) : v.toPrecision(digits)).split(".");
  return group(whole) + (rest ? `.${rest}` : "");
}
function short(v) {
  const size = Math.abs(v);
  if (v === 0) return "0";
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return trim((v / unit).toPrecision(4)) + letter;
  if (size < 1e-3) {
    const [m, e] = v.toExponential(2).split("e");
    return `${trim(m)}e${Number(e)}`;
  }
  return trim(v.toPrecision(4));
}

// A place on the axis, which counts steps but where a control says otherwise (compare.js).
const place = v => (!Number.isInteger(v) ? exact(v, 4) : v < 1e6 ? group(v) : short(v));

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1), base = 10 ** Math.floor(Math.log10(raw));
  const step = base * [1, 2, 5, 10].find(m => m * base >= raw * 0.999);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(Number((i * step).toPrecision(12)));
  return out;
}
function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), decades = Math.log10(high / low);
  const parts = decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 2.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 6)), out = [];
  for (let e = from; e <= to; e++)
    if (e % every === 0) for (const p of parts) if (p * 10 ** e >= low * 0.999 && p * 10 ** e <= high * 1.001) out.push(Number(`${p}e${e}`));
  return out;
}

function element(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "path", "line", "circle", "text", "rect", "clipPath"].includes(tag);
  const node = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Draw now and whenever the width changes; in the next frame, as a drawing may change the height and so the width.
function watch(box, draw) {
  let width = 0;
  const look = () => {
    const now = Math.floor(box.clientWidth);
    if (now && now !== width) draw(width = now);
  };
  new ResizeObserver(() => requestAnimationFrame(look)).observe(box);
  look();
}

// Index of the last x that is not above `step`, or of the nearest one.
function lastAt(x, step) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
function nearest(x, step) {
  const i = lastAt(x, step);
  if (i < 0) return 0;
  return i + 1 < x.length && x[i + 1] - step < step - x[i] ? i + 1 : i;
}

const stepsOfChecks = data.checks.map(([step]) => step);
const lossChart = data.charts.find(c => c.id === "loss");
const stops = [...new Set([...(lossChart ? lossChart.series.flatMap(s => s.x) : data.domain), ...stepsOfChecks])].sort((a, b) => a - b);
const axis = { name: "step", whole: true, low: data.domain[0], high: data.domain[1] > data.domain[0] ? data.domain[1] : data.domain[0] + 1 };

function symbol(style, colour) {
  const svg = element("svg", { viewBox: "0 0 18 10", "aria-hidden": "true" });
  const fill = `var(--${colour})`;
  if (style === "dots") svg.append(element("circle", { cx: 9, cy: 5, r: 3.5, fill }));
  else if (style === "diamonds") svg.append(element("path", { d: "M9 0.8L13.2 5L9 9.2L4.8 5Z", fill: "none", stroke: fill, "stroke-width": 1.8 }));
  else if (style === "area") svg.append(element("rect", { x: 3, y: 0, width: 12, height: 10, rx: 2, fill, opacity: 0.8 }));
  else if (style === "peaks") svg.append(element("path", { d: "M4 1H14L9 9Z", fill }));
  else if (style === "rug") svg.append(element("path", { d: "M4 1V9M9 1V9M14 1V9", stroke: fill, "stroke-width": 1.5 }));
  else svg.append(element("path", { d: "M0 5H18", stroke: fill, "stroke-width": style === "thin" ? 1.4 : 2.4, opacity: style === "thin" ? 0.5 : 1 }));
  return svg;
}

function makeChart(spec) {
  const figure = document.getElementById(`chart-${spec.id}`);
  const plot = figure.querySelector(".plot"), legend = figure.querySelector(".legend");
  const strip = spec.id === "loss" && data.checks.length ? STRIP : 0;
  const height = (HEIGHT[spec.id] ?? 170) + strip;
  for (const s of spec.series) s.y = s.y.map(number);
  for (const r of spec.rules) r.y = number(r.y);
  const hidden = new Set();
  const shown = s => !hidden.has(s) && !s.off; // `off`: by a control outside the chart (compare.js)
  const tip = element("div", { class: "tip", hidden: "" });
  let x = null, y = null, cross = null, dots = null, width = 0;

  for (const s of spec.series.filter(s => s.style !== "readout")) {
    const button = element("button", { type: "button", "aria-pressed": "true", title: "Show or hide" }, symbol(s.style, s.colour), s.label);
    button.addEventListener("click", () => {
      if (!hidden.delete(s)) hidden.add(s);
      button.setAttribute("aria-pressed", String(!hidden.has(s)));
      draw(width);
    });
    legend.append(button);
  }

  function range() {
    const lines = spec.series.filter(s => shown(s) && !["readout", "rug"].includes(s.style));
    let values = lines.flatMap(s => s.y).filter(v => Number.isFinite(v) && (!spec.log || v > 0)).sort((a, b) => a - b);
    if (!values.length) values = spec.log ? [0.1, 10] : [0, 1];
    let low = values[0], high = values[values.length - 1];
    const usual = values[Math.floor((values.length - 1) * 0.99)], middle = values[values.length >> 1];
    // One wild spike must not flatten the rest: what is cut off is marked at the edge.
    if (!spec.log && high - middle > 6 * (usual - low) && usual > low) {
      const starts = lines.map(s => s.y[0]).filter(Number.isFinite);
      high = Math.min(high, Math.max(usual + (usual - low) * 0.3, ...starts));
    }
    for (const r of spec.rules) if (Number.isFinite(r.y) && (!spec.log || r.y > 0)) { low = Math.min(low, r.y); high = Math.max(high, r.y); }
    if (spec.log) {
      const room = Math.max(1.15, (high / low) ** 0.05);
      return [low / room, high * room];
    }
    if (spec.zero) low = Math.min(0, low);
    const room = (high - low || Math.abs(high) || 1) * 0.05;
    return [spec.zero && low === 0 ? 0 : low - room, high + room];
  }

  function draw(newWidth) {
    width = newWidth;
    const [low, high] = range();
    const top = MARGIN.top, bottom = height - MARGIN.bottom - strip, left = MARGIN.left, right = width - MARGIN.right;
    const at = spec.log ? v => Math.log(v) : v => v;
    x = step => left + ((step - axis.low) / (axis.high - axis.low)) * (right - left);
    y = v => bottom - ((at(v) - at(low)) / (at(high) - at(low))) * (bottom - top);
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    const clip = `clip-${spec.id}`;
    svg.append(element("clipPath", { id: clip }, element("rect", { x: left, y: top - 4, width: right - left + 4, height: bottom - top + 8 })));

    for (const t of spec.log ? logTicks(low, high) : ticks(low, high, (bottom - top) / 34)) {
      const v = Math.round(y(t));
      svg.append(element("line", { class: "grid", x1: left, x2: right, y1: v, y2: v }));
      svg.append(element("text", { x: left - 8, y: v + 4, "text-anchor": "end" }, short(t)));
    }
    for (const t of ticks(axis.low, axis.high, Math.min((right - left) / 90, axis.whole ? axis.high - axis.low : Infinity))) {
      svg.append(element("line", { class: "grid", x1: x(t), x2: x(t), y1: top, y2: bottom }));
      svg.append(element("text", { x: x(t), y: height - 6, "text-anchor": "middle" }, place(t)));
    }
    svg.append(element("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    drawRules(svg, left, right);
    drawMarks(svg, top, bottom);
    const body = element("g", { "clip-path": `url(#${clip})` });
    svg.append(body);
    for (const s of spec.series) if (shown(s) && s.style !== "readout") drawSeries(svg, body, s, top, bottom, low, high);
    if (strip) drawChecks(svg, left, right, bottom);
    cross = element("line", { class: "cross", y1: top, y2: bottom + strip, visibility: "hidden" });
    dots = element("g");
    svg.append(cross, dots);
    plot.replaceChildren(svg, tip);
    show(lookedAt);
  }

  function drawRules(svg, left, right) {
    let last = -Infinity;
    for (const r of [...spec.rules].filter(r => Number.isFinite(r.y)).sort((a, b) => b.y - a.y)) {
      const v = y(r.y), label = Math.max(v - 5, last + 13);
      svg.append(element("line", { class: "ruleline", x1: left, x2: right, y1: v, y2: v }));
      svg.append(element("text", { class: "rule", x: right - 4, y: label, "text-anchor": "end" }, `${r.label} ${exact(r.y, 4)}`));
      last = label;
    }
  }

  // Where a branch begins: right after its step.
  function drawMarks(svg, top, bottom) {
    for (const m of data.marks.filter(m => m.step >= axis.low && m.step <= axis.high)) {
      svg.append(element("line", { class: "ruleline", x1: x(m.step), x2: x(m.step), y1: top, y2: bottom }));
      const beyond = x(m.step) > (x(axis.low) + x(axis.high)) / 2;
      svg.append(element("text", { class: "rule", x: x(m.step) + (beyond ? -4 : 4), y: bottom - 5, "text-anchor": beyond ? "end" : "start" }, m.label));
    }
  }

  function drawSeries(svg, body, s, top, bottom, low, high) {
    const colour = `var(--${s.colour})`;
    const inside = v => Number.isFinite(v) && (!spec.log || v > 0);
    if (s.style === "area") {
      const edge = (values, order) => order.map(i => `${x(s.x[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`).join("L");
      const forth = s.x.map((_, i) => i), back = [...forth].reverse();
      body.append(element("path", { d: `M${edge(s.y, forth)}L${edge(s.base, back)}Z`, fill: colour, opacity: 0.8 }));
      return;
    }
    if (s.style === "peaks") {
      s.x.forEach((step, i) => {
        const px = x(step).toFixed(1), py = Math.max(y(s.y[i]), top + 8).toFixed(1);
        body.append(element("path", { d: `M${px} ${bottom}V${py}`, stroke: colour, "stroke-width": 1, "stroke-dasharray": "2 3" }));
        svg.append(element("path", { d: `M${px} ${py}m-5 -8h10l-5 8Z`, fill: colour }));
      });
      return;
    }
    if (s.style === "rug") {
      const path = s.x.flatMap((step, i) => (s.y[i] < 1 ? `M${x(step).toFixed(1)} ${bottom}v-7` : []));
      body.append(element("path", { d: path.join(""), stroke: colour, "stroke-width": 1, opacity: 0.75 }));
      return;
    }
    if (s.style === "dots" || s.style === "diamonds") {
      const size = Math.min(Math.max((x(axis.high) - x(axis.low)) / s.x.length / 3, 1), 4);
      if (s.style === "dots")
        body.append(element("path", { d: path(s, inside), fill: "none", stroke: colour, "stroke-width": 1.2, opacity: 0.6 }));
      s.x.forEach((step, i) => {
        if (!inside(s.y[i])) return;
        const px = x(step), py = y(s.y[i]);
        body.append(s.style === "dots"
          ? element("circle", { cx: px, cy: py, r: size * 0.75, fill: colour })
          : element("path", { d: `M${px} ${py - size}l${size} ${size}l${-size} ${size}l${-size} ${-size}Z`, fill: "none", stroke: colour, "stroke-width": 1.4 }));
      });
    } else {
      const thin = s.style === "thin";
      body.append(element("path", {
        d: path(s, inside), fill: "none", stroke: colour, "stroke-linejoin": "round", "stroke-width": thin ? 1 : 1.7, opacity: thin ? 0.38 : 1,
      }));
      // A line of one point has no length.
      s.x.forEach((step, i) => {
        const alone = inside(s.y[i]) && !(i > 0 && inside(s.y[i - 1])) && !(i + 1 < s.y.length && inside(s.y[i + 1]));
        if (alone) body.append(element("circle", { cx: x(step), cy: y(s.y[i]), r: 2.5, fill: colour }));
      });
    }
    s.x.forEach((step, i) => {
      const v = s.y[i], px = x(step);
      if (!Number.isFinite(v)) svg.append(element("path", { d: `M${px - 4} ${top - 4}l8 8m0 -8l-8 8`, stroke: "var(--bad)", "stroke-width": 2 }));
      else if (inside(v) && v > high) svg.append(element("path", { d: `M${px - 4} ${top + 5}l4 -7l4 7Z`, fill: colour }));
    });
  }

  function path(s, inside) {
    let d = "", open = false;
    s.x.forEach((step, i) => {
      if (inside(s.y[i])) {
        d += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(s.y[i]).toFixed(1)}`;
        open = true;
      } else open = false;
    });
    return d;
  }

  function drawChecks(svg, left, right, bottom) {
    const middle = bottom + STRIP / 2 + 2;
    svg.append(element("text", { x: left - 8, y: middle + 4, "text-anchor": "end" }, "checks"));
    const room = ((right - left) / data.checks.length) * 0.6;
    const order = ["skipped", "could_not", "agreed", "disagreed"];
    for (const [step, verdict] of [...data.checks].sort((a, b) => order.indexOf(a[1]) - order.indexOf(b[1]))) {
      const half = verdict === "disagreed" ? 7 : verdict === "agreed" ? 5 : 3;
      const dash = verdict === "could_not" ? "2 2" : null;
      svg.append(element("line", {
        x1: x(step), x2: x(step), y1: middle - half, y2: middle + half, stroke: `var(${VERDICT[verdict][0]})`,
        "stroke-width": Math.min(verdict === "disagreed" ? 3 : 2, Math.max(room, 1)), "stroke-dasharray": dash,
      }));
    }
  }

  function show(step) {
    if (!x) return;
    dots.replaceChildren();
    if (step === null || step < axis.low || step > axis.high) {
      tip.hidden = true;
      cross.setAttribute("visibility", "hidden");
      return;
    }
    const px = Math.round(x(step)) + 0.5;
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", px);
    cross.setAttribute("x2", px);
    tip.replaceChildren(element("b", {}, `${axis.name} ${place(step)}`));
    for (const s of spec.series) {
      if (!shown(s)) continue;
      const i = s.sparse || s.style === "readout" ? lastAt(s.x, step) : nearest(s.x, step);
      if (i < 0 || (s.exact && s.x[i] !== step)) continue;
      const v = s.own ? s.own[i] : s.y[i];
      const value = element("span", {}, s.percent ? `${exact(v * 100, 4)} %` : exact(v));
      if (s.x[i] !== step) value.append(element("span", { class: "at" }, `at ${place(s.x[i])}`));
      const label = element("span", {}, element("i", { style: `background:var(--${s.colour})` }), s.reading);
      tip.append(element("div", { class: "row" }, label, value));
      if (!["readout", "rug", "area", "peaks"].includes(s.style) && Number.isFinite(v) && !(spec.log && v <= 0) && s.x[i] === step && y(v) >= 0)
        dots.append(element("circle", { class: "dot", cx: px, cy: y(v), r: 3.5, fill: `var(--${s.colour})` }));
    }
    if (strip)
      for (const [at, verdict, broken] of data.checks)
        if (at === step) {
          const count = broken ? `, ${broken} broken` : "";
          tip.append(element("div", { class: "row" }, element("span", {}, element("i", { style: `background:var(${VERDICT[verdict][0]})` }), "check"),
            element("span", { class: verdict === "disagreed" ? "bad" : "" }, VERDICT[verdict][1] + count)));
        }
    tip.hidden = false;
    const flip = px > width * 0.6;
    tip.style.top = `${MARGIN.top}px`;
    tip.style.left = flip ? "auto" : `${px + 12}px`;
    tip.style.right = flip ? `${width - px + 12}px` : "auto";
  }

  const under = event => {
    const share = (event.clientX - plot.getBoundingClientRect().left - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    return stops[nearest(stops, axis.low + Math.min(Math.max(share, 0), 1) * (axis.high - axis.low))];
  };
  plot.addEventListener("pointermove", event => look(under(event), "chart"));
  plot.addEventListener("pointerleave", () => look(null));
  plot.addEventListener("click", event => pin(pinned === under(event) ? null : under(event)));
  listeners.push(show);
  return { spec, plot, legend, draw, redraw: () => width && draw(width) };
}

const drawn = data.charts.map(makeChart);
const frame = document.getElementById("charts");
watch(frame, width => { for (const chart of drawn) chart.draw(width); });
frame.addEventListener("keydown", event => {
  const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
  if (event.key === "Escape") {
    pin(null);
    look(null);
  } else if (move) {
    const from = lookedAt === null ? 0 : nearest(stops, lookedAt) + move;
    look(stops[Math.min(Math.max(from, 0), stops.length - 1)], "key");
    event.preventDefault();
  }
});
