// Parity heatmap. core/report/heatmap.py says how the cells are packed. Only the rows in view are drawn.

const heat = data.heat;
const ABSENT = 0, BROKEN = 2;
const LABELS = 236, RIGHT = 16, SECTION = 26, FRAME = 640;

async function unpack() {
  const bytes = Uint8Array.from(atob(heat.cells), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = heat.rows.length * heat.steps.length;
  let offset = 0;
  const plane = () => buffer.subarray(offset, (offset += size));
  const pair = () => {
    const low = plane(), high = plane();
    return i => low[i] | (high[i] << 8);
  };
  const numbers = digits => {
    const exponent = plane(), mantissa = pair();
    return i => {
      const e = exponent[i];
      if (e === 0) return null;
      if (e < 5) return [NaN, Infinity, -Infinity, 0][e - 1];
      return Number(`${mantissa(i) - 32768}e${e - heat.zero - digits + 1}`);
    };
  };
  const cells = { state: plane(), meta: pair(), unequal: numbers(heat.unequal_digits), measures: {} };
  for (const name of heat.measures) cells.measures[name] = { value: numbers(heat.digits), bound: pair() };
  // Numbers are asked for in every frame that is drawn: unpack once.
  for (const m of Object.values(cells.measures)) m.values = Float64Array.from({ length: size }, (_, i) => m.value(i) ?? NaN);
  return cells;
}

// As Measure.strain in core/parity/verdict.py: how near a value is to its bound; above 1 it is broken.
function strainOf(name, value, low, high) {
  if (Number.isNaN(value)) return Infinity;
  if (name === "excess" && 0 < low && low < 1 && high > 1) return value <= 0 ? Infinity : Math.log(value) / Math.log(value >= 1 ? high : low);
  if (name.startsWith("gain")) return high ? Math.abs(value) / high : value ? Infinity : 0;
  const ratio = (a, b) => (b === 0 ? (a > 0 ? Infinity : 0) : a / b);
  return Math.max(high === null ? 0 : ratio(value, high), low ? ratio(low, value) : 0);
}

// Colour scales: `at` sends a value to [-1, 1] (diverging) or [0, 1] (sequential).
const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
const symlog = v => Math.sign(v) * Math.log10(1 + Math.abs(v) / 1e-4) / Math.log10(1 + 1e-1 / 1e-4);
const SCALES = {
  excess: {
    title: "excess error over the honest twin", at: v => clamp(Math.log2(v) / 3, -1, 1), low: -1,
    ticks: [[0.125, "≤ 0.125"], [0.25], [0.5], [1], [2], [4], [8, "≥ 8"]],
  },
  twin_distance: {
    title: "distance from the twin", at: v => clamp((Math.log10(v) + 2) / 3, 0, 1), low: 0,
    ticks: [[0.01, "≤ 0.01"], [0.1], [1], [10, "≥ 10"]],
  },
  gain_difference: {
    title: "gain minus the twin's", at: v => clamp(symlog(v), -1, 1), low: -1,
    ticks: [[-0.1, "≤ -0.1"], [-0.01], [-0.001], [0], [0.001], [0.01], [0.1, "≥ 0.1"]],
  },
  strain: {
    title: "strain: share of the way to the bound", low: 0,
    // Pale up to the bound; colour speaks beyond it.
    at: v => (v <= 1 ? 0.3 * clamp(Math.log10(v) + 1, 0, 1) ** 4 : 0.3 + 0.7 * clamp(Math.log10(v), 0, 1)),
    ticks: [[0.1, "≤ 0.1"], [1, "1 = bound"], [3], [10, "≥ 10"]],
  },
};
const RAMPS = {
  light: { cold: [[238, 238, 235], [150, 190, 222], [62, 128, 186], [16, 66, 122]], warm: [[238, 238, 235], [243, 190, 130], [222, 106, 32], [130, 38, 6]] },
  dark: { cold: [[46, 49, 54], [42, 86, 128], [74, 144, 206], [168, 214, 250]], warm: [[46, 49, 54], [132, 70, 26], [226, 122, 48], [255, 208, 150]] },
};
const darkQuery = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
function tint(t) {
  const ramps = RAMPS[darkQuery.matches && !printing ? "dark" : "light"];
  const ramp = t < 0 ? ramps.cold : ramps.warm;
  const place = Math.min(Math.abs(t) * 3, 2.9999), i = Math.floor(place), share = place - i;
  return `rgb(${ramp[i].map((c, k) => Math.round(c + (ramp[i + 1][k] - c) * share)).join(" ")})`;
}

function makeHeat(cells) {
  const columns = heat.steps.length;
  const scroll = document.getElementById("heat-scroll"), body = document.getElementById("heat-body"), canvas = body.querySelector("canvas");
  const header = element("canvas"), measureBox = document.getElementById("heat-measure");
  const filterBox = document.getElementById("heat-filter"), worstBox = document.getElementById("heat-worst");
  const tip = element("div", { class: "tip", hidden: "" });
  document.getElementById("heat-steps").append(header);
  document.getElementById("heat").append(tip);

  const measuresAt = i => heat.measures.flatMap(name => {
    const m = cells.measures[name], value = m.value(i);
    if (value === null) return [];
    const code = m.bound(i), [low, high, basis] = heat.bounds[code >> 1];
    const lowest = low === null ? null : number(low), highest = high === null ? null : number(high);
    return [{ name, value, low: lowest, high: highest, basis: heat.bases[basis], broken: Boolean(code & 1), strain: strainOf(name, value, lowest, highest) }];
  });
  const strains = Float64Array.from({ length: heat.rows.length * columns }, (_, i) =>
    cells.state[i] === ABSENT ? NaN : Math.max(0, ...measuresAt(i).map(m => m.strain), ...(cells.state[i] === BROKEN && !measuresAt(i).length ? [Infinity] : [])));
  const rows = heat.rows.map(([section, stage, tap, phase, layer, scope], index) => {
    const row = { index, section, stage, tap, phase, layer, scope, broken: 0, strain: 0 };
    for (let c = 0, i = index * columns; c < columns; c++, i++) {
      if (cells.state[i] === BROKEN) row.broken++;
      if (strains[i] > row.strain) row.strain = strains[i];
    }
    row.words = `${heat.sections[section]} ${stage} ${tap} ${scope}`.toLowerCase();
    return row;
  });

  const choices = ["excess", "twin_distance", "gain_difference"].filter(name => heat.measures.includes(name));
  for (const name of [...choices, "strain"]) measureBox.append(element("option", { value: name }, name === "strain" ? "strain (nearest to its bound)" : name.replace("_", " ")));
  let shown = [], total = 0, rowHeight = 14, cellWidth = 10, width = 0, height = 0, spot = null, held = null, column = -1;

  function choose() {
    const terms = filterBox.value.toLowerCase().split(/\s+/).filter(Boolean);
    let kept = rows.filter(row => terms.every(term => row.words.includes(term)));
    if (worstBox.checked) {
      const worst = new Map();
      for (const row of kept) {
        const key = `${row.section} ${row.layer ?? row.stage}`, best = worst.get(key);
        if (!best || row.broken && !best.broken || Boolean(row.broken) === Boolean(best.broken) && row.strain > best.strain) worst.set(key, row);
      }
      const chosen = new Set(worst.values());
      kept = kept.filter(row => chosen.has(row));
    }
    rowHeight = kept.length <= 80 ? 15 : 8;
    shown = [];
    total = 0;
    let section = -1;
    for (const row of kept) {
      if (row.section !== section) {
        section = row.section;
        const of = kept.filter(r => r.section === section), broken = of.filter(r => r.broken).length;
        shown.push({ section, count: of.length, broken, top: total, height: SECTION });
        total += SECTION;
      }
      shown.push({ row, top: total, height: rowHeight });
      total += rowHeight;
    }
    total += 4;
    const bad = kept.filter(r => r.broken).length;
    document.getElementById("heat-count").textContent = `${group(kept.length)} of ${group(rows.length)} taps, ${group(bad)} with a broken bound`;
    layOutHeat();
  }

  function layOutHeat() {
    height = Math.min(total, FRAME);
    scroll.style.height = `${height + 2}px`;
    body.style.height = `${total}px`;
    width = body.clientWidth;
    cellWidth = Math.min((width - LABELS - RIGHT) / columns, 90);
    for (const [c, h] of [[canvas, height], [header, 24]]) {
      c.width = Math.round(width * devicePixelRatio);
      c.height = Math.round(h * devicePixelRatio);
      c.style.width = `${width}px`;
      c.style.height = `${h}px`;
    }
    drawSteps();
    drawCells();
    drawLegend();
  }

  const pen = (c, h) => {
    const p = c.getContext("2d");
    p.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    p.clearRect(0, 0, width, h);
    p.textBaseline = "middle";
    return p;
  };
  const edge = c => Math.round((LABELS + c * cellWidth) * devicePixelRatio) / devicePixelRatio;

  function drawSteps() {
    const p = pen(header, 24);
    p.font = "11px system-ui, sans-serif";
    p.fillStyle = css("--ink-2");
    p.textAlign = "right";
    p.fillText("step", LABELS - 28, 14);
    p.textAlign = "center";
    const wide = p.measureText(group(heat.steps[columns - 1])).width + 16;
    const every = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500].find(n => n * cellWidth >= wide) ?? 1000;
    let last = -Infinity;
    for (let c = 0; c < columns; c++) {
      const x = LABELS + (c + 0.5) * cellWidth, named = c === column;
      if (column >= 0 && !named && Math.abs(c - column) * cellWidth < wide) continue;
      if (!named && (c % every !== 0 || x - last < wide)) continue;
      p.fillStyle = css(named ? "--ink" : "--ink-2");
      p.fillText(group(heat.steps[c]), x, 14);
      last = x;
    }
  }

  function colour(row, i) {
    const chosen = measureBox.value, m = cells.measures[chosen];
    const useStrain = chosen === "strain" || !m || m.value(i) === null;
    const v = useStrain ? strains[i] : m.values[i];
    if (Number.isNaN(v)) return css("--ink");
    return tint(SCALES[useStrain ? "strain" : chosen].at(v));
  }

  function drawCells() {
    const p = pen(canvas, height), top = scroll.scrollTop;
    const view = shown.filter(s => s.top + s.height > top && s.top < top + height);
    const ink = css("--ink"), soft = css("--ink-2"), line = css("--line");
    const gap = cellWidth > 5 ? 1 : 0, rowGap = rowHeight > 10 ? 1 : 0;
    for (const s of view) {
      const y = s.top - top;
      if (!s.row) {
        const label = heat.sections[s.section];
        p.font = "600 12px system-ui, sans-serif";
        p.fillStyle = ink;
        p.textAlign = "left";
        p.fillText(label[0].toUpperCase() + label.slice(1), 0, y + SECTION / 2 + 2);
        p.font = "12px system-ui, sans-serif";
        p.fillStyle = s.broken ? css("--bad") : soft;
        p.fillText(`${s.count} tap${s.count === 1 ? "" : "s"}${s.broken ? `, ${s.broken} broken` : ""}`, LABELS, y + SECTION / 2 + 2);
        continue;
      }
      for (let c = 0, i = s.row.index * columns; c < columns; c++, i++) {
        if (cells.state[i] === ABSENT) continue;
        p.fillStyle = colour(s.row, i);
        p.fillRect(edge(c), y, edge(c + 1) - edge(c) - gap, s.height - rowGap);
      }
    }
    drawOutlines(p, view, top, ink);
    drawLabels(p, view, top, ink, soft, line);
    if (column >= 0) {
      p.strokeStyle = soft;
      p.lineWidth = 1;
      p.strokeRect(edge(column) - 0.5, -2, edge(column + 1) - edge(column), height + 4);
    }
    if (spot) {
      const s = shown.find(each => each.row === spot.row);
      if (s) {
        p.strokeStyle = css("--bg");
        p.lineWidth = 4;
        p.strokeRect(edge(spot.c) - 1, s.top - top - 1, edge(spot.c + 1) - edge(spot.c) + 2, s.height + 2);
        p.strokeStyle = ink;
        p.lineWidth = 2;
        p.strokeRect(edge(spot.c) - 2, s.top - top - 2, edge(spot.c + 1) - edge(spot.c) + 4, s.height + 4);
      }
    }
  }

  // A heavy line around each connected patch of broken cells, and a dot in each cell that has room for one.
  function drawOutlines(p, view, top, ink) {
    const broken = (s, c) => Boolean(s && s.row && c >= 0 && c < columns && cells.state[s.row.index * columns + c] === BROKEN);
    p.strokeStyle = p.fillStyle = ink;
    p.lineWidth = 1.6;
    p.beginPath();
    for (const s of view) {
      if (!s.row) continue;
      const k = shown.indexOf(s), y = s.top - top;
      for (let c = 0; c < columns; c++) {
        if (!broken(s, c)) continue;
        const x0 = edge(c), x1 = edge(c + 1), y1 = y + s.height;
        const side = (open, a, b, d, e) => { if (!open) { p.moveTo(a, b); p.lineTo(d, e); } };
        side(broken(shown[k - 1], c), x0, y, x1, y);
        side(broken(shown[k + 1], c), x0, y1, x1, y1);
        side(broken(s, c - 1), x0, y, x0, y1);
        side(broken(s, c + 1), x1, y, x1, y1);
        if (cellWidth >= 6) p.fillRect((x0 + x1) / 2 - 1.5, y + s.height / 2 - 1.5, 2.5, 2.5);
      }
    }
    p.stroke();
  }

  // Names where there is room: every row if rows are high enough, else the first broken of a run, then the first of each layer.
  function drawLabels(p, view, top, ink, soft, line) {
    const taken = [], need = 12;
    const place = (s, bold) => {
      const y = s.top - top + s.height / 2;
      if (taken.some(t => Math.abs(t - y) < need)) return;
      taken.push(y);
      p.font = `${bold ? "600 " : ""}11px ${css("--mono")}`;
      p.fillStyle = bold ? ink : soft;
      p.textAlign = "right";
      let text = s.row.tap;
      while (p.measureText(text).width > LABELS - 22 && text.length > 8) text = `…${text.slice(2)}`;
      p.fillText(text, LABELS - 12, y + 0.5);
    };
    for (const s of view) if (!s.row) taken.push(s.top - top + SECTION / 2);
    const same = (a, b) => a && b && a.row && b.row && a.row.layer === b.row.layer;
    view.forEach((s, k) => {
      if (s.row && s.row.layer !== null && !same(view[k - 1], s) && k && rowHeight < 10) {
        p.fillStyle = line;
        p.fillRect(LABELS - 8, s.top - top - 0.5, 6, 1);
      }
    });
    if (spot && shown.some(s => s.row === spot.row)) place(shown.find(s => s.row === spot.row), true);
    view.forEach((s, k) => { if (s.row && s.row.broken && !(view[k - 1]?.row?.broken)) place(s, true); });
    if (rowHeight > 10) for (const s of view) if (s.row) place(s, s.row.broken > 0);
    view.forEach((s, k) => { if (s.row && (s.row.layer === null || !same(view[k - 1], s))) place(s, s.row.broken > 0); });
    for (const s of view) if (s.row && s.row.broken) place(s, true);
  }

  function drawLegend() {
    const chosen = measureBox.value, host = document.getElementById("heat-legend");
    const scale = name => {
      const { title, at, low, ticks } = SCALES[name];
      const colours = Array.from({ length: 25 }, (_, i) => tint(low + ((1 - low) * i) / 24));
      const marks = ticks.map(([v, label]) => element("span", { style: `left:${(((at(v) - low) / (1 - low)) * 100).toFixed(1)}%` }, label ?? String(v)));
      return element("div", { class: "scale" }, title, element("div", { class: "ramp", style: `background:linear-gradient(90deg,${colours.join(",")})` }),
        element("div", { class: "ticks" }, ...marks));
    };
    const scales = [scale(chosen)];
    if (chosen !== "strain") {
      scales.push(scale("strain"));
      scales[1].firstChild.textContent = "rows without that measure (scalars, exact): strain, share of the way to the bound";
    }
    host.replaceChildren(...scales, element("span", { class: "key" }, element("i"), "broke its bound"));
  }

  function describe({ row, c }) {
    const i = row.index * columns + c;
    if (cells.state[i] === ABSENT) return false;
    const [size, note] = heat.metas[cells.meta(i)], bad = cells.state[i] === BROKEN, unequal = cells.unequal(i);
    const pair = (label, value) => element("div", { class: "row" }, element("span", {}, label), element("span", {}, value));
    tip.replaceChildren(
      element("div", {}, element("b", {}, row.tap)),
      element("div", {}, `step ${group(heat.steps[c])}, `, element("span", { class: bad ? "bad" : "good" }, bad ? "✕ broken" : "✓ ok")),
      pair("stage", row.stage), pair("phase", `${row.phase}, ${row.scope.replace("_", " ")}`),
      pair("layer", row.layer === null ? "none" : String(row.layer)), pair("numbers compared", group(size)),
    );
    if (unequal !== null) tip.append(pair("share of unequal bits", `${exact(unequal * 100, heat.unequal_digits)} %`));
    if (note) tip.append(pair("note", note));
    const measures = measuresAt(i);
    if (!measures.length) tip.append(element("div", { class: "bad" }, "nothing compared"));
    for (const m of measures) {
      const bound = m.low !== null && m.high !== null ? `${exact(m.low)} to ${exact(m.high)}` : m.high !== null ? `≤ ${exact(m.high)}` : m.low !== null ? `≥ ${exact(m.low)}` : "no bound";
      const value = element("span", {}, element("span", { class: m.broken ? "bad" : "" }, `${m.broken ? "✕ " : ""}${exact(m.value, heat.digits)}`), element("span", { class: "at" }, bound));
      tip.append(element("div", { class: "row" }, element("b", {}, m.name.replace("_", " ")), value), element("p", { class: "basis" }, m.basis));
    }
    return true;
  }

  function point(next, quiet = false) {
    spot = next;
    tip.hidden = !next || !describe(next);
    if (!tip.hidden) {
      const s = shown.find(each => each.row === next.row);
      const x = edge(next.c + 1), y = s.top - scroll.scrollTop + 24;
      const flip = x > width * 0.62;
      tip.style.left = flip ? "auto" : `${x + 14}px`;
      tip.style.right = flip ? `${document.getElementById("heat").clientWidth - edge(next.c) + 14}px` : "auto";
      tip.style.top = `${clamp(y - 20, 0, Math.max(0, height + 40 - tip.offsetHeight))}px`;
    }
    if (!quiet) look(next ? heat.steps[next.c] : null, "heat");
    drawCells();
  }

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left - LABELS) / cellWidth), y = event.clientY - box.top + scroll.scrollTop;
    const s = shown.find(each => y >= each.top && y < each.top + each.height);
    return s?.row && c < columns && c >= 0 ? { row: s.row, c } : null;
  }
  canvas.addEventListener("pointermove", event => point(under(event) ?? held));
  canvas.addEventListener("pointerleave", () => point(held));
  canvas.addEventListener("click", event => {
    const cell = under(event);
    held = held && cell && held.row === cell.row && held.c === cell.c ? null : cell;
    pin(held && heat.steps[held.c], held && `&tap=${encodeURIComponent(held.row.tap)}&scope=${held.row.scope}`);
    point(held);
  });
  scroll.addEventListener("scroll", () => { drawCells(); if (spot) point(spot === held ? held : null, true); });
  measureBox.addEventListener("change", layOutHeat);
  filterBox.addEventListener("input", choose);
  worstBox.addEventListener("change", choose);
  darkQuery.addEventListener("change", layOutHeat);
  addEventListener("beforeprint", () => { printing = true; layOutHeat(); });
  addEventListener("afterprint", () => { printing = false; layOutHeat(); });
  new ResizeObserver(() => { if (body.clientWidth !== width) layOutHeat(); }).observe(body);
  listeners.push(step => {
    const next = step === null ? -1 : heat.steps.indexOf(step);
    if (next === column) return;
    column = next;
    drawSteps();
    drawCells();
  });
  choose();

  // A link to a cell: #step=150&tap=blocks.0.attn.q_rope&scope=local
  return (step, tap, scope) => {
    const c = heat.steps.indexOf(step), row = rows.find(r => r.tap === tap && (!scope || r.scope === scope));
    if (c < 0 || !row) return;
    if (!shown.some(s => s.row === row)) {
      filterBox.value = "";
      worstBox.checked = false;
      choose();
    }
    const s = shown.find(each => each.row === row);
    scroll.scrollTop = s.top - height / 3;
    held = { row, c };
    point(held);
  };
}

let goToCell = () => {};
function follow() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (!asked.has("step")) return;
  const step = Number(asked.get("step"));
  if (!Number.isFinite(step)) return;
  pinned = step;
  look(pinned);
  if (asked.has("tap")) goToCell(pinned, asked.get("tap"), asked.get("scope"));
}
addEventListener("hashchange", () => {
  follow();
  if (location.hash.includes("tap=")) document.getElementById("parity").scrollIntoView();
});

if (heat)
  unpack().then(makeHeat).then(go => { goToCell = go; follow(); }, error => {
    document.getElementById("heat-scroll").textContent = `The heatmap needs a newer browser (${error.message}).`;
  });
else follow();
