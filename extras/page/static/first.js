// The first screen: did it learn, which instruction won and why, what did it cost.

const CORNERS = ["first policy", "trained policy"];

function drawResult(k) {
  const run = DATA.runs[k];
  const cards = [learnedCard(run), winnerCard(run, k), costCard(run)];
  const table = DATA.runs.length > 1 ? overview() : null;
  replace($("#result"), table, h("div", { class: "cards" }, cards));
  const box = $("#result .spark");
  if (box && !box.childElementCount) firstChart(box, run);
}

let spark = null;

function firstChart(box, run) {
  if (spark) spark.destroy();
  const { t, series } = run.curves;
  const colours = palette();
  const lines = [["reward", "reward"], ["w_best", "best weight w"]].filter(([key]) => key in series)
    .map(([key, label], c) => ({ label, values: series[key], colour: colours[c] }));
  spark = lines.length ? drawChart(box, { id: "spark", title: "", t, lines, events: run.evolutions }, 130) : null;
}

function card(name, question, ...content) {
  return h("article", { class: `card ${name}` }, h("h2", {}, question), content);
}

function learnedCard(run) {
  const { table, questions, rewards, few } = run.learned;
  const first = table["first policy, first instruction"];
  const end = table["trained policy, I_star"] || table["trained policy, first instruction"];
  const out = [];
  if (first && end) {
    const [from, to] = [first[run.metric], end[run.metric]], noise = noiseOf(from, to, questions), lost = noise !== null && Math.abs(to - from) <= noise;
    out.push(h("p", { class: "headline" }, `${named(run.metric)} `, h("b", {}, fixed(from)), " → ", h("b", { class: lost ? "muted" : to > from ? "good" : "" }, fixed(to))));
    out.push(h("p", { class: "under" }, `on ${num(questions)} held-out questions, greedy, after ${plural(run.t, "step")}` + (lost ? `: within noise (±${fixed(noise)})` : "")));
    out.push(corners(run));
  } else if (rewards) {
    out.push(h("p", { class: "headline" }, "Reward ", h("b", {}, fixed(rewards[0])), " → ", h("b", { class: rewards[1] > rewards[0] ? "good" : "" }, fixed(rewards[1]))));
    out.push(h("p", { class: "under" }, `means of the first and the last ${plural(few, "step")} of ${run.t}` + (run.T ? `; ${run.T} are planned` : "")));
  } else {
    out.push(h("p", { class: "headline" }, "Nothing has been measured yet"));
  }
  out.push(h("figure", { class: "spark" }), pairLink(run));
  return card("learned", "Did it learn?", out);
}

// Returns two standard errors of the difference between two means on n questions. Scores from 0 to 1 vary most as zeros
// and ones do; of others it is not known.
function noiseOf(a, b, n) {
  if (Math.min(a, b) < 0 || Math.max(a, b) > 1) return null;
  return 2 * Math.sqrt((a * (1 - a) + b * (1 - b)) / n);
}

// The final table: which policy under which instruction. Its four corners say whose gain it is.
function corners(run) {
  const { table } = run.learned;
  const kinds = ["first instruction", "I_star"].filter((kind) => CORNERS.some((policy) => table[`${policy}, ${kind}`]));
  const said = { "first instruction": "first instruction", I_star: "winning instruction" };
  const low = colour("ramp-0"), high = colour("ramp-1");
  const scale = scaleOf(Object.values(table).map((row) => row[run.metric]));
  const cell = (row) => {
    if (!row) return h("td", {}, "–");
    const score = row[run.metric], calls = callsOf(run, row).map(([name, n]) => ` ${fixed(n, 1)} ${name}`);
    return h("td", { class: "corner", style: { boxShadow: `inset 0 -3px ${blend(low, high, scale.share(score))}` } }, fixed(score), h("small", {}, calls.join(",")));
  };
  return h("table", { class: "corners" },
    h("thead", {}, h("tr", {}, h("td"), kinds.map((kind) => h("th", { scope: "col" }, said[kind])))),
    h("tbody", {}, CORNERS.map((policy) => h("tr", {}, h("th", { scope: "row" }, policy), kinds.map((kind) => cell(table[`${policy}, ${kind}`]))))));
}

// Returns [[name, calls], ...] of a row's tools; of more than three their sum, for which a card has room.
function callsOf(run, row) {
  const calls = run.tools.filter((name) => name in row).map((name) => [name, row[name]]);
  return calls.length > 3 ? [["tool calls", calls.reduce((sum, [, n]) => sum + n, 0)]] : calls;
}

function winnerCard(run, k) {
  const won = run.winner;
  if (!won) return card("winner", "Which instruction won?", h("p", {}, "No instruction is known."));
  const byId = new Map(run.tree.instructions.map((I) => [I.id, I]));
  const I = byId.get(won.id), first = byId.get(won.lineage[0]);
  const line = won.lineage.flatMap((id, n) => [n ? " → " : null, h("a", { href: address({ section: "instructions", ins: String(id), run: String(k) }) }, `#${id}`)]);
  const finished = run.finished, why = run.tree.instructions.length + run.tree.refused.length > 1 ? reasons(won, I, run) : [];
  return card("winner", finished ? "Which instruction won?" : "Which instruction leads?",
    h("p", { class: "headline" }, line),
    diffText(first.text, I.text, false),
    h("p", { class: "note" }, I.id === first.id ? "It is the first instruction." : ["Marked: what it adds to the first instruction."]),
    why.length ? [h("h3", {}, "Why"), h("ul", { class: "why" }, why.map((text) => h("li", {}, text)))] : null);
}

