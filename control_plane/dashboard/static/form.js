// Forms whose values the server judges: what it objects to is said at the field.
import { Problem } from "./api.js";
import { changed, el, say } from "./view.js";

const SECONDS = { ms: 0.001, s: 1, m: 60, h: 3600, d: 86400 };

// 90, 90s, 5m, 2h, 30d, as the command line takes them
export function duration(text, param) {
  const match = /^(\d+(?:\.\d+)?)(ms|s|m|h|d)?$/.exec(text.trim());
  if (!match) throw new Problem(422, { message: `${text} isn't a duration: write 30s, 5m, 2h or 7d`, param });
  return Number(match[1]) * SECONDS[match[2] || "s"];
}

export function spoken(seconds) {
  for (const unit of ["d", "h", "m"]) if (seconds >= SECONDS[unit] && seconds % SECONDS[unit] === 0) return `${seconds / SECONDS[unit]}${unit}`;
  return `${seconds}s`;
}

const READ = {
  text: (text) => text,
  number: (text) => Number(text),
  duration,
  list: (text) => text.split(",").map((part) => part.trim()).filter(Boolean),
  flag: (text) => text === "yes",
};

// fields: [{ name, label, kind, value, options, required, hint, nullable }]; send(values, given) is awaited.
// Fields left empty are left out, or null where they had a value and may be null.
export function form(fields, verb, send) {
  const id = `f${Math.random().toString(36).slice(2, 8)}`;
  const inputs = new Map();
  const rows = fields.map((item) => {
    const attributes = { id: `${id}-${item.name}`, name: item.name, autocomplete: "off", required: Boolean(item.required),
      "aria-describedby": `${id}-${item.name}-note`, ...(item.kind === "number" ? { inputmode: "decimal" } : {}), type: item.secret ? "password" : null };
    const input = item.options
      ? el("select", attributes, item.options.map((option) => el("option", { value: option, selected: option === item.value }, option)))
      : el("input", { ...attributes, value: item.value ?? "" });
    inputs.set(item.name, input);
    return el("div", { class: "field" }, el("label", { for: attributes.id }, item.label), input,
      el("small", { id: `${id}-${item.name}-note`, class: "note", "data-hint": item.hint || "" }, item.hint || ""));
  });
  const button = el("button", { class: "main" }, verb);
  const node = el("form", { novalidate: true, onsubmit: async (event) => {
    event.preventDefault();
    for (const input of inputs.values()) mark(input, null);
    button.disabled = true;
    try { await send(read(fields, inputs)); changed(); } catch (error) { object(inputs, error); }
    button.disabled = false;
  } }, rows, el("div", { class: "row" }, button));
  return node;
}

function read(fields, inputs) {
  const values = {};
  for (const { name, kind, required, nullable, value: before } of fields) {
    const text = inputs.get(name).value;
    if (text.trim() === "") {
      if (required) throw new Problem(422, { message: "is needed", param: name });
      if (nullable && before != null && before !== "") values[name] = null;
    } else {
      const value = READ[kind || "text"](text, name);
      if (Number.isNaN(value)) throw new Problem(422, { message: `${text} isn't a number`, param: name });
      values[name] = value;
    }
  }
  return values;
}

function object(inputs, error) {
  const input = inputs.get((error.param || "").split(".")[0]);
  if (!input) return say(error.message);
  mark(input, error.message);
  input.focus();
}

function mark(input, message) {
  const note = input.parentElement.querySelector(".note");
  if (message) input.setAttribute("aria-invalid", "true"); else input.removeAttribute("aria-invalid");
  note.classList.toggle("wrong", Boolean(message));
  note.setAttribute("role", message ? "alert" : "note");
  note.textContent = message || note.dataset.hint;
}
