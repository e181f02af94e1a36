// Shared by all parts of the page: templates, hooks, and the formatting of values.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
export const html = htm.bind(h);

const NONE = "–";

export const number = (value, digits = 0) =>
  value == null || !Number.isFinite(value)
    ? NONE
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const percent = (value, digits = 0) => (value == null ? NONE : `${number(100 * value, digits)} %`);

/** A ratio as what it adds: 1.38 is "+38 %". */
export const change = (ratio) =>
  ratio == null || !Number.isFinite(ratio)
    ? NONE
    : `${(100 * (ratio - 1)).toLocaleString("en", { maximumFractionDigits: 0, signDisplay: "exceptZero" })} %`;

export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return NONE;
  if (seconds < 0.00995) return `${number(1000 * seconds, 1)} ms`;
  return seconds < 0.9995 ? `${number(1000 * seconds)} ms` : `${number(seconds, 2)} s`;
}

/** A size in bytes, with three digits. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value > 0 ? Math.min(Math.floor(Math.log2(value) / 10), units.length - 1) : 0;
  const shown = value / 1024 ** power;
  return `${number(shown, power && shown < 99.95 ? 1 : 0)} ${units[power]}`;
}

export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Text with its invisible characters made visible. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");

/** The number of colours for depths; greater depths have the last colour. */
export const MAX_COLOUR = 6;
export const depthClass = (depth) => `d${Math.min(depth, MAX_COLOUR)}`;
export const depthColour = (depth) => cssValue(`--d${Math.min(depth, MAX_COLOUR)}`);
export const cssValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A name that is used once, for what must not meet what others made. */
export const randomName = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("");

/** Scrolls to an element whose beginning is out of sight, or so low that little of it is seen. */
export function reveal(element) {
  const { top } = element.getBoundingClientRect();
  if (top >= 0 && top <= 0.6 * window.innerHeight) return;
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ block: "start", behavior: isStill ? "auto" : "smooth" });
}
