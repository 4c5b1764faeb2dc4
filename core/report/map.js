// The heatmap: stages down; across, layers at the chosen step and steps in the chosen layer.

const LINE = 15, SECTION = 24, TOP = 40, GAP = 28, WIDEST = 44;
const COOL = { light: [[240, 240, 237], [208, 222, 233], [150, 184, 212], [92, 140, 184]], dark: [[38, 41, 46], [40, 58, 76], [50, 86, 120], [78, 128, 172]] };
const WARM = { light: [[246, 176, 108], [228, 112, 36], [190, 62, 12], [112, 26, 4]], dark: [[140, 74, 28], [206, 104, 40], [248, 150, 84], [255, 214, 170]] };
const GROUPS = { forward: ["forward"], backward: ["backward", "gradients"] };
const darkQuery = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
const theme = () => (darkQuery.matches && !printing ? "dark" : "light");
function mix(ramp, t) {
  const place = clamp(t, 0, 0.9999) * (ramp.length - 1), i = Math.floor(place);
  return ramp[i].map((c, k) => Math.round(c + (ramp[i + 1][k] - c) * (place - i)));
}
// Cool up to the bound, over two decades of strain; warm beyond it, over two more.
function tint(strain, broken) {
  return broken ? mix(WARM[theme()], Math.log10(strain) / 2) : mix(COOL[theme()], 1 + Math.log10(strain) / 2);
}
const rgb = colour => `rgb(${colour.join(" ")})`;

function paint(p, x, y, w, h, state, strain) {
  const colour = tint(strain, state !== HELD), room = w >= 7 && h >= 7;
  if (state === CONTAMINATED) {
    const ground = theme() === "dark" ? [21, 23, 26] : [255, 255, 255];
    p.fillStyle = rgb(colour.map((c, k) => Math.round(c * 0.45 + ground[k] * 0.55)));
    p.fillRect(x, y, w, h);
    if (!room) return;
    p.save();
    p.beginPath();
    p.rect(x, y, w, h);
    p.clip();
    p.strokeStyle = rgb(colour);
    p.lineWidth = 1.2;
    p.beginPath();
    for (let d = -h; d < w; d += 5) {
      p.moveTo(x + d, y + h);
      p.lineTo(x + d + h, y);
    }
    p.stroke();
    p.restore();
    return;
  }
  p.fillStyle = rgb(colour);
  p.fillRect(x, y, w, h);
  if (state < ORIGIN || !room) return;
  const cx = x + w / 2, cy = y + h / 2;
  p.fillStyle = theme() === "dark" ? "#000" : "#fff";
  p.beginPath();
  if (state === NAMED) for (const [dx, dy] of [[0, -5], [5, 0], [0, 5], [-5, 0]]) p.lineTo(cx + dx, cy + dy);
  else p.arc(cx, cy, 2, 0, 7);
  p.fill();
}

