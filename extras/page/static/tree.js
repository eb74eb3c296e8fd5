// The family tree on the training clock: a bar for each instruction from birth to its end, refused candidates in grey.

const ROW = { instruction: 24, refused: 13 };

function drawTree(k) {
  const run = DATA.runs[k], body = $("#instructions .body");
  const { instructions, refused } = run.tree;
  if (!instructions.length) return replace(body, h("p", { class: "empty" }, "No instruction is known: population.jsonl is missing or empty."));
  const picture = h("div", { class: "tree" });
  const panel = h("div", { class: "panel", id: "instruction", tabindex: "-1", "aria-live": "polite" });
  replace(body, treeLegend(run, refused.length), h("div", { class: "split" }, picture, panel));
  paintTree(picture, run, k);
  drawInstruction(k);
}

function weightScale(run) {
  return scaleOf(run.tree.instructions.flatMap((I) => I.history.map(([, w]) => w)));
}

function treeLegend(run, refused) {
  const { low, high } = weightScale(run);
  const ramp = h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${colour("ramp-0")}, ${colour("ramp-1")})` } });
  return h("p", { class: "note" }, "A bar is an instruction from its birth to its end: its height is its share of the step's samples, its colour its weight, ", num(low), " ", ramp, ` ${num(high)}. `,
    refused ? "Grey rings are candidates that were refused. " : "", "Select one to read it. In the log, P is the set of instructions in use, w is an instruction's mean reward over the last steps that drew it, and D_B is the set of questions on which a revision is compared with its parent.");
}

// Returns the instructions and refused candidates in the order of their rows: by birth, the refused after their siblings.
function treeRows({ instructions, refused }) {
  const rows = instructions.map((I) => ({ key: String(I.id), t: I.born, I }));
  refused.forEach((c, place) => rows.push({ key: `r${place}`, t: c.t, c }));
  return rows.sort((a, b) => a.t - b.t || Boolean(a.c) - Boolean(b.c));
}

function paintTree(box, run, k) {
  const rows = treeRows(run.tree);
  const width = Math.max(280, box.clientWidth || 700), wide = width > 560;
  const left = 40, right = wide ? 158 : 16, top = 6;
  const end = Math.max(run.T || 0, run.t, 1);
  const x = (t) => left + (t / (end + 0.5)) * (width - left - right);
  let y = top;
  const place = new Map();
  for (const row of rows) {
    row.height = row.c ? ROW.refused : ROW.instruction;
    row.y = y + row.height / 2;
    y += row.height;
    place.set(row.key, row.y);
  }
  const height = y + 26;
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Family tree of the instructions over the steps" });
  drawing.append(treeAxis(x, y, end, top, width));
  for (const row of rows) for (const parent of (row.I || row.c).parents) {
    const from = place.get(String(parent));
    if (from === undefined || row.t === 0) continue;
    drawing.append(svg("path", { class: "edge", d: `M${x(row.t)},${from} V${row.y - 4} q0,4 4,4 h2` }));
  }
  const totals = sampleTotals(run.tree.instructions), scale = weightScale(run);
  for (const row of rows) drawing.append(row.I ? instructionBar(row, run, x, width, wide, totals, scale, k) : refusedRing(row, x, width, wide, k));
  replace(box, drawing);
}

function treeAxis(x, y, end, top, width) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((step) => (x(step) - x(0)) > 44) || 10000;
  const marks = [];
  for (let t = 0; t <= end; t += steps) {
    marks.push(svg("line", { class: "grid", x1: x(t), x2: x(t), y1: top, y2: y }), svg("text", { class: "axis", x: x(t), y: y + 16, "text-anchor": "middle" }, t === 0 ? "step 0" : String(t)));
  }
  return svg("g", {}, marks);
}

function sampleTotals(instructions) {
  const totals = new Map();
  for (const I of instructions) for (const [t, , , n] of I.history) if (n) totals.set(t, (totals.get(t) || 0) + n);
  return totals;
}

// Returns the share of a step's samples: counted, or as drawn by Eq. 4 where nobody has counted.
function shareOf([t, , p, n], totals) {
  return n !== null && totals.get(t) ? n / totals.get(t) : p || 0;
}

function instructionBar(row, run, x, width, wide, totals, scale, k) {
  const I = row.I, low = colour("ramp-0"), high = colour("ramp-1");
  const won = run.winner && run.winner.id === I.id;
  const last = I.left ?? Math.max(run.t, I.born);
  const bars = I.history.map((entry) => {
    const size = Math.max(2.5, shareOf(entry, totals) * 19);
    return svg("rect", { x: x(entry[0] - 0.5), width: Math.max(1, x(1) - x(0) + 0.3), y: row.y - size / 2, height: size, fill: blend(low, high, scale.share(entry[1] ?? scale.low)) });
  });
  const fate = I.left !== null ? `${I.why === "pruned" ? "pruned" : "replaced"} at ${I.left}` : won ? (run.finished ? "won" : "leads") : "in P at the end";
  const weight = I.history.length ? `, w ${fixed(I.history[I.history.length - 1][1])}` : "";
  return treeRow(row, width, k, `Instruction ${I.id}, born at step ${I.born}, ${fate}${weight}`, won ? "won" : "",
    svg("line", { class: "life", x1: x(I.born), x2: x(last), y1: row.y, y2: row.y }), bars,
    svg("text", { class: "name", x: 34, y: row.y + 4, "text-anchor": "end" }, `#${I.id}`),
    wide ? svg("text", { class: "fate", x: width - 152, y: row.y + 4 }, fate + weight) : null);
}

