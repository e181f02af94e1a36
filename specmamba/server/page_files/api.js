// Requests to the server: API keys, errors, and streams of server-sent events.
const KEY_NAME = "specmamba-api-key";
let key = readKey();

function readKey() {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  } catch {
    return "";
  }
}

/** The API key, which is stored until the tab is closed. */
export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY_NAME, value);
  } catch {
    // storage is switched off: the key is kept until the page is closed
  }
}

/** An error answer, with the message of the server. */
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null }) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

/** A response whose status is a success. Throws ApiError, and what fetch throws when there is no answer. */
export async function request(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw new ApiError(response.status, await errorOf(response));
  return response;
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    if (typeof error.message === "string") return error;
  } catch {
    // a proxy has answered in place of the server
  }
  return { message: `the server answered ${response.status} ${response.statusText}`.trim() };
}

/** The events of a stream: {name, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) yield parse(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}

/** The chunks of an answer while it is streamed. Throws ApiError, also when the stream ends early. */
export async function* complete(path, body, signal) {
  const response = await request(path, { body: { ...body, stream: true }, signal });
  let isDone = false;
  for await (const { data } of events(response)) {
    isDone = data === "[DONE]";
    if (isDone) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error);
    yield chunk;
  }
  if (!isDone) throw new ApiError(200, { message: "the connection was lost before the answer was complete" });
}
