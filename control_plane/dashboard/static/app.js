import { el, facts, field, say, show, state, table, when } from "./view.js";

const KEY = "ingle-admin-token";
let token = sessionStorage.getItem(KEY) || "";
let stream = null;

async function call(method, path, body) {
  const answer = await fetch(`/admin/v1${path}`, {
    method,
    headers: { Authorization: `Bearer ${token}`, ...(body ? { "Content-Type": "application/json" } : {}) },
    body: body ? JSON.stringify(body) : undefined,
  });
  const text = await answer.text();
  const data = text ? JSON.parse(text) : {};
  if (answer.status === 401) { leave(); throw new Error("That token is not known here."); }
  if (!answer.ok) throw new Error(data.error ? data.error.message : `HTTP ${answer.status}`);
  return data;
}
const list = async (path) => (await call("GET", path)).data;

async function act(button, what, done) {
  button.disabled = true;
  try { await what(); if (done) say(done); await draw(); } catch (error) { say(error.message); }
  button.disabled = false;
}

// ---- pages ----

async function fleet() {
  const [endpoints, regions] = await Promise.all([list("/endpoints"), list("/regions")]);
  return [
    el("h2", {}, "Fleet"),
    regions.map((region) => el("section", { "aria-label": `Region ${region.name}` },
      el("h3", {}, `${region.name} `, el("small", {}, `${region.provider}, gateway ${region.gateway}`)),
      el("div", { class: "grid" }, endpoints.filter((e) => e.region === region.name).map((e) =>
        el("a", { class: `card ${e.state}`, href: `#/endpoint/${e.name}` },
          el("strong", {}, e.name), state(e.state), el("small", {}, e.model),
          el("small", {}, `${e.replicas.filter((r) => r.state === "ready").length} of ${e.max_replicas} replicas · ${e.warmth}`)))),
      endpoints.some((e) => e.region === region.name) ? null : el("p", {}, "No endpoints here."))),
    el("h3", {}, "Create an endpoint"), creation(regions),
  ];
}

function creation(regions) {
  const form = el("form", { onsubmit: async (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(form));
    await act(form.querySelector("button"), () => call("POST", "/endpoints", {
      name: values.name, region: values.region, model: values.model,
      max_replicas: Number(values.max_replicas), idle_timeout: Number(values.idle_timeout) * 60,
    }), `${values.name} is being created`);
  } },
    field("Name", { name: "name", required: true, pattern: "[a-z0-9]([a-z0-9\\-]{0,61}[a-z0-9])?", autocomplete: "off",
      title: "lower-case letters, digits and hyphens" }),
    field("Region", { name: "region" }, regions.map((region) => region.name)),
    field("Model", { name: "model", required: true, value: "smollm2-135m-instruct" }),
    field("Replicas at most", { name: "max_replicas", type: "number", min: 1, value: 1 }),
    field("Sleeps after, minutes", { name: "idle_timeout", type: "number", min: 0.1, step: "any", value: 5 }),
    el("button", {}, "Create"));
  return form;
}

