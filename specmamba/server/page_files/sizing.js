// Why drafts are large, small or off: the decision, what the newest steps did, and what each option would gain.
import { change, html, number, percent } from "./ui.js";

const LEAST_SCALE = 0.1; // so that gains of a few percent do not look like much

/** All gains are 1 until the first look at results: what depth and gains say until then is no decision. */
const isJudged = ({ gains }) => gains.some((gain) => gain !== 1);

/** Gains are those of chosen trees by depth from 0 on, then those of chains; an option that is never made has 0. */
function optionsOf(gains) {
  const [trees, chains] = [gains.slice(0, gains.length / 2), gains.slice(gains.length / 2)];
  const options = trees.map((tree, depth) => ({ depth, tree, chain: chains[depth] ?? 0 }));
  return options.filter(({ depth, tree, chain }) => depth && (tree || chain));
}

/** A bar from the middle, which is plain decoding: to the right where drafts gain, to the left where they lose. */
function Gain({ gain, scale }) {
  if (!gain) return html`<td class="none"><span class="balance" aria-hidden="true"></span> <b>${change(null)}</b></td>`;
  const width = 50 * Math.min(Math.abs(gain - 1) / scale, 1);
  const left = gain < 1 ? 50 - width : 50;
  return html`<td class=${gain < 1 ? "loss" : "gain"}>
    <span class="balance" aria-hidden="true"><i style=${{ left: `${left}%`, width: `${width}%` }}></i></span>
    <b>${change(gain)}</b>
  </td>`;
}

function Gains({ gains, depth }) {
  const options = optionsOf(gains);
  const shown = options.flatMap(({ tree, chain }) => [tree, chain]).filter(Boolean);
  const scale = Math.max(LEAST_SCALE, ...shown.map((gain) => Math.abs(gain - 1)));
  return html`<table class="gains">
    <caption>Predicted tokens per second, against plain decoding</caption>
    <thead><tr><th scope="col">depth</th><th scope="col">chosen trees</th><th scope="col">chains</th></tr></thead>
    <tbody>
      ${options.map(
        (option) => html`<tr key=${option.depth} aria-current=${option.depth === depth ? "true" : null}>
          <th scope="row">${option.depth}${option.depth === depth && html` <small>now</small>`}</th>
          <${Gain} gain=${option.tree} scale=${scale} />
          <${Gain} gain=${option.chain} scale=${scale} />
        </tr>`,
      )}
    </tbody>
  </table>`;
}

export function Sizing({ sizing, recent }) {
  if (!sizing) return null; // the size of drafts is fixed, or the reader may not see what others' requests decide
  const { depth, gains, reason } = sizing;
  const state = depth ? `on, depth ${depth}` : "off";
  return html`<section class="card sizing" aria-labelledby="sizing-title">
    <h2 id="sizing-title">Size of drafts <small>${isJudged(sizing) ? state : ""}</small></h2>
    <div class="halves">
      <div>
        <p class="reason">${reason}</p>
        <dl class="figures">
          <div><dt>nodes/request</dt><dd>${number(recent?.nodes, 1)}</dd></div>
          <div><dt>plain steps</dt><dd>${percent(recent?.plain)}</dd></div>
          <div><dt>probes</dt><dd>${percent(recent?.probes)}</dd></div>
          <div><dt>time/predicted</dt><dd>${percent(recent?.time)}</dd></div>
          <div><dt>calibration error</dt><dd>${number(sizing.calibration_error, 3)}</dd></div>
        </dl>
        <p class="muted">Figures of the newest steps.</p>
      </div>
      ${isJudged(sizing) ? html`<${Gains} gains=${gains} depth=${depth} />` : html`<p class="empty">No draft has been judged yet.</p>`}
    </div>
  </section>`;
}
