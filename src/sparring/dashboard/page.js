// The page: reads the data inside it and draws each section, leaving out what the run does not have.
"use strict";

// Known curves first, in this order; every other metric follows under "more".
const KNOWN = {
  "rollout/reward": ["Reward", "mean over the rollouts of a step"],
  "rollout/success": ["Success", "share of rollouts the verifier accepts", {format: share, low: 0, high: 1}],
  "loss_imitate": ["Loss", "cross-entropy per assistant token, in nats", {low: 0}],
  "entropy": ["Entropy", "of the next token where the policy sampled, in nats"],
  "rollout/tokens_mean": ["Length", "sampled tokens per rollout"],
  "rollout/turns": ["Turns", "model turns per rollout"],
  "logprob_max_abs_diff": ["Engine against trainer", "largest difference of a log-probability", {smooth: false, low: 0}],
  "logprob_mean_abs_diff": ["Engine against trainer, mean", "mean difference of a log-probability", {low: 0}],
  "mismatch_k3": ["Mismatch", "KL of engine to trainer, k3 estimate, in nats", {low: 0}],
  "mismatch_ess": ["Effective samples", "of the importance weights, as a share of the tokens", {format: share, high: 1}],
  "rollout/lag_max": ["Lag", "optimiser steps that the oldest trained group was behind", {smooth: false, low: 0}],
  "time/tokens_per_s": ["Speed", "sampled tokens per second of the whole step", {low: 0}],
  "grad_norm": ["Gradient norm", "before clipping", {low: 0}],
  "learning_rate": ["Learning rate", "", {smooth: false, low: 0}],
};
const AGREEMENT = ["logprob_max_abs_diff", "logprob_mean_abs_diff", "mismatch_k3", "mismatch_ess"];
const PALETTE = ["var(--blue)", "var(--teal)", "var(--warm)", "var(--violet)", "var(--amber)", "var(--rose)", "var(--green)", "var(--red)"];
const ACCOUNT = {"trained": "var(--blue)", "group without variance": "var(--faint)", "zero advantage": "var(--amber)", "failed": "var(--red)"};
const ACTIVITIES = ["time/generating", "time/training", "time/updating", "time/waiting", "time/overlap"];
const LANES = [["engine", "time/engine/busy"], ["worlds", "time/worlds"], ["scoring", "time/judging"], ["evaluation", "time/evaluating"], ["trainer", "time/trainer/busy"], ["updates", "time/updating"], ["saving", "time/saving"]];
const BY_DATASET = "rollout/success/";
// Figures of engines and ranks, in one chart for all of them: title and hint.
const BY_PART = {
  "engine/#/completions": ["Requests by engine", "answered in a step"], "engine/#/tokens_per_s": ["Tokens a second by engine", "sampled"],
  "engine/#/requests_now": ["Requests in flight by engine", "at the end of a step"], "rank/#/sum_wait_s": ["Wait at the sum by rank", "for the slowest rank, seconds of a step"],
};

const SECTIONS = [...document.querySelectorAll("main > section")];

// Fill a section with what the run has of it; without anything it leaves the page, until there is something.
function put(id, ...content) {
  const at = SECTIONS.findIndex((s) => s.id === id), section = SECTIONS[at];
  const kept = content.flat(9).filter((c) => c !== null && c !== undefined);
  (section.querySelector(".body") ?? section).replaceChildren(...kept);
  if (!kept.length) section.remove();
  else if (!section.isConnected) document.querySelector("main").insertBefore(section, SECTIONS.slice(at).find((s) => s.isConnected) ?? null);
}

