// What two runs of a prompt, with drafts and plain, say together: the speeds, and where and why their texts part.
import { request } from "./api.js";
import { measure } from "./run.js";
import { html, number, percent, useEffect, useRef, useState, visible } from "./ui.js";

// The error of a logit that rounding can cause: 2 eps times the largest logit, for which 20 is assumed. docs/exactness.md
const LARGEST_LOGIT = 20;
const EPS = { float32: 2 ** -23, float16: 2 ** -10, bfloat16: 2 ** -7 };
const LEAST_BOUND = 1e-3;

/** The first token at which two runs differ, also because one of them has ended; null when they are equal. */
export function parting(a, b) {
  const [short, long] = a.tokens.length < b.tokens.length ? [a, b] : [b, a];
  const differs = long.tokens.findIndex(({ id }, index) => id !== short.tokens[index]?.id);
  return differs < 0 ? null : differs;
}

/** Log probabilities of the two tokens with which the texts go on, by plain decoding; null where one of them ends. */
export async function scoreParting(a, b, signal) {
  const index = parting(a, b);
  const next = [a, b].map((run) => run.tokens[index]);
  if (index === null || next.some((token) => !token)) return null;
  const tokenized = await request("tokenize", { body: { prompt: a.prompt }, signal });
  const before = [...(await tokenized.json()).tokens, ...a.tokens.slice(0, index).map(({ id }) => id)];
  const body = { prompt: next.map(({ id }) => [...before, id]), max_tokens: 0, echo: true, logprobs: 0 };
  const answer = await request("v1/completions", { body: { ...body, speculative: false }, signal });
  const { choices } = await answer.json();
  return choices.map(({ logprobs }) => logprobs.token_logprobs.at(-1));
}

/** Whether rounding to the data type explains that greedy decoding chose either of two tokens; null: not known. */
export function isNearTie(scores, dtype) {
  if (!(dtype in EPS) || scores.some((score) => score === null)) return null;
  return Math.abs(scores[0] - scores[1]) / 2 <= Math.max(LEAST_BOUND, 2 * EPS[dtype] * LARGEST_LOGIT);
}

/** The scores of the tokens at which two complete runs part: undefined until they are known. */
function useScores(speculative, plain, areDone) {
  const [scores, setScores] = useState(undefined);
  useEffect(() => {
    setScores(undefined);
    if (!areDone || parting(speculative, plain) === null) return undefined;
    const abort = new AbortController();
    scoreParting(speculative, plain, abort.signal).then(setScores, () => setScores(null));
    return () => abort.abort();
  }, [speculative, plain, areDone]);
  return scores;
}

function Parting({ runs, index, scores, dtype }) {
  const [one, other] = runs.map((run) => run.tokens[index]);
  if (!one || !other) return html`one text ends at token ${index + 1}, the other goes on.`;
  const place = html`texts part at token ${index + 1}`;
  if (!scores) return html`${place}.`;
  const [p, q] = scores.map((score) => percent(Math.exp(score), 1));
  const tokens = html`“${visible(one.text)}” (${p}) and “${visible(other.text)}” (${q})`;
  if (runs[0].temperature > 0) {
    return html`${place}, at ${tokens}: rounding moves a random choice that lies between two tokens.`;
  }
  const isTie = isNearTie(scores, dtype);
  if (isTie === null) return html`${place}, at ${tokens}.`;
  return isTie
    ? html`${place}: <b>a near tie</b> of ${tokens}, which rounding decides.`
    : html`${place}, at ${tokens}: <b>not a near tie</b>, so rounding does not explain it.`;
}

/** The verdict on two runs, when both have ended. */
export function Comparison({ runs: [speculative, plain], dtype }) {
  const box = useRef(null);
  const areDone = speculative?.state === "done" && plain?.state === "done";
  const scores = useScores(speculative, plain, areDone);
  useEffect(() => void (areDone && box.current?.scrollIntoView({ block: "nearest" })), [areDone, scores]);
  if (!areDone) return null;
  const gain = measure(speculative).perSecond / measure(plain).perSecond;
  const index = parting(speculative, plain);
  return html`<p class="verdict" role="status" ref=${box}>
    ${Number.isFinite(gain) && html`<strong>${number(gain, 2)}×</strong> the speed of plain decoding, `}
    ${index === null ? "the same text token for token." : html`<${Parting} runs=${[speculative, plain]} index=${index} scores=${scores} dtype=${dtype} />`}
    ${" "}<small>Seed ${speculative.seed} for both, each with nothing cached.</small>
  </p>`;
}
