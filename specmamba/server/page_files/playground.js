// The form for trying a prompt: with speculation, and without it for comparison.
import { Comparison } from "./comparison.js";
import { NumberField } from "./fields.js";
import { measure, newRun, stream } from "./run.js";
import { loadLike, save } from "./storage.js";
import { Legend, TokenText } from "./tokens.js";
import { count, duration, html, number, percent, randomName, reveal, useEffect, useRef, useState } from "./ui.js";

const EXAMPLES = {
  "a class": 'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n        ',
  "a function": "import os\n\ndef read_file(path):\n    ",
  "a test": "import unittest\n\nclass TestCase(unittest.TestCase):\n    def test_add(self):\n        ",
};
const FIRST = { prompt: EXAMPLES["a function"], max_tokens: "128", temperature: "0", seed: "", compare: true };

const STORED = "specmamba-playground";
const MOST_STORED = 200_000; // characters of a prompt

/** The body to send, without empty fields. Invalid values are refused by the server. */
function bodyOf(form) {
  const body = { prompt: form.prompt, max_tokens: Number(form.max_tokens), temperature: Number(form.temperature) };
  if (form.seed !== "") body.seed = Number(form.seed);
  return { ...body, return_tokens: true, stream_options: { include_usage: true } };
}

const randomNumber = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** The runs to make. Runs that are compared share a seed, and none of them finds what another one has cached. */
function plan(form) {
  const body = bodyOf(form);
  const shared = { prompt: form.prompt, temperature: body.temperature };
  if (!form.compare) return [{ ...newRun(), ...shared, name: "speculative", body }];
  const seed = body.seed ?? randomNumber();
  return ["speculative", "plain"].map((name) => ({
    ...newRun(),
    ...shared,
    name,
    seed,
    body: { ...body, seed, cache_salt: randomName(), ...(name === "plain" && { speculative: false }) },
  }));
}

function useStoredForm() {
  const [form, setForm] = useState(() => loadLike(STORED, FIRST));
  useEffect(() => void (form.prompt.length <= MOST_STORED && save(STORED, form)), [form]);
  return [form, setForm];
}

function usePlayground() {
  const [form, setForm] = useStoredForm();
  const [runs, setRuns] = useState([]);
  const [isRunning, setRunning] = useState(false);
  const abort = useRef(null);
  const frame = useRef(0);
  useEffect(() => () => abort.current?.abort(), []);

  const start = async () => {
    if (isRunning) return;
    const current = plan(form);
    const show = () => {
      cancelAnimationFrame(frame.current);
      frame.current = requestAnimationFrame(() => setRuns([...current]));
    };
    abort.current = new AbortController();
    setRunning(true);
    show();
    // one after the other: at the same time each would slow the other down
    for (const run of current) {
      if (abort.current.signal.aborted) run.state = "cancelled";
      else if (current[0].state === "failed") run.state = "skipped"; // it would fail in the same way
      else await stream(run, "v1/completions", run.body, abort.current.signal, show);
    }
    show();
    setRunning(false);
  };
  return { form, setForm, runs, isRunning, start, cancel: () => abort.current?.abort() };
}

function Form({ form, setForm, isRunning, start, cancel }) {
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      event.currentTarget.requestSubmit(); // and not start(): fields are checked first
    }
  };
  const onSubmit = (event) => {
    event.preventDefault();
    start();
  };
  const shared = { form, change: (changes) => setForm({ ...form, ...changes }) };
  return html`<form class="play-form" onSubmit=${onSubmit} onKeyDown=${onKeyDown}>
    <label for="prompt">Prompt</label>
    <textarea id="prompt" rows="7" spellcheck=${false} value=${form.prompt}
      onInput=${(event) => setForm({ ...form, prompt: event.target.value })}></textarea>
    <div class="chips" role="group" aria-label="Examples">
      ${Object.entries(EXAMPLES).map(
        ([name, prompt]) =>
          html`<button key=${name} type="button" class="chip" onClick=${() => setForm({ ...form, prompt })}>${name}</button>`,
      )}
    </div>
    <div class="fields">
      <${NumberField} name="max_tokens" label="Max tokens" min="1" step="1" required ...${shared} />
      <${NumberField} name="temperature" label="Temperature" min="0" max="100" step="any" required ...${shared} />
      <${NumberField} name="seed" label="Seed" hint="any" step="1" ...${shared} />
    </div>
    <label class="check">
      <input id="compare" type="checkbox" checked=${form.compare}
        onChange=${(event) => setForm({ ...form, compare: event.target.checked })} />
      then run it again without speculation
    </label>
    <div class="row">
      <button id="run" class="primary" disabled=${isRunning}>Run <kbd>Ctrl ↵</kbd></button>
      <button id="cancel" type="button" disabled=${!isRunning} onClick=${cancel}>Cancel</button>
    </div>
  </form>`;
}

const STATES = { waiting: "waiting for its turn", running: "running", cancelled: "cancelled", failed: "failed", skipped: "not run" };
const TITLES = { speculative: "With speculation", plain: "Plain" };

function Figures({ run }) {
  const figures = measure(run);
  const share = figures.count ? figures.drafted / figures.count : null;
  return html`<dl class="figures">
    <div><dt>tokens/s</dt><dd>${number(figures.perSecond)}</dd></div>
    <div><dt>first token</dt><dd>${duration(figures.firstToken)}</dd></div>
    <div><dt>tokens/step</dt><dd>${number(figures.perStep, 2)}</dd></div>
    <div><dt>drafted</dt><dd>${percent(share)}</dd></div>
  </dl>`;
}

function Column({ run, name }) {
  const state = run ? (STATES[run.state] ?? `${count(run.tokens.length, "token")}, ${run.finish ?? "done"}`) : "not run yet";
  return html`<section class="column" data-run=${name} data-state=${run?.state ?? "none"} aria-label=${TITLES[name]}>
    <h3>${TITLES[name]} <small>${state}</small></h3>
    <${TokenText} label=${TITLES[name]} prompt=${run?.prompt ?? ""} tokens=${run?.tokens ?? []} isRunning=${run?.state === "running"} />
    ${run?.error ? html`<p class="error" role="alert">${run.error}</p>` : html`<${Figures} run=${run ?? newRun()} />`}
  </section>`;
}

export function Playground({ hello }) {
  const state = usePlayground();
  const results = useRef(null);
  useEffect(() => void (state.isRunning && reveal(results.current)), [state.isRunning]);
  const { runs, form } = state;
  const depth = Math.max(1, ...runs.flatMap((run) => run.tokens.map((token) => token.depth)));
  const names = form.compare || runs.length > 1 ? ["speculative", "plain"] : ["speculative"];
  return html`<section class="card wide playground" aria-labelledby="playground-title">
    <h2 id="playground-title">Playground <small>${hello ? `${number(hello.context_length)} tokens of context` : ""}</small></h2>
    <div class="play">
      <${Form} ...${state} />
      <div class="results" ref=${results}>
        <div class="columns">
          ${names.map((name, index) => html`<${Column} key=${name} name=${name} run=${runs[index]} />`)}
        </div>
        <${Comparison} runs=${runs} dtype=${hello?.engine.dtype} />
        <${Legend} depth=${depth} />
      </div>
    </div>
  </section>`;
}
