"use strict";
// Names of images, classes and runs are somebody's: they become text, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const atlas = document.getElementById("atlas"), canvas = document.getElementById("map");
const tip = document.getElementById("tip"), get = id => document.getElementById(id);
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8A6FDF", "#A6761D", "#666666", "#B2182B"];
const count = data.names.length, side = data.side;
let run, group = [], groupsOf = [], grain = 0, by = "", chosen = -1, hovered = -1;
let zoom = 1, left = 0, top_ = 0, wide = 1, high = 1;

function add(parent, tag, text, values) {
  const made = Object.assign(document.createElement(tag), values || {});
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}
function thumb(i, size) {
  const picture = document.createElement("span"), scale = size / side;
  picture.className = "t";
  picture.style.width = picture.style.height = size + "px";
  picture.style.backgroundSize = data.columns * size + "px";
  picture.style.backgroundPosition = `${-(i % data.columns) * side * scale}px ${-Math.floor(i / data.columns) * side * scale}px`;
  return picture;
}
function card(parent, i, size, caption) {
  const made = add(parent, "button", undefined, {type: "button", className: "card", title: data.names[i]});
  made.style.width = size + "px";
  made.appendChild(thumb(i, size));
  if (caption) add(made, "small", caption);
  made.onclick = () => choose(i);
  return made;
}
const kinds = {
  class: {of: i => data.label[i], name: n => n < 0 ? "no class" : data.classes[n]},
  group: {of: i => group[i], name: n => "group " + (n + 1)},
  split: {of: i => data.split[i], name: n => data.splits[n]},
};
const color = n => n < 0 ? "#999999" : COLORS[n % COLORS.length];

// --- the map -----------------------------------------------------------------------------------
function place(i) {
  const size = Math.min(wide, high) * 0.92 / 10000 * zoom;
  return [left + run.x[i] * size, top_ + high - run.y[i] * size];
}
function whole() {
  zoom = 1;
  const size = Math.min(wide, high) * 0.92 / 10000;
  left = (wide - Math.max(...run.x) * size) / 2;
  top_ = (Math.max(...run.y) * size - high) / 2;
}
function fits(i) {
  const words = get("find").value.toLowerCase();
  return !words || data.names[i].toLowerCase().includes(words);
}
function draw() {
  const pen = canvas.getContext("2d"), dense = devicePixelRatio || 1;
  canvas.width = wide * dense; canvas.height = high * dense;
  pen.scale(dense, dense);
  const size = Math.min(side * 1.5, 14 * Math.sqrt(zoom)), pictures = get("pictures").checked;
  for (let i = 0; i < count; i++) {
    const [x, y] = place(i);
    if (x < -size || y < -size || x > wide + size || y > high + size) continue;
    pen.globalAlpha = fits(i) ? 1 : 0.12;
    pen.fillStyle = color(kinds[by].of(i));
    if (pictures) {
      pen.fillRect(x - size / 2 - 1.5, y - size / 2 - 1.5, size + 3, size + 3);
      pen.drawImage(atlas, (i % data.columns) * side, Math.floor(i / data.columns) * side, side, side, x - size / 2, y - size / 2, size, size);
    } else {
      pen.beginPath(); pen.arc(x, y, 3, 0, 7); pen.fill();
    }
    if (i === chosen || i === hovered) {
      pen.strokeStyle = getComputedStyle(document.body).color; pen.lineWidth = 2.5;
      pen.strokeRect(x - size / 2 - 2, y - size / 2 - 2, size + 4, size + 4);
    }
  }
}
function nearest(x, y) {
  let best = -1, least = 18 * 18;
  for (let i = 0; i < count; i++) {
    if (!fits(i)) continue;
    const [a, b] = place(i), square = (a - x) ** 2 + (b - y) ** 2;
    if (square <= least) { least = square; best = i; }
  }
  return best;
}
function scale(by, x, y) {
  const next = Math.min(60, Math.max(0.5, zoom * by)), ratio = next / zoom;
  left = x - (x - left) * ratio;
  top_ = y - high - (y - high - top_) * ratio;
  zoom = next;
  draw();
}
function at(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
function hover(x, y) {
  hovered = nearest(x, y);
  tip.style.display = hovered < 0 ? "none" : "block";
  if (hovered >= 0) {
    tip.replaceChildren(thumb(hovered, Math.max(128, side)));
    add(tip, "div", data.names[hovered]);
    add(tip, "small", facts(hovered));
    tip.style.left = Math.max(0, Math.min(x + 14, wide - 150)) + "px";
    tip.style.top = (y > high / 2 ? y - tip.offsetHeight - 10 : y + 14) + "px";
  }
  draw();
}
const held = new Map();
let moved = false;
canvas.onpointerdown = event => { canvas.setPointerCapture(event.pointerId); held.set(event.pointerId, at(event)); moved = held.size > 1; };
canvas.onpointermove = event => {
  const here = at(event), before = held.get(event.pointerId);
  if (!before) return hover(...here);
  const others = [...held].filter(([id]) => id !== event.pointerId);
  if (others.length) {
    const [x, y] = others[0][1], far = ([a, b]) => Math.hypot(a - x, b - y);
    scale(far(here) / Math.max(far(before), 1), x, y);
  } else if (moved || Math.hypot(here[0] - before[0], here[1] - before[1]) > 3) {
    moved = true; tip.style.display = "none";
    left += here[0] - before[0]; top_ += here[1] - before[1];
    draw();
  } else return;
  held.set(event.pointerId, here);
};
canvas.onpointerup = canvas.onpointercancel = event => {
  held.delete(event.pointerId);
  if (moved) return;
  const i = nearest(...at(event));
  if (i >= 0) choose(i);
};
canvas.onpointerleave = () => { hovered = -1; tip.style.display = "none"; draw(); };
canvas.onwheel = event => { event.preventDefault(); scale(Math.exp(-event.deltaY / 300), ...at(event)); };
// By keyboard: arrows move the map, + and - scale it, Enter opens the image in its middle.
const arrows = {ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60]};
canvas.onkeydown = event => {
  const by = arrows[event.key], middle = [wide / 2, high / 2];
  if (by) { left += by[0]; top_ += by[1]; hover(...middle); }
  else if (event.key === "+") scale(1.6, ...middle);
  else if (event.key === "-") scale(1 / 1.6, ...middle);
  else if (event.key === "Enter") { const i = nearest(...middle); if (i >= 0) choose(i); }
  else return;
  event.preventDefault();
};
get("in").onclick = () => scale(1.6, wide / 2, high / 2);
get("out").onclick = () => scale(1 / 1.6, wide / 2, high / 2);
get("all").onclick = () => { whole(); draw(); };
get("find").oninput = get("pictures").onchange = draw;

