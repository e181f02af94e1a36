// Shows Markdown. Every text becomes a text node, and every element and attribute is named here: an answer can contain
// no markup of its own.
import { CopyButton } from "../clipboard.js";
import { html, useMemo } from "../ui.js";
import { parseMarkdown } from "./markdown.js";

const MAX_CHARACTERS = 200_000; // longer texts are shown as they are
const EMPHASIS = { strong: "strong", emphasis: "em", strike: "s" };
const FIRST_HEADING = 2; // below the titles of the page

function Parts({ parts }) {
  return parts.map((part, index) => {
    if (typeof part === "string") return part;
    if (part.kind === "code") return html`<code key=${index}>${part.text}</code>`;
    const inner = html`<${Parts} parts=${part.parts} />`;
    if (part.kind === "link") {
      return html`<a key=${index} href=${part.href} title=${part.href} target="_blank" rel="noopener noreferrer nofollow">${inner}</a>`;
    }
    return html`<${EMPHASIS[part.kind]} key=${index}>${inner}<//>`;
  });
}

function Code({ language, text }) {
  return html`<div class="code">
    <div class="code-head"><span>${language || "code"}</span><${CopyButton} text=${text} label="Copy code" /></div>
    <pre tabindex="0" role="group" aria-label="Code, scrollable"><code>${text}</code></pre>
  </div>`;
}

function List({ ordered, start, items }) {
  const rows = items.map((blocks, index) => html`<li key=${index}><${Blocks} blocks=${blocks} /></li>`);
  return ordered ? html`<ol start=${start}>${rows}</ol>` : html`<ul>${rows}</ul>`;
}

function Table({ head, rows }) {
  const cell = (name) => (parts, index) => html`<${name} key=${index}><${Parts} parts=${parts} /><//>`;
  return html`<div class="table" tabindex="0" role="group" aria-label="Table, scrollable"><table>
    <thead><tr>${head.map(cell("th"))}</tr></thead>
    <tbody>${rows.map((row, index) => html`<tr key=${index}>${row.map(cell("td"))}</tr>`)}</tbody>
  </table></div>`;
}

function Block({ block }) {
  switch (block.kind) {
    case "code":
      return html`<${Code} ...${block} />`;
    case "heading":
      return html`<${`h${Math.min(block.level + FIRST_HEADING, 6)}`}><${Parts} parts=${block.parts} /><//>`;
    case "quote":
      return html`<blockquote><${Blocks} blocks=${block.blocks} /></blockquote>`;
    case "list":
      return html`<${List} ...${block} />`;
    case "table":
      return html`<${Table} ...${block} />`;
    case "rule":
      return html`<hr />`;
    default:
      return html`<p><${Parts} parts=${block.parts} /></p>`;
  }
}

function Blocks({ blocks }) {
  return blocks.map((block, index) => html`<${Block} key=${index} block=${block} />`);
}

/** A text as Markdown. */
export function Prose({ text }) {
  const blocks = useMemo(() => (text.length > MAX_CHARACTERS ? null : parseMarkdown(text)), [text]);
  return html`<div class="prose">${blocks ? html`<${Blocks} blocks=${blocks} />` : html`<p>${text}</p>`}</div>`;
}
