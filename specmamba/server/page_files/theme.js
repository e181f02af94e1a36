// Runs before anything is painted, so that a chosen theme does not flash in.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("specmamba-theme");
  } catch {
    // storage is switched off: the system's theme it is
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
