// Choices that the browser remembers: theme, language, smoothing, what colours the tokens.

export function remembered(name, otherwise) {
  try {
    return localStorage.getItem(`rloom.${name}`) ?? otherwise;
  } catch {
    return otherwise; // storage is switched off
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`rloom.${name}`, value);
  } catch {
    // the choice then holds until the page is closed
  }
}

export const THEMES = ["system", "light", "dark"];

export function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

export function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  remember("theme", name);
}
