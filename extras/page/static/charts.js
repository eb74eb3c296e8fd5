// The curves: one small chart for each thing that a run measures, with one cursor for all of them.

const PANELS = [
  { id: "answered", title: "Answered, valid actions", keys: { answered: "answered", valid_actions: "valid actions" } },
  { id: "tokens", title: "Tokens per trajectory", keys: { context_tokens: "all", prompt_tokens: "prompt", response_tokens: "response" } },
  { id: "kl", title: "KL to the first policy, nats", keys: { kl: "k3 estimate" } },
  { id: "logp", title: "Log-prob per token of the demonstrations", keys: { logp: "mean" } },
  { id: "entropy", title: "Entropy per token, nats", keys: { entropy: "entropy" } },
  { id: "clip_fraction", title: "Clipped tokens", keys: { clip_fraction: "share" } },
  { id: "logp_gap", title: "Log-prob gap, engine to trainer, nats", keys: { logp_gap: "mean" } },
  { id: "zero_variance_groups", title: "Groups whose rewards are all equal", keys: { zero_variance_groups: "share" } },
  { id: "grad_norm", title: "Gradient norm before clipping", keys: { grad_norm: "norm" } },
  {
    id: "seconds", title: "Seconds per step",
    keys: { "time/rollout": "rollouts", "time/tools": "of which waiting for tools", "time/reward": "rewards", "time/update": "update", "time/evolve": "evolution" },
  },
  { id: "speed", title: "Tokens per second", keys: { "time/sampled_per_s": "sampled, in rollouts", "time/trained_per_s": "trained on, in updates" } },
];
const charts = [];

// Returns the panels of these runs: what their tasks measure, then what every run does.
function panelsOf(runs) {
  const metrics = [...new Set(runs.flatMap((run) => run.metrics))], tools = [...new Set(runs.flatMap((run) => run.tools))];
  const ofMetric = (name) => ({ id: name, title: named(name), keys: { [name]: "training", [`${name}/*`]: "", [`test/${name}`]: "held out", [`valid/${name}`]: "validation" } });
  return [
    { id: "reward", title: "Reward of a step's rollouts", keys: { reward: "mean reward", w_best: "best weight w" } },
    ...metrics.map(ofMetric),
    { id: "by-source", title: "Reward by source", keys: { "reward/*": "" }, when: (series) => !metrics.some((name) => identical(series, "reward", name)) },
    { id: "calls", title: "Tool calls per trajectory", keys: Object.fromEntries(tools.map((name) => [name, name])) },
    ...PANELS,
  ];
}

// Returns whether a series has values at few steps, which are drawn as points.
function isSparse(key) {
  return /^(test|valid)\/|evolve$/.test(key);
}

function identical(series, a, b) {
  return series[a] && series[b] && series[a].every((x, k) => x === series[b][k]);
}

// Returns [[key, label], ...] of a panel that these series can show.
function keysOf(panel, series) {
  if (panel.when && !panel.when(series)) return [];
  return Object.entries(panel.keys).flatMap(([key, label]) => {
    if (!key.endsWith("/*")) return key in series ? [[key, label]] : [];
    const found = Object.keys(series).filter((name) => name.startsWith(key.slice(0, -1)));
    return found.map((name) => [name, name.slice(key.length - 1)]);
  });
}

function drawCurves() {
  const body = $("#curves .body");
  while (charts.length) charts.pop().destroy();
  const shown = DATA.runs.length > 1 ? comparison() : single(DATA.runs[0]);
  if (!shown.length) return replace(body, h("p", { class: "empty" }, "No step has been measured yet."));
  const legend = DATA.runs.length > 1 ? groupLegend() : null;
  const grid = h("div", { class: "charts" });
  replace(body, legend, grid);
  for (const chart of shown) {
    const box = h("figure", { class: "chart", id: `panel-${chart.id}` });
    grid.append(box);
    chart.events = DATA.runs.length > 1 ? [] : DATA.runs[0].evolutions;
    charts.push(drawChart(box, chart));
  }
}

function single(run) {
  const { t, series } = run.curves;
  const colours = palette();
  return panelsOf([run]).map((panel) => ({
    id: panel.id, title: panel.title, t,
    lines: keysOf(panel, series).map(([key, label], k) => ({
      label, values: series[key], colour: colours[k % colours.length], sparse: isSparse(key),
    })),
  })).filter((chart) => chart.lines.length);
}

// Charts of several runs: a line for each group of seeds, their mean, in a band from the lowest to the highest.
function comparison() {
  const colours = palette();
  const t = [...new Set(DATA.runs.flatMap((run) => run.curves.t))].sort((a, b) => a - b);
  const all = Object.assign({}, ...DATA.runs.map((run) => run.curves.series));
  const out = [];
  for (const panel of panelsOf(DATA.runs)) {
    for (const [key, label] of keysOf(panel, all)) {
      const title = Object.keys(panel.keys).length > 1 || key.includes("/") ? `${panel.title}: ${label}` : panel.title;
      out.push({ id: `${panel.id}-${key.replace(/\W/g, "-")}`, title, t, lines: groupLines(key, t, colours) });
    }
  }
  return out;
}

