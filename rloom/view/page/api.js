// Requests to the server, and whether it can be reached.

export class NotFound extends Error {}
export class Refused extends Error {} // another token: the server was started again

const listeners = new Set();
let connection = "ok"; // ok | lost | refused

export function onConnection(listener) {
  listeners.add(listener);
}

function report(state) {
  if (state === connection) return;
  connection = state;
  for (const listener of listeners) listener(state);
}

export async function get(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  let response;
  try {
    response = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { credentials: "same-origin" });
  } catch (error) {
    report("lost");
    throw error;
  }
  if (response.status === 403) {
    report("refused");
    throw new Refused();
  }
  report("ok");
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new NotFound(body.error ?? `${response.status}`);
  return body;
}
