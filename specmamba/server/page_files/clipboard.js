// Copies text, and says so on the button for a moment.
import { html, useEffect, useRef, useState } from "./ui.js";

const SHOWN_MS = 1600;

/** Puts a text on the clipboard. Pages that are not served by loopback or HTTPS only have the old way. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!isCopied) throw new Error("the browser does not let this page copy");
}

export function CopyButton({ text, label = "Copy" }) {
  const [note, setNote] = useState("");
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const onClick = async () => {
    const result = await copy(text).then(() => "Copied", () => "Not allowed");
    setNote(result);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setNote(""), SHOWN_MS);
  };
  return html`<button type="button" class="small" onClick=${onClick} aria-label=${label}><span aria-live="polite">${note || "Copy"}</span></button>`;
}
