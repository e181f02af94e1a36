// One streamed answer, and its measured times.
import { complete } from "./api.js";

export const newRun = () => ({ tokens: [], content: "", reasoning: "", state: "waiting", error: null, usage: null, finish: null });

/** Streams the answer to a request into a run; calls ``onChange`` after each chunk. */
export async function stream(run, path, body, signal, onChange) {
  const started = performance.now();
  run.state = "running";
  onChange();
  try {
    for await (const chunk of complete(path, body, signal)) take(run, chunk, started);
    run.state = "done";
  } catch (error) {
    run.state = error.name === "AbortError" ? "cancelled" : "failed";
    if (run.state === "failed") run.error = describe(error);
  }
  onChange();

  function take(run, chunk, started) {
    const choice = chunk.choices[0];
    if (chunk.usage) run.usage = chunk.usage;
    if (!choice) return;
    run.content += choice.delta?.content ?? "";
    run.reasoning += choice.delta?.reasoning_content ?? "";
    if (choice.tokens?.length) {
      const now = (performance.now() - started) / 1000;
      run.firstAt ??= now;
      run.firstCount ??= choice.tokens.length;
      run.lastAt = now;
      run.tokens.push(...choice.tokens);
    }
    run.finish = choice.finish_reason ?? run.finish;
    onChange();
  }
}

function describe(error) {
  if (error.status === 401) return "The server asks for its API key.";
  if (error.status === undefined) return "The server does not answer.";
  return error.message;
}

/** Seconds and rates as measured in the browser; null when there is no value yet. */
export function measure(run) {
  const count = run.tokens.length;
  const steps = run.tokens.filter((token) => token.depth === 0).length;
  const elapsed = run.lastAt - run.firstAt;
  return {
    count,
    steps,
    drafted: count - steps,
    perStep: steps ? count / steps : null,
    firstToken: run.firstAt ?? null,
    perSecond: elapsed > 0 ? (count - run.firstCount) / elapsed : null,
  };
}
