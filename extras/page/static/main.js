// Draws the page, follows the address and light and dark.

function runShown() {
  const k = Number(state.run);
  return DATA.runs[k] ? k : 0;
}

function drawHeader(k) {
  const { finished, t, T } = DATA.runs[k];
  replace($("#runs"), DATA.runs.length === 1
    ? h("b", {}, DATA.runs[k].name)
    : h("select", { "aria-label": "Run", onchange: (event) => go({ run: event.target.value, open: "", beside: "", ins: "" }, true) },
      DATA.runs.map((one, place) => h("option", { value: place, selected: place === k }, one.name))));
  const text = finished ? `finished, ${plural(t, "step")}` : `step ${t} of ${T}`;
  replace($("#status"), h("span", { class: `chip ${finished ? "finished" : ""}` }, text));
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
