// One trajectory, or two of the same question side by side: blocks, passages, and what is known of each token.

const BLOCK = /<(\w+)>[\s\S]*?<\/\1>|<(\w+)>(?![\s\S]*<\/)[\s\S]*$/g; // the last one may be cut off
const PAINTS = {
  none: ["no colour", () => 0],
  logp: ["log-prob", (token) => Math.min(1, -(token.logp ?? token.engine ?? 0) / 4)],
  entropy: ["entropy", (token) => Math.min(1, (token.entropy ?? 0) / 3)],
  kl: ["KL", (token) => Math.min(1, (token.kl ?? 0) / 0.5)],
  ratio: ["ratio", (token) => Math.min(1, Math.abs(Math.log(token.ratio ?? 1)) / 0.3)],
  clipped: ["clipped", (token) => (token.clipped ? 1 : 0)],
};

let drawing = 0;

// Returns the rows to show: those of the address, or else a question before and after training, or else any.
function chosenRows(run) {
  const rows = rowsOf(run);
  if (rows[Number(state.open)] && state.open !== "") return [rows[Number(state.open)], state.beside === "" ? null : rows[Number(state.beside)]];
  return beforeAfter(run) || [rows.find((row) => row.tokens) || rows[0], null];
}

async function drawTrajectory(k) {
  const run = DATA.runs[k], panel = $("#trajectory");
  if (!panel) return;
  const rows = rowsOf(run);
  const [row, beside] = chosenRows(run);
  const turn = ++drawing;
  const shown = await Promise.all([row, beside].filter(Boolean).map((one) => openTrajectory(k, one)));
  if (turn !== drawing) return; // another one was chosen while this one was unpacked
  hideTip();
  const peers = rows.filter((other) => other.k !== row.k && other.question === row.question);
  replace(panel,
    h("h3", { class: "question" }, run.index.questions[row.question]),
    shown[0]?.golds?.length ? h("p", { class: "gold" }, "Gold: ", h("b", {}, shown[0].golds.join(" or "))) : null,
    h("div", { class: "tools" }, paintChoice(shown), besideChoice(peers, row, beside)),
    h("div", { class: beside ? "pair" : "alone" }, [row, beside].filter(Boolean).map((one, n) => oneTrajectory(one, shown[n], run, k))));
  markRow();
}

async function openTrajectory(k, row) {
  const names = DATA.pages.filter((name) => name.startsWith(`${k}/`) && name !== `${k}/calls`);
  const content = await openPage(names[row.page]);
  return content && content[row.place];
}

function paintChoice(shown) {
  if (!shown.some((one) => one && one.token_data)) return null;
  return h("label", {}, "colour tokens by", h("select", { name: "paint", onchange: (event) => go({ paint: event.target.value }) },
    Object.entries(PAINTS).map(([name, [label]]) => h("option", { value: name, selected: state.paint === name }, label))));
}

