// The course of the page: sign in, choose a page, follow the news.
import { Problem, call, frames, keep, onSignOut, open, signIn, signOut, signedIn } from "./api.js";
import { alerts } from "./alerts.js";
import { endpoint } from "./endpoint.js";
import { fleet } from "./fleet.js";
import { keys } from "./keys.js";
import { audit, certs, usage } from "./records.js";
import { el, say, show } from "./view.js";

const PAGES = { "": fleet, keys, usage, alerts, certs, audit };
const TOGETHER_MS = 250, LOOK_AGAIN_MS = 10000;
let current = null, drawing = 0, stream = null, pending = null;

// ---- pages: a plain one is drawn anew by news, an endpoint's refreshes itself ----

const plain = (make) => ({ async draw() { return { nodes: await make() }; }, redraws: true });
const route = () => {
  const [, page = "", name] = location.hash.split("/");
  return page === "endpoint" && name ? { page, draw: () => endpoint(decodeURIComponent(name)) } : { page, ...plain(PAGES[page] || fleet) };
};

// `polite`: whoever has begun to do something on the page meanwhile is left alone.
async function draw({ quietly = false, polite = false } = {}) {
  const { page, draw: make, redraws } = route();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${page === "endpoint" ? "" : page}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const mine = ++drawing;
  try {
    const made = await make();
    if (mine !== drawing || !signedIn() || (polite && busy())) return made.stop?.();
    current?.stop?.();
    const before = current?.live;
    current = { ...made, redraws };
    show(made.nodes);
    if (stream && before !== made.live) follow();
  } catch (error) {
    if (mine !== drawing || !signedIn() || quietly) return undefined;
    if (error instanceof Problem && error.status === 404) show(el("h2", {}, "Not here"), el("p", {}, error.message));
    say(error.message);
  }
  return undefined;
}

// What somebody stands on, has opened or must still read is not drawn over by news.
const busy = () => document.querySelector("main :focus, main details[open], main pre:not([hidden])") !== null;

function news() {
  clearTimeout(pending);
  pending = setTimeout(() => {
    if (!current || !signedIn()) return;
    if (current.redraws) { if (!busy()) draw({ quietly: true, polite: true }); } else current.refresh().catch(() => {});
  }, TOGETHER_MS);
}

async function follow() {
  stream?.abort();
  const mine = stream = new AbortController();
  const light = document.getElementById("live");
  for (let pause = 1; signedIn(); pause = Math.min(pause * 2, 30)) {
    try {
      const query = current?.live ? `?live=${encodeURIComponent(current.live)}` : "";
      const answer = await open("GET", `/events${query}`, undefined, mine.signal);
      light.textContent = "live";
      pause = 1;
      for await (const { event, data } of frames(answer)) {
        if (event === "live") current?.onLive?.(JSON.parse(data));
        else if (data) news();
      }
    } catch {
      if (mine.signal.aborted) return;
    }
    light.textContent = "reconnecting …";
    await new Promise((done) => setTimeout(done, pause * 1000));
    if (mine.signal.aborted) return;
    news();
  }
}

// ---- sign-in ----

function door() {
  const token = el("input", { id: "token", name: "token", type: "password", required: true, autocomplete: "off" });
  const form = el("form", { onsubmit: async (event) => {
    event.preventDefault();
    signIn(token.value.trim());
    try { await call("GET", "/status"); keep(); await enter(); } catch (error) { say(error.message); }
  } },
    el("div", { class: "field" }, el("label", { for: "token" }, "Admin token"), token,
      el("small", { class: "note" }, "It stands in profile.toml in the platform's home folder.")),
    el("div", { class: "row" }, el("button", { class: "main" }, "Sign in")));
  show(el("h2", {}, "Sign in"), form);
  token.focus();
}

async function enter() {
  document.getElementById("nav").hidden = document.getElementById("leave").hidden = false;
  await draw();
  if (signedIn()) follow();
}

onSignOut(() => {
  stream?.abort();
  current?.stop?.();
  stream = current = null;
  document.getElementById("live").textContent = "";
  document.getElementById("nav").hidden = document.getElementById("leave").hidden = true;
  door();
});
// alerts and sums change without an event
setInterval(() => { if (!document.hidden) news(); }, LOOK_AGAIN_MS);
document.addEventListener("ingle-changed", async () => {
  if (!current?.redraws) return current?.refresh().catch(() => {});
  if (document.querySelector("main pre:not([hidden])")) return undefined;
  await draw({ quietly: true });
  return document.getElementById("main").focus({ preventScroll: true });
});
document.getElementById("leave").addEventListener("click", signOut);
window.addEventListener("hashchange", async () => {
  if (!signedIn()) return;
  scrollTo(0, 0);
  document.getElementById("main").focus({ preventScroll: true });
  await draw();
});
if (signedIn()) enter(); else door();
