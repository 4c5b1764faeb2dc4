"use strict";
// The table of runs: sorted by the column whose head is pressed, filtered by words and by state.

const table = document.getElementById("runs"), body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
const find = document.getElementById("find"), none = document.getElementById("none"), states = new Set();

// What a cell is sorted by; null stands last in either order.
function valueOf(row, column) {
  const text = row.cells[column].dataset.v ?? "";
  if (text === "" || text === "nan") return null;
  const value = Number(text.replace("inf", "Infinity"));
  return Number.isNaN(value) ? text : value;
}
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a.localeCompare(b, "en", { numeric: true });
}
function sort(column) {
  const up = heads[column].getAttribute("aria-sort") !== "ascending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", up ? "ascending" : "descending");
  const has = rows.filter(row => valueOf(row, column) !== null), rest = rows.filter(row => valueOf(row, column) === null);
  has.sort((a, b) => (up ? 1 : -1) * compare(valueOf(a, column), valueOf(b, column)));
  body.append(...has, ...rest);
}
heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column)));

const words = rows.map(row => row.textContent.toLowerCase());
function filter() {
  const asked = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  rows.forEach((row, i) => {
    row.hidden = !asked.every(word => words[i].includes(word)) || (states.size > 0 && !states.has(row.dataset.state));
    shown += !row.hidden;
  });
  none.hidden = shown > 0;
}
find.addEventListener("input", filter);
for (const button of document.querySelectorAll("button[data-state]"))
  button.addEventListener("click", () => {
    if (!states.delete(button.dataset.state)) states.add(button.dataset.state);
    button.setAttribute("aria-pressed", String(states.has(button.dataset.state)));
    filter();
  });
const more = document.getElementById("more");
if (more)
  more.addEventListener("click", () => {
    more.setAttribute("aria-pressed", String(table.classList.toggle("all")));
  });
