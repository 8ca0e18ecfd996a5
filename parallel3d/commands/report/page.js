"use strict";
// Draws the curves of the page: data.runs (name, colour, restarts) and data.charts (a curve of each
// run, or null: s steps, t tokens, y values, low and high beside a mean, odd [s, t, "nan"]).
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 230, LEFT = 62, RIGHT = 10, TOP = 10, BOTTOM = 24;
const one = (selector) => document.querySelector(selector);
const axis = () => one("input[name=axis]:checked").value;
const isShown = (run) => one(`.shown[value="${run}"]`).checked;

function make(parent, tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return parent.appendChild(node);
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e15) return value.toExponential(2).replace("e+", "e");
  for (const [unit, name] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]])
    if (size >= unit) {
      const by = name === " k" ? 1e3 : unit;
      return +(value / by).toPrecision(4) + name;
    }
  return String(+value.toPrecision(5));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const f of [1, 2, 5]) if (f * 10 ** e >= low && f * 10 ** e <= high) found.push(f * 10 ** e);
  return found.length > 1 ? found : ticks(low, high, 4);
}

function nearest(xs, x) { // place of the value closest to x in an ascending list
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    const figure = one("#charts").appendChild(document.createElement("figure"));
    const caption = figure.appendChild(document.createElement("figcaption"));
    caption.textContent = spec.name + " ";
    caption.appendChild(document.createElement("small")).textContent = spec.unit;
    this.read = figure.appendChild(document.createElement("div"));
    this.read.className = "read";
    this.read.setAttribute("aria-live", "polite");
    this.box = figure.appendChild(document.createElement("div"));
    this.box.className = "chart";
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", `${spec.name}: arrow keys read its values`);
    this.at = null; // the step, or tokens, that is read; null: the last of each run
    this.box.addEventListener("pointermove", (event) => {
      const x = event.clientX - this.box.getBoundingClientRect().left;
      this.point(this.low + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.high - this.low));
    });
    this.box.addEventListener("pointerleave", () => this.point(null));
    this.box.addEventListener("blur", () => this.point(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  get curves() { // [run, its x, its curve] of the runs that are shown
    return this.spec.curves.map((curve, run) => [run, curve && curve[axis()], curve])
      .filter(([run, , curve]) => curve && isShown(run));
  }

  draw() {
    const x = axis(), curves = this.curves, isLog = this.spec.log && one("#log").checked;
    const keep = (y) => y !== null && (!isLog || y > 0);
    let bottom = Infinity, top = -Infinity, low = Infinity, high = -Infinity;
    for (const [, xs, curve] of curves) {
      for (const value of [...(curve.low || curve.y), ...(curve.high || curve.y)])
        if (keep(value)) { bottom = Math.min(bottom, value); top = Math.max(top, value); }
      low = Math.min(low, xs[0]); high = Math.max(high, xs[xs.length - 1]);
    }
    this.box.replaceChildren();
    this.width = this.box.clientWidth;
    const svg = make(this.box, "svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, "aria-hidden": "true" });
    if (!(low <= high)) { low = 0; high = 1; }
    if (!(bottom <= top)) { bottom = 0.1; top = 1; }
    if (low === high) { low -= 0.5; high += 0.5; }
    if (isLog) { bottom *= 0.97; top *= 1.03; } else {
      const pad = (top - bottom || Math.abs(top) || 1) * 0.05;
      bottom = bottom >= 0 && bottom < pad ? 0 : bottom - pad;
      top += pad;
    }
    this.low = low; this.high = high;
    const scale = isLog ? Math.log : (y) => y;
    this.x = (value) => LEFT + ((value - low) / (high - low)) * (this.width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((scale(value) - scale(bottom)) / (scale(top) - scale(bottom))) * (HEIGHT - TOP - BOTTOM);
    for (const tick of isLog ? logTicks(bottom, top) : ticks(bottom, top, 4)) {
      make(svg, "line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(tick), y2: this.y(tick) });
      make(svg, "text", { x: LEFT - 7, y: this.y(tick) + 4, "text-anchor": "end" }, short(tick));
    }
    const across = ticks(low, high, Math.max(2, this.width / 120)).filter((tick) => x === "t" || Number.isInteger(tick));
    for (const tick of across) {
      const text = tick === across[across.length - 1] && this.x(tick) > this.width - 40 ? "end" : "middle";
      make(svg, "line", { class: "grid", x1: this.x(tick), x2: this.x(tick), y1: TOP, y2: HEIGHT - BOTTOM });
      make(svg, "text", { x: this.x(tick), y: HEIGHT - 7, "text-anchor": text }, short(tick));
    }
    for (const [run, xs, curve] of curves) {
      const { name, colour, restarts } = data.runs[run];
      for (const restart of restarts) {
        if (restart[x] < low || restart[x] > high) continue;
        const place = this.x(restart[x]);
        const line = make(svg, "line", { class: "restart", stroke: colour, x1: place, x2: place, y1: TOP, y2: HEIGHT - BOTTOM });
        make(line, "title", {}, `${name} restarted after step ${restart.s}, ${restart.at}`);
      }
      const place = (i, y) => `${this.x(xs[i]).toFixed(1)} ${this.y(y).toFixed(1)}`;
      const numbers = curve.y.flatMap((value, i) => keep(value) ? [i] : []);
      if (curve.low) {
        const wide = numbers.filter((i) => keep(curve.low[i]));
        const edge = [...wide.map((i) => place(i, curve.high[i])), ...wide.reverse().map((i) => place(i, curve.low[i]))];
        make(svg, "polygon", { points: edge.join(" "), fill: colour, opacity: 0.22 });
      }
      const path = numbers.map((i, n) => (numbers[n - 1] === i - 1 ? "L" : "M") + place(i, curve.y[i])).join("");
      make(svg, "path", { class: "curve", stroke: colour, d: path, "data-run": name, "data-points": numbers.length });
      for (const i of numbers) // a dot where a line would not show it
        if (numbers.length <= 40 || !(keep(curve.y[i - 1] ?? null) || keep(curve.y[i + 1] ?? null)))
          make(svg, "circle", { cx: this.x(xs[i]), cy: this.y(curve.y[i]), r: 2.2, fill: colour });
      for (const [s, t, value] of curve.odd) {
        const mark = make(svg, "text", { class: "odd", x: this.x(x === "s" ? s : t), y: TOP + 10, "text-anchor": "middle", style: `fill:${colour}` }, "✕");
        make(mark, "title", {}, `${name}, step ${s}: ${value}`);
      }
    }
    this.marks = make(svg, "g");
    this.point(this.at);
  }

  point(at) { // reads the values at a place of the x axis
    this.at = at === null ? null : Math.min(Math.max(at, this.low), this.high);
    this.marks.replaceChildren();
    this.read.replaceChildren();
    const found = [];
    for (const [run, xs, curve] of this.curves) {
      const last = xs.length - 1, i = this.at === null ? last : nearest(xs, this.at);
      if (this.at !== null && this.at > xs[last] + (this.high - this.low) / 50) continue;
      found.push([run, curve, i]);
    }
    if (this.at !== null && found.length) {
      const [, first, i] = found[0], place = this.x(first[axis()][i]);
      make(this.marks, "line", { class: "cross", x1: place, x2: place, y1: TOP, y2: HEIGHT - BOTTOM });
    }
    for (const [run, curve, i] of found) {
      const { name, colour } = data.runs[run], value = curve.y[i];
      const odd = curve.odd.find(([s]) => s === curve.s[i]);
      const range = curve.low && value !== null ? ` (${short(curve.low[i])} to ${short(curve.high[i])})` : "";
      const said = odd ? odd[2] : value === null ? "none" : short(value) + (this.at === null ? "" : range);
      const dot = document.createElement("i");
      dot.className = "dot";
      dot.style.background = colour;
      const entry = this.read.appendChild(document.createElement("span"));
      entry.append(dot, `${name} ${said}`);
      if (this.at !== null && value !== null) make(this.marks, "circle", { cx: this.x(curve[axis()][i]), cy: this.y(value), r: 4, fill: colour });
    }
    if (found.length) {
      const [, curve, i] = found[0];
      const when = this.read.appendChild(document.createElement("span"));
      when.className = "muted";
      when.textContent = this.at === null ? "at the end" : `step ${curve.s[i].toLocaleString("en")} · ${short(curve.t[i])} tokens`;
    }
  }

  key(event) {
    const all = [...new Set(this.curves.flatMap(([, xs]) => xs))].sort((a, b) => a - b);
    if (!all.length) return;
    const here = this.at === null ? all.length - 1 : nearest(all, this.at);
    const by = event.shiftKey ? Math.max(1, Math.round(all.length / 20)) : 1;
    const to = { ArrowLeft: here - by, ArrowRight: here + by, Home: 0, End: all.length - 1 }[event.key];
    if (event.key === "Escape") this.point(null);
    if (to === undefined) return;
    event.preventDefault();
    this.point(all[Math.min(Math.max(to, 0), all.length - 1)]);
  }
}

const charts = data.charts.map((spec) => new Chart(spec));
const draw = () => charts.forEach((chart) => { chart.at = null; chart.draw(); });
one(".controls").addEventListener("change", draw);
new ResizeObserver(draw).observe(one("#charts"));
draw();
