// The rollout viewer: one conversation, token by token, as it was sampled. Rollout text is untrusted and stays text.
"use strict";

const TONES = {policy: "var(--blue)", prompt: "var(--soft)", tool: "var(--green)", harness: "var(--violet)", expert: "var(--amber)", teacher: "var(--rose)"};
const MODES = ["source", "log-probability", "advantage", "weight version"];
const VERSION_TONES = ["var(--blue)", "var(--teal)", "var(--amber)", "var(--violet)", "var(--rose)", "var(--green)"];
const tint = (color, share) => `color-mix(in srgb, ${color} ${Math.round(100 * share)}%, transparent)`;

function expand(runs, length) {
  const out = new Array(length).fill(null);
  let i = 0;
  for (const [n, value] of runs || []) for (let k = 0; k < n; k++) out[i++] = value;
  return out;
}

// The colour of one token, null for none. `scale` is the largest |advantage| of the page.
function tokenColor(mode, token, scale) {
  if (mode === "source") return token.sampled ? tint(TONES[token.source], .15) : null;
  if (!token.sampled) return null;
  if (mode === "log-probability") return token.logprob === null ? "var(--red)" : tint("var(--warm)", Math.min(.75, -token.logprob / 4));
  if (mode === "weight version") return tint(VERSION_TONES[token.version % VERSION_TONES.length], .24);
  if (!token.advantage) return null;
  return tint(token.advantage > 0 ? "var(--green)" : "var(--red)", .12 + .45 * Math.abs(token.advantage) / scale);
}

function tokenNode(token, pieces, select) {
  const [text, kind] = pieces[token.id] || ["‹" + token.id + "›", "special"];
  const made = node("span.t" + (kind ? "." + kind : "") + (token.sampled ? ".sampled" : ""));
  text.split("\n").forEach((part, i) => {
    if (i) made.append(node("span.nl", null, "↵"), "\n");
    made.append(part);
  });
  const rows = [["token", JSON.stringify(text), true], ["id", String(token.id)], ["position", String(token.position)], ["source", token.source]];
  if (token.sampled) {
    rows.push(["log-probability", token.logprob === null ? "not finite" : token.logprob.toFixed(5)],
      ["probability", token.logprob === null ? "–" : percent(Math.exp(token.logprob), 2)],
      ["advantage", token.advantage === null ? "–" : token.advantage.toFixed(4)],
      ["weight version", String(token.version)], ["oldest KV version", token.kv === null ? "–" : String(token.kv)]);
  } else rows.push(["trained", "no: the policy did not sample it"]);
  made.addEventListener("pointermove", (event) => showTip(event, rows));
  made.addEventListener("pointerleave", hideTip);
  made.addEventListener("click", () => select(made, rows));
  return made;
}

function segmentTokens(segment, position) {
  const n = segment.tokens.length;
  const versions = expand(segment.versions, n), kv = expand(segment.kv_versions, n), advantages = expand(segment.advantages, n);
  return segment.tokens.map((id, i) => ({
    id, position: position + i, source: segment.source, sampled: segment.logprobs !== null,
    logprob: segment.logprobs && segment.logprobs[i], version: versions[i], kv: kv[i], advantage: advantages[i],
  }));
}

// The largest |advantage| of some rollouts.
function largest(rollouts) {
  return Math.max(1e-9, ...rollouts.flatMap((r) => r.segments.flatMap((s) => (s.advantages || []).map(([, v]) => Math.abs(v || 0)))));
}

class Talk {
  constructor() {
    this.mode = MODES[0];
    this.box = node("div.talk");
  }

  // Show one rollout: `pieces` has the text of its tokens, `scale` is the |advantage| of the strongest colour.
  show(rollout, pieces, scale) {
    this.rollout = rollout;
    this.scale = scale;
    this.painted = [];
    const pin = node("div.facts.mono");
    const select = (made, rows) => {
      for (const other of this.box.querySelectorAll(".pinned")) other.classList.remove("pinned");
      made.classList.add("pinned");
      pin.replaceChildren(...rows.map(([name, value]) => node("span", null, name + " ", node("b", null, value))));
    };
    const ends = new Map();
    const segments = rollout.segments.map((segment) => {
      const start = segment.parent === null ? 0 : ends.get(segment.role + segment.parent) ?? 0;
      ends.set(segment.role + segment.index, start + segment.tokens.length);
      const line = node("div.tokens");
      for (const token of segmentTokens(segment, start)) {
        const made = tokenNode(token, pieces, select);
        this.painted.push([made, token]);
        line.append(made);
      }
      const label = segment.label && segment.label !== "agent" ? node("div.label", null, segment.label) : null;
      const fork = segment.fork ? node("div.fork", null, "fork: " + segment.fork.reason + (segment.fork.agent ? " " + segment.fork.agent : "") +
        (segment.fork.of === null ? "" : " of " + segment.fork.of)) : null;
      const quotes = (segment.quotes || []).length ? node("div.quotes", null, "quotes " + segment.quotes.join(", ")) : null;
      const branch = segment.parent !== null && segment.parent !== segment.index - 1 ? node("div", null, "branches from " + segment.parent) : null;
      return node("div.segment", {style: {"--tone": TONES[segment.source]}},
        node("div.who", null, node("b", null, segment.source), segment.message_role === segment.source ? null : segment.message_role || "template",
          segment.role === "policy" ? null : node("div", null, segment.role), label, branch, fork, quotes, node("div", null, segment.tokens.length + " tokens")), line);
    });
    this.bar = node("div.bar");
    this.box.replaceChildren(...this.head(rollout), this.bar, pin, ...segments);
    this.box.scrollTop = 0;
    this.paint();
  }

