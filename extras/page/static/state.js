// What is shown, kept in the address: #section?key=value. A link, a reload and the back button restore the same view.

const DEFAULTS = {
  run: "0", ins: "", kind: "", from: "", to: "", by: "", outcome: "", stop: "", source: "", calls: "", ask: "",
  open: "", beside: "", price: "",
};
const listeners = [];
let state = parseAddress();

function parseAddress() {
  const [section, query] = location.hash.slice(1).split("?");
  const found = { ...DEFAULTS, section: section || "" };
  for (const [key, value] of new URLSearchParams(query || "")) if (key in DEFAULTS) found[key] = value;
  return found;
}

// Returns the address of the present view with some changes.
function address(changes = {}) {
  const next = { ...state, ...changes };
  const query = new URLSearchParams();
  for (const key of Object.keys(DEFAULTS)) if (next[key] !== DEFAULTS[key]) query.set(key, next[key]);
  const text = query.toString();
  return `#${next.section}${text ? `?${text}` : ""}`;
}

// Changes the view. `step` makes it one that the back button returns from.
function go(changes, step = false) {
  const to = address(changes);
  if (to === location.hash) return;
  history[step ? "pushState" : "replaceState"](null, "", to);
  follow(false);
}

// Listens for changes of the view: render(state, before).
function onChange(render) {
  listeners.push(render);
}

function follow(scroll = true) {
  const before = state;
  state = parseAddress();
  for (const render of listeners) render(state, before);
  if (scroll && state.section !== before.section) reveal();
}

function reveal() {
  const section = state.section && document.getElementById(state.section);
  if (section) section.scrollIntoView();
}

addEventListener("hashchange", () => follow());
addEventListener("popstate", () => follow());
