// Controls of the comparison: which runs, on which axis, how smooth.

const chosen = { axis: "step", smoothing: "light", hidden: new Set() };

function apply() {
  const all = new Set();
  for (const chart of data.charts)
    for (const s of chart.series) {
      s.x = s.xs[chosen.axis];
      s.off = chosen.hidden.has(s.run) || (s.level !== undefined && s.level !== chosen.smoothing);
      if (!chosen.hidden.has(s.run)) for (const x of s.x) all.add(x);
    }
  stops.splice(0, stops.length, ...[...all].sort((a, b) => a - b));
  if (!stops.length) stops.push(0);
  axis.name = chosen.axis;
  axis.whole = chosen.axis !== "minutes";
  axis.low = stops[0];
  axis.high = stops[stops.length - 1] > axis.low ? stops[stops.length - 1] : axis.low + (axis.whole ? 1 : 0.01);
  pinned = lookedAt = null;
  for (const chart of drawn) chart.redraw();
}

for (const name of ["axis", "smoothing"])
  for (const input of document.querySelectorAll(`input[name="${name}"]`))
    input.addEventListener("change", () => {
      chosen[name] = input.value;
      apply();
    });
for (const button of document.querySelectorAll("button[data-run]"))
  button.addEventListener("click", () => {
    const run = Number(button.dataset.run);
    if (!chosen.hidden.delete(run)) chosen.hidden.add(run);
    button.setAttribute("aria-pressed", String(!chosen.hidden.has(run)));
    apply();
  });
apply();
