// API keys: made, rotated, revoked. A secret is shown once.
import { call, list } from "./api.js";
import { form } from "./form.js";
import { button, el, say, table, when } from "./view.js";

const FIELDS = [
  { name: "name", label: "Name", required: true, value: "web" },
  { name: "tenant", label: "Tenant", value: "default" },
  { name: "endpoints", label: "For endpoints", kind: "list", hint: "empty: all of the tenant's" },
  { name: "networks", label: "From networks", kind: "list", hint: "such as 10.0.0.0/8; empty: anywhere" },
  { name: "expires_in", label: "Expires after", kind: "duration", hint: "such as 30d; empty: never" },
  { name: "requests_per_minute", label: "Requests a minute", kind: "number" },
  { name: "tokens_per_minute", label: "Tokens a minute", kind: "number" },
  { name: "monthly_budget", label: "Budget of a month", kind: "number" },
];

export async function keys() {
  const rows = await list("/keys?limit=1000");
  const shown = el("pre", { hidden: true, tabindex: "-1", role: "status" });
  const reveal = (key) => {
    shown.hidden = false;
    shown.textContent = `${key.secret}\n\nShown this once. Keep it now.`;
    shown.focus();
  };
  const grace = el("select", { id: "grace" }, [["at once", 0], ["an hour later", 3600], ["a day later", 86400]].map(([text, value]) =>
    el("option", { value, selected: value === 3600 }, text)));
  return [
    el("h2", {}, "Keys"), form(FIELDS, "Create a key", async (spec) => reveal(await call("POST", "/keys", spec))), shown,
    el("h3", {}, "All keys"), el("label", { class: "inline", for: "grace" }, "A rotated key ends ", grace),
    table([["Key", (k) => el("code", {}, k.prefix)], ["Name", (k) => k.name], ["Tenant", (k) => k.tenant], ["State", (k) => k.state],
      ["For", (k) => (k.endpoints || ["all"]).join(", ")], ["Expires", (k) => when(k.expires_at)], ["Last used", (k) => when(k.last_used_at)],
      ["", (k) => k.state !== "active" || k.rotated_to ? "" : el("span", { class: "row tight" },
        button("Rotate", async () => {
          reveal(await call("POST", `/keys/${k.id}/rotate`, { grace_seconds: Number(grace.value) }));
          say(grace.value === "0" ? "The old one has ended." : "Both work for a while.");
        }, { label: `Rotate ${k.name}` }),
        button("Revoke", () => (confirm(`Revoke ${k.name}? It stops at once.`) ? call("DELETE", `/keys/${k.id}`) : false),
          { done: `${k.name} is revoked`, kind: "danger", label: `Revoke ${k.name}` }))]],
      rows, "No keys yet.", "All keys"),
  ];
}
