// The most important figures, current or last known.
import { duration, html, number, percent } from "./ui.js";

const latest = (series) => series.findLast((value) => value !== null) ?? null;

function Tile({ name, value, note }) {
  return html`<div class="tile">
    <dt>${name}</dt>
    <dd>${value}</dd>
    <dd class="note">${note}</dd>
  </div>`;
}

export function Tiles({ feed: { stats, history } }) {
  const spec = stats?.spec;
  const cache = stats?.cache;
  const overall = spec?.drafts ? 1 + spec.accepted / spec.drafts : null;
  const hitRate = cache?.query_tokens ? cache.hit_tokens / cache.query_tokens : null;
  return html`<section aria-label="Key figures">
    <dl class="tiles">
      <${Tile} name="Tokens per draft" value=${number(latest(history.accept), 2)} note=${`${number(overall, 2)} since the start`} />
      <${Tile} name="Tokens per second" value=${number(latest(history.throughput))} note=${`${number(spec?.tokens)} tokens so far`} />
      <${Tile} name="To first token" value=${duration(latest(history.firstToken))} note=${`then ${duration(latest(history.interToken))} per token`} />
      <${Tile} name="Requests" value=${number(stats?.running)} note=${`running, ${number(stats?.waiting)} waiting`} />
      <${Tile} name="Cache hits" value=${percent(hitRate)} note=${`of ${number(cache?.query_tokens)} prompt tokens`} />
    </dl>
  </section>`;
}