function besideChoice(peers, row, beside) {
  if (!peers.length) return null;
  const others = peers.filter((peer) => peer.kind !== row.kind || peer.t !== row.t || peer.group !== row.group);
  const same = peers.filter((peer) => !others.includes(peer));
  const option = (peer) => h("option", { value: peer.k, selected: beside === peer }, `${whenOf(peer)}, ${nameOf(peer.ins)}: ${outcomeOf(peer)}, reward ${num(peer.reward)}`);
  return h("label", {}, "the same question", h("select", { name: "beside", onchange: (event) => go({ section: "trajectories", open: String(row.k), beside: event.target.value }, true) },
    h("option", { value: "" }, `beside this (${peers.length})`),
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
    tokenNote(found.token_data),
    promptText(found.token_data),
    blocks(found, row));
}

function outcomeLine(row, found) {
  const scores = [`reward ${num(row.reward)}`, ...Object.entries(found.metrics || {}).map(([name, value]) => `${named(name)} ${num(value)}`)];
  const answered = typeof found.prediction === "string", asked = answered || found.golds?.length;
  return h("p", { class: "verdict" }, asked ? "Answer: " : null, h("b", { class: row.failed ? "bad" : "good" }, answered ? found.prediction : asked ? "none" : outcomeOf(row)), ` · ${scores.join(" · ")}`);
}

function signed(x) {
  return x === null ? "–" : `${x >= 0 ? "+" : "−"}${fixed(Math.abs(x))}`;
}

function tokenNote(tokens) {
  if (!tokens) return null;
  const cut = tokens.n - tokens.text.length;
  return cut > 0 ? h("p", { class: "note" }, `The data of the last ${plural(cut, "token")} of ${num(tokens.n)} were not stored.`) : null;
}

// The whole prompt, template and control tokens included; of a trajectory whose tokens were watched.
function promptText(tokens) {
  return tokens?.prompt ? h("details", { class: "prompt" }, h("summary", {}, "The prompt, as the model reads it"), h("pre", {}, tokens.prompt)) : null;
}

// ---- blocks

function blocks(found, row) {
  const tokens = found.token_data ? tokensOf(found) : null;
  let turn = 0;
  const out = found.parts.map(([kind, text]) => {
    if (kind === "obs") return observation(text);
    const own = tokens ? tokens[turn] : null;
    turn++;
    return own && own.length ? actionTokens(own) : actionText(text);
  });
  const box = h("div", { class: "blocks" }, out);
  if (tokens) watchTokens(box, tokens.flat());
  return box;
}

// Returns the tokens of each turn as objects: text, and a value by name.
function tokensOf({ token_data: tokens, advantage }) {
  const names = ["engine", "logp", "entropy", "ratio", "kl", "clipped"].filter((name) => Array.isArray(tokens[name]));
  const all = tokens.text.map((text, k) => ({ k, text, advantage, ...Object.fromEntries(names.map((name) => [name, tokens[name][k]])) }));
  let start = 0;
  return (tokens.turns || [all.length]).map((n) => all.slice(start, (start += n)));
}

function actionText(text) {
  return cut(text).map(({ tag, start, end }) => block(tag, [text.slice(start, end)]));
}

// Cuts at tags, wherever the tokens end: a token belongs to the block in which it starts.
function actionTokens(tokens) {
  const text = tokens.map((token) => token.text).join("");
  const ranges = cut(text), inside = ranges.map(() => []);
  let place = 0;
  for (const token of tokens) {
    const first = place + (token.text.length - token.text.trimStart().length);
    const k = ranges.findIndex(({ end }) => first < end);
    if (ranges.length) inside[k < 0 ? ranges.length - 1 : k].push(token);
    place += token.text.length;
  }
  return ranges.map(({ tag }, k) => inside[k].length ? block(tag, inside[k].map((token, n) => tokenSpan(token, n === 0))) : null);
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

// ---- tokens

function tokenSpan(token, first) {
  const [, share] = PAINTS[state.paint] || PAINTS.logp;
  const alpha = share(token);
  const style = alpha > 0.01 ? { background: `color-mix(in srgb, var(--token) ${Math.round(8 + 72 * alpha)}%, transparent)` } : {};
  return h("span", { class: token.clipped ? "token clipped" : "token", "data-k": token.k, style }, first ? token.text.trimStart() : token.text);
}

// Shows a token's numbers under the pointer, on a click, and with the arrow keys once its box has the focus.
function watchTokens(box, tokens) {
  let pinned = null;
  const at = (k) => box.querySelector(`.token[data-k="${k}"]`);
  const show = (span) => {
    box.querySelector(".token.now")?.classList.remove("now");
    span.classList.add("now");
    showTip(span, tokens[Number(span.dataset.k)]);
  };
  const leave = () => {
    box.querySelector(".token.now")?.classList.remove("now");
    hideTip();
  };
  box.tabIndex = 0;
  box.setAttribute("aria-label", "Tokens: the arrow keys go from one to the next");
  box.addEventListener("pointerover", (event) => event.target.classList.contains("token") && pinned === null && show(event.target));
  box.addEventListener("pointerleave", () => pinned === null && leave());
  box.addEventListener("click", (event) => {
    if (!event.target.classList.contains("token")) return;
    pinned = pinned === event.target ? null : event.target;
    pinned ? show(pinned) : leave();
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") return (pinned = null), leave();
    if (!step) return;
    const now = box.querySelector(".token.now");
    pinned = at(now ? Number(now.dataset.k) + step : 0) || now;
    if (pinned) show(pinned);
    event.preventDefault();
  });
  box.addEventListener("blur", () => ((pinned = null), leave()));
}

function showTip(span, token) {
  const rows = [
    ["log-prob", token.logp ?? token.engine], ["probability", Math.exp(token.logp ?? token.engine ?? 0)], ["engine's log-prob", token.engine], ["entropy", token.entropy],
    ["ratio", token.ratio], ["KL", token.kl], ["advantage", token.advantage], ["clipped", token.clipped === undefined ? undefined : token.clipped ? "yes" : "no"],
  ].filter(([, value]) => value !== undefined && value !== null);
  const tip = $("#tip");
  replace(tip, h("code", {}, JSON.stringify(token.text).slice(1, -1) || "(part of a character)"), definitions(rows.map(([name, value]) => [name, typeof value === "string" ? value : num(value, 4)])));
  tip.hidden = false;
  const box = span.getClientRects()[0] || span.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = box.bottom + 6 + size.height < innerHeight;
  tip.style.left = `${Math.max(6, Math.min(innerWidth - size.width - 6, box.left))}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(6, box.top - size.height - 6)}px`;
}

function hideTip() {
  $("#tip").hidden = true;
}
