// The tab for chats: the conversation, and the field for the next message below it.
import { Legend } from "../tokens.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";
import { Answer, Asked, isEnter } from "./message.js";
import { ChatSession } from "./session.js";
import { ChatSide } from "./settings.js";

const NEAR_END = 48; // pixels

function useSession() {
  const [, setVersion] = useState(0);
  const session = useRef(null);
  const frame = useRef(0);
  if (session.current === null) {
    const show = () => setVersion((version) => version + 1);
    session.current = new ChatSession(show, () => {
      cancelAnimationFrame(frame.current);
      frame.current = requestAnimationFrame(show);
    });
  }
  return session.current;
}

/** Keeps the end of a box in sight while it grows, unless its reader has scrolled away from it. */
function useEndInSight(isNew) {
  const box = useRef(null);
  const isAtEnd = useRef(true);
  const onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current;
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
  };
  useEffect(() => void (isAtEnd.current = true), [isNew]);
  useLayoutEffect(() => {
    if (isAtEnd.current) box.current.scrollTop = box.current.scrollHeight;
  });
  return { box, onScroll };
}

function Log({ session }) {
  const { chat, isRunning, settings } = session;
  const { messages } = chat;
  const { box, onScroll } = useEndInSight(`${chat.id} ${messages.length}`);
  const last = messages.length - 1;
  return html`<div class="log" role="log" aria-live="off" aria-label="Conversation" tabindex="0" ref=${box} onScroll=${onScroll}>
    ${!messages.length && html`<p class="empty">Ask the model something. What you see here stays in this browser.</p>`}
    ${messages.map((message, index) =>
      message.role === "user"
        ? html`<${Asked} key=${`${chat.id} ${index}`} message=${message} isRunning=${isRunning} edit=${(text) => session.edit(index, text)} />`
        : html`<${Answer} key=${`${chat.id} ${index}`} message=${message} isLive=${isRunning && index === last} isLast=${index === last}
            isRunning=${isRunning} colours=${settings.colours} regenerate=${() => session.regenerate()} />`,
    )}
  </div>`;
}

function Composer({ session, isShown }) {
  const [text, setText] = useState("");
  const area = useRef(null);
  useEffect(() => void (isShown && matchMedia("(pointer: fine)").matches && area.current.focus({ preventScroll: true })), []);
  const send = (event) => {
    event.preventDefault();
    if (session.isRunning || !text.trim()) return;
    session.send(text);
    setText("");
    area.current.focus();
  };
  const stop = () => {
    session.stop();
    area.current.focus();
  };
  return html`<form class="composer" onSubmit=${send}>
    <label class="unseen" for="message">Message</label>
    <textarea id="message" ref=${area} rows="2" placeholder="Message. Enter sends, Shift+Enter breaks the line." value=${text}
      onInput=${(event) => setText(event.target.value)} onKeyDown=${(event) => isEnter(event) && send(event)}></textarea>
    ${
      session.isRunning
        ? html`<button id="chat-stop" key="stop" type="button" onClick=${stop}>Stop</button>`
        : html`<button id="chat-send" key="send" class="primary" disabled=${!text.trim()}>Send</button>`
    }
  </form>`;
}

export function Chat({ hello, isShown }) {
  const session = useSession();
  const depth = Math.max(1, ...session.chat.messages.flatMap(({ tokens = [] }) => tokens.map((token) => token.depth)));
  return html`<section class="card chat" aria-label="Chat">
    <${ChatSide} session=${session} model=${hello?.model ?? null} />
    <div class="chat-main">
      <${Log} session=${session} />
      ${session.settings.colours && html`<${Legend} depth=${depth} />`}
      ${!session.isStored && html`<p class="notice">The browser has no room for this chat: it is lost when the page is closed.</p>`}
      <${Composer} session=${session} isShown=${isShown} />
      <div class="unseen" role="status">${session.notice}</div>
    </div>
  </section>`;
}
