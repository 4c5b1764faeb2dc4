// Error through depth: each comparison of the chosen step at its place in the forward chain, end to end and local.

const DEPTH = { height: 176, left: 52, right: 10, top: 8, bottom: 24 };

function makeDepth(cells) {
  const host = document.getElementById("depth"), names = ["excess", "relative_error", "twin_distance"].filter(m => heat.measures.includes(m));
  const panels = [];
  for (const name of names)
    for (const phase of ["forward", "backward"]) {
      const rows = heat.rows.flatMap(([line, , , , depth], i) => (depth >= 0 && heat.lines[line][1] === phase ? [i] : []));
      if (!rows.length) continue;
      const plot = element("div", { class: "plot", role: "img" }), tip = element("div", { class: "tip", hidden: "" });
      const title = element("figcaption", {}, element("h3", {}, words(name), element("span", { class: "unit" }, phase)));
      host.append(element("figure", { class: "chart" }, title, plot));
      panels.push({ name, phase, rows, plot, tip });
    }
  // Values in one column, in the order of depth: {row, depth, value, broken}, by scope.
  function pointsOf(panel, column, scope) {
    const out = [];
    for (const row of panel.rows) {
      if (heat.rows[row][3] !== scope) continue;
      const m = cells.at(row, column)?.measures.find(each => each.name === panel.name);
      if (m) out.push({ row, depth: heat.rows[row][4], value: m.value, broken: m.broken });
    }
    return out.sort((a, b) => a.depth - b.depth);
  }

  function draw(panel) {
    const width = Math.floor(panel.plot.clientWidth), { height, left, right, top, bottom } = DEPTH;
    if (!width) return;
    const whole = pointsOf(panel, chosen.step, "end_to_end"), local = pointsOf(panel, chosen.step, "local");
    const base = heat.detailed[0] === chosen.step ? [] : pointsOf(panel, heat.detailed[0], "end_to_end");
    const values = [...whole, ...local, ...base].map(p => p.value).filter(v => Number.isFinite(v) && v > 0).sort((a, b) => a - b);
    // Exact twins have distance 0: they stand on the floor, a little below what is not.
    let low = values[Math.floor(values.length * 0.02)] ?? 0.1, high = values[values.length - 1] ?? 10;
    low = Math.max(Math.min(low / 1.3, 0.9), high * 1e-5);
    high = Math.max(high * 1.3, low * 4, panel.name === "excess" ? 1.3 : 0);
    const last = Math.max(1, heat.depths.length - 1), x = d => left + (d / last) * (width - left - right);
    const y = v => (Number.isNaN(v) || v === Infinity ? top : v <= low ? height - bottom : top + (1 - Math.log(v / low) / Math.log(high / low)) * (height - top - bottom));
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    for (const t of logTicks(low, high)) {
      svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: Math.round(y(t)), y2: Math.round(y(t)) }));
      svg.append(element("text", { x: left - 7, y: y(t) + 4, "text-anchor": "end" }, short(t)));
    }
    let named = -Infinity;
    heat.depths.forEach(([layer], d) => {
      if (d && heat.depths[d - 1][0] === layer) return;
      const label = layer === null ? (d ? "head" : "") : `${layer}`, px = x(d);
      svg.append(element("line", { class: "grid", x1: px, x2: px, y1: top, y2: height - bottom }));
      if (!label || px - named < (layer === null ? 34 : 20)) return;
      svg.append(element("text", { x: Math.min(px + 3, width - 26), y: height - 8 }, label));
      named = px;
    });
    const line = points => points.map((p, i) => `${i ? "L" : "M"}${x(p.depth).toFixed(1)} ${y(p.value).toFixed(1)}`).join("");
    const dots = (points, r) => points.map(p => `M${(x(p.depth) - r).toFixed(1)} ${(y(p.value) - r).toFixed(1)}h${2 * r}v${2 * r}h${-2 * r}Z`).join("");
    svg.append(
      element("path", { d: line(base), fill: "none", stroke: "var(--rule)", "stroke-width": 1.2, opacity: 0.8 }),
      element("path", { d: dots(local.filter(p => !p.broken), 1.2), fill: "var(--c3)" }),
      element("path", { d: line(whole), fill: "none", stroke: "var(--c1)", "stroke-width": 1.7, "stroke-linejoin": "round" }),
    );
    for (const p of [...whole, ...local].filter(p => p.broken)) {
      const px = x(p.depth), py = y(p.value), own = heat.rows[p.row][3] === "local";
      svg.append(element("path", { d: own ? `M${px} ${py - 5}l5 5l-5 5l-5 -5Z` : `M${px - 3} ${py - 3}l6 6m0 -6l-6 6`, stroke: own ? "var(--bg)" : "var(--bad)", fill: own ? "var(--bad)" : "none", "stroke-width": 1.3 }));
    }
    panel.points = [...local, ...whole].map(p => ({ ...p, x: x(p.depth), y: y(p.value) }));
    panel.width = width;
    const broken = panel.points.filter(p => p.broken).length, finite = whole.map(p => p.value).filter(Number.isFinite);
    const extent = finite.length ? `, end to end from ${exact(finite[0], 3)} at the embedding to ${exact(finite[finite.length - 1], 3)} at the head` : "";
    panel.plot.setAttribute("aria-label", `${words(panel.name)} ${panel.phase} at step ${heat.steps[chosen.step]}${extent}; ${broken} broken.`);
    const missing = panel.points.length ? [] : [element("p", { class: "hint none" }, "Nothing of this at this step, or its values are only in parity.jsonl.")];
    panel.plot.replaceChildren(svg, panel.tip, ...missing);
    panel.tip.hidden = true;
  }

  for (const panel of panels) {
    panel.plot.addEventListener("pointermove", event => {
      const to = panel.plot.getBoundingClientRect(), px = event.clientX - to.left, py = event.clientY - to.top;
      const far = p => (p.x - px) ** 2 + (p.y - py) ** 2;
      const near = (panel.points ?? []).reduce((best, p) => (!best || far(p) < far(best) ? p : best), null);
      panel.tip.hidden = !near || far(near) > 900;
      if (panel.tip.hidden) return;
      panel.tip.replaceChildren(...describe(cells, near.row, chosen.step));
      placeTip(panel.tip, near.x, near.y, panel.width, 400);
    });
    panel.plot.addEventListener("pointerleave", () => { panel.tip.hidden = true; });
  }
  const all = () => panels.forEach(draw);
  let before = null;
  choosers.push(() => { if (before !== chosen.step) { before = chosen.step; all(); } });
  watch(host, all);
}