function groupLines(key, t, colours) {
  return DATA.groups.flatMap((group, g) => {
    const columns = group.runs.map((k) => valuesAt(DATA.runs[k].curves, key, t));
    const at = (step) => columns.map((values) => values[step]).filter((x) => x !== null);
    const pick = (reduce) => t.map((_, step) => (at(step).length ? reduce(at(step)) : null));
    const line = { label: group.label, values: pick(mean), colour: colours[g % colours.length], sparse: isSparse(key) };
    if (columns.length > 1) {
      line.low = pick((values) => Math.min(...values));
      line.high = pick((values) => Math.max(...values));
    }
    return line.values.some((x) => x !== null) ? [line] : [];
  });
}

function valuesAt(curves, key, t) {
  const found = new Map(curves.t.map((step, k) => [step, (curves.series[key] || [])[k] ?? null]));
  return t.map((step) => found.get(step) ?? null);
}

// Returns what tells a group of runs from the first run, by name.
function unlike(group) {
  const more = group.unlike.length - 4;
  const names = group.unlike.slice(0, 4).join(", ") + (more > 0 ? ` and ${more} more` : "");
  return names && ` differs in ${names}`;
}

function groupLegend() {
  const colours = palette();
  const entries = DATA.groups.map((group, g) => h("li", {}, swatch(colours[g % colours.length]), group.label, h("small", {}, unlike(group))));
  return h("div", {}, h("ul", { class: "legend" }, entries), DATA.groups.some((group) => group.runs.length > 1) && h("p", { class: "note" }, "A line is the mean over seeds; its band reaches from the lowest seed to the highest."));
}

function swatch(background) {
  return h("i", { class: "swatch", style: { background } });
}

// Draws one chart; its caption shows the last values, and those under the cursor while there is one.
function drawChart(box, chart, height = 150) {
  const values = chart.lines.map(() => h("b"));
  const caption = h("figcaption", {}, h("span", { class: "title" }, chart.title));
  const keys = chart.lines.map((line, k) => h("span", { class: "key" }, swatch(line.colour), line.label, " ", values[k]));
  const where = h("span", { class: "where" });
  caption.append(h("span", { class: "keys" }, keys, where, chart.title && csvLink(chart)));
  box.append(caption);
  const show = (at) => {
    chart.lines.forEach((line, k) => {
      values[k].textContent = num(at === null ? line.values.findLast((x) => x !== null) : line.values[at]);
    });
    where.textContent = at === null ? "" : `step ${chart.t[at]}`;
  };
  show(null);
  const data = [chart.t], series = [{}], bands = [];
  for (const line of chart.lines) {
    if (line.high) {
      data.push(line.high, line.low);
      series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      bands.push({ series: [data.length - 2, data.length - 1], fill: `${line.colour}2e` });
    }
    data.push(line.values);
    series.push({ stroke: line.colour, width: 1.6, spanGaps: true, ...(line.sparse ? { paths: () => null } : {}), points: { show: line.sparse || chart.t.length < 3, size: 6, fill: line.colour } });
  }
  const axis = { stroke: colour("muted"), font: `11px ${getComputedStyle(document.body).fontFamily}`, ticks: { show: false } };
  const grid = { stroke: colour("line"), width: 1 };
  const options = {
    width: Math.max(200, box.clientWidth - 2), height, legend: { show: false }, series, bands, padding: [6, 8, 0, 0],
    cursor: { sync: { key: "steps" }, y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: { x: { time: false }, y: { range: (_, low, high) => nearZero(low, high) } },
    axes: [
      { ...axis, grid: { show: false }, size: 22, gap: 2, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
      { ...axis, grid, size: 44, gap: 4, space: 28, values: (_, splits) => splits.map((x) => num(x)) },
    ],
    hooks: {
      setCursor: [(plot) => show(plot.cursor.idx ?? null)],
      drawClear: [(plot) => drawEvents(plot, chart.events || [])],
    },
  };
  const plot = new uPlot(options, data, box);
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", describeChart(chart));
  const resize = new ResizeObserver(() => {
    const width = box.clientWidth - 2;
    if (width > 50 && Math.abs(width - plot.width) > 1) plot.setSize({ width, height });
  });
  resize.observe(box);
  return { destroy: () => (resize.disconnect(), plot.destroy()) };
}

// Returns a link that saves the chart's lines as a table, a row for each step.
function csvLink(chart) {
  const cell = (x) => (typeof x === "string" ? `"${x.replaceAll('"', '""')}"` : x ?? "");
  const rows = [["step", ...chart.lines.map((line) => line.label)], ...chart.t.map((t, k) => [t, ...chart.lines.map((line) => line.values[k])])];
  const text = rows.map((row) => row.map(cell).join(",") + "\n").join("");
  return h("a", { class: "csv", download: `${chart.id}.csv`, href: `data:text/csv;charset=utf-8,${encodeURIComponent(text)}` }, "CSV");
}

// Returns the range of the y axis: it starts at 0 unless the values leave no doubt that they do not belong there.
function nearZero(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high * 1.1)];
  const from = low < 0 || low > 0.6 * high ? low - 0.1 * (high - low) : 0;
  return [from, high + 0.04 * (high - from)];
}

function drawEvents(plot, steps) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour("event");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const step of steps) {
    const x = Math.round(plot.valToPos(step, "x", true));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function describeChart(chart) {
  const ends = chart.lines.map((line) => {
    const known = line.values.filter((x) => x !== null);
    return known.length ? `${line.label} from ${num(known[0])} to ${num(known[known.length - 1])}` : "";
  });
  return `${chart.title}, steps ${chart.t[0]} to ${chart.t[chart.t.length - 1]}: ${ends.filter(Boolean).join("; ")}`;
}
