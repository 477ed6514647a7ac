// One endpoint: how it is, its history, its cost, a chat with it, and all that can be changed of it.
import { call, list } from "./api.js";
import { Board } from "./charts.js";
import { chat } from "./chat.js";
import { change } from "./endpoint_forms.js";
import { firing } from "./alerts.js";
import { generations, rungs } from "./rollouts.js";
import { button, count, el, facts, fill, money, say, state, table, when } from "./view.js";

const RANGES = [["15 min", 900], ["6 h", 21600], ["Day", 86400], ["Week", 604800]];
const POINTS = 360;
const RELOAD_MS = 60000;

export async function endpoint(name) {
  const path = `/endpoints/${encodeURIComponent(name)}`;
  const parts = Object.fromEntries(["title", "buttons", "facts", "alerts", "warmth", "generations", "starts", "replicas", "events", "change"].map((part) => [part, el("div")]));
  const reason = el("p", { role: "status" });
  const board = new Board();
  const talk = chat(name);
  let span = RANGES[0][1], timer = null, generation = null;

  const ranges = el("div", { class: "row", role: "group", "aria-label": "How far back" }, RANGES.map(([text, seconds]) =>
    el("button", { type: "button", "aria-pressed": String(seconds === span), onclick: ({ currentTarget }) => {
      for (const other of ranges.children) other.setAttribute("aria-pressed", String(other === currentTarget));
      span = seconds;
      history();
    } }, text)));

  async function history() {
    clearTimeout(timer);
    const wanted = span, now = Date.now() / 1000;
    let points = [];
    try {
      points = (await list(`${path}/history?from=${Math.floor(now - span)}&to=${Math.ceil(now)}&step=${Math.max(60, Math.ceil(span / POINTS))}`)).map(point);
    } catch (error) {
      if (error.status !== 404) say(error.message);
    }
    if (wanted !== span) return;
    if (span > 900) timer = setTimeout(history, RELOAD_MS);
    board.set(span > 900 ? points : [...points.filter((one) => one.at < (live[0]?.at ?? Infinity)), ...live], span);
  }

  const live = [];
  function onLive(now) {
    live.push(now);
    if (live.length > 450) live.shift();
    if (span === 900) board.push(now);
    fill(nowNode, `${now.in_flight} in flight, ${now.held} held · ${now.running} running, ${now.waiting} waiting at replicas · ${now.cost_per_hour.toFixed(2)} ${now.currency} an hour`);
  }
  const nowNode = el("p", { class: "now" }, "");

  async function refresh() {
    const today = new Date().setUTCHours(0, 0, 0, 0) / 1000;
    const [e, events, starts, usage, cost, alerts, ladder, asked] = await Promise.all([
      call("GET", path), list(`${path}/events?limit=100`), list(`${path}/cold-starts?limit=8`),
      list(`/usage?endpoint=${encodeURIComponent(name)}`), list(`/cost?since=${today}&endpoint=${encodeURIComponent(name)}`), firing(name),
      list(`${path}/warmth`), list(`${path}/generations?limit=10`)]);
    const used = usage[0], price = cost.find((c) => !c.deleted_at);
    if (reason.textContent !== e.reason.message) reason.textContent = e.reason.message;
    fill(parts.title, el("h2", {}, name, " ", state(e.state)));
    fill(parts.buttons, el("div", { class: "row" },
        button("Wake", () => call("POST", `${path}/wake`), { done: `${name} wakes` }),
        button("Sleep", () => call("POST", `${path}/sleep`), { done: `${name} goes to sleep` }),
        button(e.paused ? "Resume" : "Pause", () => call("PATCH", path, { paused: !e.paused }), { done: e.paused ? `${name} serves again` : `${name} is paused` }),
        button("Delete", async () => {
          if (!confirm(`Delete ${name}? What is in flight ends first.`)) return false;
          await call("DELETE", path);
          location.hash = "#/";
          return true;
        }, { done: `${name} is being deleted`, kind: "danger" })));
    fill(parts.facts, facts([
      ["URL", el("code", {}, e.url)], ["Region", e.region], ["Model", e.model], ["Tenant", e.tenant],
      ["Warmth", e.warmth_by_wait ? `${e.warmth}, by its wait` : e.warmth], ["Generation", `${e.observed_generation} of ${e.generation}`],
      ["Canary", e.canary && e.stable_generation < e.generation ? `${e.canary} % of requests` : null],
      ["Replicas", `${e.min_replicas} to ${e.max_replicas}, ${e.desired_replicas} wanted`],
      ["Sleeps after", `${e.idle_timeout} s`], ["Holds a request", `${e.max_wait} s`],
      ["Requests, 30 days", used && count(used.requests)], ["Tokens in, out", used && `${count(used.prompt_tokens)}, ${count(used.completion_tokens)}`],
      ["Mean time to first token", used && used.mean_ttft_ms && `${Math.round(used.mean_ttft_ms)} ms`],
      ["Cost today (UTC)", price && money(price.replicas_cost, price.currency) + (price.warmth_cost === null ? "" : `, of it ${money(price.warmth_cost, price.currency)} idle`)],
      ["Replica hours today", price && price.replica_hours.toFixed(3)],
    ]));
    fill(parts.alerts, alerts.length ? [el("h3", {}, "Alerts"), alerts] : null);
    fill(parts.warmth, el("h3", {}, "Warmth"), rungs(ladder));
    fill(parts.generations, el("h3", {}, "Generations"), generations(e, asked, path));
    fill(parts.starts, el("h3", {}, "Cold starts"), coldStarts(starts));
    fill(parts.replicas, el("h3", {}, "Replicas"),
      table([["Id", (r) => r.id], ["State", (r) => state(r.state === "resting" ? r.rung : r.state)], ["Generation", (r) => r.generation, "number"],
        ["Address", (r) => r.address], ["Since", (r) => when(r.ready_at || r.created_at)], ["Reason", (r) => r.reason.message]],
        e.replicas, "None run: the next request starts one.", "Replicas"));
    fill(parts.events, el("h3", {}, "Events"),
      table([["At", (v) => when(v.at)], ["What", (v) => v.kind], ["State", (v) => v.state && state(v.state)], ["Why", (v) => v.message]],
        events.slice().reverse(), "Nothing has happened yet.", "Events"));
    // a form that somebody is filling in stays as it is
    if (generation !== e.generation && !parts.change.contains(document.activeElement)) {
      generation = e.generation;
      const open = parts.change.querySelector("details")?.open;
      fill(parts.change, el("details", { open: Boolean(open) }, el("summary", {}, "Change this endpoint"), change(e)));
    }
  }

  await refresh();
  history();
  return {
    nodes: [parts.title, reason, parts.buttons, parts.alerts, nowNode, ranges, board.node,
      el("div", { class: "halves" },
        el("section", { "aria-label": "Try it" }, el("h3", {}, "Try it"), talk.node),
        el("section", { "aria-label": "Facts" }, el("h3", {}, "Facts"), parts.facts, parts.change)),
      parts.warmth, parts.generations, parts.starts, parts.replicas, parts.events],
    live: name, onLive, refresh,
    stop() { clearTimeout(timer); board.stop(); talk.stop(); },
  };
}

