// Text, token by token: the colour is the depth of a token in its accepted draft.
import { depthClass, html, MAX_COLOUR, number, useEffect, useLayoutEffect, useRef, useState, visible } from "./ui.js";

function describe(token, index) {
  const origin =
    token.depth === 0 ? "the model's own token, one per step" : `drafted at depth ${token.depth}, accepted by the model`;
  return `“${visible(token.text)}”, token ${index + 1}, id ${token.id}: ${origin}`;
}

export function Legend({ depth }) {
  const shown = Array.from({ length: Math.min(Math.max(depth, 1), MAX_COLOUR) }, (_, index) => index + 1);
  return html`<ul class="legend" aria-label="Colours of tokens">
    <li><span class="tok d0">word</span> the model's own</li>
    ${shown.map(
      (d) => html`<li key=${d}><span class="tok d${d}">word</span> drafted, depth ${d}${d === MAX_COLOUR ? " and more" : ""}</li>`,
    )}
  </ul>`;
}

/** Line breaks are shown as a mark, so that their colour is visible. */
function pieces(text) {
  return text
    .split("\n")
    .flatMap((line, index) => (index ? [html`<i class="nl" key=${index}></i>`, `\n${line}`] : [line]));
}

function Token({ token, index, isChosen }) {
  const classes = `tok ${depthClass(token.depth)}${isChosen ? " on" : ""}`;
  return html`<span class=${classes} data-index=${index} data-depth=${token.depth}>${pieces(token.text)}</span>`;
}

/** A tooltip at a token, placed inside of the box. */
function Tip({ box, index, text }) {
  const tip = useRef(null);
  useLayoutEffect(() => {
    const token = box.current?.querySelector(`[data-index="${index}"]`);
    if (!token || !tip.current) return;
    const spot = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const frame = box.current.parentElement.getBoundingClientRect();
    const left = Math.min(spot.left - frame.left, frame.width - tip.current.offsetWidth - 4);
    tip.current.style.left = `${Math.max(4, left)}px`;
    tip.current.style.top = `${spot.bottom - frame.top + 6}px`;
  });
  return html`<div class="tip" role="tooltip" ref=${tip}>${text}</div>`;
}

export function TokenText({ prompt, tokens, label, isRunning }) {
  const box = useRef(null);
  const [chosen, choose] = useState(null);
  const last = tokens.length - 1;
  useEffect(() => {
    if (isRunning && box.current) box.current.scrollTop = box.current.scrollHeight;
    if (isRunning) choose(null);
  }, [tokens.length, isRunning]);
  const onKeyDown = (event) => {
    const moves = { ArrowRight: (chosen ?? -1) + 1, ArrowLeft: (chosen ?? 0) - 1, Home: 0, End: last };
    if (event.key === "Escape") choose(null);
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    const index = Math.min(Math.max(moves[event.key], 0), last);
    choose(index);
    box.current.querySelector(`[data-index="${index}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const onOver = (event) => choose(Number(event.target.closest(".tok")?.dataset.index ?? NaN));
  const isShown = Number.isInteger(chosen) && chosen <= last;
  const text = isShown ? describe(tokens[chosen], chosen) : "";
  return html`<div class="text-frame" onPointerLeave=${() => choose(null)}>
    <div class="text" ref=${box} tabindex="0" role="group" aria-label=${`${label}: ${number(tokens.length)} tokens, arrow keys walk through them`}
      onKeyDown=${onKeyDown} onPointerOver=${onOver} onBlur=${() => choose(null)}>
      <span class="prompt">${prompt}</span>${tokens.map(
        (token, index) => html`<${Token} key=${index} token=${token} index=${index} isChosen=${index === chosen} />`,
      )}${isRunning && html`<i class="caret"></i>`}
    </div>
    ${isShown && html`<${Tip} box=${box} index=${chosen} text=${text} />`}
    <div class="unseen" aria-live="polite">${text}</div>
  </div>`;
}
