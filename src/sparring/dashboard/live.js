// What only a served page has: every rollout, found by search and opened by a link, and curves that follow the run.
"use strict";

const LOOK_EVERY_MS = 3000;
const LATER_MS = 250;  // after the last key, before a search is sent

async function ask(path, query) {
  const answer = await fetch(path + "?" + new URLSearchParams(query));
  if (answer.status === 204) return null;
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// Look for something new to draw, and say so where nobody answers any more.
function followRun(stamp) {
  let seen = stamp;
  setInterval(async () => {
    if (document.hidden) return;
    try {
      const data = await ask("figures", {seen});
      if (data) { seen = data.stamp; draw(data); document.dispatchEvent(new Event("recorded")); }
    } catch (error) {
      document.getElementById("written").textContent = "· no longer served: " + error.message;
    }
  }, LOOK_EVERY_MS);
}

function liveViewer(data) {
  const talk = new Talk(), list = node("div.list", {role: "listbox", "aria-label": "Rollouts"}), shown = node("span.count", {role: "status"});
  const more = node("button", {type: "button", onclick: () => fillList(list.childElementCount)}, "more");
  const words = node("input", {type: "search", maxlength: 200, placeholder: "search task, id, outcome, question, answer", "aria-label": "search"});
  const chosen = {};
  let asked = 0;

  // A later question makes the answers to earlier ones worthless.
  async function fillList(after) {
    const mine = ++asked, answer = await ask("rollouts", {...chosen, words: words.value, after});
    if (mine !== asked) return;
    const lines = answer.lines.map((r) => listed("a", r, {role: "option", href: "#" + encodeURIComponent(r.id), "aria-selected": String(r.id === opened())}));
    if (after) list.append(...lines); else list.replaceChildren(...lines);
    shown.textContent = `${count(answer.found)} of ${count(answer.all)} rollouts`;
    more.hidden = list.childElementCount >= answer.found;
    if (!opened() && lines.length) show(answer.lines[0].id);
  }

  const opened = () => decodeURIComponent(location.hash.slice(1));

  async function show(id) {
    for (const line of list.children) line.setAttribute("aria-selected", String(line.hash === "#" + encodeURIComponent(id)));
    try {
      const {rollout, pieces} = await ask("rollout", {id});
      talk.show(rollout, pieces, largest([rollout]));
    } catch (error) {
      talk.box.replaceChildren(node("p.empty", null, id + ": " + error.message));
    }
  }

  const filters = Object.entries(data.axes).map(([axis, values]) =>
    node("select", {"aria-label": axis, onchange: (event) => { chosen[axis] = event.target.value; fillList(0); }},
      node("option", {value: ""}, "any " + axis), values.map((value) => node("option", {value}, value))));
  let waiting = 0;
  words.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => fillList(0), LATER_MS); });
  addEventListener("hashchange", () => show(opened()));
  document.addEventListener("recorded", () => { if (list.scrollTop < 40 && list.childElementCount <= 200) fillList(0); });
  walkable(list);
  fillList(0);
  if (opened()) show(opened());
  return [
    node("p.note", null, "All recorded rollouts, the latest first; each has a link of its own. Point at a token for its numbers; click it to keep them."),
    node("div.filters", null, words, filters, shown),
    node("div.panel.viewer", null, node("div", null, list, more), talk.box)];
}
