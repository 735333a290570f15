// Choices of a page that belong to its address (`#/run/0/step/3?sort=mean`): a link or the back button restores them.

export class Query {
  constructor(parameters, defaults) {
    this.defaults = defaults;
    this.values = { ...defaults };
    for (const [name, value] of parameters) if (name in defaults) this.values[name] = value;
  }

  set(changes) {
    Object.assign(this.values, changes);
    const path = location.hash.split("?")[0];
    const text = this.text();
    history.replaceState(null, "", text ? `${path}?${text}` : path);
  }

  text() {
    const changed = Object.entries(this.values).filter(([name, value]) => String(value) !== String(this.defaults[name]));
    return new URLSearchParams(changed).toString();
  }
}
