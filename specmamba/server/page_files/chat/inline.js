// Inline Markdown: emphasis, code and links. The result is data: texts, and objects with a kind. Nothing here makes
// elements, and the time is linear in the length of the text.
const MAX_DEPTH = 6;
const MAX_LABEL = 500;
const MAX_ADDRESS = 2000;
const NEXT = /\\|`+|\*\*|~~|[*_]|!?\[|<https?:|https?:\/\//g;
const LINK = new RegExp(
  `!?\\[([^\\[\\]\\n]{1,${MAX_LABEL}})\\]` + // its label,
    `\\(((?:[^()\\s]|\\([^()\\s]{0,${MAX_ADDRESS}}\\)){1,${MAX_ADDRESS}})` + // its address,
    `(?:\\s{1,9}"[^"\\n]{0,${MAX_LABEL}}")?\\)`, // and a title, which is not shown
  "y",
);
const ANGLES = new RegExp(`<(https?:[^\\s<>]{1,${MAX_ADDRESS}})>`, "y");
const ADDRESS = new RegExp(`https?://[^\\s<>"'\`\\\\]{1,${MAX_ADDRESS}}`, "y");
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const MARKS = { "**": "strong", "~~": "strike", "*": "emphasis", _: "emphasis" };

/** The address of a link as the browser reads it; null: it is none, or not of the web. */
export function webAddress(text) {
  try {
    const { protocol, href } = new URL(text);
    return protocol === "http:" || protocol === "https:" ? href : null;
  } catch {
    return null;
  }
}

const isSpace = (text, at) => at < 0 || at >= text.length || /\s/.test(text[at]);
const isWord = (text, at) => at >= 0 && at < text.length && /[\p{L}\p{N}_]/u.test(text[at]);

/** Whether a mark can begin emphasis. Two underscores never do: they are names of Python more often than emphasis. */
function canOpen(text, at, mark) {
  const after = at + mark.length;
  if (isSpace(text, after) || text[after] === mark[0]) return mark === "**" && text[after] === "*" && !isSpace(text, after + 1);
  return mark !== "_" || !isWord(text, at - 1);
}

/** Where the emphasis that begins before ``from`` ends; -1: nowhere. */
function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at)) {
    let run = at;
    while (text[run] === mark[0]) run += 1;
    const fits = mark.length === 2 ? run - at >= 2 : run - at !== 2;
    const end = run - mark.length; // of a longer run the last ones, so that what is inside can end before
    if (fits && at > from && !isSpace(text, at - 1) && (mark !== "_" || (run - at === 1 && !isWord(text, run)))) return end;
    at = run;
  }
  return -1;
}

/** Where a code span that begins before ``from`` ends: at a run of exactly as many backticks; -1: nowhere. */
function closingTicks(text, from, size) {
  const runs = /`+/g;
  runs.lastIndex = from;
  for (let run = runs.exec(text); run; run = runs.exec(text)) if (run[0].length === size) return run.index;
  return -1;
}

function sticky(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** An address that stands in a text, without the punctuation behind it. */
function bareAddress(text, at) {
  let found = sticky(ADDRESS, text, at)?.[0] ?? "";
  while (/[.,;:!?*_~\])}]$/.test(found)) {
    if (found.endsWith(")") && found.includes("(")) break;
    found = found.slice(0, -1);
  }
  return found;
}

class Inline {
  constructor(text, depth, isLink) {
    Object.assign(this, { text, depth, isLink, parts: [], plain: 0, missing: new Set() });
  }

  parse() {
    const next = new RegExp(NEXT);
    for (let found = next.exec(this.text); found; found = next.exec(this.text)) {
      const [part, end] = this._read(found[0], found.index) ?? [null, found.index + found[0].length];
      if (part !== null) this._add(part, found.index, end);
      next.lastIndex = end;
    }
    this._add(null, this.text.length, this.text.length);
    return this.parts;
  }

  _add(part, start, end) {
    if (start > this.plain) this.parts.push(this.text.slice(this.plain, start));
    if (part !== null) this.parts.push(part);
    this.plain = end;
  }

  /** What begins here, and where it ends; undefined: nothing but text. */
  _read(mark, at) {
    if (mark === "\\") return this._escaped(at);
    if (mark[0] === "`") return this._code(mark, at);
    if (mark in MARKS) return this._emphasis(mark, at);
    return this.isLink ? undefined : this._link(mark, at);
  }

  _escaped(at) {
    const next = this.text[at + 1] ?? "";
    return PUNCTUATION.test(next) ? [next, at + 2] : undefined;
  }

  _code(ticks, at) {
    const from = at + ticks.length;
    const end = this.missing.has(ticks) ? -1 : closingTicks(this.text, from, ticks.length);
    if (end < 0) return void this.missing.add(ticks);
    const text = this.text.slice(from, end);
    const isPadded = text.startsWith(" ") && text.endsWith(" ") && text.trim();
    return [{ kind: "code", text: isPadded ? text.slice(1, -1) : text }, end + ticks.length];
  }

  _emphasis(mark, at) {
    if (this.depth >= MAX_DEPTH || this.missing.has(mark) || !canOpen(this.text, at, mark)) return undefined;
    const from = at + mark.length;
    const end = closing(this.text, from, mark);
    if (end < 0) return void this.missing.add(mark);
    const parts = new Inline(this.text.slice(from, end), this.depth + 1, this.isLink).parse();
    return [{ kind: MARKS[mark], parts }, end + mark.length];
  }

  _link(mark, at) {
    const [found, label, address] = this._target(mark, at);
    const href = webAddress(address);
    if (!found || href === null) return undefined;
    const parts = label === null ? [address] : new Inline(label, this.depth + 1, true).parse();
    return [{ kind: "link", href, parts }, at + found.length];
  }

  /** What is written, its label (null: the address itself) and its address. */
  _target(mark, at) {
    if (mark.endsWith("[")) return sticky(LINK, this.text, at) ?? ["", null, ""];
    if (mark[0] === "<") return [sticky(ANGLES, this.text, at)?.[0] ?? "", null, sticky(ANGLES, this.text, at)?.[1] ?? ""];
    const address = isWord(this.text, at - 1) ? "" : bareAddress(this.text, at);
    return [address, null, address];
  }
}

/** The parts of a text: strings, {kind: "code", text}, {kind: "link", href, parts}, and emphasis as {kind, parts}. */
export const parseInline = (text) => new Inline(text, 0, false).parse();