function refusedRing(row, x, width, wide, k) {
  const verified = typeof row.c.r === "number" ? `${fixed(row.c.r)}, parent ${fixed(row.c.r_parent)}: ` : "";
  return treeRow(row, width, k, `Refused at step ${row.t}: ${verified}${row.c.why}`, "refused",
    svg("circle", { cx: x(row.t) + 10, cy: row.y, r: 3.5 }),
    svg("text", { class: "fate", x: x(row.t) + 20, y: row.y + 3.5 }, wide ? verified + row.c.why : verified.split(":")[0] || row.c.why));
}

function treeRow(row, width, k, label, kind, ...shapes) {
  const open = () => go({ section: "instructions", ins: row.key, run: String(k) });
  const press = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") open();
    else if (step) treeNeighbour(event.currentTarget, step)?.focus();
    else return;
    event.preventDefault();
  };
  return svg("g", { class: `row ${kind}`, tabindex: "0", role: "button", "aria-label": label, "data-key": row.key, onclick: open, onkeydown: press },
    svg("title", {}, label), svg("rect", { class: "hit", x: 0, y: row.y - row.height / 2, width, height: row.height, rx: 4 }), shapes);
}

function treeNeighbour(row, step) {
  const rows = [...document.querySelectorAll(".tree .row")];
  return rows[rows.indexOf(row) + step];
}

// ---- one instruction

function drawInstruction(k) {
  const run = DATA.runs[k], panel = $("#instruction");
  if (!panel) return;
  const key = findInstruction(run, state.ins) ? state.ins : run.winner ? String(run.winner.id) : "0";
  for (const row of document.querySelectorAll(".tree .row")) row.classList.toggle("chosen", row.dataset.key === key);
  const I = findInstruction(run, key);
  if (!I) return replace(panel);
  const parent = I.parents.length ? findInstruction(run, String(I.parents[0])) : null;
  replace(panel,
    h("h3", {}, nameOf(key), key.startsWith("r") ? h("span", { class: "chip" }, "refused") : run.winner && run.winner.id === I.id ? h("span", { class: "chip good" }, run.finished ? "won" : "leads") : null),
    definitions(factsOf(I, run, k)),
    weightLine(I, weightScale(run)),
    parent ? diffText(parent.text, I.text) : h("p", { class: "instruction" }, I.text),
    parent && h("p", { class: "note" }, `Against #${parent.id}: `, h("ins", {}, "added"), ", ", h("del", {}, "removed"), "."),
    key.startsWith("r") ? null : h("p", { class: "more" }, h("a", { href: address({ section: "trajectories", by: key, kind: "", open: "" }) }, "Its trajectories")),
    I.call ? h("div", { class: "call" }) : null);
  if (I.call) drawCall($("#instruction .call"), k, I.call);
}

