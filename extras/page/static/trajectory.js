// One trajectory, or two of the same question side by side: blocks and passages.

const BLOCK = /<(\w+)>[\s\S]*?<\/\1>|<(\w+)>(?![\s\S]*<\/)[\s\S]*$/g; // the last one may be cut off

let drawing = 0;

// Returns the rows to show: those of the address, or else a question before and after training, or else any.
function chosenRows(run) {
  const rows = rowsOf(run);
  if (rows[Number(state.open)] && state.open !== "") return [rows[Number(state.open)], state.beside === "" ? null : rows[Number(state.beside)]];
  return beforeAfter(run) || [rows[0], null];
}

async function drawTrajectory(k) {
  const run = DATA.runs[k], panel = $("#trajectory");
  if (!panel) return;
  const rows = rowsOf(run);
  const [row, beside] = chosenRows(run);
  const turn = ++drawing;
  const shown = await Promise.all([row, beside].filter(Boolean).map((one) => openTrajectory(k, one)));
  if (turn !== drawing) return; // another one was chosen while this one was unpacked
  const peers = rows.filter((other) => other.k !== row.k && other.question === row.question);
  replace(panel,
    h("h3", { class: "question" }, run.index.questions[row.question]),
    shown[0]?.golds?.length ? h("p", { class: "gold" }, "Gold: ", h("b", {}, shown[0].golds.join(" or "))) : null,
    h("div", { class: "tools" }, besideChoice(peers, row, beside)),
    h("div", { class: beside ? "pair" : "alone" }, [row, beside].filter(Boolean).map((one, n) => oneTrajectory(one, shown[n], run, k))));
  markRow();
}

async function openTrajectory(k, row) {
  const names = DATA.pages.filter((name) => name.startsWith(`${k}/`) && name !== `${k}/calls`);
  const content = await openPage(names[row.page]);
  return content && content[row.place];
}

function besideChoice(peers, row, beside) {
  if (!peers.length) return null;
  const others = peers.filter((peer) => peer.kind !== row.kind || peer.t !== row.t || peer.group !== row.group);
  const same = peers.filter((peer) => !others.includes(peer));
  const option = (peer) => h("option", { value: peer.k, selected: beside === peer }, `${whenOf(peer)}, ${nameOf(peer.ins)}: ${outcomeOf(peer)}, reward ${num(peer.reward)}`);
  return h("label", {}, "compare with", h("select", { name: "beside", onchange: (event) => go({ section: "trajectories", open: String(row.k), beside: event.target.value }, true) },
    h("option", { value: "" }, `the same question (${peers.length} more)`),
    others.length ? h("optgroup", { label: "at another time or under another instruction" }, others.map(option)) : null,
    same.length ? h("optgroup", { label: "in the same group" }, same.map(option)) : null));
}

function oneTrajectory(row, found, run, k) {
  if (!found) return h("article", { class: "trajectory" }, h("p", { class: "empty" }, "This trajectory could not be read."));
  const link = findInstruction(run, row.ins) ? h("a", { href: address({ section: "instructions", ins: row.ins }) }, nameOf(row.ins)) : nameOf(row.ins);
  const facts = [`${num(found.action_tokens)} tokens written`, plural(row.calls, "tool call"), `ended by ${row.stop}`];
  if (row.kind === "training" && found.advantage !== undefined) facts.push(`advantage ${signed(found.advantage)}`);
  return h("article", { class: "trajectory" },
    h("p", { class: "under" }, [whenOf(row), " · instruction ", link, " · ", facts.join(" · ")]),
    outcomeLine(row, found),
    blocks(found));
}

function outcomeLine(row, found) {
  const scores = [`reward ${num(row.reward)}`, ...Object.entries(found.metrics || {}).map(([name, value]) => `${named(name)} ${num(value)}`)];
  const answered = typeof found.prediction === "string", asked = answered || found.golds?.length;
  return h("p", { class: "verdict" }, asked ? "Answer: " : null, h("b", { class: row.failed ? "bad" : "good" }, answered ? found.prediction : asked ? "none" : outcomeOf(row)), ` · ${scores.join(" · ")}`);
}

function signed(x) {
  return x === null ? "–" : `${x >= 0 ? "+" : "−"}${fixed(Math.abs(x))}`;
}

// ---- blocks

function blocks(found) {
  return h("div", { class: "blocks" }, found.parts.map(([kind, text]) => (kind === "obs" ? observation(text) : actionText(text))));
}

function actionText(text) {
  return cut(text).map(({ tag, start, end }) => block(tag, [text.slice(start, end)]));
}

// Returns [{tag, start, end}]: the tagged blocks of a text and what lies between them.
function cut(text) {
  const out = [];
  let place = 0;
  for (const match of text.matchAll(BLOCK)) {
    if (text.slice(place, match.index).trim()) out.push({ tag: "", start: place, end: match.index });
    out.push({ tag: match[1] || match[2], start: match.index, end: match.index + match[0].length });
    place = match.index + match[0].length;
  }
  if (text.slice(place).trim()) out.push({ tag: "", start: place, end: text.length });
  return out;
}

function block(tag, content) {
  return h("div", { class: `block ${["think", "answer", ""].includes(tag) ? tag : "tool"}` }, h("span", { class: "label" }, tag || "text"), h("div", { class: "words" }, content));
}

// What a tool returned: passages that the policy read and did not write. Its tokens are masked, which makes them dim.
function observation(text) {
  const match = /^\s*<(\w+)>([\s\S]*)<\/\1>\s*$/.exec(text);
  const passages = match ? match[2].split(/(?=Doc \d+\s*\(Title:)/).map((passage) => passage.trim()).filter(Boolean) : [text.trim()];
  const label = match ? match[1] : "observation";
  return h("div", { class: "block masked" }, h("span", { class: "label" }, label, h("small", {}, " masked")),
    h("div", { class: "words" }, passages.map((passage) => {
      const title = /^Doc (\d+)\s*\(Title:\s*(.*?)\s*\)\s*([\s\S]*)$/.exec(passage);
      return title ? h("p", { class: "passage" }, h("b", {}, title[2]), " ", title[3]) : h("p", { class: "passage" }, passage);
    })));
}
