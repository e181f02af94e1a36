// The messages of a chat: what was asked, with a way to change it, and answers with their figures.
import { CopyButton } from "../clipboard.js";
import { measure } from "../run.js";
import { TokenText } from "../tokens.js";
import { count, duration, html, number, useLayoutEffect, useRef, useState } from "../ui.js";
import { Prose } from "./prose.js";

/** Whether a key press ends the text: Enter does, Shift+Enter breaks the line, and so does Enter while a word is composed. */
export const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

function Editor({ content, save, cancel }) {
  const [text, setText] = useState(content);
  const area = useRef(null);
  useLayoutEffect(() => area.current.focus(), []);
  const onKeyDown = (event) => {
    if (event.key === "Escape") cancel();
    if (!isEnter(event)) return;
    event.preventDefault();
    if (text.trim()) save(text);
  };
  return html`<div class="editor">
    <textarea ref=${area} rows="3" aria-label="Edit the message" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
    <div class="row">
      <button type="button" class="primary small" disabled=${!text.trim()} onClick=${() => save(text)}>Send</button>
      <button type="button" class="small" onClick=${cancel}>Cancel</button>
      <small>What follows this message is removed.</small>
    </div>
  </div>`;
}

export function Asked({ message, isRunning, edit }) {
  const [isEdited, setEdited] = useState(false);
  const save = (text) => {
    setEdited(false);
    edit(text);
  };
  return html`<article class="message user" aria-label="Message">
    ${isEdited ? html`<${Editor} content=${message.content} save=${save} cancel=${() => setEdited(false)} />` : html`<p class="asked">${message.content}</p>`}
    ${
      !isEdited &&
      html`<div class="actions">
        <${CopyButton} text=${message.content} label="Copy the message" />
        <button type="button" class="small" disabled=${isRunning} onClick=${() => setEdited(true)} aria-label="Edit the message">Edit</button>
      </div>`
    }
  </article>`;
}

/** What speculation did, how fast the answer came, and what was cached. */
function Figures({ message }) {
  const { count: numTokens, perStep, firstToken, perSecond } = measure(message);
  if (!numTokens) return null;
  const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } = message.usage?.completion_tokens_details ?? {};
  const cached = message.usage?.prompt_tokens_details?.cached_tokens;
  const facts = [
    count(numTokens, "token"),
    perSecond !== null && `${number(perSecond)} tokens/s`,
    `first after ${duration(firstToken)}`,
    perStep !== null && `${number(perStep, 2)} tokens/step`,
    accepted + rejected > 0 && `${number(accepted)} of ${number(accepted + rejected)} drafted tokens accepted`,
    cached > 0 && `${number(cached)} of ${number(message.usage.prompt_tokens)} prompt tokens cached`,
    message.finish === "length" && "cut off at the limit of tokens",
  ];
  return html`<ul class="answer-figures" aria-label="Figures of the answer">
    ${facts.filter(Boolean).map((fact) => html`<li key=${fact}>${fact}</li>`)}
  </ul>`;
}

function Reasoning({ message, isLive }) {
  if (!message.reasoning) return null;
  return html`<details class="reasoning" open=${isLive && !message.content}>
    <summary>Reasoning <small>${count(message.reasoning.trim().split(/\s+/).length, "word")}</small></summary>
    <${Prose} text=${message.reasoning} />
  </details>`;
}

function Text({ message, isLive, colours }) {
  if (colours && message.tokens.length) {
    return html`<${TokenText} label="Answer" prompt="" tokens=${message.tokens} isRunning=${isLive} />`;
  }
  return html`<${Prose} text=${message.content} />${isLive && html`<i class="caret" aria-hidden="true"></i>`}`;
}

export function Answer({ message, isLive, isLast, isRunning, colours, regenerate }) {
  const again = isLast && !isRunning;
  return html`<article class="message assistant" aria-label="Answer" aria-busy=${isLive ? "true" : "false"} data-state=${message.state}>
    <${Reasoning} message=${message} isLive=${isLive} />
    <${Text} message=${message} isLive=${isLive} colours=${colours} />
    ${message.state === "cancelled" && html`<p class="muted">Stopped.</p>`}
    ${
      message.error &&
      html`<div class="error row"><span role="alert">${message.error}</span>
        ${again && html`<button type="button" class="small" onClick=${regenerate}>Retry</button>`}
      </div>`
    }
    <${Figures} message=${message} />
    ${
      !isLive &&
      html`<div class="actions">
        ${message.content && html`<${CopyButton} text=${message.content} label="Copy the answer" />`}
        ${again && !message.error && html`<button type="button" class="small" onClick=${regenerate}>Regenerate</button>`}
      </div>`
    }
  </article>`;
}