function nameOf(key) {
  return key.startsWith("r") ? `Candidate ${Number(key.slice(1)) + 1}` : key === "?" ? "unknown" : `#${key}`;
}

function findInstruction(run, key) {
  if (key.startsWith("r")) return run.tree.refused[Number(key.slice(1))];
  return key === "" ? undefined : run.tree.instructions.find((I) => String(I.id) === key);
}

function factsOf(I, run, k) {
  const link = (id) => h("a", { href: address({ section: "instructions", ins: String(id), run: String(k) }) }, `#${id}`);
  const parents = I.parents.map(link);
  const facts = [];
  if ("id" in I) {
    facts.push(["Born", ["step ", String(I.born), I.parents.length ? [I.born ? ", a revision of " : ", a paraphrase of ", parents] : ""]]);
    facts.push(["Left", I.left === null ? "never" : `step ${I.left}, ${I.why === "pruned" ? "pruned" : "the next generation took its place"}`]);
  } else {
    facts.push(["Proposed", [`step ${I.t}, as a revision of `, parents]], ["Refused", I.why]);
  }
  if (typeof I.r === "number") facts.push(["Verified", `${fixed(I.r)} on ${plural(I.questions, "question")}, its parent ${fixed(I.r_parent)}`]);
  return facts;
}

// A small line of the weight over the steps in P.
function weightLine(I, scale) {
  const points = (I.history || []).filter(([, w]) => w !== null);
  if (points.length < 2) return null;
  const width = 260, height = 34, first = points[0][0], last = points[points.length - 1][0];
  const x = (t) => ((t - first) / (last - first)) * width, y = (w) => height - 2 - Math.min(1, Math.max(0, scale.share(w))) * (height - 4);
  const d = points.map(([t, w], n) => `${n ? "L" : "M"}${x(t).toFixed(1)},${y(w).toFixed(1)}`).join("");
  return h("p", { class: "weight" }, svg("svg", { width, height, role: "img", "aria-label": `weight from ${fixed(points[0][1])} to ${fixed(points[points.length - 1][1])}` }, svg("path", { d })),
    h("span", { class: "note" }, `weight ${fixed(points[points.length - 1][1])} at step ${last}`));
}

// What the optimizer was shown and what it replied, opened when someone asks.
async function drawCall(box, k, place) {
  const calls = await openPage(`${k}/calls`);
  const call = calls && calls[place];
  if (!call || !box.isConnected) return;
  const shown = call.failures.map(({ text, gold }, n) => h("li", {}, h("pre", {}, text), gold ? h("p", { class: "note" }, "Correct answer: ", h("b", {}, gold)) : null));
  replace(box,
    shown.length ? h("details", {}, h("summary", {}, `${plural(shown.length, "failure")} that the optimizer was shown`), h("ol", { class: "failures" }, shown)) : null,
    call.analysis ? h("details", { open: true }, h("summary", {}, "Its analysis"), h("pre", { class: "analysis" }, call.analysis)) : null,
    h("details", {}, h("summary", {}, `The prompt, ${plural(call.prompt_tokens ?? 0, "token")}`), h("pre", {}, call.prompt)),
    h("details", {}, h("summary", {}, `The reply, ${plural(call.completion_tokens ?? 0, "token")}`), h("pre", {}, call.reply)));
}
