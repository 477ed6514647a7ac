// All endpoints by region, with how warm and how busy they are.
import { list } from "./api.js";
import { creation } from "./endpoint_forms.js";
import { firing } from "./alerts.js";
import { el, state } from "./view.js";

export async function fleet() {
  const [endpoints, regions, live, alerts] = await Promise.all([list("/endpoints"), list("/regions"), list("/live"), firing()]);
  const now = new Map(live.map((one) => [one.endpoint, one]));
  const form = creation(regions.map((region) => region.name), (name) => { location.hash = `#/endpoint/${name}`; });
  return [
    el("h2", {}, "Fleet"),
    alerts.length ? [el("h3", {}, "Alerts"), alerts] : null,
    regions.map((region) => el("section", { "aria-label": `Region ${region.name}` },
      el("h3", {}, `${region.name} `, el("small", {}, [region.jurisdiction, region.provider + (region.reachable ? "" : " (not reachable)"), `gateway ${region.gateway}`].filter(Boolean).join(", "))),
      el("div", { class: "grid" }, endpoints.filter((e) => e.region === region.name).map((e) => card(e, now.get(e.name)))),
      endpoints.some((e) => e.region === region.name) ? null : el("p", {}, "No endpoints here."))),
    el("h3", {}, "Create an endpoint"), form,
  ];
}

function card(e, now) {
  return el("a", { class: `card ${e.state}`, href: `#/endpoint/${e.name}` },
    el("strong", {}, e.name), state(e.state), el("small", {}, e.model),
    el("small", {}, `${e.replicas.filter((r) => r.state === "ready").length} of ${e.max_replicas} replicas · ${e.warmth}`),
    now ? el("small", {}, `${now.in_flight} in flight, ${now.held} held · ${(now.tokens_per_s ?? 0).toFixed(0)} tokens/s`) : null);
}
