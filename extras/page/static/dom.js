"use strict";
// Elements, numbers as text, and the data of the page. Text of a model enters the page through text nodes alone.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

// Returns an element; `attributes` may hold listeners (onclick) and a style object. null children are left out.
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

function $(selector) {
  return document.querySelector(selector);
}

// ---- numbers

function num(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 10000) return Math.round(x).toLocaleString("en");
  if (size >= 100 || Number.isInteger(x)) return String(Math.round(x * 10) / 10);
  if (size < 0.001) return x.toExponential(1);
  return String(Number(x.toPrecision(digits)));
}

function fixed(x, digits = 2) {
  return x === null || x === undefined ? "–" : x.toFixed(digits);
}

function percent(x, digits = 0) {
  return x === null || x === undefined ? "–" : `${(100 * x).toFixed(digits)} %`;
}

function plural(n, one, many = `${one}s`) {
  return `${num(n)} ${n === 1 ? one : many}`;
}

function duration(seconds) {
  if (seconds < 90) return `${num(seconds, 2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function mean(values) {
  return values.length ? values.reduce((sum, x) => sum + x, 0) / values.length : null;
}

// Returns a metric's name as the page shows it.
function named(metric) {
  return { em: "EM", f1: "F1" }[metric] ?? metric;
}

// Returns the scale of some scores: from 0 to 1, or further where they go further.
function scaleOf(values) {
  const low = values.reduce((a, b) => Math.min(a, b ?? 0), 0), high = values.reduce((a, b) => Math.max(a, b ?? 1), 1);
  return { low, high, share: (x) => (x - low) / (high - low) };
}

// ---- pages: parts of the data that stay compressed until someone opens them

const opened = new Map();

// Returns a promise of the content of a page: `name` is "<place of the run>/<name>".
function openPage(name) {
  if (!opened.has(name)) opened.set(name, unpack(name));
  return opened.get(name);
}

async function unpack(name) {
  const element = document.getElementById(`page-${DATA.pages.indexOf(name)}`);
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// ---- colours: those of the style sheet, so that canvas and SVG follow light and dark

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function palette() {
  return [1, 2, 3, 4, 5, 6].map((k) => colour(`series-${k}`));
}

// Returns the colour between two "#rrggbb" at a share of the way.
function blend(from, to, share) {
  const channel = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
  const mix = (k) => Math.round(channel(from, k) + (channel(to, k) - channel(from, k)) * Math.min(1, Math.max(0, share)));
  return `rgb(${mix(0)}, ${mix(1)}, ${mix(2)})`;
}
