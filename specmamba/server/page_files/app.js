// The whole page: its layout, the theme, and the state that all parts share.
import { Accepted } from "./accepted.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat/tab.js";
import { DraftTree } from "./draft.js";
import { Feed } from "./feed.js";
import { Playground } from "./playground.js";
import { Pools } from "./pools.js";
import { RadixTree } from "./radix.js";
import { Sizing } from "./sizing.js";
import { Panel, Tabs, useTab } from "./tabs.js";
import { Tiles } from "./tiles.js";
import { html, render, useEffect, useRef, useState } from "./ui.js";

const STATUS = {
  connecting: "connecting",
  live: "live",
  busy: "engine busy",
  lost: "reconnecting",
  stopped: "server stopped",
  key: "needs a key",
  full: "too many viewers",
};
const TABS = { playground: "Playground", chat: "Chat" };
const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

function useFeed() {
  const [, setVersion] = useState(0);
  const feed = useRef(null);
  if (feed.current === null) feed.current = new Feed(() => setVersion((version) => version + 1));
  useEffect(() => void feed.current.run(), []);
  return feed.current;
}

/** The chosen theme ("auto", "light" or "dark"), and the one that is shown ("light" or "dark"). */
function useTheme() {
  const [chosen, setChosen] = useState(document.documentElement.dataset.theme ?? "auto");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [isDark, setDark] = useState(system.matches);
  useEffect(() => {
    const follow = () => setDark(system.matches);
    system.addEventListener("change", follow);
    return () => system.removeEventListener("change", follow);
  }, []);
  const choose = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("specmamba-theme", theme);
    } catch {
      // storage is switched off: the choice is lost when the page is closed
    }
    setChosen(theme);
  };
  return { chosen, choose, seen: chosen === "auto" ? (isDark ? "dark" : "light") : chosen };
}

/** The model, its data type, its device and its drafts. */
function describe(hello) {
  if (!hello) return "";
  const { dtype, device, speculative_algorithm: drafts } = hello.engine;
  const parts = [hello.model, dtype, device, drafts && (drafts === "none" ? "no drafts" : `${drafts} drafts`)];
  return parts.filter(Boolean).join(" · ");
}

function Header({ feed, theme, tab, choose }) {
  const next = { auto: "light", light: "dark", dark: "auto" }[theme.chosen];
  return html`<header class="top">
    <img src="page/icon.svg" alt="" width="30" height="30" />
    <h1>specmamba</h1>
    <${Tabs} titles=${TABS} chosen=${tab} choose=${choose} />
    <span class="model">${describe(feed.hello)}</span>
    <span class="pill ${feed.status}" role="status"><i></i>${STATUS[feed.status]}</span>
    <button class="quiet theme" onClick=${() => theme.choose(next)} aria-label=${`Theme: ${THEMES[theme.chosen]}. Switch to ${THEMES[next]}`}>
      <i class="moon" aria-hidden="true"></i>${THEMES[theme.chosen]}
    </button>
  </header>`;
}

function KeyForm({ feed }) {
  const [key, setKey] = useState("");
  const submit = (event) => {
    event.preventDefault();
    if (key) feed.useKey(key);
  };
  return html`<form class="card key" onSubmit=${submit}>
    <label for="key">This server asks for its API key. It is kept in this tab only.</label>
    <div class="row">
      <input id="key" type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} />
      <button class="primary" disabled=${!key}>Use key</button>
    </div>
  </form>`;
}

function Notice({ feed }) {
  if (feed.status === "key") return html`<${KeyForm} feed=${feed} />`;
  if (feed.status === "lost")
    return html`<p class="notice">The server does not answer. The page tries again by itself.</p>`;
  if (feed.message) return html`<p class="notice">${STATUS[feed.status]}: ${feed.message}</p>`;
  return null;
}

function App() {
  const feed = useFeed();
  const theme = useTheme();
  const [tab, choose] = useTab(Object.keys(TABS));
  return html`<${Header} feed=${feed} theme=${theme} tab=${tab} choose=${choose} />
    <main>
      <${Notice} feed=${feed} />
      <${Panel} name="playground" chosen=${tab}>
        <${Tiles} feed=${feed} />
        <${Playground} hello=${feed.hello} />
        <${DraftTree} drafts=${feed.drafts} />
        <div class="third stack">
          <${Pools} stats=${feed.stats} />
          <${Accepted} stats=${feed.stats} />
        </div>
        <${Sizing} sizing=${feed.stats?.sizing} recent=${feed.history.sizing} />
        <${Charts} history=${feed.history} version=${feed.history.version} theme=${theme.seen} />
        <${RadixTree} tree=${feed.tree} stats=${feed.stats} />
      <//>
      <${Panel} name="chat" chosen=${tab}><${Chat} hello=${feed.hello} isShown=${tab === "chat"} /><//>
    </main>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