function makeMap(cells) {
  const columns = heat.steps.length, box = document.getElementById("map"), canvas = box.querySelector("canvas");
  const said = document.getElementById("map-said"), tip = element("div", { class: "tip", hidden: "" });
  box.append(tip);
  const layers = [...new Set(heat.rows.map(r => r[2]))].sort((a, b) => (a ?? -1) - (b ?? -1));
  const rowsOf = heat.lines.map(() => []);
  heat.rows.forEach((row, i) => rowsOf[row[0]].push(i));
  let shown = [], height = 0, width = 0, labels = 0, layerWidth = 0, stepWidth = 0, stepsAt = 0, spot = null, looked = -1;
  let byLayer = new Map(), byStep = new Map();

  const fits = row => chosen.scope === "all" || heat.rows[row][3] === chosen.scope;
  const inLayer = (row, layer) => layer === undefined || heat.rows[row][2] === layer;
  const score = (row, column) => (cells.state[row * columns + column] << 8) | cells.strain[row * columns + column];
  const worst = (rows, column) => rows.reduce((most, row) => Math.max(most, score(row, column)), 0);

  function gather() {
    shown = [];
    let y = TOP, last = null;
    heat.lines.forEach(([name, , stage], line) => {
      const groups = GROUPS[chosen.phase], others = chosen.phase === "the rest" && Object.values(GROUPS).flat();
      if ((groups && !groups.includes(name)) || (others && others.includes(name))) return;
      const rows = rowsOf[line].filter(fits);
      if (!rows.length) return;
      if (name !== last) {
        shown.push({ name, y, height: SECTION });
        y += SECTION;
        last = name;
      }
      shown.push({ line, stage, rows, y, height: LINE });
      y += LINE;
    });
    height = y + 6;
    byStep = new Map(shown.filter(s => s.rows).map(s => {
      const rows = s.rows.filter(row => inLayer(row, chosen.layer));
      return [s.line, Uint16Array.from({ length: columns }, (_, c) => worst(rows, c))];
    }));
    gatherLayers();
  }
  function gatherLayers() {
    byLayer = new Map(shown.filter(s => s.rows).map(s => [s.line, layers.map(layer => worst(s.rows.filter(row => inLayer(row, layer)), chosen.step))]));
  }

  function layOut() {
    width = Math.floor(box.clientWidth);
    if (!width) return;
    labels = width < 700 ? 92 : 128;
    const room = width - labels - GAP;
    layerWidth = Math.min(WIDEST, (room * (columns === 1 ? 0.8 : 0.45)) / layers.length);
    stepsAt = labels + layers.length * layerWidth + GAP;
    stepWidth = Math.min(WIDEST, (width - stepsAt - 2) / columns);
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    draw();
  }
  const snap = v => Math.round(v * devicePixelRatio) / devicePixelRatio;
  const layerX = i => snap(labels + i * layerWidth), stepX = c => snap(stepsAt + c * stepWidth);

  function draw() {
    if (!width) return;
    const p = canvas.getContext("2d");
    p.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    p.clearRect(0, 0, width, height);
    p.textBaseline = "middle";
    const ink = css("--ink"), soft = css("--ink-2");
    drawHeads(p, ink, soft);
    for (const s of shown) {
      if (!s.rows) {
        p.font = "600 12px system-ui, sans-serif";
        p.fillStyle = ink;
        p.textAlign = "left";
        p.fillText(s.name[0].toUpperCase() + s.name.slice(1), 0, s.y + SECTION / 2 + 3);
        continue;
      }
      const across = byLayer.get(s.line), along = byStep.get(s.line), y = snap(s.y), h = snap(s.y + LINE) - y - 1;
      p.font = `${Math.max(...across, 0) >> 8 > HELD ? "600 " : ""}11px ${css("--mono")}`;
      p.fillStyle = Math.max(...across, 0) >> 8 > HELD ? ink : soft;
      p.textAlign = "right";
      p.fillText(s.stage, labels - 10, s.y + LINE / 2);
      const cell = (x, next, gap, code) => {
        if (code >> 8 !== ABSENT) paint(p, x, y, next - x - gap, h, code >> 8, strainOf(code & 255));
      };
      layers.forEach((_, i) => cell(layerX(i), layerX(i + 1), 1, across[i]));
      for (let c = 0; c < columns; c++) cell(stepX(c), stepX(c + 1), stepWidth > 5 ? 1 : 0, along[c]);
    }
    const frame = (x, next, colour, w) => {
      p.strokeStyle = colour;
      p.lineWidth = w;
      p.strokeRect(x - 1, TOP - 2, next - x + 1, height - TOP);
    };
    if (chosen.layer !== undefined && layers.includes(chosen.layer)) frame(layerX(layers.indexOf(chosen.layer)), layerX(layers.indexOf(chosen.layer) + 1), ink, 1.5);
    frame(stepX(chosen.step), stepX(chosen.step + 1), ink, 1.5);
    if (looked >= 0 && looked !== chosen.step) frame(stepX(looked), stepX(looked + 1), soft, 1);
    if (spot) {
      const [x, next] = spot.layer !== undefined ? [layerX(spot.layer), layerX(spot.layer + 1)] : [stepX(spot.step), stepX(spot.step + 1)];
      p.strokeStyle = ink;
      p.lineWidth = 2;
      p.strokeRect(x - 1.5, spot.s.y - 1.5, next - x + 2, LINE + 2);
    }
  }

  function drawHeads(p, ink, soft) {
    const at = `${group(heat.steps[chosen.step])}`;
    p.textAlign = "left";
    p.font = "12px system-ui, sans-serif";
    p.fillStyle = soft;
    const wide = stepsAt - labels > 130;
    p.fillText(wide ? `layer, at step ${at}` : "layer", labels, 9);
    const which = chosen.layer === undefined ? "worst of all layers" : chosen.layer === null ? "outside the blocks" : `layer ${chosen.layer}`;
    p.fillText(`step, ${which}`, stepsAt, 9);
    p.textAlign = "center";
    p.font = "11px system-ui, sans-serif";
    const every = Math.ceil(24 / layerWidth);
    layers.forEach((layer, i) => {
      if (layer !== null && layer % every && layer !== chosen.layer) return;
      p.fillStyle = chosen.layer === layer ? ink : soft;
      p.fillText(layer === null ? "–" : layer, (layerX(i) + layerX(i + 1)) / 2, 28);
    });
    const room = p.measureText(group(heat.steps[columns - 1])).width + 14, bold = [chosen.step, looked].filter(c => c >= 0);
    let last = -Infinity;
    for (let c = 0; c < columns; c++) {
      const x = (stepX(c) + stepX(c + 1)) / 2, named = bold.includes(c);
      if (!named && (x - last < room || bold.some(b => Math.abs(b - c) * stepWidth < room))) continue;
      p.fillStyle = named ? ink : soft;
      p.fillText(group(heat.steps[c]), x, 28);
      if (!named) last = x;
    }
  }

  function drawLegend() {
    const ramp = (from, to, broken) => {
      const stops = Array.from({ length: 13 }, (_, i) => rgb(tint(10 ** (from + ((to - from) * i) / 12), broken)));
      return element("i", { class: "ramp", style: `background:linear-gradient(90deg,${stops.join(",")})` });
    };
    const key = (state, label) => {
      const c = element("canvas", { width: 32, height: 26, style: "width:16px;height:13px" }), p = c.getContext("2d");
      p.scale(2, 2);
      paint(p, 0, 0, 16, 13, state, 6);
      return element("span", { class: "key" }, c, label);
    };
    const scale = element("span", { class: "key" }, "strain 0.01", ramp(-2, 0, false), "1 = bound", ramp(0, 2, true), "100");
    document.getElementById("map-legend").replaceChildren(scale, key(NAMED, "the origin"), key(ORIGIN, "wrong by itself"), key(CONTAMINATED, "contaminated: inherited"));
  }

  function rowsAt({ s, layer, step }) {
    const column = step ?? chosen.step, of = step === undefined ? layers[layer] : chosen.layer;
    const rows = s.rows.filter(row => inLayer(row, of) && score(row, column) >> 8 !== ABSENT);
    return [rows.sort((a, b) => score(b, column) - score(a, column)), column];
  }

  function point(next, quiet = false) {
    spot = next;
    tip.hidden = true;
    if (next) {
      const [rows, column] = rowsAt(next);
      const broken = rows.filter(row => score(row, column) >> 8 > HELD).length;
      if (rows.length) {
        const full = rows.slice(0, broken > 1 ? 2 : 1), more = rows.length - full.length;
        const brokenMore = Math.max(0, broken - full.length);
        tip.replaceChildren(...full.map(row => element("div", { class: "one" }, ...describe(cells, row, column))));
        if (more) tip.append(element("div", { class: "at" }, `and ${group(more)} more here, ${brokenMore ? `${group(brokenMore)} broken` : "all held"}`));
        const x = next.layer !== undefined ? layerX(next.layer + 1) : stepX(next.step + 1);
        placeTip(tip, x, next.s.y, width, Math.max(height, 260));
        const [, tap] = heat.rows[rows[0]];
        said.textContent = `${next.s.stage}, step ${heat.steps[column]}, ${tap}: ${ROLES[score(rows[0], column) >> 8].slice(2)}, strain ${exact(strainOf(score(rows[0], column) & 255), 2)}`;
      } else said.textContent = `${next.s.stage}: nothing compared here`;
    }
    if (!quiet) look(next && next.step !== undefined ? heat.steps[next.step] : null, "map");
    draw();
  }

  function under(event) {
    const to = canvas.getBoundingClientRect(), x = event.clientX - to.left, y = event.clientY - to.top;
    const s = shown.find(each => y >= each.y && y < each.y + each.height);
    const layer = Math.floor((x - labels) / layerWidth), step = Math.floor((x - stepsAt) / stepWidth);
    const inHead = y < TOP;
    if (!inHead && !s?.rows) return null;
    if (layer >= 0 && layer < layers.length) return { s: inHead ? null : s, layer };
    if (step >= 0 && step < columns) return { s: inHead ? null : s, step };
    return null;
  }
  function take(cell) {
    if (!cell) return;
    if (cell.step !== undefined) choose({ step: cell.step });
    else choose({ layer: chosen.layer === layers[cell.layer] ? undefined : layers[cell.layer] });
  }
  canvas.addEventListener("pointermove", event => {
    const cell = under(event);
    point(cell?.s ? cell : null);
  });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("click", event => take(under(event)));
  box.addEventListener("blur", () => point(null));
  box.addEventListener("keydown", event => {
    const lines = shown.filter(s => s.rows), flat = layers.length + columns;
    if (event.key === "Escape") return point(null);
    if (event.key === "Enter" && spot) return take(spot);
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0] }[event.key];
    if (!move || !lines.length) return;
    event.preventDefault();
    const from = spot ? [lines.findIndex(s => s.line === spot.s.line), spot.layer ?? layers.length + spot.step] : [-move[0], layers.length + chosen.step - move[1]];
    const s = lines[clamp(from[0] + move[0], 0, lines.length - 1)], place = clamp(from[1] + move[1], 0, flat - 1);
    point(place < layers.length ? { s, layer: place } : { s, step: place - layers.length });
  });
  listeners.push(step => {
    const next = step === null ? -1 : heat.steps.indexOf(step);
    if (next !== looked) {
      looked = next;
      draw();
    }
  });
  let before = "";
  choosers.push(() => {
    const now = `${chosen.scope} ${chosen.phase} ${chosen.layer}`;
    if (now === before) {
      gatherLayers();
      draw();
    } else {
      before = now;
      gather();
      const s = spot && shown.find(each => each.rows && each.line === spot.s.line);
      spot = s ? { ...spot, s } : null;
      tip.hidden = true;
      layOut();
      drawLegend();
    }
  });
  const again = () => { layOut(); drawLegend(); };
  darkQuery.addEventListener("change", again, alive);
  addEventListener("beforeprint", () => { printing = true; again(); }, alive);
  addEventListener("afterprint", () => { printing = false; again(); }, alive);
  watch(box, layOut);

  // Show a comparison, as a link asks: its step, then a tip on it.
  return row => {
    const s = shown.find(each => each.rows?.includes(row));
    if (s) point({ s, layer: layers.indexOf(heat.rows[row][2]) });
  };
}

