// A field of a form for a number. What is typed stays text: empty is not zero.
import { html } from "./ui.js";

export function NumberField({ name, label, hint, form, change, prefix = "", ...attributes }) {
  const id = prefix + name;
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <input id=${id} type="number" inputmode="decimal" value=${form[name]} placeholder=${hint}
      onInput=${(event) => change({ [name]: event.target.value })} ...${attributes} />
  </div>`;
}
