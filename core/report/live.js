"use strict";
// Asks the server for the run again and again, and shows what has changed. Text comes as text or as escaped HTML; the
// page's policy lets nothing run but this script.

const EVERY = 1000, HIDDEN = 5000, PATIENCE = 20000;
const place = document.getElementById("parts"), holder = document.getElementById("data");
const stateBox = document.getElementById("live-state"), saidBox = document.getElementById("live-said");
const DRAWN = ["charts", "parity", "bias"]; // parts that the script draws into
const shown = new Map();
let version = "", checks = "", kept = {}, page = null, told = null, toldAt = 0, lost = false;

const nodesOf = html => [...new DOMParser().parseFromString(html, "text/html").body.childNodes];

function fill(box, html) {
  const open = new Set([...box.querySelectorAll("details[open] > summary")].map(s => s.textContent));
  box.replaceChildren(...nodesOf(html));
  for (const summary of box.querySelectorAll("details > summary")) if (open.has(summary.textContent)) summary.parentElement.open = true;
}

// All parts anew, and the report's script on them; what was chosen is chosen again, and nothing jumps.
function rebuild(answer) {
  const radios = [...place.querySelectorAll("input[type=radio]:checked")].map(r => [r.name, r.value]);
  const hidden = [...place.querySelectorAll(".chart")].map(c => [c.id, [...c.querySelectorAll(".legend button")].flatMap((b, i) => (b.getAttribute("aria-pressed") === "false" ? [i] : []))]);
  const left = scrollX, top = scrollY;
  place.style.minHeight = `${place.offsetHeight}px`;
  page?.life.abort();
  shown.clear();
  place.replaceChildren(...answer.parts.map(([name, html]) => {
    const box = document.createElement("div");
    fill(box, html);
    shown.set(name, { box, html });
    return box;
  }));
  holder.textContent = JSON.stringify(answer.data);
  page = start();
  for (const [id, indices] of hidden) for (const i of indices) document.querySelectorAll(`#${CSS.escape(id)} .legend button`)[i]?.click();
  setTimeout(() => {
    for (const [name, value] of radios) {
      const radio = place.querySelector(`input[name="${CSS.escape(name)}"][value="${CSS.escape(value)}"]`);
      if (radio && !radio.checked && !radio.disabled) radio.click();
    }
    place.style.minHeight = "";
    scrollTo(left, top);
  }, 300);
  scrollTo(left, top);
}

function show(answer) {
  if (answer.data.heat === undefined && answer.parts.length) Object.assign(answer.data, kept);
  const same = page && answer.checks === checks && answer.parts.length === shown.size;
  kept = { heat: answer.data.heat, bias: answer.data.bias };
  if (!answer.parts.length) {
    place.replaceChildren();
    shown.clear();
    page?.life.abort();
    page = null;
  } else if (same && page.refresh(answer.data)) {
    for (const [name, html] of answer.parts) {
      const part = shown.get(name);
      if (DRAWN.includes(name) || part.html === html) continue;
      fill(part.box, html);
      part.html = html;
    }
  } else rebuild(answer);
  document.title = answer.title;
  ({ version, checks } = answer);
}

function seconds(spent) {
  if (spent < 120) return `${Math.round(spent)} s`;
  return spent < 7200 ? `${Math.round(spent / 60)} min` : `${Math.round(spent / 3600)} h`;
}
function say() {
  if (!told) return;
  stateBox.className = `state ${told.state.replace(" ", "-")}`;
  stateBox.textContent = told.state;
  const words = [];
  if (told.step !== null) words.push(`step ${told.step}${told.planned ? ` of ${told.planned}` : ""}`);
  if (told.age !== null) words.push(`last record ${seconds(told.age + (Date.now() - toldAt) / 1000)} ago`);
  if (told.why) words.push(told.why);
  if (told.problem) words.push(told.problem);
  if (lost) words.push("the server does not answer; trying again");
  saidBox.textContent = words.join(" · ");
}

async function ask() {
  try {
    const query = new URLSearchParams({ version, checks });
    const found = await fetch(`/data?${query}`, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (found.status === 200) {
      const answer = await found.json();
      told = answer;
      toldAt = Date.now();
      show(answer);
    }
    lost = found.status !== 200 && found.status !== 204;
  } catch (error) {
    lost = true;
    if (!(error instanceof TypeError) && error.name !== "TimeoutError") console.error(error);
  }
  say();
  setTimeout(ask, document.hidden ? HIDDEN : EVERY);
}
setInterval(say, 1000);
ask();