function figures(data) {
  const s = data.summary, cells = [];
  const add = (value, label, hint) => cells.push(node("div.figure", null, node("div.value", null, value), node("div.label", null, label), node("div.hint", null, hint)));
  const total = data.evaluation && data.evaluation.total;
  if (total && total.after) add(percent(total.after[0]), "solved after RL", total.before ? "from " + percent(total.before[0]) + " after SFT" : count(total.tasks) + " held-out tasks");
  else if (total && total.before) add(percent(total.before[0]), "solved after SFT", count(total.tasks) + " held-out tasks");
  if (typeof s.rl_success_low === "number") add("≥ " + percent(s.rl_success_low), "lower end of the 95 % interval", count(s.eval_tasks) + " held-out tasks");
  if (typeof s.no_tool_success === "number") add(percent(s.no_tool_success), "solved without the tool host", "what the tool is worth");
  if (typeof s.logprob_max_abs_diff === "number") add(s.logprob_max_abs_diff === 0 ? "0.0" : number(s.logprob_max_abs_diff), "engine against trainer", s.logprob_max_abs_diff === 0 ? "bitwise equal over the whole run" : "largest log-probability difference");
  if (typeof s.tokens_sampled === "number") add(number(s.tokens_sampled), "tokens sampled", typeof s.tokens_trained === "number" ? percent(s.tokens_trained / s.tokens_sampled) + " of them trained" : "");
  const wall = data.stages.reduce((sum, stage) => sum + stage.wall_s, 0);
  if (wall) add(seconds(wall), "wall clock", typeof s.peak_rss_bytes === "number" ? (s.peak_rss_bytes / 2 ** 30).toFixed(2) + " GiB at peak" : "all stages");
  return cells;
}

function evaluation(data) {
  if (!data.evaluation) return null;
  const rate = (r) => r ? [percent(r[0]), node("div.hint", null, percent(r[1], 0).replace(" %", "") + " – " + percent(r[2], 0))] : "–";
  const row = (r, total) => {
    const change = r.before && r.after ? r.after[0] - r.before[0] : null;
    return node(total ? "tr.total" : "tr", null,
      node("td", null, r.name, " ", r.coverage ? node("span.badge." + r.coverage, null, {well: "well covered", thin: "thinly covered"}[r.coverage] || r.coverage) : null),
      node("td", null, dumbbell(r.before, r.after)), node("td.number", null, rate(r.before)), node("td.number", null, rate(r.after)),
      node("td.number" + (change > 0 ? ".up" : change < 0 ? ".down" : ""), null, change === null ? "–" : (change >= 0 ? "+" : "−") + (100 * Math.abs(change)).toFixed(1)),
      node("td.number", null, count(r.tasks)));
  };
  const heads = [["dataset"], ["0 to 100 %, with 95 % interval"], ["after SFT", 1], ["after RL", 1], ["points", 1], ["tasks", 1]];
  return [
    node("p.note", null, "Tasks no training stream has seen, sampled at training temperature. Intervals at 95 %."),
    key([["after SFT", "var(--faint)"], ["after RL", "var(--teal)"]]),
    node("div.panel.scroll", null, node("table", {id: "evaluation-table"}, node("thead", null, node("tr", null, heads.map(([h, right]) => node("th" + (right ? ".number" : ""), null, h)))),
      node("tbody", null, data.evaluation.rows.map((r) => row(r, false)), row(data.evaluation.total, true)))),
  ];
}

function evaluations(data) {
  if (!data.evaluations.length) return null;
  const range = (f, text) => f && f[1] !== null ? node("div.hint", null, text(f[1]) + " – " + text(f[2])) : null;
  const figure = (f, text) => f ? [text(f[0]), range(f, text)] : "–";
  const signed = (text) => (v) => (v < 0 ? "−" : "+") + text(Math.abs(v));
  const change = (c) => c ? [figure(c.figure, signed(c.of === "success" ? percent : number)), node("div.hint", null, "against " + c.against)] : "–";
  const row = (e) => node("tr", null,
    node("td", null, e.name, e.passes.length ? node("div.hint", null, e.passes.filter((p) => p.figure).map((p) => p.name + " " + percent(p.figure[0])).join(" · ")) : null),
    node("td.number", null, figure(e.success, percent)), node("td.number", null, figure(e.reward, number)), node("td.number", null, change(e.change)),
    node("td.number", null, count(e.tasks) + (e.samples > 1 ? " × " + count(e.samples) : "")),
    node("td.number" + (e.lost ? ".down" : ""), null, e.lost ? count(e.lost) + " of " + count(e.rollouts) : "0"));
  const heads = [["evaluation"], ["success", 1], ["reward", 1], ["change", 1], ["tasks × samples", 1], ["lost", 1]];
  return [
    node("p.note", null, "Intervals at 95 %, clustered by task; changes are task by task, over the tasks that both scored. Lost rollouts were broken by infrastructure or judge and are in no figure."),
    node("div.panel.scroll", null, node("table", {id: "evaluations-table"}, node("thead", null, node("tr", null, heads.map(([h, right]) => node("th" + (right ? ".number" : ""), null, h)))),
      node("tbody", null, data.evaluations.map(row)))),
  ];
}