async function endpoint(name) {
  const path = `/endpoints/${encodeURIComponent(name)}`;
  const [e, events, usage, cost] = await Promise.all([
    call("GET", path), list(`${path}/events?limit=200`), list("/usage"), list("/cost")]);
  const used = usage.find((row) => row.endpoint === name), price = cost.find((row) => row.endpoint === name);
  const button = (text, what, done, kind) => el("button", { class: kind, onclick: (event) => act(event.target, what, done) }, text);
  return [
    el("h2", {}, name, " ", state(e.state)),
    el("p", {}, e.reason.message),
    el("div", { class: "row" },
      button("Wake", () => call("POST", `${path}/wake`), `${name} wakes`),
      button("Sleep", () => call("POST", `${path}/sleep`), `${name} goes to sleep`),
      button("Delete", async () => {
        if (!confirm(`Delete ${name}? What is in flight ends first.`)) return;
        await call("DELETE", path);
        location.hash = "#/";
      }, "", "danger")),
    facts([
      ["URL", el("code", {}, e.url)], ["Region", e.region], ["Model", e.model], ["Tenant", e.tenant],
      ["Generation", `${e.observed_generation} of ${e.generation}`],
      ["Replicas", `${e.min_replicas} to ${e.max_replicas}, ${e.desired_replicas} wanted`],
      ["Sleeps after", `${e.idle_timeout} s`], ["Holds a request", `${e.max_wait} s`],
      ["Last cold start", e.cold_start_ms == null ? null : `${Math.round(e.cold_start_ms)} ms`],
      ["Requests", used && used.requests], ["Tokens in, out", used && `${used.prompt_tokens}, ${used.completion_tokens}`],
      ["Mean time to first token", used && used.mean_ttft_ms && `${Math.round(used.mean_ttft_ms)} ms`],
      ["Cost so far", price && `${(price.replicas_cost + price.warmth_cost).toFixed(4)} ${price.currency}, ${price.replica_hours.toFixed(3)} replica hours`],
    ]),
    el("h3", {}, "Replicas"),
    table([["Id", (r) => r.id], ["State", (r) => state(r.state)], ["Generation", (r) => r.generation, "number"],
      ["Address", (r) => r.address], ["Since", (r) => when(r.ready_at || r.created_at)], ["Reason", (r) => r.reason.message]],
      e.replicas, "None run: the next request starts one."),
    el("h3", {}, "Events"),
    table([["At", (v) => when(v.at)], ["What", (v) => v.kind], ["State", (v) => v.state && state(v.state)], ["Why", (v) => v.message]],
      events.slice().reverse(), "Nothing has happened yet."),
  ];
}

async function keys() {
  const rows = await list("/keys");
  const shown = el("pre", { hidden: true });
  const reveal = (key) => { shown.hidden = false; shown.textContent = `${key.secret}\n\nShown this once. Keep it now.`; };
  const form = el("form", { onsubmit: async (event) => {
    event.preventDefault();
    try { reveal(await call("POST", "/keys", { name: new FormData(form).get("name") })); } catch (error) { say(error.message); }
  } }, field("Name", { name: "name", required: true, value: "web" }), el("button", {}, "Create a key"));
  return [
    el("h2", {}, "Keys"), form, shown, el("h3", {}, "All keys"),
    table([["Key", (k) => el("code", {}, k.prefix)], ["Name", (k) => k.name], ["Tenant", (k) => k.tenant], ["State", (k) => k.state],
      ["Expires", (k) => when(k.expires_at)], ["Last used", (k) => when(k.last_used_at)],
      ["", (k) => k.state !== "active" ? "" : el("span", {},
        el("button", { onclick: async (event) => {
          event.target.disabled = true;
          try { reveal(await call("POST", `/keys/${k.id}/rotate`, { grace_seconds: 3600 })); say("Both work for an hour."); }
          catch (error) { say(error.message); }
        } }, "Rotate"), " ",
        el("button", { class: "danger", onclick: (event) => confirm(`Revoke ${k.name}? It stops at once.`)
          && act(event.target, () => call("DELETE", `/keys/${k.id}`), `${k.name} is revoked`) }, "Revoke"))]],
      rows, "No keys yet."),
  ];
}

async function usage() {
  const [used, cost] = await Promise.all([list("/usage"), list("/cost")]);
  const number = (value) => value == null ? null : Math.round(value).toLocaleString();
  return [
    el("h2", {}, "Usage"),
    table([["Endpoint", (u) => u.endpoint], ["Tenant", (u) => u.tenant], ["Requests", (u) => number(u.requests), "number"],
      ["Tokens in", (u) => number(u.prompt_tokens), "number"], ["out", (u) => number(u.completion_tokens), "number"],
      ["cached", (u) => number(u.cached_tokens), "number"], ["wasted", (u) => number(u.wasted_tokens), "number"],
      ["TTFT, ms", (u) => number(u.mean_ttft_ms), "number"]], used, "Nothing was used yet."),
    el("h3", {}, "Cost"),
    table([["Endpoint", (c) => c.endpoint], ["Region", (c) => c.region], ["Accelerator", (c) => c.accelerator],
      ["Replica hours", (c) => c.replica_hours.toFixed(3), "number"], ["idle", (c) => c.idle_hours.toFixed(3), "number"],
      ["Replicas", (c) => c.replicas_cost.toFixed(4), "number"], ["Tokens", (c) => c.tokens_price.toFixed(4), "number"],
      ["", (c) => c.currency]], cost, "Nothing cost anything yet."),
  ];
}

