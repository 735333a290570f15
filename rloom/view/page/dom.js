// Elements by function. Text becomes text nodes and is never parsed as markup: answers may contain anything.

// The name of SVG's namespace looks like an address; pages contain none, so it is read from the <svg> of index.html.
const SVG = document.querySelector("svg").namespaceURI;

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "vars") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

export function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
}

export function replace(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

// Sets text only where it differs, so that a selection in unchanged text survives an update.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function link(href, text, attributes = {}) {
  return el("a", { href, ...attributes }, text);
}

export function button(text, onClick, attributes = {}) {
  return el("button", { type: "button", on: { click: onClick }, ...attributes }, text);
}

let number = 0;
export function field(text, control, attributes = {}) {
  control.id ||= `field-${(number += 1)}`;
  return el("div", { class: "field", ...attributes }, el("label", { for: control.id }, text), control);
}

export function select(options, chosen, onChange, attributes = {}) {
  const items = options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text));
  return el("select", { on: { change: (event) => onChange(event.target.value) }, ...attributes }, items);
}

// Calls `action` once, `wait` milliseconds after the last of many calls: for typing in a filter.
export function debounced(action, wait = 200) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), wait);
  };
}

export function emptyState(title, ...lines) {
  return el("div", { class: "empty" }, el("h2", {}, title), lines.map((line) => el("p", {}, line)));
}
