// The use of the memory pools: by requests, by the cache only, and free.
import { html, number } from "./ui.js";

const POOLS = [
  ["kv", "KV cache", "tokens"],
  ["states", "Recurrent states", "slots"],
  ["records", "Speculation buffers", "pending records"],
];

function Bar({ name, unit, pool: { used, cached, total } }) {
  const share = (value) => `${(100 * value) / total}%`;
  const label = `${name}: ${number(used)} used, ${number(cached)} cached, of ${number(total)} ${unit}`;
  return html`<div class="pool">
    <div class="pool-head"><span>${name}</span><span class="muted">${number(used + cached)} of ${number(total)} ${unit}</span></div>
    <div class="bar" role="img" aria-label=${label}>
      <i class="used" style=${{ width: share(used) }}></i><i class="cached" style=${{ width: share(cached) }}></i>
    </div>
  </div>`;
}

export function Pools({ stats }) {
  const pools = POOLS.filter(([key]) => stats?.pools[key].total);
  return html`<section class="card" aria-labelledby="pools-title">
    <h2 id="pools-title">Pools <small>${stats ? `${number(stats.preemptions)} preemptions` : ""}</small></h2>
    ${pools.map(([key, name, unit]) => html`<${Bar} key=${key} name=${name} unit=${unit} pool=${stats.pools[key]} />`)}
    ${stats?.split && html`<p class="muted">KV and states share memory: the line between them has moved ${number(stats.split.num_moves)} times</p>`}
    ${!stats && html`<p class="empty">No figures yet.</p>`}
    <ul class="legend">
      <li><i class="swatch used"></i> needed by requests</li>
      <li><i class="swatch cached"></i> kept by the prefix cache</li>
    </ul>
  </section>`;
}