function reasons(won, I, run) {
  const out = [];
  if (won.w !== undefined && won.w !== null) {
    const rival = won.second ? `; the next, #${won.second[1]}, has ${fixed(won.second[0])}` : "";
    out.push(`Its weight is ${fixed(won.w)}${rival}.`);
  }
  if (typeof I.r === "number") out.push(`When it joined at step ${I.born} it scored ${fixed(I.r)} on ${plural(I.questions, "question")}, its parent ${fixed(I.r_parent)}.`);
  else if (I.born === 0 && I.parents.length) out.push("It is a paraphrase of the first one, there from the start.");
  const { "trained policy, first instruction": before, "trained policy, I_star": after } = run.learned.table;
  if (before && after) {
    const used = Object.fromEntries(callsOf(run, before));
    const calls = callsOf(run, after).filter(([name]) => name in used).map(([name, n]) => [name, fixed(n, 1), fixed(used[name], 1)]).filter(([, now, then]) => now !== then).map(([name, now, then]) => `, with ${now} ${name} instead of ${then}`);
    out.push(`The trained policy scores ${fixed(after[run.metric])} under it and ${fixed(before[run.metric])} under the first one${calls.join("")}.`);
  }
  const { instructions, refused } = run.tree;
  out.push(`It is one of ${plural(instructions.length, "instruction")} that were tried; ${plural(refused.length, "candidate was", "candidates were")} refused.`);
  return out;
}

function costCard(run) {
  const cost = run.cost;
  const share = cost.training_rollouts ? cost.verification_rollouts / cost.training_rollouts : null;
  const facts = [
    ["Time", `${duration(cost.seconds)}${run.t ? `, ${num(cost.seconds / run.t, 2)} s per step` : ""}`],
    cost.optimizer_calls && ["Optimizer", `${plural(cost.optimizer_calls, "call")}, ${plural(cost.prompt_tokens + cost.completion_tokens, "token")}`],
    ...speedFacts(cost.speed),
    share && ["Verification", h("span", {}, `${percent(share, 1)} of the training rollouts `, h("span", { class: "muted" }, "(the paper: 1.4–7\u00a0%)"))],
  ];
  return card("spent", "What did it cost?", definitions(facts.filter(Boolean)), phaseBar(cost.phases), h("p", { class: "more" }, h("a", { href: "#cost" }, "All costs")));
}

function definitions(facts) {
  return h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function pairLink(run) {
  const pair = beforeAfter(run);
  return pair && h("p", { class: "more" }, h("a", { href: address({ section: "trajectories", open: String(pair[0].k), beside: String(pair[1].k), run: String(DATA.runs.indexOf(run)) }) }, "One question before and after training"));
}

// Returns a question before and after: the first policy under the first instruction, the trained one under the best.
function beforeAfter(run) {
  const rows = rowsOf(run);
  const after = rows.filter((row) => row.kind === "trained policy, I_star" && !row.failed);
  for (const row of after.sort((a, b) => b.calls - a.calls)) {
    const before = rows.find((other) => other.kind === "first policy, first instruction" && other.question === row.question && other.failed);
    if (before) return [before, row];
  }
  return null;
}

function overview() {
  const metrics = [...new Set(DATA.runs.map((run) => run.metric))];
  const rows = DATA.groups.flatMap((group, g) => group.runs.map((k) => {
    const run = DATA.runs[k], table = run.learned.table;
    const first = table["first policy, first instruction"], end = table["trained policy, I_star"] || table["trained policy, first instruction"];
    const rewards = run.learned.rewards || [null, null];
    return h("tr", { class: String(k) === state.run ? "chosen" : "" },
      h("th", { scope: "row" }, swatch(palette()[g % 6]), h("a", { href: address({ run: String(k), open: "", beside: "", ins: "" }) }, run.name)),
      h("td", {}, group.runs.length > 1 ? `seed ${num(run.config.seed)}` : "", unlike(group)),
      h("td", {}, first && end ? `${metrics.length > 1 ? `${named(run.metric)} ` : ""}${fixed(first[run.metric])} → ${fixed(end[run.metric])}` : "–"), h("td", {}, `${fixed(rewards[0])} → ${fixed(rewards[1])}`),
      h("td", {}, `${run.t}${run.T ? ` of ${run.T}` : ""}`), h("td", {}, duration(run.cost.seconds)));
  }));
  const heads = ["run", "", metrics.length > 1 ? "held out" : `held-out ${named(metrics[0])}`, "reward", "steps", "time"];
  return h("div", { class: "scroll" }, h("table", { class: "overview" }, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows)));
}
