// A classic script in <head>: it sets the theme before the first paint, so that a dark page does not flash white.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("rloom.theme");
  } catch {
    // storage is switched off: the theme of the system is used
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
