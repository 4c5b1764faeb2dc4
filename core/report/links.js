// Links into the page: #step=150 looks at a step; with tap, scope and phase it goes to that comparison.

let goToRow = () => {};
function follow() {
  const asked = new URLSearchParams(location.hash.slice(1)), step = Number(asked.get("step"));
  if (!asked.has("step") || !Number.isFinite(step)) return;
  pinned = step;
  look(pinned);
  if (!heat) return;
  const column = heat.steps.indexOf(step), tap = asked.get("tap");
  if (column >= 0) choose({ step: column });
  if (!tap) return;
  const row = heat.rows.findIndex(r => r[1] === tap && r[3] === asked.get("scope") && heat.lines[r[0]][1] === asked.get("phase"));
  if (row < 0 || column < 0) return;
  choose({ scope: "all", phase: "all", layer: undefined });
  document.getElementById("parity").scrollIntoView();
  goToRow(row);
}
addEventListener("hashchange", follow, alive);

if (heat)
  unpack().then(cells => {
    const start = makeControls(cells);
    goToRow = makeMap(cells);
    makeDepth(cells);
    choose({ step: start });
    follow();
  }, error => {
    document.getElementById("map").textContent = `The heatmap needs a newer browser (${error.message}).`;
  });
else follow();
