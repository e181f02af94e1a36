// Runs before the first paint, so that the page does not flash in the wrong theme.
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("specmamba-theme");
  } catch {
    // storage is switched off: the theme of the system is used
  }
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

  /** Set the class "dark" from the chosen theme, or from the theme of the system. */
  const update = () => root.classList.toggle("dark", (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark");
  system.addEventListener("change", update);
  new MutationObserver(update).observe(root, { attributeFilter: ["data-theme"] });
  update();
})();
