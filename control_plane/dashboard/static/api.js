// The admin API, with the operator's token. A refusal is a Problem, which knows the field that it is about.
const KEY = "ingle-admin-token";
let token = sessionStorage.getItem(KEY) || "";
let turnedAway = () => {};

export class Problem extends Error {
  constructor(status, { message, param, code } = {}) {
    super(message || `HTTP ${status}`);
    Object.assign(this, { status, param, code });
  }
}

export const signedIn = () => token !== "";
export const onSignOut = (what) => { turnedAway = what; };
export function signIn(text) { token = text; }
export function keep() { sessionStorage.setItem(KEY, token); }
export function signOut() {
  token = "";
  sessionStorage.removeItem(KEY);
  turnedAway();
}

export async function open(method, path, body, signal) {
  const answer = await fetch(`/admin/v1${path}`, {
    method,
    signal,
    headers: { Authorization: `Bearer ${token}`, ...(body ? { "Content-Type": "application/json" } : {}) },
    body: body ? JSON.stringify(body) : undefined,
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  if (answer.status === 401 && told.error?.code === "invalid_admin_token") {
    signOut();
    throw new Problem(401, { message: "That token is not known here." });
  }
  throw new Problem(answer.status, told.error);
}

export async function call(method, path, body) {
  const text = await (await open(method, path, body)).text();
  return text ? JSON.parse(text) : {};
}

export const list = async (path) => (await call("GET", path)).data;

// Server-sent events of a reply, as { event, data } with data as text; comments are passed as { comment }.
export async function* frames(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let step = await reader.read(); !step.done; step = await reader.read()) {
    const parts = (rest + step.value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/);
      const value = (name) => lines.filter((line) => line.startsWith(name)).map((line) => line.slice(name.length).trimStart()).join("\n");
      const data = value("data:");
      yield data ? { event: value("event:") || "message", data } : { comment: value(":") };
    }
  }
}
