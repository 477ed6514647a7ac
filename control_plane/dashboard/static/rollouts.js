// What an endpoint was asked to be, and what each rung of warmth takes and costs.
import { call } from "./api.js";
import { button, el, state, table, when } from "./view.js";

const ms = (value) => (value == null ? "–" : `${Math.round(value)} ms`);

export function rungs(ladder) {
  return table([
    ["Rung", (r) => el("span", {}, r.rung, r.chosen ? " ✓" : "")],
    ["An hour", (r) => `${r.price_per_hour.toFixed(4)} ${r.currency}`, "number"],
    ["First token", (r) => ms(r.first_token_ms), "number"], ["p95", (r) => ms(r.p95_ms), "number"],
    ["Measured", (r) => (r.measured ? `${r.measured} times` : r.first_token_ms == null ? "–" : "estimated")],
    ["Of it, ms", (r) => Object.entries(r.phases).map(([phase, took]) => `${phase.replace("_", " ")} ${Math.round(took)}`).join(", ")],
  ], ladder, "Nothing was measured yet.", "Warmth");
}

export function generations(endpoint, asked, path) {
  const canary = endpoint.canary && endpoint.stable_generation < endpoint.generation;
  const back = (generation) => async () => {
    if (!confirm(`Ask for generation ${generation} again?`)) return false;
    await call("POST", `${path}/rollback`, { to: generation });
    return true;
  };
  return [
    canary ? el("div", { class: "row" }, button("Roll the canary out", () => call("POST", `${path}/promote`), { done: "It takes all requests" })) : null,
    table([
      ["Generation", (g) => g.generation, "number"], ["At", (g) => when(g.at)], ["Outcome", (g) => state(g.outcome)],
      ["Changed", (g) => g.changed.join(", ") || "created"], ["Why", (g) => g.reason],
      ["", (g) => (g.generation < endpoint.generation ? button("Back to it", back(g.generation), { done: `Generation ${g.generation} is asked for again` }) : "")],
    ], asked, "None.", "Generations"),
  ];
}