// A figure of evaluations beside training, between the ends of its interval.
function spread(name, metrics, options) {
  const y = metrics.values, band = [["upper end", name + "_high", "var(--faint)"], [name, name, "var(--teal)"], ["lower end", name + "_low", "var(--faint)"]];
  return lineChart(band.map(([label, key, color]) => ({name: label, color, x: metrics.steps, y: y[key]})), {smooth: false, ...options});
}

function stages(data) {
  if (!data.stages.length) return null;
  const all = data.stages.reduce((sum, s) => sum + s.wall_s, 0) || 1;
  const tone = (i) => tint(PALETTE[i % PALETTE.length], .3);
  const facts = (s) => Object.entries(s.facts).map(([name, value]) => name.replaceAll("_", " ") + " " + number(value)).join(" · ");
  return [
    node("div.strip", null, data.stages.map((s, i) => node("div", {style: {flex: String(Math.max(s.wall_s, all / 400)), background: tone(i)}, title: s.name + " " + seconds(s.wall_s)}, s.wall_s / all > .06 ? s.name : ""))),
    node("div.panel.scroll", null, node("table", {id: "stage-table"},
      node("thead", null, node("tr", null, node("th", null, "stage"), node("th.number", null, "steps"), node("th.number", null, "wall clock"), node("th.number", null, "share"), node("th", null, "at its end"))),
      node("tbody", null, data.stages.map((s) => node("tr", null, node("td", null, s.name), node("td.number", null, s.steps ? count(s.steps) : "–"),
        node("td.number", null, seconds(s.wall_s)), node("td.number", null, percent(s.wall_s / all, 0)), node("td", null, node("span.hint", null, facts(s)))))))),
  ];
}

function metricChart(name, steps, y) {
  const [title, hint, options] = KNOWN[name] || [name.replaceAll("_", " ").replaceAll("/", " / "), ""];
  const exact = AGREEMENT.includes(name) && y.every((v) => v === (name === "mismatch_ess" ? 1 : 0));
  if (exact && name !== AGREEMENT[0]) return null;
  return lineChart([{name: title, color: exact ? "var(--green)" : "var(--blue)", x: steps, y}],
    {title, hint: exact ? "bitwise equal log-probabilities at every step" : hint, ...options});
}

function manyChart(names, metrics, options) {
  return lineChart(names.map(([metric, name], i) => ({name, color: PALETTE[i % PALETTE.length], x: metrics.steps, y: metrics.values[metric]})),
    {format: share, low: 0, high: 1, ...options});
}

