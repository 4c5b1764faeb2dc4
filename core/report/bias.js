// Bias over steps: the running sums of each comparison, of the whole run and of its recent checks, below their bounds.

const BIAS = { height: 104, left: 44, right: 8, top: 6, bottom: 18 };

function drawBias(plot, curve, name) {
  const width = Math.floor(plot.clientWidth), { height, left, right, top, bottom } = BIAS, part = curve[name];
  if (!width) return;
  const x0 = curve.x[0], x1 = Math.max(curve.x[curve.x.length - 1], x0 + 1);
  const columns = Object.fromEntries(["value", "bound", "recent", "recent_bound"].map(k => [k, part[k].map(v => (v === null ? NaN : number(v)))]));
  const finite = Object.values(columns).flat().filter(Number.isFinite);
  const high = Math.max(...finite, 1e-12) * 1.08;
  const x = v => left + ((v - x0) / (x1 - x0)) * (width - left - right), y = v => height - bottom - (Math.min(v, high) / high) * (height - top - bottom);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
  for (const t of ticks(0, high, 3)) {
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: Math.round(y(t)), y2: Math.round(y(t)) }));
    svg.append(element("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, short(t)));
  }
  for (const [v, anchor] of [[x0, "start"], [x1, "end"]]) svg.append(element("text", { x: x(v), y: height - 4, "text-anchor": anchor }, `${group(v)}${anchor === "end" ? ` ${curve.unit}` : ""}`));
  const path = values => {
    let d = "", open = false;
    values.forEach((v, i) => {
      if (Number.isFinite(v)) d += `${open ? "L" : "M"}${x(curve.x[i]).toFixed(1)} ${y(v).toFixed(1)}`;
      open = Number.isFinite(v);
    });
    return d;
  };
  const beyond = columns.value.map((v, i) => (v > columns.bound[i] || columns.recent[i] > columns.recent_bound[i] ? Math.max(v, columns.recent[i]) : NaN));
  svg.append(
    element("path", { d: path(columns.bound), class: "ruleline", fill: "none" }),
    element("path", { d: path(columns.recent), fill: "none", stroke: "var(--c2)", "stroke-width": 1.2 }),
    element("path", { d: path(columns.value), fill: "none", stroke: "var(--c1)", "stroke-width": 1.7 }),
  );
  beyond.forEach((v, i) => { if (Number.isFinite(v)) svg.append(element("circle", { cx: x(curve.x[i]), cy: y(v), r: 2.2, fill: "var(--bad)" })); });
  const end = curve.x.length - 1, of = v => (Number.isNaN(v) ? "none" : exact(v, 3));
  plot.setAttribute("aria-label", `${words(name)} after ${curve.x[end]} ${curve.unit}: ${of(columns.value[end])}, bound ${of(columns.bound[end])}`);
  const tip = element("div", { class: "tip", hidden: "" });
  plot.replaceChildren(svg, tip);
  plot.onpointermove = event => {
    const share = (event.clientX - plot.getBoundingClientRect().left - left) / (width - left - right);
    const i = nearest(curve.x, x0 + clamp(share, 0, 1) * (x1 - x0)), row = (label, v, b) => element("div", { class: "row" }, element("span", {}, label), element("span", {}, of(v), element("span", { class: "at" }, `≤ ${of(b)}`)));
    tip.replaceChildren(element("b", {}, `${curve.unit.replace(/s$/, "")} ${group(curve.x[i])}`), row("whole run", columns.value[i], columns.bound[i]), row("recent", columns.recent[i], columns.recent_bound[i]));
    placeTip(tip, x(curve.x[i]), 20, width, 400);
  };
  plot.onpointerleave = () => { tip.hidden = true; };
}

if (data.bias) {
  const host = document.getElementById("bias-curves"), plots = [];
  for (const curve of data.bias.curves) {
    const strain = number(curve.strain), share = strain <= 1 ? `${exact(strain * 100, 2)} % of its bound` : `✕ ${exact(strain, 3)} × its bound`;
    const where = `${curve.stage} ${curve.phase}${curve.layer === null ? "" : `, layer ${curve.layer}`}`;
    const card = element("figure", { class: `bias ${strain > 1 ? "bad" : ""}` },
      element("figcaption", {}, element("code", {}, curve.tap), element("small", {}, `${where}: `, element("span", {}, share))));
    for (const name of ["bias", "gain_bias"]) {
      const plot = element("div", { class: "plot", role: "img" });
      card.append(element("div", { class: "half" }, element("small", {}, name === "bias" ? "bias" : "gain bias"), plot));
      plots.push([plot, curve, name]);
    }
    host.append(card);
  }
  const key = (style, label) => element("span", { class: "key" }, element("i", { class: "stroke", style }), label);
  host.after(element("div", { id: "bias-legend" }, key("border-top:2px solid var(--c1)", "whole run"), key("border-top:2px solid var(--c2)", "recent checks"), key("border-top:1px dashed var(--rule)", "bound, of the whole run")));
  watch(host, () => { for (const plot of plots) drawBias(...plot); });
}
