// A conversation with an endpoint through its gateway, with what it took.
import { Problem, frames, open } from "./api.js";
import { el } from "./view.js";

const MOST_TURNS = 40;

export function chat(name) {
  const turns = [];
  let running = null;
  const log = el("div", { class: "talk", role: "log", "aria-live": "polite", "aria-label": "Conversation", tabindex: "0" });
  const text = el("textarea", { id: "prompt", rows: "2", required: true, placeholder: "Ask something" });
  const most = el("input", { id: "most", type: "number", min: "1", max: "4096", value: "200" });
  const heat = el("input", { id: "heat", type: "number", min: "0", max: "2", step: "0.1", value: "0.7" });
  const times = el("p", { class: "times", role: "status" });
  const send = el("button", { class: "main" }, "Send");
  const stop = el("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const clear = el("button", { type: "button", onclick: () => { running?.abort(); turns.length = 0; log.replaceChildren(); times.textContent = ""; } }, "Clear");
  const form = el("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); ask(); } },
    el("label", { for: "prompt", class: "hidden" }, "Message"), text,
    el("div", { class: "row" }, send, stop, clear,
      el("label", { for: "most", class: "inline" }, "Tokens at most", most), el("label", { for: "heat", class: "inline" }, "Temperature", heat)));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
  });

  function bubble(role, content) {
    const node = el("p", { class: `turn ${role}` }, content);
    log.append(node);
    log.scrollTop = log.scrollHeight;
    return node;
  }

  async function ask() {
    const question = text.value.trim();
    if (!question || running) return;
    text.value = "";
    turns.push({ role: "user", content: question });
    while (turns.length > MOST_TURNS) { turns.shift(); log.firstChild.remove(); }
    bubble("user", question);
    const node = bubble("assistant", "");
    node.setAttribute("aria-busy", "true");
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    const reply = { text: "", tokens: 0, began: performance.now(), first: null };
    try {
      await follow(reply, node);
      times.textContent = timing(reply);
    } catch (error) {
      const stopped = error.name === "AbortError";
      node.append(el("em", {}, stopped ? " [stopped]" : ` ${error.message}`));
      times.textContent = stopped ? `Stopped. ${timing(reply)}` : "";
    }
    node.removeAttribute("aria-busy");
    if (reply.text) turns.push({ role: "assistant", content: reply.text }); else turns.pop();
    running = null;
    send.disabled = false;
    stop.disabled = true;
  }

  async function follow(reply, node) {
    times.textContent = "Waiting for the first token …";
    const body = { messages: turns, max_tokens: Number(most.value) || 200, temperature: Number(heat.value) };
    const answer = await open("POST", `/endpoints/${encodeURIComponent(name)}/chat`, body, running.signal);
    const words = document.createTextNode("");
    node.append(words);
    for await (const { data, comment } of frames(answer)) {
      if (comment !== undefined) {
        if (reply.first === null) times.textContent = `Held while a replica starts: ${seconds(reply)} s`;
        continue;
      }
      if (data === "[DONE]") return;
      const frame = JSON.parse(data);
      if (frame.error) throw new Problem(502, frame.error);
      const piece = frame.choices?.[0]?.delta?.content;
      if (piece) {
        reply.first ??= performance.now();
        reply.tokens += 1;
        reply.text += piece;
        words.data = reply.text;
        log.scrollTop = log.scrollHeight;
        times.textContent = timing(reply);
      }
      if (frame.usage) reply.tokens = frame.usage.completion_tokens;
    }
    throw new Problem(502, { message: "the reply broke off" });
  }

  const seconds = (reply) => ((performance.now() - reply.began) / 1000).toFixed(0);
  function timing(reply) {
    if (reply.first === null) return "No token came.";
    const took = (performance.now() - reply.first) / 1000;
    const speed = reply.tokens > 1 && took > 0 ? ` · ${((reply.tokens - 1) / took).toFixed(0)} tokens/s` : "";
    return `First token after ${Math.round(reply.first - reply.began)} ms · ${reply.tokens} tokens${speed}`;
  }

  return { node: el("div", { class: "chat" }, log, times, form), stop: () => running?.abort() };
}
