// The tabs of the page. The chosen one is in the address, so that it stays when the page is loaded again.
import { html, useEffect, useRef, useState } from "./ui.js";

/** The chosen one of several names, the first by default, and the function that chooses one. */
export function useTab(names) {
  const read = () => names.find((name) => location.hash === `#${name}`) ?? names[0];
  const [chosen, setChosen] = useState(read);
  useEffect(() => {
    const follow = () => setChosen(read());
    window.addEventListener("hashchange", follow);
    return () => window.removeEventListener("hashchange", follow);
  }, []);
  const choose = (name) => {
    history.replaceState(null, "", name === names[0] ? location.pathname + location.search : `#${name}`);
    setChosen(name);
  };
  return [chosen, choose];
}

/** A list of tabs: one stop for the Tab key, arrow keys between them. ``titles`` by name. */
export function Tabs({ titles, chosen, choose }) {
  const list = useRef(null);
  const names = Object.keys(titles);
  const onKeyDown = (event) => {
    const at = names.indexOf(chosen);
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1 + names.length, Home: 0, End: names.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const to = moves[event.key] % names.length;
    choose(names[to]);
    list.current.children[to].focus();
  };
  return html`<div class="tabs" role="tablist" aria-label="Views" ref=${list} onKeyDown=${onKeyDown}>
    ${names.map(
      (name) => html`<button key=${name} type="button" role="tab" id=${`tab-${name}`} aria-controls=${`panel-${name}`}
        aria-selected=${name === chosen ? "true" : "false"} tabindex=${name === chosen ? 0 : -1} onClick=${() => choose(name)}>${titles[name]}</button>`,
    )}
  </div>`;
}

export function Panel({ name, chosen, children }) {
  return html`<div class="panel" role="tabpanel" id=${`panel-${name}`} aria-labelledby=${`tab-${name}`} hidden=${name !== chosen}>${children}</div>`;
}
