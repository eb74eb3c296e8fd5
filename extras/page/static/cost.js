// What a run has cost: calls, tokens, money at a price, verification against training, seconds by phase; its settings.

const PHASES = { rollout: "rollouts", tools: "waiting for tools", reward: "rewards", update: "update", verify: "verification", evolve: "the optimizer's calls", evaluate: "evaluation", other: "the rest: start, final evaluation, checkpoints" };

function drawCost(k) {
  const { cost } = DATA.runs[k];
  const tokens = cost.prompt_tokens + cost.completion_tokens;
  replace($("#cost .body"), h("div", { class: "two" },
    h("div", {}, h("h3", {}, "The optimizer"),
      definitions([["Model", cost.optimizer || "none"], ["Calls", num(cost.optimizer_calls)], ["Tokens", `${num(cost.prompt_tokens)} of prompts, ${num(cost.completion_tokens)} of replies`], ["Waiting", duration(cost.optimizer_seconds)], ["Price", priceFields(cost, tokens)]]),
      h("h3", {}, "Rollouts"),
      definitions([["Training", num(cost.training_rollouts)], ["Verification", num(cost.verification_rollouts)], ["Tool calls", num(cost.tool_calls)]]),
      overheadBar(cost)),
    h("div", {}, h("h3", {}, `Time: ${duration(cost.seconds)}`), phaseBar(cost.phases, false), phaseTable(cost),
      h("h3", {}, "Speed, median of the steps"), definitions(speedFacts(cost.speed)))));
}

// Returns [[name, text], ...] of the speeds that were measured.
function speedFacts(speed) {
  return [["Sampled", "sampled_per_s"], ["Trained on", "trained_per_s"]].filter(([, key]) => key in speed).map(([name, key]) => [name, `${num(Math.round(speed[key]))} tokens per second`]);
}

// Dollars for a million tokens, of prompts and of replies: from the address.
function priceFields(cost) {
  const given = state.price ? state.price.split(",").map(Number) : null;
  const valid = given && given.length === 2 && given.every((x) => Number.isFinite(x) && x >= 0);
  const total = valid ? (cost.prompt_tokens * given[0] + cost.completion_tokens * given[1]) / 1e6 : null;
  const amount = h("b", { class: "amount" }, total === null ? "give a price" : `$${total < 0.01 && total > 0 ? total.toFixed(4) : total.toFixed(2)}`);
  const field = (place, label) => h("input", { type: "number", min: 0, step: "any", "aria-label": label, value: valid ? given[place] : "", onchange: (event) => {
    const inputs = event.target.parentElement.querySelectorAll("input");
    go({ section: "cost", price: [...inputs].map((input) => input.value || "0").join(",") });
  } });
  return h("span", { class: "price" }, amount, h("span", {}, " at $", field(0, "dollars per million tokens of prompts"), " and $", field(1, "dollars per million tokens of replies"), " per million tokens"));
}

// Verification rollouts as a share of the training rollouts, beside the paper's 1.4 to 7 %.
function overheadBar(cost) {
  if (!cost.training_rollouts) return null;
  const share = (100 * cost.verification_rollouts) / cost.training_rollouts, end = Math.max(10, share * 1.15);
  const x = (value) => `${(100 * value) / end}%`;
  return h("figure", { class: "overhead" },
    h("div", { class: "track" }, h("i", { class: "paper", style: { left: x(1.4), width: x(5.6) } }), h("i", { class: "here", style: { left: `calc(${x(share)} - 1px)` } })),
    h("figcaption", { class: "note" }, "Verification is ", h("b", {}, `${share.toFixed(1)} %`), " of the training rollouts; the band is the paper's 1.4 to 7 %."));
}

function phaseParts(phases) {
  const total = Object.values(phases).reduce((sum, x) => sum + x, 0);
  const colours = palette();
  return Object.keys(PHASES).filter((name) => phases[name] > 0).map((name, k) => ({ name, seconds: phases[name], share: total ? phases[name] / total : 0, colour: k < colours.length ? colours[k] : colour("muted") }));
}

function phaseBar(phases, legend = true) {
  const parts = phaseParts(phases);
  if (!parts.length) return null;
  const said = parts.map(({ name, share }) => `${PHASES[name]} ${percent(share)}`).join(", ");
  return h("figure", { class: "phases", role: "img", "aria-label": said },
    h("div", { class: "stack" }, parts.map((part) => h("i", { style: { width: `${100 * part.share}%`, background: part.colour }, title: `${PHASES[part.name]} ${percent(part.share)}` }))),
    legend && h("figcaption", { class: "note" }, parts.filter((part) => part.share > 0.03).map((part) => h("span", { class: "key" }, swatch(part.colour), `${PHASES[part.name].split(":")[0]} ${percent(part.share)}`))));
}

function phaseTable(cost) {
  return h("table", { class: "plain" }, h("tbody", {}, phaseParts(cost.phases).map((part) => h("tr", {}, h("th", { scope: "row" }, swatch(part.colour), PHASES[part.name]), h("td", {}, duration(part.seconds)), h("td", {}, percent(part.share, 1))))));
}

function drawSettings(k) {
  const entries = Object.entries(DATA.runs[k].config);
  replace($("#settings .body"), h("dl", { class: "settings" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value === "" ? "–" : String(value))))));
}
