// The side of the chat: which one is shown, its system prompt, how answers are sampled, and its export.
import { NumberField } from "../fields.js";
import { html, useState } from "../ui.js";
import { titleOf } from "./chats.js";
import { asJson, asMarkdown, download } from "./export.js";

const PREFIX = "chat-";
const WIDE = "(min-width: 1001px)";

function Chosen({ session }) {
  const { chats, chat } = session;
  return html`<div class="chosen">
    <label for="chat-select">Chat</label>
    <div class="row">
      <select id="chat-select" value=${chat.id} onChange=${(event) => session.choose(event.target.value)}>
        ${chats.map((each) => html`<option key=${each.id} value=${each.id}>${titleOf(each)}</option>`)}
      </select>
      <button id="chat-new" type="button" onClick=${() => session.begin()} disabled=${!chat.messages.length}>New</button>
    </div>
  </div>`;
}

function Check({ name, label, session }) {
  return html`<label class="check">
    <input id=${PREFIX + name} type="checkbox" checked=${session.settings[name]}
      onChange=${(event) => session.set({ [name]: event.target.checked })} />
    ${label}
  </label>`;
}

function Sampling({ session }) {
  const shared = { form: session.settings, change: (changes) => session.set(changes), prefix: PREFIX };
  return html`<div class="fields">
      <${NumberField} name="temperature" label="Temperature" hint="default" min="0" max="100" step="any" ...${shared} />
      <${NumberField} name="top_p" label="Top-p" hint="default" min="0" max="1" step="any" ...${shared} />
      <${NumberField} name="max_tokens" label="Max tokens" hint="all that fit" min="1" step="1" ...${shared} />
      <${NumberField} name="seed" label="Seed" hint="any" step="1" ...${shared} />
    </div>
    <${Check} name="speculative" label="with speculation" session=${session} />
    <${Check} name="colours" label="colour tokens by the depth of their draft" session=${session} />`;
}

function Files({ session, model }) {
  const isEmpty = !session.chat.messages.length;
  const remove = () => window.confirm("Delete this chat?") && session.remove();
  return html`<div class="row" role="group" aria-label="This chat">
    <button type="button" class="small" disabled=${isEmpty} onClick=${() => download("json", asJson(session, model))}>Export JSON</button>
    <button type="button" class="small" disabled=${isEmpty} onClick=${() => download("md", asMarkdown(session.chat))}>Export Markdown</button>
    <button type="button" class="small" disabled=${isEmpty} onClick=${remove}>Delete</button>
  </div>`;
}

export function ChatSide({ session, model }) {
  const [isOpen] = useState(matchMedia(WIDE).matches);
  return html`<div class="chat-side">
    <${Chosen} session=${session} />
    <details class="chat-settings" open=${isOpen}>
      <summary>System prompt and sampling</summary>
      <label for="chat-system">System prompt</label>
      <textarea id="chat-system" rows="4" spellcheck=${false} value=${session.chat.system} placeholder="none"
        onInput=${(event) => session.setSystem(event.target.value)}></textarea>
      <${Sampling} session=${session} />
      <${Files} session=${session} model=${model} />
      <p class="muted">Chats stay in this browser.</p>
    </details>
  </div>`;
}
