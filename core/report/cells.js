// The checks' cells, unpacked (core/report/heatmap.py says how they are packed), and what is chosen of them.

const heat = data.heat;
const ABSENT = 0, HELD = 1, CONTAMINATED = 2, ORIGIN = 3, NAMED = 4;
const ROLES = ["", "✓ held", "✕ contaminated", "✕ wrong by itself", "✕ the origin"];
const FED = { local: "own inputs", end_to_end: "end to end", over_steps: "over steps" };

// What is looked at. step: a column. layer: a block, null outside the blocks, undefined for all of them.
const chosen = { step: 0, layer: undefined, scope: "all", phase: "all" };
const choosers = [];
function choose(part) {
  Object.assign(chosen, part);
  for (const listen of choosers) listen();
}

// A strain from its byte: 1 is the bound.
const strainOf = code => (code === 255 ? Infinity : code <= 1 ? 0 : 10 ** ((code - heat.at_bound) / heat.per_decade));

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpack() {
  const columns = heat.steps.length, wide = heat.detailed.length, map = await inflate(heat.cells), buffer = await inflate(heat.details);
  const size = heat.rows.length * wide;
  let offset = 0;
  const plane = () => buffer.subarray(offset, (offset += size));
  const pair = () => {
    const low = plane(), high = plane();
    return i => low[i] | (high[i] << 8);
  };
  // Null where absent. Two codes of the low bound say it by the high one.
  const numbers = (digits, high = null) => {
    const exponent = plane(), mantissa = pair();
    return i => {
      const e = exponent[i];
      if (e === 0) return null;
      if (e < 5) return [NaN, Infinity, -Infinity, 0][e - 1];
      if (e < 7) return e === 5 ? -high(i) : 1 / high(i);
      return Number(`${mantissa(i) - 32768}e${e - heat.zero - digits + 1}`);
    };
  };
  const meta = pair(), unequal = numbers(heat.unequal_digits), measures = [];
  for (const name of heat.measures) {
    const value = numbers(heat.digits), high = numbers(heat.bound_digits), low = numbers(heat.bound_digits, high);
    measures.push({ name, value, high, low, basis: pair() });
  }
  const detailed = new Map(heat.detailed.map((column, place) => [column, place]));
  const state = map.subarray(0, columns * heat.rows.length), strain = map.subarray(columns * heat.rows.length);
  return {
    state, strain,
    // What was measured in a row's column; null where the page does not carry it.
    at(row, column) {
      if (state[row * columns + column] === ABSENT || !detailed.has(column)) return null;
      const i = row * wide + detailed.get(column), [compared, note] = heat.metas[meta(i)], found = [];
      for (const m of measures) {
        const value = m.value(i);
        if (value === null) continue;
        const code = m.basis(i);
        found.push({ name: m.name, value, low: m.low(i), high: m.high(i), basis: heat.bases[code >> 1], broken: Boolean(code & 1) });
      }
      return { compared, note, unequal: unequal(i), measures: found };
    },
  };
}

const words = text => text.replaceAll("_", " ");
function boundWords({ low, high }) {
  if (low !== null && high !== null) return low === -high ? `±${exact(high, 3)}` : `${exact(low, 3)} to ${exact(high, 3)}`;
  return high !== null ? `≤ ${exact(high, 3)}` : low !== null ? `≥ ${exact(low, 3)}` : "no bound";
}

// A comparison for a tip: where it is, what it is, its measures with their bounds and why those.
function describe(cells, row, column) {
  const [line, tap, layer, scope] = heat.rows[row], [, phase, stage] = heat.lines[line];
  const state = cells.state[row * heat.steps.length + column], found = cells.at(row, column);
  const tone = state === HELD ? "good" : "bad";
  const parts = [
    element("div", {}, element("b", {}, tap)),
    element("div", {}, `${stage} ${phase}${layer === null ? "" : `, layer ${layer}`}, ${FED[scope] ?? scope}, step ${group(heat.steps[column])} `, element("span", { class: tone }, ROLES[state])),
  ];
  if (!found) return [...parts, element("p", { class: "basis" }, "values and bounds: parity.jsonl")];
  for (const m of found.measures) {
    const value = element("span", {}, element("span", { class: m.broken ? "bad" : "" }, `${m.broken ? "✕ " : ""}${exact(m.value, heat.digits)}`), element("span", { class: "at" }, boundWords(m)));
    parts.push(element("div", { class: "row" }, element("b", {}, words(m.name)), value), element("p", { class: "basis" }, m.basis));
  }
  if (!found.measures.length) parts.push(element("div", { class: "bad" }, "nothing compared"));
  if (found.note) parts.push(element("p", { class: "basis" }, found.note));
  const bits = found.unequal === null ? "" : `, ${exact(found.unequal * 100, heat.unequal_digits)} % with other bits than the twin's`;
  parts.push(element("p", { class: "basis" }, `${group(found.compared)} numbers${bits}`));
  return parts;
}

// A tip beside (x, y) within a box of this width, on whichever side has room.
function placeTip(tip, x, y, width, height) {
  tip.hidden = false;
  const right = x + 14 + tip.offsetWidth <= width;
  tip.style.left = `${Math.max(0, right ? x + 14 : x - 14 - tip.offsetWidth)}px`;
  tip.style.top = `${Math.max(0, Math.min(y - 16, height - tip.offsetHeight))}px`;
}
