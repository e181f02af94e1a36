// Charts over time, drawn by uPlot, which the page loads before its own modules.
import { cssValue, depthColour, duration, html, number, percent, useEffect, useRef, useState } from "./ui.js";

const [LEAST_SPAN_S, SPAN_S] = [30, 120];
const HEIGHT = 150;
const FIRST_WIDTH = 300; // of a chart that is not shown yet

function axes(format) {
  const shared = { stroke: cssValue("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const grid = { stroke: cssValue("--line"), width: 1 };
  const clock = (_, values) => values.map((value) => new Date(1000 * value).toTimeString().slice(0, 8));
  return [
    { ...shared, grid: { show: false }, space: 90, size: 26, values: clock },
    { ...shared, grid, space: 34, size: 48, values: (_, values) => values.map((value) => format(value)) },
  ];
}

/** The figures of the last two minutes. */
function span(time) {
  const end = time.at(-1) ?? LEAST_SPAN_S;
  return [Math.min(Math.max(time[0] ?? 0, end - SPAN_S), end - LEAST_SPAN_S), end];
}

function options(width, series, format, top, onCursor) {
  return {
    width,
    height: HEIGHT,
    padding: [8, 26, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: {
      x: { range: (plot) => span(plot.data[0]) },
      y: { range: (_, low, high) => [0, top ?? Math.max(high * 1.15, 1e-3)] },
    },
    axes: axes(format),
    series: [{}, ...series.map(({ colour }) => ({ stroke: colour, width: 2, points: { size: 4, fill: colour } }))],
    hooks: { setCursor: [(plot) => onCursor(plot.cursor.idx)] },
  };
}

function Chart({ title, note, series, time, version, theme, format, top = null }) {
  const box = useRef(null);
  const plot = useRef(null);
  const [cursor, setCursor] = useState(null);
  useEffect(() => {
    const data = [time, ...series.map(({ values }) => values)];
    const drawn = new window.uPlot(options(box.current.clientWidth || FIRST_WIDTH, series, format, top, setCursor), data, box.current);
    const observer = new ResizeObserver(() => box.current?.clientWidth && drawn.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    observer.observe(box.current);
    plot.current = drawn;
    return () => {
      observer.disconnect();
      drawn.destroy();
    };
  }, [theme, series.length]);
  useEffect(() => plot.current?.setData([time, ...series.map(({ values }) => values)]), [version]);
  const at = ({ values }) => (cursor === null ? values.findLast((value) => value !== null) : values[cursor]);
  const numPoints = series[0]?.values.filter((value) => value !== null).length ?? 0;
  const summary = series.map((each) => `${each.label} ${format(at(each))}`).join(", ");
  return html`<figure class="chart" data-chart=${title} data-points=${numPoints}>
    <figcaption>${title} <small>${note}</small></figcaption>
    <div class="plot" ref=${box} role="img" aria-label=${`${title}: ${summary}`}></div>
    <ul class="legend">
      ${series.map((each) => html`<li key=${each.label}><i class="line" style=${{ background: each.colour }}></i>${each.label} <b>${format(at(each))}</b></li>`)}
    </ul>
  </figure>`;
}

export function Charts({ history, version, theme }) {
  const shared = { time: history.time, version, theme };
  const [accent, second] = [cssValue("--accent"), cssValue("--d3")];
  const positions = history.perPosition.map((values, index) => ({
    label: `depth ${index + 1}`,
    colour: depthColour(index + 1),
    values,
  }));
  const none = [{ label: "depth 1", colour: depthColour(1), values: history.time.map(() => null) }];
  return html`<section class="card charts" aria-label="Over time">
    <h2>Over time <small>the last two minutes</small></h2>
    <div class="grid">
      <${Chart} title="Acceptance length" note="tokens per draft" ...${shared} format=${(value) => number(value, 1)}
        series=${[{ label: "mean", colour: accent, values: history.accept }]} />
      <${Chart} title="Acceptance by depth" note="share of drafts" ...${shared} format=${percent} top=${1}
        series=${positions.length ? positions : none} />
      <${Chart} title="Throughput" note="tokens per second" ...${shared} format=${(value) => number(value)}
        series=${[{ label: "all requests", colour: accent, values: history.throughput }]} />
      <${Chart} title="Latency" note="per token after the first" ...${shared} format=${duration}
        series=${[
          { label: "mean", colour: accent, values: history.interToken },
          { label: "95 %", colour: second, values: history.interTokenHigh },
        ]} />
    </div>
  </section>`;
}
