// Draws the page, follows the address, light and dark, and a server that says when the run has gone on.

function runShown() {
  const k = Number(state.run);
  return DATA.runs[k] ? k : 0;
}

function drawHeader(k) {
  const run = DATA.runs[k], { state: what, t, T, written } = run.status;
  replace($("#runs"), DATA.runs.length === 1
    ? h("b", {}, run.name)
    : h("select", { "aria-label": "Run", onchange: (event) => go({ run: event.target.value, open: "", beside: "", ins: "" }, true) },
      DATA.runs.map((one, place) => h("option", { value: place, selected: place === k }, one.name))));
  const text = what === "finished" ? `finished, ${plural(t, "step")}` : what === "running" ? `running, step ${t}${T ? ` of ${T}` : ""}` : `stopped at step ${t}${T ? ` of ${T}` : ""}`;
  replace($("#status"), h("span", { class: `chip ${what}` }, text), h("span", { class: "muted" }, ` ${what === "finished" ? "" : `last line ${ago(written)}`}`));
}

function drawAll() {
  const k = runShown();
  drawHeader(k);
  drawCurves();
  drawResult(k);
  drawTree(k);
  drawTrajectories(k);
  drawCost(k);
  drawSettings(k);
}

onChange((now, before) => {
  const changed = (...keys) => keys.some((key) => now[key] !== before[key]);
  const k = runShown();
  if (changed("run")) return drawAll();
  if (changed("ins")) drawInstruction(k);
  if (changed("kind", "from", "to", "by", "outcome", "stop", "source", "calls", "ask")) {
    listed = PAGE;
    syncFilters();
    drawList(k);
  }
  if (changed("open", "beside")) drawTrajectory(k);
  if (changed("price")) drawCost(k);
});

// The server of --serve answers what the run's files look like; when that differs from this page's files, it is reread.
function watchServer() {
  setInterval(async () => {
    try {
      const live = await (await fetch("stamp", { cache: "no-store" })).text();
      if (live !== DATA.live) location.reload();
    } catch {
      $("#status").title = "The server that made this page does not answer.";
    }
  }, 2000);
}

drawAll();
$("#made").textContent = `${new Date(1000 * DATA.made).toISOString().slice(0, 16).replace("T", " ")} UTC`;
reveal();
Promise.allSettled([...opened.values()]).then(() => requestAnimationFrame(reveal)); // what was unpacked has moved it
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let width = innerWidth;
addEventListener("resize", () => {
  if (Math.abs(innerWidth - width) < 20) return;
  width = innerWidth;
  const tree = $(".tree");
  if (tree) paintTree(tree, DATA.runs[runShown()], runShown()), drawInstruction(runShown());
});
if (DATA.live && location.protocol.startsWith("http")) watchServer();
