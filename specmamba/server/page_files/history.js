// Series over time, computed from counters: each point covers the window before it.
const MAX_POINTS = 320;
const WINDOW_S = 2;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this._samples = [];
    this.version = 0;
    this.time = [];
    this.accept = [];
    this.perPosition = []; // one series per depth
    this.throughput = [];
    this.firstToken = [];
    this.interToken = [];
    this.interTokenHigh = [];
    this.sizing = null; // of the newest window that ended with steps
  }

  add(stats) {
    const last = this._samples.at(-1);
    if (last && stats.spec.steps < last.spec.steps) this.clear(); // another server
    if (last && stats.time <= last.time) return;
    this._samples.push(stats);
    while (this._samples.length > 2 && this._samples[1].time <= stats.time - WINDOW_S) this._samples.shift();
    this._push(this._samples[0], stats);
    const hasSteps = stats.sizing?.num_steps > last?.sizing?.num_steps; // a window that ends idle has ever fewer
    if (hasSteps) this.sizing = sized(this._samples[0].sizing, stats.sizing);
    this.version += 1;
  }

  _push(before, now) {
    const drafts = now.spec.drafts - before.spec.drafts;
    const accepted = now.spec.accepted - before.spec.accepted;
    const tokens = now.spec.tokens - before.spec.tokens;
    const elapsed = now.time - before.time;
    this.time.push(now.time);
    this.accept.push(drafts ? 1 + accepted / drafts : null);
    this.throughput.push(elapsed ? tokens / elapsed : null);
    const first = difference(before.latency.first_token, now.latency.first_token);
    const inter = difference(before.latency.inter_token, now.latency.inter_token);
    this.firstToken.push(mean(first));
    this.interToken.push(mean(inter));
    this.interTokenHigh.push(quantile(inter, 0.95));
    const reached = now.spec.per_position.filter((total) => total > 0); // trees are wider than they are deep
    reached.forEach((total, depth) => {
      this.perPosition[depth] ??= new Array(this.time.length - 1).fill(null);
      const since = total - (before.spec.per_position[depth] ?? 0);
      this.perPosition[depth].push(drafts ? since / drafts : null);
    });
    this._series().forEach((series) => series.length > MAX_POINTS && series.shift());
  }

  _series() {
    const { time, accept, throughput, firstToken, interToken, interTokenHigh } = this;
    return [time, accept, throughput, firstToken, interToken, interTokenHigh, ...this.perPosition];
  }
}

/** Means and shares of the steps between two samples. */
function sized(before, now) {
  if (!before) return null;
  const since = (name) => now[name] - before[name];
  const [steps, predicted] = [since("num_steps"), since("predicted_seconds")];
  return {
    nodes: since("num_nodes") / since("num_requests"),
    plain: since("num_plain_steps") / steps,
    probes: since("num_probes") / steps,
    time: predicted > 0 ? since("measured_seconds") / predicted : null, // the first steps of a kind are not timed
  };
}

/** The difference of two histograms: counts at or below each bound, and the sum. */
function difference(before, now) {
  const buckets = now.buckets.map(([bound, total], index) => [bound, total - (before.buckets[index]?.[1] ?? 0)]);
  return { sum: now.sum - before.sum, buckets };
}

const size = ({ buckets }) => buckets.at(-1)?.[1] ?? 0;

export const mean = (histogram) => (size(histogram) > 0 ? histogram.sum / size(histogram) : null);

/** A quantile, interpolated between the bounds of its bucket; above the last bound, that bound. */
export function quantile(histogram, share) {
  const rank = share * size(histogram);
  if (rank <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, total] of histogram.buckets) {
    if (total >= rank) return bound === null ? low : low + ((bound - low) * (rank - below)) / (total - below);
    [low, below] = [bound, total];
  }
  return low;
}
