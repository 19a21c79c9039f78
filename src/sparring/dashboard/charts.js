// Drawing primitives: DOM nodes and inline SVG. Text only ever enters the page through text nodes, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

// node("div.note", {title: "x"}, child, ...): children are nodes or text; null is left out.
function node(what, attributes, ...children) {
  const [tag, ...classes] = what.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  return fill(made, attributes, children);
}

function shape(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "style") for (const [name, v] of Object.entries(value)) made.style.setProperty(name, v);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  for (const child of children.flat(9)) if (child !== null && child !== undefined) made.append(child);
  return made;
}

const percent = (v, digits = 1) => v === null || v === undefined ? "–" : (100 * v).toFixed(digits) + " %";
const share = (v) => percent(v, v > 0 && v < 0.0995 ? 1 : 0);
const count = (v) => v === null || v === undefined ? "–" : Math.round(v).toLocaleString("en-US").replace(/,/g, "\u202f");

function number(v) {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size >= 1e6) return (v / 1e6).toFixed(2) + " M";
  if (size >= 1e4) return count(v);
  if (size >= 100 || Number.isInteger(v)) return String(Math.round(v * 10) / 10);
  if (size >= 0.01) return String(Number(v.toPrecision(3)));
  return v.toExponential(1).replace("e-", "e\u2212");
}

function seconds(v) {
  if (v === null || v === undefined) return "–";
  if (v < 1) return (v * 1000).toFixed(0) + " ms";
  if (v < 100) return v.toFixed(v < 10 ? 1 : 0) + " s";
  if (v < 7200) return Math.floor(v / 60) + " min " + String(Math.round(v % 60)).padStart(2, "0") + " s";
  return (v / 3600).toFixed(1) + " h";
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(Math.abs(v) < step * 1e-6 ? 0 : v);
  return out;
}

// Gaussian-weighted mean of the neighbours on both sides: smooth without lagging behind. Gaps stay gaps.
function smoothed(values, reach) {
  return values.map((here, i) => {
    if (here === null) return null;
    let sum = 0, norm = 0;
    for (let k = Math.max(0, i - 3 * reach); k <= Math.min(values.length - 1, i + 3 * reach); k++) {
      if (values[k] === null) continue;
      const weight = Math.exp(-(((k - i) / reach) ** 2) / 2);
      sum += weight * values[k];
      norm += weight;
    }
    return sum / norm;
  });
}

function path(x, y, at) {
  let out = "", pen = false;
  y.forEach((v, i) => {
    if (v === null) { pen = false; return; }
    out += (pen ? "L" : "M") + at.x(x[i]).toFixed(1) + " " + at.y(v).toFixed(1);
    pen = true;
  });
  return out;
}

function key(entries) {
  return node("div.key", null, entries.map(([name, color]) => node("span", null, node("i", {style: {background: color}}), name)));
}

// series: [{name, color, x, y}]; options: title, hint, format, low, high, wide, smooth (false draws the values as they are).
function lineChart(series, options) {
  const {title, hint = "", format = number, wide = false, smooth = true} = options;
  const width = wide ? 1140 : 380, height = wide ? 250 : 150, left = 44, right = 10, top = 10, bottom = 22;
  const drawn = series.map((s) => ({...s, line: smooth && s.y.length > 12 ? smoothed(s.y, Math.max(1, Math.round(s.y.length / 50))) : s.y}));
  const values = series.flatMap((s) => s.y).filter((v) => v !== null), xs = series.flatMap((s) => s.x);
  let low = options.low ?? Math.min(...values), high = options.high ?? Math.max(...values);
  if (!(high - low > 1e-12)) { high = low + (Math.abs(low) || 1) * 0.5; low = options.low ?? (low ? low - Math.abs(low) * 0.5 : 0); }
  const first = Math.min(...xs), last = Math.max(first + 1, Math.max(...xs));
  const at = {
    x: (v) => left + (v - first) / (last - first) * (width - left - right),
    y: (v) => height - bottom - (v - low) / (high - low) * (height - top - bottom),
  };
  const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
  for (const v of ticks(low, high, wide ? 5 : 3)) {
    svg.append(shape("line", {class: "grid", x1: left, x2: width - right, y1: at.y(v), y2: at.y(v)}));
    svg.append(shape("text", {x: left - 8, y: at.y(v) + 3.5, "text-anchor": "end"}, format(v)));
  }
  for (const v of ticks(first, last, wide ? 10 : 4).filter(Number.isInteger)) {
    svg.append(shape("text", {x: at.x(v), y: height - 5, "text-anchor": "middle"}, String(v)));
  }
  for (const s of drawn) {
    if (s.line !== s.y) svg.append(shape("path", {class: "raw", stroke: s.color, d: path(s.x, s.y, at)}));
    svg.append(shape("path", {class: "smooth", stroke: s.color, d: path(s.x, s.line, at)}));
    if (s.x.length === 1) svg.append(shape("circle", {cx: at.x(s.x[0]), cy: at.y(s.y[0]), r: 3, fill: s.color}));
  }
  const now = node("span.now", null, drawn.length === 1 ? format(drawn[0].y.at(-1)) : "");
  follow(svg, drawn, at, {first, last, left, right, width, height, top, bottom, format, title});
  return node("div.panel.chart" + (wide ? ".wide" : ""), null,
    node("div.head", null, node("h3", null, title), node("span", null, saveButton(svg, title), " ", now)), hint || !wide ? node("div.hint", null, hint) : null,
    drawn.length > 1 ? key(drawn.map((s) => [s.name, s.color])) : null, svg);
}