// --- beside and below it -------------------------------------------------------------------------
function facts(i) {
  const words = [data.splits[data.split[i]], "group " + (group[i] + 1)];
  if (data.label[i] >= 0) words.unshift(data.classes[data.label[i]]);
  return words.join(", ");
}
function choose(i) {
  chosen = i;
  const box = get("one");
  box.replaceChildren();
  box.appendChild(thumb(i, Math.max(160, side)));
  add(box, "p", data.names[i]).style.overflowWrap = "anywhere";
  add(box, "p", facts(i));
  add(box, "h2", "What looks like it");
  run.near[i].forEach((other, k) => card(box, other, 64, run.similarity[i][k].toFixed(2)));
  draw();
}
function groups() {
  const box = get("groups");
  box.replaceChildren();
  groupsOf.forEach((members, n) => {
    const counts = new Map();
    for (const i of members) if (data.label[i] >= 0) counts.set(data.label[i], (counts.get(data.label[i]) || 0) + 1);
    const most = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 3);
    const mix = most.map(([label, k]) => `${data.classes[label]} ${Math.round(100 * k / members.length)} %`).join(", ");
    add(box, "p", `Group ${n + 1}: ${members.length} images${mix && "; " + mix}`);
    for (const i of members.slice(0, 12)) card(box, i, 64);
  });
}
function key() {
  const numbers = [...new Set(data.names.map((_, i) => kinds[by].of(i)))].sort((a, b) => a - b), box = get("key");
  box.replaceChildren();
  for (const n of numbers.slice(0, 40)) {
    const line = add(box, "span"), dot = add(line, "i");
    dot.style.background = color(n);
    line.append(kinds[by].name(n));
  }
}
const counts = () => Object.keys(run.grains).map(Number).sort((a, b) => a - b);
function cut(number) {
  grain = number; groupsOf = run.grains[number]; group = [];
  groupsOf.forEach((members, n) => { for (const i of members) group[i] = n; });
  const all = counts(), own = number === run.chosen ? "" : ", by your choice";
  get("about").textContent = `${count} images, ${number} groups found without labels from the vectors of ${run.run}${own}.`;
  get("grain").textContent = `${number} groups`;
  get("coarser").disabled = number === all[0];
  get("finer").disabled = number === all[all.length - 1];
}
function regroup(step) {
  const all = counts();
  cut(all[all.indexOf(grain) + step]);
  groups(); key(); draw();
  if (chosen >= 0) choose(chosen);
}
function pick(name) {
  run = data.runs.find(one => one.run === name);
  cut(run.chosen);
}
function show() {
  groups(); key(); whole(); draw();
  if (chosen >= 0) choose(chosen);
}
function fit() {
  wide = canvas.clientWidth; high = canvas.clientHeight;
  whole(); draw();
}
for (const one of data.runs) add(get("run"), "option", one.run, {value: one.run});
pick(data.runs[data.runs.length - 1].run);
get("run").value = run.run;
get("run").onchange = event => { pick(event.target.value); show(); };
get("coarser").onclick = () => regroup(-1);
get("finer").onclick = () => regroup(1);
const given = Object.keys(kinds).filter(kind => kind === "class" ? data.label.some(n => n >= 0) : kind === "group" || data.splits.length > 1);
for (const kind of given) add(get("by"), "option", kind, {value: kind});
by = given[0];
get("by").onchange = event => { by = event.target.value; key(); draw(); };
for (const cell of document.querySelectorAll("#pairs td[data-name]")) {
  const {name, split} = cell.dataset;  // a name may be in several splits
  const i = data.names.findIndex((one, k) => one === name && data.splits[data.split[k]] === split);
  if (i < 0) continue;
  cell.prepend(thumb(i, 64));
  cell.tabIndex = 0;
  cell.onclick = () => choose(i);
  cell.onkeydown = event => { if (event.key === "Enter") choose(i); };
}
atlas.decode().then(() => {
  document.styleSheets[0].insertRule(`.t{background-image:url("${atlas.src}")}`);
  wide = canvas.clientWidth; high = canvas.clientHeight;
  show();
  addEventListener("resize", fit);
  document.body.dataset.ready = "yes";
});