// What went on when: a lane for each activity, as dark in each step as the share of it that the activity took.
function timeline(metrics, events) {
  const lasted = (metrics.values["time/step_s"] || []).map((v) => v || 0), all = lasted.reduce((sum, v) => sum + v, 0);
  const lanes = LANES.filter(([, key]) => metrics.values[key]);
  if (!all || !metrics.values["time/engine/busy"]) return null;
  const width = 1000, left = 80, high = 18, marks = [];
  lanes.forEach(([name, key], lane) => {
    marks.push(shape("text", {x: 0, y: lane * high + 13, "font-size": 12, fill: "var(--soft)"}, name));
    let at = left;
    lasted.forEach((v, i) => {
      const wide = (width - left) * v / all, part = metrics.values[key][i] || 0;
      if (part > 0.002) marks.push(shape("rect", {x: at.toFixed(2), y: lane * high + 2, width: Math.max(wide, .5).toFixed(2), height: high - 4, fill: PALETTE[lane], "fill-opacity": part.toFixed(3)},
        shape("title", null, `step ${metrics.steps[i]}: ${name} ${percent(part)} of ${seconds(v)}`)));
      at += wide;
    });
  });
  for (const e of events) { // a line at the end of its step
    const before = lasted.filter((_, i) => metrics.steps[i] <= e.at_step), x = left + (width - left) * before.reduce((sum, v) => sum + v, 0) / all;
    marks.push(shape("line", {x1: x, x2: x, y1: 0, y2: lanes.length * high, stroke: "var(--red)", "stroke-width": 3}, shape("title", null, `step ${e.at_step}: ${e.event}`)));
  }
  return node("div.panel.timeline", null, node("p.note", null, `What went on in ${seconds(all)} of steps, from left to right; the darker, the larger the part of the step.`),
    shape("svg", {viewBox: `0 0 ${width} ${lanes.length * high}`, width: "100%"}, marks), ["engine", "trainer"].map((part) => causes(part, metrics, lasted, all)));
}

// The time of the engine or of the trainer: busy, or idle for a cause. The parts add up to all of it.
function causes(part, metrics, lasted, all) {
  const start = `time/${part}/`, keys = Object.keys(metrics.values).filter((n) => n.startsWith(start));
  const spent = (key) => metrics.values[key].reduce((sum, v, i) => sum + (v || 0) * lasted[i], 0);
  const parts = keys.map((key) => [key.slice(start.length).replaceAll("_", " "), spent(key)]).filter(([, s]) => s > 0);
  parts.sort(([a, x], [b, y]) => (b === "busy") - (a === "busy") || y - x);
  const tone = (i) => tint(i ? PALETTE[i % PALETTE.length] : "var(--green)", i ? .3 : .5);
  const label = (name) => name === "busy" ? part + " busy" : name === "other" ? "idle for nothing of these" : "idle: " + name;
  return [
    node("div.strip", {style: {"margin-top": "14px"}}, parts.map(([name, s], i) => node("div", {style: {flex: String(Math.max(s, all / 400)), background: tone(i)}, title: `${label(name)} ${seconds(s)}`}, s / all > .12 ? label(name) : ""))),
    key(parts.map(([name, s], i) => [`${label(name)} ${seconds(s)} (${percent(s / all)})`, tone(i)])),
  ];
}

function stageCurves(stage, metrics, events) {
  const names = Object.keys(metrics.values), known = Object.keys(KNOWN).filter((n) => names.includes(n));
  const activities = ACTIVITIES.filter((n) => names.includes(n)), datasets = names.filter((n) => n.startsWith(BY_DATASET));
  const spreads = ["success", "reward"].filter((n) => names.includes(n + "_low"));
  const parts = names.filter((n) => n.startsWith("time/engine/") || n.startsWith("time/trainer/"));
  const ofParts = Object.entries(BY_PART).map(([key, told]) => [names.filter((n) => n.replace(/\d+/, "#") === key), ...told]).filter(([n]) => n.length);
  const shown = new Set([...known, ...activities, ...parts, ...datasets, ...ofParts.flatMap(([n]) => n), ...spreads.flatMap((n) => [n, n + "_low", n + "_high"])]), rest = names.filter((n) => !shown.has(n));
  const draw = (n) => metricChart(n, metrics.steps, metrics.values[n]);
  return [
    node("h3.stage", null, node("b", null, stage), ` · ${metrics.last} steps`),
    timeline(metrics, events.filter((e) => e.stage === stage && e.at_step !== undefined)),
    node("div.charts", null,
      datasets.length ? manyChart(datasets.map((n) => [n, n.slice(BY_DATASET.length)]), metrics, {title: "Success by dataset", hint: "training rollouts of each step, smoothed", wide: true}) : null,
      spreads.map((n) => spread(n, metrics, n === "success" ? {title: "Held-out success", hint: "evaluations beside training, 95 % interval", format: share, low: 0, high: 1} : {title: "Held-out reward", hint: "evaluations beside training, 95 % interval"})),
      known.map(draw),
      ofParts.map(([n, title, hint]) => manyChart(n.map((name) => [name, name.split("/", 2).join(" ")]), metrics, {title, hint, format: number, high: undefined})),
      activities.length ? manyChart(activities.map((n) => [n, n.slice(5)]), metrics, {title: "Where the time goes", hint: "share of each step"}) : null),
    rest.length ? node("details", {"data-stage": stage}, node("summary", null, rest.length + " more metrics"), node("div.charts", null, rest.map(draw))) : null,
  ];
}

