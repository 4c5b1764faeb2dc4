// New points for charts that are there already. What is hovered, pinned and hidden stays.

const shapeOf = charts => JSON.stringify(charts.map(c => [c.id, c.title, c.series.map(s => [s.style, s.colour])]));
const shape = shapeOf(data.charts);

// Take over a later state of the same run; false if the page must be made anew for it.
function refresh(fresh) {
  if (shapeOf(fresh.charts) !== shape || fresh.checks.length !== data.checks.length) return false;
  data.checks.splice(0, Infinity, ...fresh.checks);
  data.marks.splice(0, Infinity, ...fresh.marks);
  [axis.low, axis.high] = fresh.domain;
  if (axis.high <= axis.low) axis.high = axis.low + 1;
  const loss = fresh.charts.find(c => c.id === "loss"), all = loss ? loss.series.flatMap(s => s.x) : fresh.domain;
  stops.splice(0, Infinity, ...[...new Set([...all, ...fresh.checks.map(([step]) => step)])].sort((a, b) => a - b));
  fresh.charts.forEach((chart, i) => {
    const { spec, plot, legend } = drawn[i];
    spec.rules = chart.rules.map(r => ({ ...r, y: number(r.y) }));
    chart.series.forEach((series, k) => Object.assign(spec.series[k], series, { y: series.y.map(number) }));
    chart.series.filter(s => s.style !== "readout").forEach((s, k) => { legend.children[k].lastChild.textContent = s.label; });
    plot.setAttribute("aria-label", chart.summary);
    drawn[i].redraw();
  });
  return true;
}