async function certs() {
  const rows = await list("/certs");
  return [
    el("h2", {}, "Certificates"),
    el("div", { class: "row" }, el("button", { onclick: (event) =>
      act(event.target, () => call("POST", "/certs/rotate", {}), "Renewed. Open connections stay.") }, "Renew now")),
    table([["Name", (c) => c.name], ["Names", (c) => c.names.join(", ")], ["Until", (c) => when(c.not_after)],
      ["Days left", (c) => c.days_left.toFixed(1), "number"], ["Serial", (c) => el("code", {}, c.serial)]], rows, "None."),
  ];
}

async function audit() {
  const rows = await list("/audit?limit=200");
  return [
    el("h2", {}, "Audit"),
    el("div", { class: "row" }, el("button", { onclick: async (event) => {
      event.target.disabled = true;
      try { const found = await call("GET", "/audit/verify"); say(found.intact ? `${found.records} records, intact.` : "The chain is broken."); }
      catch (error) { say(error.message); }
      event.target.disabled = false;
    } }, "Verify the chain")),
    table([["At", (a) => when(a.at)], ["Who", (a) => a.actor], ["What", (a) => a.action], ["Target", (a) => a.target]],
      rows.slice().reverse(), "Nothing was changed yet."),
  ];
}

function signIn() {
  const form = el("form", { onsubmit: async (event) => {
    event.preventDefault();
    token = new FormData(form).get("token").trim();
    try { await call("GET", "/status"); sessionStorage.setItem(KEY, token); await enter(); }
    catch (error) { say(error.message); }
  } },
    field("Admin token", { name: "token", type: "password", required: true, autocomplete: "off" }),
    el("button", {}, "Sign in"),
    el("small", {}, "It stands in profile.toml in the platform's home folder."));
  show(el("h2", {}, "Sign in"), form);
  form.querySelector("input").focus();
}

// ---- course ----

const PAGES = { "": fleet, keys, usage, certs, audit };
let drawing = 0;

async function draw(quietly) {
  const [, page = "", name] = location.hash.split("/");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${page}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const mine = ++drawing;
  try {
    const content = page === "endpoint" ? await endpoint(decodeURIComponent(name)) : await (PAGES[page] || fleet)();
    if (mine === drawing && token) show(...content.flat());
  } catch (error) {
    if (token && !quietly) say(error.message);
  }
}

// An open form or a shown secret is not drawn over by news.
const busy = () => document.querySelector("form :focus, pre:not([hidden])") !== null;

async function follow() {
  stream = new AbortController();
  const live = document.getElementById("live");
  for (let pause = 1; token; pause = Math.min(pause * 2, 30)) {
    try {
      const answer = await fetch("/admin/v1/events", { headers: { Authorization: `Bearer ${token}` }, signal: stream.signal });
      if (!answer.ok) throw new Error(String(answer.status));
      live.textContent = "live";
      pause = 1;
      const reader = answer.body.getReader();
      const text = new TextDecoder();
      for (let step = await reader.read(); !step.done; step = await reader.read()) {
        if (text.decode(step.value, { stream: true }).includes("data:") && !busy()) draw(true);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
    }
    live.textContent = "reconnecting …";
    await new Promise((done) => setTimeout(done, pause * 1000));
  }
}

async function enter() {
  document.getElementById("nav").hidden = document.getElementById("leave").hidden = false;
  await draw();
  follow();
}

function leave() {
  token = "";
  sessionStorage.removeItem(KEY);
  if (stream) stream.abort();
  document.getElementById("live").textContent = "";
  document.getElementById("nav").hidden = document.getElementById("leave").hidden = true;
  signIn();
}

document.getElementById("leave").addEventListener("click", leave);
window.addEventListener("hashchange", () => { if (token) { draw(); document.getElementById("main").focus({ preventScroll: true }); scrollTo(0, 0); } });
if (token) enter(); else signIn();
