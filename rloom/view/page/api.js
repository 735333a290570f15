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

// A list becomes one parameter for each of its values.
async function ask(method, path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  const text = query.toString();
  let response;
  try {
    response = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { method, credentials: "same-origin" });
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

export function get(path, parameters = {}) {
  return ask("GET", path, parameters);
}

// Only labels of runs are written.
export function post(path, parameters = {}) {
  return ask("POST", path, parameters);
}