// A point of the history in the words of what comes live, at the middle of the while that it tells of.
function point(row) {
  return { ...row, at: row.at + row.step / 2, cost_per_hour: row.cost == null ? null : (row.cost / row.step) * 3600 };
}

const PHASES = ["start", "import", "open", "load", "restore", "text"];

function coldStarts(starts) {
  if (!starts.length) return el("p", {}, "It has not started yet.");
  const longest = Math.max(...starts.map((start) => start.total_ms));
  return el("div", { class: "starts" }, starts.map((start) => {
    const known = PHASES.filter((phase) => start.phases[phase] > 0);
    const named = known.map((phase) => [phase.replace("_", " "), start.phases[phase]]);
    const rest = start.total_ms - named.reduce((sum, [, ms]) => sum + ms, 0);
    if (rest > 0) named.push(["other", rest]);
    const words = named.map(([phase, ms]) => `${phase} ${Math.round(ms)}`).join(", ");
    const bar = el("div", { class: "bar", role: "img", "aria-label": words, title: `${words} ms` }, named.map(([, ms], index) => {
      const part = el("i", { class: `part${index % 5}` });
      part.style.width = `${(100 * ms) / longest}%`;
      return part;
    }));
    return el("div", { class: "start" }, el("span", {}, when(start.at)), el("strong", {}, `${Math.round(start.total_ms)} ms`), bar, el("small", {}, words));
  }));
}