const PICTURE_SCALE = 3;
const DRAWN = ["stroke", "stroke-width", "stroke-linecap", "stroke-linejoin", "fill", "opacity", "font-family", "font-size"];

// A button that saves a chart as a PNG, with the colours that it has on the page.
function saveButton(svg, title) {
  const save = () => {
    const copy = svg.cloneNode(true), {width, height} = svg.viewBox.baseVal, styled = [...svg.querySelectorAll("*")];
    copy.querySelectorAll("*").forEach((part, i) => {
      const style = getComputedStyle(styled[i]);
      for (const name of DRAWN) part.setAttribute(name, style.getPropertyValue(name));
    });
    copy.querySelectorAll(".cursor").forEach((line) => line.remove());
    fill(copy, {xmlns: SVG, width, height}, []);
    const picture = new Image(), canvas = node("canvas", {width: width * PICTURE_SCALE, height: height * PICTURE_SCALE});
    picture.addEventListener("load", () => {
      const ink = canvas.getContext("2d");
      ink.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--panel") || "white";
      ink.fillRect(0, 0, canvas.width, canvas.height);
      ink.drawImage(picture, 0, 0, canvas.width, canvas.height);
      node("a", {href: canvas.toDataURL("image/png"), download: title.replace(/[^\p{L}\p{N}]+/gu, "-") + ".png"}).click();
    });
    picture.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  };
  return node("button.save", {type: "button", title: "Save this chart as a picture", onclick: save}, "PNG");
}

// A cursor that reads all series at the nearest step.
function follow(svg, series, at, box) {
  const line = shape("line", {class: "cursor", y1: box.top, y2: box.height - box.bottom, visibility: "hidden"});
  svg.append(line);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const px = (event.clientX - frame.left) / frame.width * box.width;
    const x = box.first + (px - box.left) / (box.width - box.left - box.right) * (box.last - box.first);
    const nearest = (s) => s.x.reduce((best, v, i) => Math.abs(v - x) < Math.abs(s.x[best] - x) ? i : best, 0);
    const step = series[0].x[nearest(series[0])];
    line.setAttribute("x1", at.x(step)); line.setAttribute("x2", at.x(step)); line.setAttribute("visibility", "visible");
    showTip(event, [["step", String(step)], ...series.map((s) => [series.length > 1 ? s.name : box.title, box.format(s.y[nearest(s)])])]);
  });
  svg.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); hideTip(); });
}

function showTip(event, rows) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...rows.map(([name, value, mono]) =>
    node("div.row", null, node("span", null, name), node(mono ? "span.mono" : "span", null, value))));
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18) + "px";
}

function hideTip() { document.getElementById("tip").hidden = true; }

// A rate with its 95 % interval before and after, on one 0 to 1 axis.
function dumbbell(before, after) {
  const width = 440, height = 30, at = (v) => 6 + v * (width - 12);
  const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, width, height});
  for (const v of [0, 0.25, 0.5, 0.75, 1]) svg.append(shape("line", {class: "grid", x1: at(v), x2: at(v), y1: 2, y2: height - 2}));
  if (before && after) svg.append(shape("line", {x1: at(before[0]), x2: at(after[0]), y1: 15, y2: 15, stroke: "var(--faint)", "stroke-width": 1.4}));
  for (const [rate, color, y] of [[before, "var(--faint)", 11], [after, "var(--teal)", 19]]) {
    if (!rate) continue;
    svg.append(shape("line", {x1: at(rate[1]), x2: at(rate[2]), y1: y, y2: y, stroke: color, "stroke-width": 2.2, "stroke-linecap": "round", opacity: .55}));
    svg.append(shape("circle", {cx: at(rate[0]), cy: 15, r: 5, fill: color, stroke: "var(--panel)", "stroke-width": 1.5}));
  }
  return svg;
}
