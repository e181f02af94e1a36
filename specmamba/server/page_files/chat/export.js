// Chats as files.
import { measure } from "../run.js";
import { titleOf } from "./chats.js";

function figuresOf(message) {
  const { count, steps, drafted, firstToken, perSecond } = measure(message);
  return { tokens: count, steps, drafted_tokens: drafted, seconds_to_first_token: firstToken, tokens_per_second: perSecond };
}

function exported(message) {
  const { role, content, reasoning, state, error, finish, usage } = message;
  if (role === "user") return { role, content };
  return {
    role,
    content,
    ...(reasoning && { reasoning_content: reasoning }),
    state,
    ...(error && { error }),
    finish_reason: finish,
    usage,
    figures: figuresOf(message),
  };
}

/** A chat with its settings and the figures of its answers. */
export function asJson({ chat, settings }, model) {
  const { colours, ...sampling } = settings;
  const system = chat.system ? [{ role: "system", content: chat.system }] : [];
  const value = { title: titleOf(chat), exported: new Date().toISOString(), model, sampling };
  return `${JSON.stringify({ ...value, messages: [...system, ...chat.messages.map(exported)] }, null, 2)}\n`;
}

const NAMES = { system: "System", user: "User", assistant: "Assistant" };

/** A chat to read. Answers are Markdown already. */
export function asMarkdown(chat) {
  const system = chat.system ? [{ role: "system", content: chat.system }] : [];
  const parts = [...system, ...chat.messages].map(({ role, content }) => `## ${NAMES[role]}\n\n${content.trim()}\n`);
  return `# ${titleOf(chat)}\n\n${parts.join("\n")}`;
}

const TYPES = { json: "application/json", md: "text/markdown" };

/** Lets the browser save a text as a file. */
export function download(extension, text) {
  const address = URL.createObjectURL(new Blob([text], { type: TYPES[extension] }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `specmamba-chat-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.${extension}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
