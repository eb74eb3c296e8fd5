// What a text says that its parent does not. Optimizers shuffle sentences as much as they reword them, so sentences are
// matched first, wherever they stand; the words of two sentences that resemble each other are compared then.

const LARGEST = 4e6; // cells of the table of words; beyond it both texts are shown whole
const ALIKE = 0.6; // share of common words above which a sentence counts as a rewording of another

// Returns [["same" | "added" | "gone", text], ...]: `after` in its order, then the sentences of `before` that are gone.
function diffTexts(before, after) {
  const left = sentences(before), out = [];
  const rest = sentences(after).map((text) => {
    const k = left.findIndex((other) => other.trim() === text.trim());
    if (k < 0) return { text, from: null };
    left.splice(k, 1);
    return { text, same: true };
  });
  for (const piece of rest.filter((piece) => !piece.same)) {
    const likeness = left.map((other) => alike(other, piece.text));
    const best = Math.max(0, ...likeness);
    if (best >= ALIKE) [piece.from] = left.splice(likeness.indexOf(best), 1);
  }
  for (const { text, same, from } of rest) {
    if (same) out.push(["same", text]);
    else if (from) out.push(...diffWords(from, text));
    else out.push(["added", text]);
  }
  if (left.length) out.push(["same", " "], ["gone", left.join("").trim()]);
  return out;
}

function sentences(text) {
  return text.match(/[^.!?\n]*[.!?\n]+\s*|[^.!?\n]+$/g) || [];
}

function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
}

// Returns twice the common words over all words, from 0 to 1.
function alike(a, b) {
  const [left, right] = [a, b].map((text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || []);
  const free = [...right];
  const common = left.filter((word) => free.includes(word) && free.splice(free.indexOf(word), 1)).length;
  return (2 * common) / Math.max(1, left.length + right.length);
}

// Returns the edits that turn one text into another, along their longest common sequence of words.
function diffWords(before, after) {
  const x = words(before), y = words(after);
  if (x.length * y.length > LARGEST) return [["gone", before], ["added", after]];
  const width = y.length + 1;
  const worth = (word) => (word.trim() ? 2 : 1); // a word counts more than the space before it
  const common = new Uint32Array((x.length + 1) * width); // the best that the rests have in common
  for (let i = x.length - 1; i >= 0; i--) {
    for (let j = y.length - 1; j >= 0; j--) {
      const skip = Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
      common[i * width + j] = x[i] === y[j] ? Math.max(skip, worth(x[i]) + common[(i + 1) * width + j + 1]) : skip;
    }
  }
  const edits = [];
  let i = 0, j = 0;
  while (i < x.length || j < y.length) {
    const here = common[i * width + j];
    if (i < x.length && j < y.length && x[i] === y[j] && here === worth(x[i]) + common[(i + 1) * width + j + 1]) {
      edits.push(["same", x[i]]);
      i++, j++;
    } else if (i < x.length && here === common[(i + 1) * width + j]) {
      edits.push(["gone", x[i++]]);
    } else {
      edits.push(["added", y[j++]]);
    }
  }
  return join(edits);
}

// Joins neighbours. A space alone between two changes is no reason to tear them apart.
function join(edits) {
  const out = [];
  let gone = "", added = "";
  const flush = () => {
    if (gone) out.push(["gone", gone]);
    if (added) out.push(["added", added]);
    gone = added = "";
  };
  edits.forEach(([kind, text], k) => {
    const bridge = kind === "same" && !text.trim() && (gone || added) && edits[k + 1] && edits[k + 1][0] !== "same";
    if (kind === "same" && !bridge) {
      flush();
      if (out.length && out[out.length - 1][0] === "same") out[out.length - 1][1] += text;
      else out.push(["same", text]);
    } else {
      if (kind !== "added") gone += text;
      if (kind !== "gone") added += text;
    }
  });
  flush();
  return out;
}

// Returns a paragraph that marks the changes; without `gone` only what was added.
function diffText(before, after, gone = true) {
  const tags = { same: "span", added: "ins", gone: "del" };
  const edits = diffTexts(before, after).filter(([kind]) => gone || kind !== "gone");
  return h("p", { class: "instruction" }, edits.map(([kind, text]) => h(tags[kind], {}, text)));
}
