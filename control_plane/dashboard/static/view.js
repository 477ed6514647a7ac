// Making elements: text is always set as text, never as markup.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

export function show(...children) {
  document.getElementById("main").replaceChildren(...children.flat().filter((child) => child != null));
}

let fading;
export function say(text) {
  const box = document.getElementById("say");
  box.textContent = text;
  clearTimeout(fading);
  fading = setTimeout(() => { box.textContent = ""; }, 6000);
}

export const when = (text) => (text ? new Date(text).toLocaleString() : "–");
export const state = (name) => el("span", { class: `state ${name}` }, name);

// columns: [heading, row => content, "number" or nothing]
export function table(columns, rows, empty) {
  if (!rows.length) return el("p", {}, empty);
  const cell = (tag, content, kind) => el(tag, { class: kind, scope: tag === "th" ? "col" : null }, content ?? "–");
  return el("div", { class: "scroll" }, el("table", {},
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

export function field(label, attributes, options) {
  const input = options
    ? el("select", attributes, options.map((option) => el("option", { value: option }, option)))
    : el("input", attributes);
  return el("label", {}, label, input);
}