function events(data) {
  const row = (e) => node("tr", null, [new Date(1000 * e.time).toLocaleString(), e.stage, e.at_step ?? "–", e.event].map((cell) => node("td", null, String(cell))));
  const heads = ["time", "stage", "step", "event"].map((head) => node("th", null, head)), body = node("tbody", null, data.events.map(row));
  return data.events.length ? node("div.panel.scroll", null, node("table", {id: "events-table"}, node("thead", null, node("tr", null, heads)), body)) : null;
}

function account(data) {
  if (!data.account.length) return null;
  const total = data.account.reduce((sum, a) => sum + a.tokens, 0);
  const outcomes = data.outcomes.length ? node("div.panel.scroll", {style: {"margin-top": "16px"}}, node("table", {id: "outcome-table"},
    node("thead", null, node("tr", null, node("th", null, "outcome of a training rollout"), node("th.number", null, "rollouts"), node("th.number", null, "share"))),
    node("tbody", null, data.outcomes.map((o) => node("tr", null, node("td", null, o.name), node("td.number", null, count(o.count)), node("td.number", null, percent(o.share))))))) : null;
  return [
    node("p.note", null, `${count(total)} tokens were sampled for training. Each was trained once or left out for a reason with a name.`),
    node("div.strip", null, data.account.map((a) => node("div", {style: {flex: String(Math.max(a.tokens, total / 400)), background: tint(ACCOUNT[a.name] || "var(--red)", .3)}, title: a.name}, a.tokens / total > .08 ? a.name : ""))),
    key(data.account.map((a) => [`${a.name}: ${count(a.tokens)} (${percent(a.tokens / total)})`, tint(ACCOUNT[a.name] || "var(--red)", .5)])),
    outcomes,
  ];
}

// Everything but the rollouts; a live page draws it again as the run goes on, and leaves open what was opened.
function draw(data) {
  const opened = new Set([...document.querySelectorAll("#curves details[open]")].map((d) => d.dataset.stage));
  document.getElementById("name").textContent = data.name;
  document.getElementById("written").textContent = (data.live ? "· live, " : "· report of ") + data.written;
  document.getElementById("lede").textContent = data.lede;
  put("figures", figures(data));
  put("evaluation", evaluation(data));
  put("evaluations", evaluations(data));
  put("stages", stages(data));
  put("curves", Object.entries(data.metrics).map(([stage, metrics]) => stageCurves(stage, metrics, data.events)));
  put("events", events(data));
  put("account", account(data));
  put("config", data.config ? node("div.panel", null, node("pre", null, data.config)) : null);
  for (const details of document.querySelectorAll("#curves details")) details.open = opened.has(details.dataset.stage);
}

function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const dress = (theme) => { root.dataset.theme = theme; };
  dress(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => dress(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => dress(root.dataset.theme === "dark" ? "light" : "dark"));
  draw(data);
  put("rollouts", data.live ? liveViewer(data) : data.rollouts.length ? [
    node("p.note", null, `${data.rollouts.length} of ${count(data.rollouts_seen)} recorded rollouts: the first, the last, some between, the best and the worst. Point at a token for its numbers; click it to keep them. sparring report RUN --serve opens all of them.`),
    rolloutViewer(data)] : null);
  if (data.live) followRun(data.stamp);
  root.dataset.ready = "yes";
}

main();
