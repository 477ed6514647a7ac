// What can be asked of an endpoint, in the words of the command line.
import { call } from "./api.js";
import { duration, form, spoken } from "./form.js";
import { say } from "./view.js";

const LIMITS = [
  { name: "requests_per_minute", label: "Requests a minute", kind: "number", nullable: true, hint: "empty: no limit" },
  { name: "tokens_per_minute", label: "Tokens a minute", kind: "number", nullable: true },
  { name: "concurrency", label: "Requests at once", kind: "number", nullable: true },
  { name: "monthly_budget", label: "Budget of a month", kind: "number", nullable: true },
];

const WARMTH = ["cold", "ember", "asleep", "hot", "auto"];

export function creation(regions, done) {
  const fields = [
    { name: "name", label: "Name", required: true, hint: "lower-case letters, digits and hyphens" },
    { name: "region", label: "Region", options: regions, hint: "the only one that it ever runs in" },
    { name: "model", label: "Model", required: true, value: "smollm2-135m-instruct", hint: "a name, a path or an address" },
    { name: "gpu", label: "Accelerator", hint: "empty: the CPU" },
    { name: "min_replicas", label: "Replicas at least", kind: "number", hint: "0: it sleeps when nobody calls" },
    { name: "max_replicas", label: "Replicas at most", kind: "number" },
    { name: "idle_timeout", label: "Sleeps after", kind: "duration", value: "5m" },
    { name: "max_wait", label: "Holds a request for", kind: "duration", value: "60s" },
    { name: "warmth", label: "Warmth", options: WARMTH, value: "cold", hint: "what is kept while nobody calls; auto: what the line above needs" },
    { name: "tenant", label: "Tenant", value: "default" },
    ...LIMITS,
  ];
  return form(fields, "Create", async (spec) => {
    if (spec.warmth === "hot") spec.min_replicas ??= 1;
    if (spec.min_replicas) spec.max_replicas ??= spec.min_replicas;
    if (spec.gpu) spec.gpus = 1;
    await call("POST", "/endpoints", spec);
    say(`${spec.name} is being created`);
    done(spec.name);
  });
}

export function change(e) {
  const fields = [
    { name: "model", label: "Model", value: e.model, required: true },
    { name: "gpu", label: "Accelerator", value: e.gpu, nullable: true, hint: "empty: the CPU" },
    { name: "min_replicas", label: "Replicas at least", kind: "number", value: e.min_replicas, required: true },
    { name: "max_replicas", label: "Replicas at most", kind: "number", value: e.max_replicas, required: true },
    { name: "idle_timeout", label: "Sleeps after", kind: "duration", value: spoken(e.idle_timeout), required: true },
    { name: "max_wait", label: "Holds a request for", kind: "duration", value: spoken(e.max_wait), required: true },
    { name: "retention", label: "Keeps records for", kind: "duration", value: spoken(e.retention), required: true },
    { name: "warmth", label: "Warmth", options: WARMTH, value: e.warmth_by_wait ? "auto" : e.warmth },
    { name: "target", label: "Requests at once for a replica", kind: "number", value: e.target, required: true },
    { name: "ttft_slo", label: "First token within", kind: "duration", value: e.ttft_slo && spoken(e.ttft_slo), nullable: true },
    { name: "canary", label: "Try it on so many % of requests", kind: "number", value: e.canary, nullable: true, hint: "for a change of the model; empty: on all" },
    ...LIMITS.map((limit) => ({ ...limit, value: e.limits[limit.name] })),
  ];
  const before = Object.fromEntries(fields.map(({ name, kind, value }) => [name, value == null ? null : kind === "duration" ? duration(value) : value]));
  return form(fields, "Save", async (values) => {
    const changes = Object.fromEntries(Object.entries(values).filter(([name, value]) => value !== before[name]));
    if (!Object.keys(changes).length) return say("Nothing was changed.");
    await call("PATCH", `/endpoints/${encodeURIComponent(e.name)}`, changes);
    return say(`${e.name} is being changed`);
  });
}
