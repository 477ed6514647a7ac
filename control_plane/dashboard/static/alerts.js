// What fires, what nobody is told of for a while, and what alerts there are.
import { call, list } from "./api.js";
import { form } from "./form.js";
import { button, el, say, table, when } from "./view.js";

// An installation whose controller doesn't watch itself has none to show.
async function found(path) {
  try { return await list(path); } catch (error) { if (error.status === 404) return []; throw error; }
}

const place = (alert) => [alert.labels.endpoint, alert.labels.region].filter(Boolean).join(" in ");

// Short notes on what fires now, of one endpoint or of all.
export async function firing(endpoint) {
  const rows = (await found("/alerts?state=firing")).filter((alert) => !alert.silenced && (!endpoint || alert.labels.endpoint === endpoint));
  return rows.slice(0, 50).map((alert) => el("p", { class: `alarm ${alert.severity}`, role: "status" },
    el("strong", {}, alert.name), ` ${alert.summary} `, el("small", {}, `since ${when(alert.since)}`)));
}

const FIELDS = [
  { name: "alert", label: "Alert", hint: "empty: whichever" },
  { name: "endpoint", label: "Endpoint", hint: "empty: all" },
  { name: "seconds", label: "For", kind: "duration", value: "1h", required: true },
  { name: "comment", label: "Why" },
];

const hush = (matchers, seconds, comment) => call("POST", "/alerts/silences", { matchers, seconds, comment });

export async function alerts() {
  const [open, over, silences, rules] = await Promise.all([
    found("/alerts"), found("/alerts?state=resolved"), found("/alerts/silences"), found("/alerts/rules")]);
  const columns = [["Alert", (a) => a.name], ["Severity", (a) => el("span", { class: `state ${a.severity}` }, a.severity)],
    ["State", (a) => (a.silenced ? `${a.state}, silenced` : a.state)], ["What", (a) => a.summary], ["Where", place], ["Since", (a) => when(a.since)]];
  return [
    el("h2", {}, "Alerts"),
    table([...columns, ["", (a) => button("Silence", async () => {
      await hush({ alert: a.name, ...(a.labels.endpoint ? { endpoint: a.labels.endpoint } : {}) }, 3600, "");
    }, { done: "Nobody is told of it for an hour.", label: `Silence ${a.name} for an hour` })]], open, "Nothing fires.", "Alerts"),
    el("h3", {}, "Silences"),
    table([["Of", (s) => Object.entries(s.matchers).map((pair) => pair.join("=")).join(", ")], ["Why", (s) => s.comment], ["By", (s) => s.created_by],
      ["Until", (s) => when(s.ends_at)], ["", (s) => button("End", () => call("DELETE", `/alerts/silences/${s.id}`), { done: "The silence has ended.", label: `End silence ${s.id}` })]],
      silences, "None: everybody is told of everything.", "Silences"),
    el("details", {}, el("summary", {}, "Silence something"), form(FIELDS, "Silence", async ({ alert, endpoint, seconds, comment = "" }) => {
      await hush({ ...(alert ? { alert } : {}), ...(endpoint ? { endpoint } : {}) }, seconds, comment);
      say("It is silenced.");
    })),
    el("h3", {}, "Over, in the last week"),
    table([...columns, ["Resolved", (a) => when(a.resolved_at)]], over.slice(0, 100), "None.", "Resolved alerts"),
    el("details", {}, el("summary", {}, `All ${rules.length} alerts`),
      table([["Alert", (r) => r.name], ["Severity", (r) => r.severity], ["Means", (r) => r.summary], ["For", (r) => `${r.for_seconds} s`, "number"],
        ["Runbook", (r) => el("code", {}, r.runbook)]], rules, "None.", "All alerts")),
  ];
}
