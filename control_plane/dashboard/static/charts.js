// An endpoint's charts: history from the roll-ups, and what comes live. Without uPlot's wheel they are numbers only.
import { el } from "./view.js";

const MOST = 1500;
const ms = (value) => (value >= 1 ? `${value.toFixed(1)} s` : `${value < 0.01 ? (value * 1000).toFixed(1) : Math.round(value * 1000)} ms`);
const plain = (value) => (value >= 10 || Number.isInteger(value) ? Math.round(value).toLocaleString() : value.toFixed(1));
const percent = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;

const CHARTS = [
  { title: "Time to first token", series: [["p50", "ttft_p50"], ["p95", "ttft_p95"]], unit: ms },
  { title: "Time per token", series: [["", "tpot"]], unit: ms },
  { title: "Tokens a second", series: [["", "tokens_per_s"]], unit: plain },
  { title: "Requests", series: [["in flight", "in_flight"], ["held", "held"]], unit: plain, whole: true },
  { title: "KV cache in use", series: [["", "kv_usage"]], unit: percent, top: 1 },
  { title: "Prefix hit rate", series: [["", "hit_ratio"]], unit: percent, top: 1 },
  { title: "Replicas", series: [["ready", "replicas"], ["wanted", "desired"]], unit: plain, whole: true },
  { title: "Cost an hour", series: [["", "cost_per_hour"]], unit: (value) => value.toFixed(2) },
];
const FIELDS = CHARTS.flatMap((chart) => chart.series.map(([, field]) => field));
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const INKS = ["--link", "--hot"];

let loading;
function library() {
  loading ??= new Promise((done) => {
    document.head.append(el("link", { rel: "stylesheet", href: "/static/uplot.css" }),
      el("script", { src: "/static/uplot.js", onload: () => done(window.uPlot ?? null), onerror: () => done(null) }));
  });
  return loading;
}

export class Board {
  constructor() {
    this.node = el("div", { class: "charts" });
    this.columns = Object.fromEntries(["at", ...FIELDS].map((field) => [field, []]));
    this.span = 900;
    this.charts = CHARTS.map((chart) => {
      const value = el("span", { class: "value" }, "–");
      const box = el("div", { class: "plot", role: "img", "aria-label": chart.title });
      this.node.append(el("figure", {}, el("figcaption", {}, el("span", {}, chart.title), value), box));
      return { ...chart, value, box, plot: null };
    });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.build = this.build.bind(this);
    this.scheme.addEventListener("change", this.build);
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.node);
    library().then((uPlot) => { this.uPlot = uPlot; this.build(); });
  }

  stop() {
    this.sizes.disconnect();
    this.scheme.removeEventListener("change", this.build);
    for (const chart of this.charts) chart.plot?.destroy();
  }

  // Points of the last `span` seconds, oldest first, instead of those that there are.
  set(points, span) {
    this.span = span;
    const kept = points.slice(-MOST);
    this.columns.at = kept.map((point) => point.at);
    for (const field of FIELDS) this.columns[field] = kept.map((point) => point[field] ?? null);
    this.draw();
  }

  push(point) {
    const { at } = this.columns;
    if (at.length && point.at <= at[at.length - 1]) return;
    at.push(point.at);
    for (const field of FIELDS) this.columns[field].push(point[field] ?? null);
    let old = Math.max(0, at.length - MOST);
    while (old < at.length && at[old] < point.at - this.span) old++;
    if (old) for (const column of Object.values(this.columns)) column.splice(0, old);
    this.draw();
  }

  build() {
    if (!this.uPlot || !this.node.isConnected) return;
    const style = getComputedStyle(document.documentElement);
    const shade = document.createElement("span");
    document.body.append(shade);
    const ink = (name) => { shade.style.color = `var(${name})`; return getComputedStyle(shade).color; };
    const soft = ink("--soft"), line = ink("--line"), inks = INKS.map(ink);
    shade.remove();
    const axis = { stroke: soft, font: `11px ${style.fontFamily || "sans-serif"}`, ticks: { show: false }, grid: { stroke: line, width: 1 } };
    for (const chart of this.charts) {
      chart.plot?.destroy();
      chart.plot = new this.uPlot({
        width: Math.max(120, chart.box.clientWidth), height: 130, legend: { show: false }, padding: [8, 8, 0, 0],
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: { x: { range: () => [this.end() - this.span, this.end()] },
          y: { range: (_, low, high) => [0, chart.top ?? Math.max(high ?? 0, chart.whole ? 1 : 1e-3) * 1.1] } },
        axes: [{ ...axis, space: 70, size: 26, values: (_, ticks) => ticks.map((tick) => this.clock(tick)) }, { ...(chart.whole ? { incrs: WHOLE } : {}), ...axis, size: 52, space: 32, values: (_, ticks) => ticks.map((tick) => chart.unit(tick)) }],
        series: [{}, ...chart.series.map((_, index) => ({ stroke: inks[index], width: 1.75, points: { size: 4 } }))],
        hooks: { setCursor: [({ cursor }) => this.tell(chart, cursor.idx ?? null)] },
      }, this.data(chart), chart.box);
    }
    this.draw();
  }

  resize() {
    if (this.uPlot && !this.charts[0].plot) this.build();
    for (const { plot, box } of this.charts) {
      if (plot && Math.abs(plot.width - box.clientWidth) > 1 && box.clientWidth > 0) plot.setSize({ width: box.clientWidth, height: 130 });
    }
  }

  draw() {
    for (const chart of this.charts) {
      chart.plot?.setData(this.data(chart));
      if (!chart.plot || chart.plot.cursor.left < 0) this.tell(chart, null);
    }
  }

  clock(seconds) {
    const at = new Date(seconds * 1000);
    return this.span > 86400 ? at.toLocaleDateString([], { month: "short", day: "numeric" }) : at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
  }

  data(chart) { return [this.columns.at, ...chart.series.map(([, field]) => this.columns[field])]; }
  end() { return this.columns.at.length ? this.columns.at[this.columns.at.length - 1] : Date.now() / 1000; }

  // The caption says the values at a point: the newest ones that there are, or those under the pointer.
  tell(chart, index) {
    const said = chart.series.map(([name, field]) => {
      const column = this.columns[field];
      const value = index === null ? column[column.length - 1] : column[index];
      return `${name} ${value == null ? "–" : chart.unit(value)}`.trim();
    }).join(" · ");
    chart.value.textContent = index === null ? said : `${said} at ${new Date(this.columns.at[index] * 1000).toLocaleTimeString()}`;
    if (index === null) chart.box.setAttribute("aria-label", `${chart.title}: ${said}`);
  }
}
