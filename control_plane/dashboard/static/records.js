// What was used, which certificates there are, who changed what.
import { call, list } from "./api.js";
import { button, count, el, say, table, when } from "./view.js";

export async function usage() {
  const [used, cost] = await Promise.all([list("/usage"), list("/cost?limit=1000")]);
  return [
    el("h2", {}, "Usage"),
    table([["Endpoint", (u) => u.endpoint], ["Tenant", (u) => u.tenant], ["Requests", (u) => count(u.requests), "number"],
      ["Tokens in", (u) => count(u.prompt_tokens), "number"], ["out", (u) => count(u.completion_tokens), "number"],
      ["cached", (u) => count(u.cached_tokens), "number"], ["wasted", (u) => count(u.wasted_tokens), "number"],
      ["TTFT, ms", (u) => count(u.mean_ttft_ms), "number"]], used, "Nothing was used yet.", "Usage"),
    el("h3", {}, "Cost"),
    table([["Endpoint", (c) => (c.deleted_at ? `${c.endpoint}, deleted ${when(c.deleted_at)}` : c.endpoint)], ["Region", (c) => c.region], ["Accelerator", (c) => c.accelerator],
      ["Replica hours", (c) => c.replica_hours.toFixed(3), "number"], ["idle", (c) => c.idle_hours?.toFixed(3), "number"],
      ["Replicas", (c) => c.replicas_cost.toFixed(4), "number"], ["Tokens", (c) => c.tokens_price.toFixed(4), "number"],
      ["", (c) => c.currency]], cost, "Nothing cost anything yet.", "Cost"),
  ];
}

export async function certs() {
  const rows = await list("/certs");
  const renew = (name) => call("POST", "/certs/rotate", name ? { name } : {});
  return [
    el("h2", {}, "Certificates"),
    el("div", { class: "row" }, button("Renew the gateways' now", () => renew(), { done: "Renewed. Open connections stay." })),
    table([["Name", (c) => c.name], ["Names", (c) => c.names.join(", ")], ["Until", (c) => when(c.not_after)],
      ["Days left", (c) => c.days_left.toFixed(1), "number"], ["Serial", (c) => el("code", {}, c.serial)],
      ["", (c) => button("Rotate", () => (c.name !== "ca" || confirm("Follow the authority by a new one? Clients need the new ca.pem before the next time.")) && renew(c.name),
        { done: `${c.name} is renewed. Open connections stay.`, label: `Rotate ${c.name}` })]], rows, "None.", "Certificates"),
  ];
}

export async function audit() {
  const rows = await list("/audit?limit=200");
  return [
    el("h2", {}, "Audit"),
    el("div", { class: "row" }, button("Verify the chain", async () => {
      const found = await call("GET", "/audit/verify");
      say(found.intact ? `${found.records} records, intact.` : "The chain is broken.");
    })),
    table([["At", (a) => when(a.at)], ["Who", (a) => a.actor], ["What", (a) => a.action], ["Target", (a) => a.target]],
      rows, "Nothing was changed yet.", "Audit"),
  ];
}
