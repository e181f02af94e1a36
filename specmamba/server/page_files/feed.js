// The connection to /events: it reconnects by itself, and keeps the last minutes as series for the charts.
import { ApiError, events, request, setKey } from "./api.js";
import { History } from "./history.js";

const HIDDEN_S = 15;
const MAX_DRAFTS = 60;

export class Feed {
  constructor(onChange) {
    this.status = "connecting"; // live, busy, lost, stopped, key, full
    this.message = "";
    this.hello = this.stats = this.tree = null;
    this.drafts = [];
    this.numDrafts = 0; // seen since the page was opened
    this.history = new History();
    this._onChange = onChange;
    this._pause = 0.5;
    this._wake = () => {};
  }

  async run() {
    this._watchVisibility();
    for (;;) {
      await this._visible();
      this._abort = new AbortController();
      await this._listen().catch((error) => this._failed(error));
      this._onChange();
      await this._wait();
    }
  }

  useKey(key) {
    setKey(key);
    this._pause = 0.5;
    this._set("connecting");
    this._wake();
  }

  async _listen() {
    const response = await request("events", { signal: this._abort.signal });
    this._pause = 0.5;
    this._set("live");
    for await (const { name, data } of events(response)) {
      this._take(name, JSON.parse(data));
      this._onChange();
    }
    if (this.status !== "stopped") this._set("lost");
  }

  _take(name, event) {
    if (name === "hello") this.hello = event;
    else if (name === "tree") this.tree = event;
    else if (name === "busy") this._set("busy", `in one step for ${event.seconds} s`);
    else if (name === "end") this._set("stopped", event.reason === "failed" ? "the engine has failed" : "");
    else if (name === "draft") {
      const drafts = event.drafts.map((draft, index) => ({ ...draft, number: this.numDrafts + index }));
      this.numDrafts += drafts.length;
      this.drafts = [...this.drafts, ...drafts].slice(-MAX_DRAFTS);
    } else if (name === "stats") {
      this._set("live");
      this.stats = event;
      this.history.add(event);
    }
  }

  _failed(error) {
    if (error.name === "AbortError") this._set("connecting");
    else if (error instanceof ApiError && [401, 403].includes(error.status)) this._set("key", error.message);
    else if (error instanceof ApiError) this._set(error.status === 429 ? "full" : "stopped", error.message);
    else this._set("lost");
  }

  _set(status, message = "") {
    this.status = status;
    this.message = message;
  }

  /** Wait before the next attempt: longer each time; when a key is missing, until it is entered. */
  async _wait() {
    const woken = new Promise((resolve) => (this._wake = resolve));
    if (this.status === "key") return woken;
    const pause = new Promise((resolve) => setTimeout(resolve, 1000 * this._pause));
    this._pause = Math.min(2 * this._pause, 5);
    return Promise.race([woken, pause]);
  }

  /** A page that is hidden closes its connection after a while. */
  _watchVisibility() {
    let timer = 0;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(timer);
      if (document.hidden) timer = setTimeout(() => this._abort?.abort(), 1000 * HIDDEN_S);
    });
  }

  _visible() {
    if (!document.hidden) return Promise.resolve();
    return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}