// The controls: what is fed, which phase, and the step by slider and by name.
function makeControls(cells) {
  const slider = document.getElementById("at"), output = document.getElementById("at-step"), columns = heat.steps.length;
  const score = heat.steps.map((_, c) => {
    let most = 0, broken = false;
    for (let row = 0; row < heat.rows.length; row++) {
      const i = row * columns + c;
      most = Math.max(most, cells.strain[i]);
      broken ||= cells.state[i] > HELD;
    }
    return { most, broken };
  });
  const worst = score.reduce((best, s, c) => (s.most > score[best].most ? c : best), 0);
  const go = { first: 0, first_bad: score.findIndex(s => s.broken), worst, latest: columns - 1 };
  slider.max = columns - 1;
  slider.disabled = columns === 1;
  slider.addEventListener("input", () => choose({ step: Number(slider.value) }));
  for (const button of document.querySelectorAll("[data-go]")) {
    const to = go[button.dataset.go];
    button.hidden = to < 0;
    button.addEventListener("click", () => choose({ step: to }));
  }
  for (const radio of document.querySelectorAll(".choice input")) {
    const there = radio.name !== "scope" || radio.value === "all" || heat.rows.some(row => row[3] === radio.value);
    radio.disabled = !there;
    radio.addEventListener("change", () => choose({ [radio.name]: radio.value }));
  }
  choosers.push(() => {
    slider.value = chosen.step;
    output.textContent = `${group(heat.steps[chosen.step])} ${score[chosen.step].broken ? "✕" : "✓"}`;
    for (const radio of document.querySelectorAll(".choice input")) radio.checked = chosen[radio.name] === radio.value;
  });
  return go.first_bad >= 0 ? go.first_bad : worst;
}
