// What the page keeps in the browser between visits. Storage may be switched off or full: then nothing is kept.

/** The value stored under a name; null when there is none, or when it cannot be read. */
export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

/** Stores a value as JSON. Returns whether there was room for it. */
export function save(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** The stored object with the fields of ``fallback`` only, each of the same type as there. */
export function loadLike(name, fallback) {
  const stored = load(name);
  const fits = ([field, value]) => typeof stored?.[field] === typeof value;
  return Object.fromEntries(Object.entries(fallback).map((entry) => [entry[0], fits(entry) ? stored[entry[0]] : entry[1]]));
}
