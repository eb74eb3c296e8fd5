// The list of trajectories and its filters. Rows come from the index; a trajectory itself is opened when chosen.

const PAGE = 60;
const indexes = new Map();
let listed = PAGE;

// Returns the rows of a run's index as objects; `k` is a row's place and its name in links.
function rowsOf(run) {
  if (!indexes.has(run)) {
    const { columns, rows } = run.index;
    indexes.set(run, rows.map((row, k) => ({ k, ...Object.fromEntries(columns.map((name, c) => [name, row[c]])) })));
  }
  return indexes.get(run);
}

function matches(row, run) {
  const { kind, from, to, by, outcome, stop, source, calls, ask } = state;
  return (!kind || row.kind === kind) && (!from || row.t >= Number(from)) && (!to || row.t <= Number(to)) && (!by || row.ins === by) &&
    (!outcome || outcomeOf(row) === outcome) && (!stop || row.stop === stop) && (!source || row.source === source) && (!calls || row.calls === Number(calls)) &&
    (!ask || run.index.questions[row.question].toLowerCase().includes(ask.toLowerCase()));
}

function outcomeOf(row) {
  return row.failed ? "failed" : "solved";
}

function drawTrajectories(k) {
  const run = DATA.runs[k], body = $("#trajectories .body");
  if (!rowsOf(run).length) return replace(body, h("p", { class: "empty" }, "No trajectory is stored in this run's directory."));
  replace(body, storedNote(run), filters(run), h("div", { class: "split list-first" },
    h("div", { class: "list" }, h("p", { class: "count note", role: "status" }), h("ul", { class: "rows", onkeydown: walkList }), h("button", { class: "further", onclick: () => ((listed += PAGE), drawList(k)) })),
    h("div", { class: "panel", id: "trajectory", tabindex: "-1" })));
  listed = PAGE;
  drawList(k);
  drawTrajectory(k);
}

// Says how many trajectories there were and how many are here: nothing is left out in silence.
function storedNote(run) {
  const { all } = run.index, rows = rowsOf(run), seen = rows.length;
  const text = seen < all ? `${num(seen)} of the ${num(all)} trajectories on disk are in this page` : `All ${num(all)} trajectories on disk are in this page`;
  return h("p", { class: "note" }, `${text}.`);
}

function filters(run) {
  const rows = rowsOf(run);
  const distinct = (name) => [...new Set(rows.map((row) => String(row[name])))].filter(Boolean).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const choose = (key, label, options) => h("label", {}, label, h("select", { name: key, onchange: (event) => filter({ [key]: event.target.value }) },
    h("option", { value: "" }, "all"), options.map(([value, text]) => h("option", { value, selected: state[key] === value }, text))));
  const same = (values) => values.map((value) => [value, value]);
  const field = (key, label, type, extra = {}) => h("label", {}, label, h("input", { name: key, type, value: state[key], oninput: (event) => filter({ [key]: event.target.value }), ...extra }));
  return h("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
    choose("kind", "kind", same(distinct("kind"))),
    field("from", "from step", "number", { min: 0 }), field("to", "to step", "number", { min: 0 }),
    choose("by", "instruction", distinct("ins").map((key) => [key, nameOf(key)])),
    choose("outcome", "outcome", same(["solved", "failed"])),
    choose("stop", "ended by", same(distinct("stop"))), choose("source", "source", same(distinct("source"))),
    choose("calls", "tool calls", same(distinct("calls"))), field("ask", "question contains", "search", { placeholder: "text" }),
    h("button", { type: "reset", onclick: (event) => (event.preventDefault(), clearFilters()) }, "Clear"));
}

function filter(changes) {
  go({ section: "trajectories", ...changes });
}

function clearFilters() {
  const names = ["kind", "from", "to", "by", "outcome", "stop", "source", "calls", "ask"];
  filter(Object.fromEntries(names.map((name) => [name, ""])));
}

// Brings the fields of the filters in line with the state, without taking the cursor out of the one being typed in.
function syncFilters() {
  for (const field of document.querySelectorAll(".filters [name]")) if (field.value !== state[field.name]) field.value = state[field.name];
}

function drawList(k) {
  const run = DATA.runs[k], list = $("#trajectories .rows");
  if (!list) return;
  const found = rowsOf(run).filter((row) => matches(row, run));
  $("#trajectories .count").textContent = `${plural(found.length, "trajectory", "trajectories")}, mean reward ${fixed(mean(found.map((row) => row.reward)))}`;
  const same = (a, b) => b && a.question === b.question && a.t === b.t && a.ins === b.ins && a.kind === b.kind;
  replace(list, found.slice(0, listed).map((row, n) => listRow(row, run, same(row, found[n - 1]))));
  const further = $("#trajectories .further");
  further.hidden = found.length <= listed;
  further.textContent = `Show ${Math.min(PAGE, found.length - listed)} more of ${num(found.length - listed)}`;
  markRow();
}

// A row of the list; `again`: the one above it is of the same group, and has the question already.
function listRow(row, run, again) {
  const label = `${outcomeOf(row)}, reward ${num(row.reward)}`;
  const question = run.index.questions[row.question];
  const meta = [...(again ? [] : [whenOf(row), nameOf(row.ins), row.source]), plural(row.calls, "tool call"), row.stop, [0, 1].includes(row.reward) ? "" : `reward ${num(row.reward)}`];
  return h("li", { class: again ? "again" : "" }, h("a", { href: address({ section: "trajectories", open: String(row.k), beside: "" }), "data-k": row.k, "aria-label": again ? `${question} ${label}, ${meta.join(", ")}` : null },
    h("i", { class: row.failed ? "mark bad" : "mark", title: label }),
    again ? null : h("span", { class: "ask" }, question),
    h("span", { class: "meta" }, meta.filter(Boolean).join(" · "))));
}

function whenOf(row) {
  if (row.kind === "training") return `step ${row.t}`;
  return row.kind === "verification" ? `verified at ${row.t}` : row.kind.replace("I_star", "winning instruction");
}

function markRow() {
  const shown = chosenRows(DATA.runs[runShown()])[0];
  for (const link of document.querySelectorAll("#trajectories .rows a")) {
    if (Number(link.dataset.k) === shown.k) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

function walkList(event) {
  const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
  if (!step) return;
  const links = [...event.currentTarget.querySelectorAll("a")];
  links[links.indexOf(document.activeElement) + step]?.focus();
  event.preventDefault();
}
