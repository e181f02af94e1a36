// The tree of the prefix cache, the most recent branches first: nodes with KV, and nodes with a recurrent state.
import { bytes, count, duration, html, number, visible } from "./ui.js";

const MAX_INDENT = 12;
const TIER_NAMES = { host: "Host memory", disk: "Disk", store: "Store" };

const kindOf = (node) => (node.depth === 0 ? "root" : node.has_state ? "state" : "tombstone");

/** The first words of a piece of text. */
function Beginning({ node }) {
  if (node.text === null) return html`<span class="beginning muted">a text under a salt</span>`;
  const text = node.text.trimStart() ? visible(node.text).replaceAll("␣", " ") : visible(node.text);
  return html`<span class="beginning" title=${text}>${text}</span>`;
}

function Row({ node, longest }) {
  const kind = kindOf(node);
  const length = node.end - node.start;
  const left = `${(100 * node.start) / longest}%`;
  const width = `${Math.max((100 * length) / longest, 0.6)}%`;
  const facts = [
    node.hits && ["hit", kind === "root" ? `${count(node.hits, "request")} began here` : count(node.hits, "hit")],
    node.locks && ["lock", count(node.locks, "lock")],
    ...node.tiers.map((tier) => ["tier", tier]),
    node.depth && !node.locks && ["age", `age ${number(node.age)}`],
  ].filter(Boolean);
  return html`<li class="radix-row ${kind}" data-kind=${kind}>
    <span class="name" style=${{ paddingLeft: `${12 * Math.min(Math.max(node.depth - 1, 0), MAX_INDENT)}px` }}>
      <i class="mark" aria-hidden="true"></i>
      <span>${kind === "root" ? "start of a text" : `${number(node.start)}–${number(node.end)}`}</span>
      ${kind !== "root" && html`<span class="kind">${kind === "state" ? "state" : "tombstone"}, ${count(length, "token")}</span>`}
    </span>
    ${kind !== "root" && html`<${Beginning} node=${node} />`}
    <span class="span" aria-hidden="true">${kind !== "root" && html`<i style=${{ left, width }}></i>`}</span>
    <span class="facts">${facts.map(([name, text]) => html`<b key=${text} class=${name}>${text}</b>`)}</span>
  </li>`;
}

const sum = (counts) => Object.values(counts).reduce((total, value) => total + value, 0);

/** What lies below the pools: sizes now, and counts since the start. */
function Tier({ name, tier }) {
  const lost = sum(tier.lost_writes);
  const facts = [
    `${count(tier.num_entries, "piece")} of texts, ${bytes(tier.num_bytes)} of ${bytes(tier.max_bytes)}`,
    tier.hits ? `${count(tier.hits, "hit")} of ${count(tier.hit_tokens, "token")}, ${duration(tier.load_seconds / tier.hits)} each` : "no hits",
    `${number(tier.writes)} written (${bytes(tier.written_bytes)})`,
    lost && `${number(lost)} not written`,
    tier.evictions && `${number(tier.evictions)} evicted`,
    tier.damaged && `${number(tier.damaged)} damaged`,
  ].filter(Boolean);
  return html`<li data-tier=${name}><b>${TIER_NAMES[name]}</b> ${facts.join("; ")}</li>`;
}

export function RadixTree({ tree, stats }) {
  const nodes = tree?.nodes ?? [];
  const longest = Math.max(1, ...nodes.map((node) => node.end));
  const cache = stats?.cache;
  const tiers = stats?.tiers ?? {};
  const note = cache ? `${count(cache.num_nodes, "node")}, ${count(cache.num_tombstones, "tombstone")}, ${count(cache.num_tokens, "token")}` : "";
  return html`<section class="card" aria-labelledby="radix-title">
    <h2 id="radix-title">Prefix cache <small>${note}</small></h2>
    ${
      nodes.length
        ? html`<ol class="radix scroll" tabindex="0" aria-label="Nodes of the prefix tree">
            ${nodes.map((node, index) => html`<${Row} key=${index} node=${node} longest=${longest} />`)}
          </ol>`
        : html`<p class="empty">Nothing is cached yet.</p>`
    }
    ${tree?.num_left > 0 && html`<p class="muted">and ${number(tree.num_left)} more</p>`}
    <ul class="legend">
      <li><i class="mark state"></i> a state: texts can go on from here</li>
      <li><i class="mark tombstone"></i> a tombstone: KV without a state</li>
    </ul>
    ${
      Object.keys(tiers).length > 0 &&
      html`<ul class="tiers" aria-label="Tiers below the pools">
        ${Object.entries(tiers).map(([name, tier]) => html`<${Tier} key=${name} name=${name} tier=${tier} />`)}
      </ul>`
    }
  </section>`;
}
