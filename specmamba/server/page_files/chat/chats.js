// Chats as they are kept in the browser, one entry of its storage each: the newest ones, and a bounded size in all.
import { load, save } from "../storage.js";
import { randomName } from "../ui.js";

const PREFIX = "specmamba-chat-";
const MAX_CHATS = 30;
const MAX_CHARACTERS = 3_000_000; // of all chats; browsers store about five million
const MAX_TITLE = 48;
const FIGURES = ["firstAt", "firstCount", "lastAt"];

export const newChat = (system = "") => ({ id: randomName(), changed: Date.now(), system, messages: [] });

/** The first words of a chat. */
export function titleOf({ messages }) {
  const words = (messages[0]?.content ?? "").trim().split(/\s+/).join(" ");
  return words.length > MAX_TITLE ? `${words.slice(0, MAX_TITLE - 1)}…` : words || "New chat";
}

/** A message for storage: tokens without the names of their fields, and nothing that is still running. */
function packed({ role, content, reasoning, tokens, state, error, finish, usage, ...rest }) {
  if (role === "user") return { role, content };
  const figures = Object.fromEntries(FIGURES.map((name) => [name, rest[name]]));
  const ended = state === "running" || state === "waiting" ? "cancelled" : state;
  const list = tokens.map(({ id, text, depth }) => [id, text, depth]);
  return { role, content, reasoning, tokens: list, state: ended, error, finish, usage, ...figures };
}

const isText = (value) => typeof value === "string";
const textOr = (value, other) => (isText(value) ? value : other);
const isToken = (value) => Array.isArray(value) && Number.isInteger(value[0]) && isText(value[1]) && Number.isInteger(value[2]);

/** A message from storage; null: it is none. */
function unpacked(value) {
  if (!isText(value?.content) || !["user", "assistant"].includes(value.role)) return null;
  if (value.role === "user") return { role: "user", content: value.content };
  const tokens = Array.isArray(value.tokens) ? value.tokens.filter(isToken) : [];
  const figures = FIGURES.filter((name) => Number.isFinite(value[name])).map((name) => [name, value[name]]);
  return {
    role: "assistant",
    content: value.content,
    reasoning: textOr(value.reasoning, ""),
    tokens: tokens.map(([id, text, depth]) => ({ id, text, depth })),
    state: ["done", "cancelled", "failed"].includes(value.state) ? value.state : "done",
    error: textOr(value.error, null),
    finish: textOr(value.finish, null),
    usage: Number.isInteger(value.usage?.completion_tokens) ? value.usage : null,
    ...Object.fromEntries(figures),
  };
}

function readChat(name) {
  const value = load(name);
  if (!Array.isArray(value?.messages)) return null;
  const messages = value.messages.map(unpacked).filter((message) => message !== null);
  const changed = Number.isFinite(value.changed) ? value.changed : 0;
  return { id: name.slice(PREFIX.length), changed, system: textOr(value.system, ""), messages };
}

function names() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return []; // storage is switched off
  }
}

/** The stored chats, the newest first. */
export function loadChats() {
  const chats = names().map(readChat).filter((chat) => chat?.messages.length);
  return chats.sort((a, b) => b.changed - a.changed);
}

export function removeChat({ id }) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // storage is switched off: there is nothing to remove
  }
}

/** Stores a chat. The oldest others make room where there is too little; returns those, and whether there was room. */
export function saveChat(chat, others) {
  const value = { changed: chat.changed, system: chat.system, messages: chat.messages.map(packed) };
  let length = JSON.stringify(value).length;
  const dropTokens = () => {
    value.messages.forEach((message) => message.tokens && (message.tokens = []));
    length = JSON.stringify(value).length;
  };
  if (length > MAX_CHARACTERS) dropTokens();
  if (length > MAX_CHARACTERS) return { removed: [], isSaved: false }; // no room that others could make is enough
  const oldest = others.filter(({ id }) => id !== chat.id).sort((a, b) => a.changed - b.changed);
  const removed = [];
  const fits = () => {
    const sizes = names().filter((name) => name !== PREFIX + chat.id).map((name) => localStorage.getItem(name)?.length ?? 0);
    const size = length + sizes.reduce((sum, length) => sum + length, 0);
    return sizes.length < MAX_CHATS && size <= MAX_CHARACTERS && save(PREFIX + chat.id, value);
  };
  for (;;) {
    if (fits()) return { removed, isSaved: true };
    const victim = oldest.shift();
    if (victim) removed.push(victim);
    else if (value.messages.some(({ tokens }) => tokens?.length)) dropTokens();
    else return { removed, isSaved: false };
    if (victim) removeChat(victim);
  }
}