  head(r) {
    const fact = (name, value) => node("span", null, name + " ", node("b", null, value));
    const parts = Object.entries(r.parts).map(([name, value]) => fact(name, number(value)));
    return [
      node("h3", null, r.task),
      node("div.facts", null, fact("dataset", r.tag || "–"), fact("stage", r.stage), fact("group", r.group + " · " + (r.index + 1) + " of " + r.of),
        fact("outcome", r.outcome + " (" + r.reason + ")"), fact("reward", number(r.reward)), fact("sampled", r.sampled + " tokens"),
        fact("turns", String(r.turns)), fact("wall", seconds(r.wall_s)), fact("id", r.id), ...parts),
      r.failure ? node("div.failure", null, node("b", null, r.failure.error), " at " + r.failure.where + ": " + r.failure.message) : null,
    ].filter(Boolean);
  }

  paint() {
    const buttons = MODES.map((mode) => node("button", {type: "button", "aria-pressed": String(mode === this.mode), onclick: () => { this.mode = mode; this.paint(); }}, mode));
    this.bar.replaceChildren(node("span.note", {style: {margin: "0 4px 0 0"}}, "Colour by"), ...buttons, this.legend());
    for (const [made, token] of this.painted) made.style.background = tokenColor(this.mode, token, this.scale) || "";
  }

  untrained() {
    if (this.rollout.stage.includes("eval")) return "an evaluation: nothing was trained on it";
    return this.rollout.reward === null ? "left its group: nothing was trained on it" : "no advantage: all rollouts of its group scored the same";
  }

  legend() {
    if (this.mode === "source") return key([...new Set(this.rollout.segments.map((s) => s.source))].map((s) => [s, TONES[s]]));
    if (this.mode === "log-probability") return key([["certain", tint("var(--warm)", .06)], ["surprising", tint("var(--warm)", .75)]]);
    if (this.mode === "advantage" && !this.rollout.segments.some((s) => s.advantages)) return node("span.note", {style: {margin: "0 0 0 8px"}}, this.untrained());
    if (this.mode === "advantage") return key([["made likelier", tint("var(--green)", .5)], ["made less likely", tint("var(--red)", .5)]]);
    const versions = [...new Set(this.rollout.segments.flatMap((s) => (s.versions || []).map(([, v]) => v)))].sort((a, b) => a - b);
    return key(versions.slice(0, 8).map((v) => ["version " + v, tint(VERSION_TONES[v % VERSION_TONES.length], .5)]));
  }
}

// One rollout in a list.
function listed(tag, r, attributes) {
  const mark = r.success === null ? null : node("span.badge." + (r.success ? "yes" : "no"), null, r.success ? "solved" : "not solved");
  return node(tag, attributes,
    node("div.top", null, node("span", null, r.tag || r.task), node("span.reward", null, r.reward === null ? "no score" : number(r.reward))),
    node("div.sub", null, node("span", null, r.stage + " · weights " + r.version + " · " + r.sampled + " tokens"), mark ?? node("span.badge", null, r.outcome)));
}

// Let the arrow keys go through a list.
function walkable(list) {
  list.addEventListener("keydown", (event) => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key], items = [...list.children];
    const next = step && items[items.indexOf(document.activeElement) + step];
    if (next) { event.preventDefault(); next.focus(); next.click(); }
  });
}

function rolloutViewer(data) {
  const talk = new Talk(), scale = largest(data.rollouts), list = node("div.list", {role: "listbox", "aria-label": "Rollouts"}), shown = node("span.count");
  const axes = {
    picked: (r) => r.picks, stage: (r) => [r.stage], dataset: (r) => [r.tag || "–"], outcome: (r) => [r.outcome],
    success: (r) => [r.success === null ? "not judged" : r.success ? "solved" : "not solved"], weights: (r) => ["version " + r.version],
    reward: (r) => [r.reward === null ? "not scored" : r.reward > 0 ? "above 0" : r.reward < 0 ? "below 0" : "exactly 0"],
  };
  const chosen = {};
  const fresh = () => data.rollouts.filter((r) => Object.entries(chosen).every(([axis, value]) => !value || axes[axis](r).includes(value)));
  const open = (rollout, button) => {
    for (const other of list.children) other.setAttribute("aria-selected", "false");
    button.setAttribute("aria-selected", "true");
    talk.show(rollout, data.pieces, scale);
  };
  const redraw = () => {
    const rollouts = fresh();
    shown.textContent = rollouts.length + " of " + data.rollouts.length + " shown";
    list.replaceChildren(...rollouts.map(entry));
    // a solved rollout of the trained policy says most, so it is the one that lies open
    const best = rollouts.findLastIndex((r) => r.stage === "rl" && r.success), at = Math.max(0, best);
    if (rollouts.length) { open(rollouts[at], list.children[at]); requestAnimationFrame(() => { list.scrollTop = list.children[at].offsetTop - list.offsetTop - 60; }); }
    else talk.box.replaceChildren(node("p.empty", null, "No rollout matches these filters."));
  };
  const entry = (r) => {
    const made = listed("button", r, {type: "button", role: "option", onclick: () => open(r, made)});
    return made;
  };
  const filters = Object.entries(axes).map(([axis, values]) => {
    const names = [...new Set(data.rollouts.flatMap(values))].sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
    if (names.length < 2) return null;
    return node("select", {"aria-label": axis, onchange: (event) => { chosen[axis] = event.target.value; redraw(); }},
      node("option", {value: ""}, "any " + axis), names.map((name) => node("option", {value: name}, name)));
  });
  walkable(list);
  redraw();
  return [node("div.filters", null, filters, shown), node("div.panel.viewer", null, list, talk.box)];
}
