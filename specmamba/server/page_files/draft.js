// The draft of a step as a tree: the drafted tokens, the accepted ones, and the bonus token of the model.
import { depthClass, html, number, useEffect, useState, visible } from "./ui.js";

const WIDTH = 84;
const HEIGHT = 30;
const GAP_X = 26;
const GAP_Y = 10;
const MAX_CHARACTERS = 9;

const shorten = (text) => (text.length > MAX_CHARACTERS ? `${text.slice(0, MAX_CHARACTERS - 1)}…` : text);

/** Place nodes by column (their depth) and row: leaves below each other, parents in the middle of their children. */
function layout({ nodes, parents, path, bonus }) {
  const accepted = new Set(path);
  const placed = nodes.map((token, index) => ({ token, index, parent: parents[index], kind: accepted.has(index) ? "yes" : "no" }));
  placed.push({ token: bonus, index: nodes.length, parent: path.at(-1), kind: "bonus" });
  const children = placed.map((node) => placed.filter((other) => other.parent === node.index));
  let numRows = 0;
  const place = (node, depth) => {
    node.depth = depth;
    const below = children[node.index];
    below.forEach((child) => place(child, depth + 1));
    node.row = below.length ? (below[0].row + below.at(-1).row) / 2 : numRows++;
  };
  place(placed[0], 0);
  return { placed, numRows, numColumns: 1 + Math.max(...placed.map((node) => node.depth)) };
}

const x = (node) => 2 + node.depth * (WIDTH + GAP_X);
const y = (node) => 2 + node.row * (HEIGHT + GAP_Y);

function Edge({ from, to }) {
  const [left, right] = [x(from) + WIDTH, x(to)];
  const [top, bottom] = [y(from) + HEIGHT / 2, y(to) + HEIGHT / 2];
  const middle = (left + right) / 2;
  return html`<path class="edge ${to.kind}" d=${`M${left},${top}C${middle},${top} ${middle},${bottom} ${right},${bottom}`} />`;
}

const ROLES = { yes: "accepted", no: "not accepted", bonus: "the model's own token" };

function Node({ node }) {
  const role = node.depth === 0 ? "the root, decided in the step before" : ROLES[node.kind];
  const text = visible(node.token.text) || `id ${node.token.id}`;
  const colour = node.kind === "yes" && node.depth ? depthClass(node.depth) : "d0";
  return html`<g class="node ${node.kind} ${colour}" transform=${`translate(${x(node)},${y(node)})`}>
    <title>${`${text}, id ${node.token.id}: ${role}`}</title>
    <rect width=${WIDTH} height=${HEIGHT} rx="8" />
    <text x=${WIDTH / 2} y=${HEIGHT / 2 + 4} text-anchor="middle">${shorten(text)}</text>
  </g>`;
}

function Picture({ draft }) {
  const { placed, numRows, numColumns } = layout(draft);
  const width = 4 + numColumns * WIDTH + (numColumns - 1) * GAP_X;
  const height = 4 + numRows * HEIGHT + (numRows - 1) * GAP_Y;
  const words = draft.path.slice(1).map((index) => visible(draft.nodes[index].text));
  const label = `A draft of ${draft.nodes.length - 1} tokens, ${words.length} accepted: ${words.join(" ")}`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Draft tree, scrollable">
    <svg class="draft" role="img" aria-label=${label} width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}>
      ${placed.map((node) => node.parent >= 0 && html`<${Edge} key=${node.index} from=${placed[node.parent]} to=${node} />`)}
      ${placed.map((node) => html`<${Node} key=${node.index} node=${node} />`)}
    </svg>
  </div>`;
}

const STEP = 9;
const STRIP_HEIGHT = 34;

/** One bar for each recent draft: its drafted tokens, and from below the accepted ones. */
function Strip({ drafts, index, go }) {
  const most = Math.max(...drafts.map((draft) => draft.nodes.length - 1));
  const height = (value) => (value / most) * STRIP_HEIGHT;
  const width = Math.max(drafts.length * STEP, 1);
  const style = { marginLeft: `min(0px, calc(100% - ${width}px))` }; // where there is no room for all, the newest
  return html`<div class="strip"><svg width=${width} height=${STRIP_HEIGHT + 4} style=${style} aria-hidden="true">
    ${drafts.map((draft, place) => {
      const [drafted, accepted] = [height(draft.nodes.length - 1), height(draft.path.length - 1)];
      return html`<g key=${draft.number} class=${place === index ? "on" : ""} transform=${`translate(${place * STEP},0)`} onClick=${() => go(place)}>
        <rect class="all" y=${STRIP_HEIGHT - drafted} width=${STEP - 3} height=${drafted} rx="2" />
        <rect class="good" y=${STRIP_HEIGHT - accepted} width=${STEP - 3} height=${accepted} rx="2" />
        <rect class="here" y=${STRIP_HEIGHT + 2} width=${STEP - 3} height="2" />
      </g>`;
    })}
  </svg></div>`;
}

export function DraftTree({ drafts }) {
  const [held, hold] = useState(null); // number of the draft that is looked at; null: the newest
  const found = drafts.findIndex((draft) => draft.number === held);
  const index = found < 0 ? drafts.length - 1 : found;
  const draft = drafts[index];
  useEffect(() => void (held !== null && drafts.length && drafts[0].number > held && hold(null)), [drafts]);
  const go = (to) => hold(to >= drafts.length - 1 ? null : drafts[to].number);
  return html`<section class="card two-thirds drafts" aria-labelledby="draft-title">
    <h2 id="draft-title">${held === null ? "Draft of the last step" : "Draft of an earlier step"} <small>${draft ? `${draft.path.length - 1} of ${draft.nodes.length - 1} drafted tokens accepted` : ""}</small></h2>
    ${draft ? html`<${Picture} draft=${draft} />` : html`<p class="empty">Nothing has been drafted while this page was open. Run a prompt.</p>`}
    ${draft && html`<${Strip} drafts=${drafts} index=${index} go=${go} />`}
    <div class="row stepper">
      <button onClick=${() => go(index - 1)} disabled=${index <= 0}>← Earlier</button>
      <button onClick=${() => go(index + 1)} disabled=${index >= drafts.length - 1}>Later →</button>
      <button onClick=${() => hold(null)} disabled=${held === null}>Newest</button>
      <small>${draft ? `draft ${number(draft.number + 1)} seen` : ""}</small>
    </div>
    <ul class="legend">
      <li><i class="swatch yes"></i> accepted</li>
      <li><i class="swatch no"></i> not accepted</li>
      <li><i class="swatch bonus"></i> the model's own, the next root</li>
    </ul>
  </section>`;
}
