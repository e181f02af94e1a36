// Markdown as blocks of data: paragraphs, headings, lists, quotations, tables, rules and code. What it does not know is
// text. It reads answers while they are streamed, so a block of code may lack its end.
import { parseInline } from "./inline.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)| *$)/;
const DELIMITERS = /^[ \t]*\|?[ \t:|-]*-[ \t:|-]*$/;

const indentOf = (line) => line.length - line.trimStart().length;
const isBlank = (line) => line.trim() === "";
const isRule = (line) => indentOf(line) < 4 && /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replaceAll(/[ \t]/g, ""));
const isFence = (line) => {
  const [, marks = "", info = ""] = FENCE.exec(line) ?? [];
  return marks !== "" && !(marks[0] === "`" && info.includes("`"));
};
const isTable = (lines, at) =>
  lines[at].includes("|") && lines[at + 1]?.includes("|") && DELIMITERS.test(lines[at + 1]) && cells(lines[at]).length === cells(lines[at + 1]).length;
const beginsBlock = (lines, at) =>
  isFence(lines[at]) || HEADING.test(lines[at]) || QUOTE.test(lines[at]) || ITEM.test(lines[at]) || isRule(lines[at]) || isTable(lines, at);

/** The cells of a row, split at bars that are not escaped. */
function cells(line) {
  const found = [""];
  const inner = line.trim().replace(/^\|/, "");
  for (let at = 0; at < inner.length; at += 1) {
    if (inner[at] === "\\" && inner[at + 1] === "|") found[found.length - 1] += inner[(at += 1)];
    else if (inner[at] === "|") found.push("");
    else found[found.length - 1] += inner[at];
  }
  if (found.length > 1 && isBlank(found.at(-1))) found.pop();
  return found.map((cell) => cell.trim());
}

/** Readers of one kind of block each: from the line at which it begins, the block and the line behind its end. */
function readFence(lines, at) {
  const [, marks, info] = FENCE.exec(lines[at]);
  const indent = indentOf(lines[at]);
  let end = at + 1;
  const isEnd = (line) => indentOf(line) < 4 && line.trim().startsWith(marks) && line.trim().replaceAll(marks[0], "") === "";
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return [{ kind: "code", language: info.trim().split(/\s/)[0].slice(0, 40), text: code.join("\n") }, end + 1];
}

function readHeading(lines, at) {
  const [mark, hashes] = HEADING.exec(lines[at]);
  const text = lines[at].slice(mark.length).trim();
  const bare = text.replace(/#+$/, "");
  const title = bare === "" || /\s$/.test(bare) ? bare.trim() : text;
  return [{ kind: "heading", level: hashes.length, parts: parseInline(title) }, at + 1];
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", blocks: parseLines(inner, depth + 1) }, end];
}

/** The lines of an item that follow its first one: those that are indented, and those that go on with a paragraph. */
function endOfItem(lines, at, indent) {
  let end = at + 1;
  let kept = end;
  while (end < lines.length) {
    const line = lines[end];
    const belongs = indentOf(line) >= indent || (kept === end && !beginsBlock(lines, end));
    if (!isBlank(line) && !belongs) break;
    end += 1;
    if (!isBlank(line)) kept = end;
  }
  return kept;
}

function readList(lines, at, depth) {
  const isOrdered = (mark) => /\d/.test(mark);
  const [, , first] = ITEM.exec(lines[at]);
  const list = { kind: "list", ordered: isOrdered(first), start: isOrdered(first) ? Number.parseInt(first, 10) : 1, items: [] };
  let next = at;
  while (next < lines.length) {
    const [, before, mark, after = " "] = ITEM.exec(lines[next]) ?? [];
    if (mark === undefined || isOrdered(mark) !== list.ordered || isRule(lines[next])) break;
    const indent = before.length + mark.length + after.length;
    const end = endOfItem(lines, next, indent);
    const inner = lines.slice(next, end).map((line, index) => line.slice(index ? Math.min(indent, indentOf(line)) : indent));
    list.items.push(parseLines(inner, depth + 1));
    next = end;
    let ahead = next;
    while (ahead < lines.length && isBlank(lines[ahead])) ahead += 1;
    if (ahead < lines.length && ITEM.test(lines[ahead])) next = ahead;
  }
  return [list, next];
}

function readTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && lines[end].includes("|")) end += 1;
  const row = (line) => cells(line).map(parseInline);
  return [{ kind: "table", head: row(lines[at]), rows: lines.slice(at + 2, end).map(row) }, end];
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines, end)) end += 1;
  return [{ kind: "paragraph", parts: parseInline(lines.slice(at, end).join("\n")) }, end];
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (isFence(line)) return readFence(lines, at);
  if (HEADING.test(line)) return readHeading(lines, at);
  if (isRule(line)) return [{ kind: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  return isTable(lines, at) ? readTable(lines, at) : readParagraph(lines, at);
}

function parseLines(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = readBlock(lines, at, depth);
    blocks.push(block);
    at = end;
  }
  return blocks;
}

/** The blocks of a text. */
export const parseMarkdown = (text) => parseLines(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
