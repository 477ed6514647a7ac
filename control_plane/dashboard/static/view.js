// Making elements: text is always set as text, never as markup.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...solid(children));
  return node;
}

const solid = (children) => children.flat(3).filter((child) => child != null && child !== false);

export function show(...children) { document.getElementById("main").replaceChildren(...solid(children)); }

// New content for a part of the page; who stood on a button or link there stands on its successor.
export function fill(node, ...children) {
  const held = node.contains(document.activeElement) ? document.activeElement.textContent : null;
  node.replaceChildren(...solid(children));
  if (held !== null) [...node.querySelectorAll("button, a")].find((one) => one.textContent === held)?.focus({ preventScroll: true });
}

let fading;
export function say(text) {
  const box = document.getElementById("say");
  box.textContent = text;
  clearTimeout(fading);
  fading = setTimeout(() => { box.textContent = ""; }, 6000);
}

// Something was changed from here: what is shown may be old.
export const changed = () => document.dispatchEvent(new Event("ingle-changed"));

// A button that does one thing at a time and says how it went.
export function button(text, what, { done, kind, label } = {}) {
  return el("button", { type: "button", class: kind, "aria-label": label, onclick: async ({ currentTarget: it }) => {
    it.disabled = true;
    try {
      if ((await what()) !== false) { if (done) say(done); changed(); }
    } catch (error) { say(error.message); }
    it.disabled = false;
  } }, text);
}

export const when = (text) => (text ? new Date(text).toLocaleString() : "–");
export const state = (name) => el("span", { class: `state ${name}` }, name);
export const count = (value) => (value == null ? null : Math.round(value).toLocaleString());
export const money = (value, currency) => `${value.toFixed(4)} ${currency}`;

// columns: [heading, row => content, "number" or nothing]
export function table(columns, rows, empty, caption) {
  if (!rows.length) return el("p", {}, empty);
  const cell = (tag, content, kind) => el(tag, { class: kind, scope: tag === "th" ? "col" : null }, content ?? "–");
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map(([name, , kind]) => cell("th", name, kind)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, columns.map(([, read, kind]) => {
      const value = read(row);
      return cell("td", value instanceof Node ? value : value == null ? "–" : String(value), kind);
    }))))));
}

export function facts(pairs) {
  return el("dl", {}, pairs.flatMap(([name, value]) => [
    el("dt", {}, name), el("dd", {}, value instanceof Node ? value : value == null ? "–" : String(value))]));
}
