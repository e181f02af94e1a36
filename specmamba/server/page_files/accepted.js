// A histogram: drafts by the number of their accepted tokens, since the start of the server.
import { depthClass, html, number, percent } from "./ui.js";

/** Drafts by the number of their accepted tokens. In the histogram the steps without a draft also count at 0. */
function withDraft(spec) {
  const [none = 0, ...others] = spec?.histogram ?? [];
  return [none - (spec?.steps ?? 0) + (spec?.drafts ?? 0), ...others];
}

export function Accepted({ stats }) {
  const counts = withDraft(stats?.spec);
  const last = counts.findLastIndex((steps) => steps > 0);
  const shown = counts.slice(0, last + 1);
  const total = shown.reduce((sum, steps) => sum + steps, 0);
  const most = Math.max(1, ...shown);
  return html`<section class="card" aria-labelledby="accepted-title">
    <h2 id="accepted-title">Accepted per draft <small>${total ? `of ${number(total)} drafts` : ""}</small></h2>
    ${!total && html`<p class="empty">No draft yet.</p>`}
    <ul class="accepted">
      ${shown.map(
        (steps, depth) => html`<li key=${depth} class=${depth ? depthClass(depth) : "d0"}>
          <span>${depth} tokens</span>
          <span class="track" aria-hidden="true"><i style=${{ width: `${(100 * steps) / most}%` }}></i></span>
          <b>${percent(steps / total)}</b>
        </li>`,
      )}
    </ul>
  </section>`;
}
