// The chats, the one that is shown, and its answer while it is streamed. It lives as long as the page, not as its tab.
import { measure, newRun, stream } from "../run.js";
import { loadLike, save } from "../storage.js";
import { loadChats, newChat, removeChat, saveChat } from "./chats.js";

const STORED = "specmamba-chat"; // its settings; chats have longer names
const DEFAULTS = { temperature: "", top_p: "", max_tokens: "512", seed: "", speculative: true, colours: false };

export class ChatSession {
  /** ``onChange`` is called after each change, ``onChunk`` after each piece of an answer. */
  constructor(onChange, onChunk) {
    this.chats = loadChats();
    this.chat = this.chats[0] ?? this._added(newChat());
    this.settings = loadLike(STORED, DEFAULTS);
    this.isStored = true;
    this.notice = ""; // for those who listen to the page
    this._abort = null;
    this._onChange = onChange;
    this._onChunk = onChunk;
    window.addEventListener("pagehide", () => {
      if (this.isRunning) this._save();
      this._isLeft = true; // the browser ends the stream now, which is no failure to be stored
    });
    window.addEventListener("pageshow", () => (this._isLeft = false));
  }

  get isRunning() {
    return this._abort !== null;
  }

  set(changes) {
    this.settings = { ...this.settings, ...changes };
    save(STORED, this.settings);
    this._onChange();
  }

  setSystem(system) {
    this.chat.system = system;
    if (this.chat.messages.length) this._save();
    this._onChange();
  }

  begin() {
    this._leave();
    this.chats = this.chats.filter(({ messages }) => messages.length);
    this.chat = this._added(newChat(this.chat.system));
    this._onChange();
  }

  choose(id) {
    this._leave();
    this.chat = this.chats.find((chat) => chat.id === id) ?? this.chat;
    this._onChange();
  }

  remove() {
    this._leave();
    removeChat(this.chat);
    this.chats = this.chats.filter((chat) => chat !== this.chat);
    this.chat = this.chats[0] ?? this._added(newChat(this.chat.system));
    this._onChange();
  }

  send(content) {
    if (this.isRunning || !content.trim()) return;
    this.chat.messages.push({ role: "user", content });
    this._answer();
  }

  /** Replaces a message of the user; what followed it is gone. */
  edit(index, content) {
    if (this.isRunning || !content.trim()) return;
    this.chat.messages.splice(index, Infinity, { role: "user", content });
    this._answer();
  }

  /** Answers the last message of the user once more. */
  regenerate() {
    if (this.isRunning) return;
    while (this.chat.messages.at(-1)?.role === "assistant") this.chat.messages.pop();
    if (this.chat.messages.length) this._answer();
  }

  stop() {
    this._abort?.abort();
  }

  /** Stops the answer of a chat that is no longer shown: the next one need not wait for its end. */
  _leave() {
    this.stop();
    this._abort = null;
  }

  /** The body to send, without empty fields. Invalid values are refused by the server. */
  body() {
    const { settings, chat } = this;
    const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
    const said = chat.messages.filter(({ content }) => content !== "").map(({ role, content }) => ({ role, content }));
    const names = ["temperature", "top_p", "max_tokens", "seed"].filter((name) => settings[name] !== "");
    return {
      messages: [...system, ...said],
      ...Object.fromEntries(names.map((name) => [name, Number(settings[name])])),
      ...(!settings.speculative && { speculative: false }),
      return_tokens: true,
      stream_options: { include_usage: true },
    };
  }

  async _answer() {
    const { chat } = this;
    const abort = new AbortController();
    const body = this.body();
    const message = { ...newRun(), role: "assistant" };
    chat.messages.push(message);
    this._abort = abort;
    this.notice = "Answering.";
    this._save();
    this._onChange();
    await stream(message, "v1/chat/completions", body, abort.signal, this._onChunk);
    if (this._abort === abort) this._abort = null;
    this.notice = message.state === "done" ? `The answer is complete: ${measure(message).count} tokens.` : "";
    if (this.chats.includes(chat)) this._save(chat);
    this._onChange();
  }

  _added(chat) {
    this.chats = [chat, ...this.chats];
    return chat;
  }

  _save(chat = this.chat) {
    if (this._isLeft) return;
    chat.changed = Date.now();
    const { removed, isSaved } = saveChat(chat, this.chats);
    this.chats = this.chats.filter((other) => !removed.includes(other) || other === this.chat);
    this.isStored = isSaved;
  }
}
