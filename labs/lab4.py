import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 4: tokens in, tokens out")

with app.setup:
    import re
    import tempfile

    import marimo as mo
    import numpy as np

    from engines.torch_engine import TorchEngine
    from grpo import Learner
    from labs import desk, play, small
    from models.model import load_model, load_tokenizer
    from tasks import Question, Trajectory
    from tasks.tools import encode


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Lab 4: tokens in, tokens out

    *Paper: §2.1 and Eq. 2, between the lines. You need: what a tokenizer does; lab 3. 25 minutes.*

    The engine samples tokens. A tool reads text. The trainer scores tokens again: under the policy that sampled them,
    $\rho = \pi_\theta / \pi_{\mathrm{old}}$ is exactly 1 until the first update. It is tempting to keep the episode as
    text and to encode it once more before training. Many agents did. `rollout.py` does not: it keeps the sampled ids
    (`Trajectory.act`) and decodes only to look for a call or an answer.

    ## Before anything else: predict

    A small policy with a byte-level BPE tokenizer, cut as Qwen2.5's is, has been trained for a moment to write
    searches, on text that was properly encoded. It now samples 400 of them at temperature 1. **In what share of
    them does decoding and encoding change the ids?** Write a number between 0 and 1 into `predicted`.
    """)
    return


@app.cell
def _():
    predicted = None  # your guess
    return (predicted,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## There and back

    A tokenizer is a function from text to ids, and `decode` one from ids to text. Only one of the two compositions has
    to be the identity. Mind the special tokens: nobody sampled those that a tokenizer adds by itself, and those that
    were sampled must not get lost.
    """)
    return


@app.function
def again(tokenizer, ids):
    """Returns the ids (a list) that `ids` become when decoded to text and encoded again."""
    ...


@app.function(hide_code=True)
def check_again(again):
    class Tokenizer:
        """Two letters that also are one token, as in any BPE; 9 begins every text, 8 ends a turn."""

        texts = {1: "a", 2: "b", 3: "ab", 8: "</s>", 9: "<s>"}

        def decode(self, ids, skip_special_tokens=False, **_):
            return "".join(self.texts[k] for k in ids if k < 8 or not skip_special_tokens)

        def __call__(self, text, add_special_tokens=True, **_):
            ids = {text: k for k, text in self.texts.items()}
            return {"input_ids": [9] * add_special_tokens + [ids[x] for x in re.findall("<s>|</s>|ab|a|b", text)]}

        def encode(self, text, add_special_tokens=True, **_):
            return self(text, add_special_tokens)["input_ids"]

    got = again(Tokenizer(), [1, 2, 8])
    if not isinstance(got, list):
        return f"it returns a {type(got).__name__}, not a list of ids: encode the text, and take `input_ids`."
    in_front = "the tokenizer adds a token in front that nobody sampled: `add_special_tokens=False`."
    return desk.judge(
        "of a toy tokenizer's [1, 2, 8]", got, [3, 8],
        ([1, 2, 8], "it returns the ids as they came; decode them, and encode the text."),
        ([9, 3, 8], in_front), ([9, 3], in_front),
        ([3], "the end of the turn is lost: `skip_special_tokens=False`, for the policy did sample that token."),
    )


@app.cell(hide_code=True)
def _():
    right_again = desk.verdict(check_again, again)
    desk.say(r"""
    ## What it costs

    $\rho$ of Eq. 2 compares one token under two policies. If the ids have changed, there is no token to compare with:
    even their number may differ. What can be compared is the whole turn, whose probability is the product of its
    tokens'. The trainer believes that it scores what was sampled.
    """)
    return (right_again,)


@app.function
def rho(new, old):
    """Returns rho of a turn, a number, from the log-probs of its tokens: `new` as the trainer has them, `old` as the
    engine had them. They may have different lengths."""
    ...


@app.function(hide_code=True)
def check_rho(rho):
    new, old = np.log([0.5, 0.4]), np.log([0.5, 0.2, 0.5])
    if np.ndim(got := rho(new, old)):
        return "it returns a value for each token; a turn has one rho."
    return desk.judge(
        "with 0.5 * 0.4 over 0.5 * 0.2 * 0.5", got, 4.0,
        (np.log(4.0), "that is the log of rho: take the exponential."),
        (0.25, "it is upside down: the trainer's probability belongs on top."),
        (np.exp(np.mean(new) - np.mean(old)), "it compares averages; the probability of a turn is a product."),
    )


@app.cell(hide_code=True)
def _():
    right_rho = desk.verdict(check_rho, rho)
    desk.say(r"""
    ## The run

    The policy is trained and saved; the project's engine samples 400 turns; the project's learner scores them, once as
    they were sampled and once as your `again` leaves them. There has been no update: every $\rho$ ought to be 1.
    """)
    return (right_rho,)


@app.cell
def _(right_again, right_rho):
    desk.need("The run", right_again, right_rho)
    with tempfile.TemporaryDirectory() as _folder:
        _path = small.train(_folder, steps=150)
        model, tokenizer = load_model(_path), load_tokenizer(_path)
    learner = Learner(model, None, play.config(beta=0.0))
    prompt = encode(tokenizer, "<search>")

    def played(ids, logps):
        tau = Trajectory(None, Question("", ""), 0, [], 0)
        tau.observe(prompt)
        tau.prompt_tokens = len(prompt)
        tau.act(ids, logps)
        return tau

    _engine = TorchEngine(model, tokenizer, ("</search>",))
    _engine.reset(0)
    sampled = [played(ids, logps) for _, ids, logps, _ in _engine.generate(dict.fromkeys(range(400), prompt), 40, 1.0)]
    _ids = [again(tokenizer, tau.ids)[len(prompt) :] for tau in sampled]
    encoded = [played(ids, [0.0] * len(ids)) for ids in _ids]
    changed = [a.ids != b.ids for a, b in zip(sampled, encoded, strict=True)]
    taught = np.mean([again(tokenizer, ids) != ids for ids in (encode(tokenizer, text) for text in small.calls())])

    def rhos(taus):
        then = [np.array([lp for lp, m in zip(tau.logps, tau.mask, strict=True) if m]) for tau in sampled]
        return np.array([*map(rho, play.score(learner, taus), then)])

    kept, moved = rhos(sampled), rhos(encoded)[np.array(changed)]
    return changed, encoded, kept, moved, sampled, taught, tokenizer


@app.cell
def _(changed, encoded, sampled, tokenizer):
    def _cut(tau):
        return " ".join(f"`{tokenizer.decode([k])}`" for k in tau.ids)

    _k = min(np.flatnonzero(changed), key=lambda k: len(sampled[k].ids))
    _pairs = enumerate(zip(sampled[_k].ids, encoded[_k].ids, strict=False))
    _place = next(place for place, (a, b) in _pairs if a != b)
    mo.md(f"""
    One of them, token by token. They differ from token {_place} on; the text is the same, letter for letter.

    sampled: {_cut(sampled[_k])}

    encoded again: {_cut(encoded[_k])}
    """)
    return


@app.cell
def _(kept, moved):
    desk.draw(
        "log10 of rho of a turn, before any update", "share of turns up to there",
        *(
            (name, np.sort(np.log10(rhos)).clip(-10, 10), np.linspace(0, 1, len(rhos)))
            for name, rhos in (("encoded again, ids changed", moved), ("as sampled, all turns", kept))
        ),
    )
    return


@app.cell(hide_code=True)
def _(changed, kept, moved, predicted, taught):
    found = {
        "share of changed turns": np.mean(changed),
        "share of changed texts among those it was taught": taught,
        "largest |log rho| as sampled": abs(np.log(kept)).max(),
        "median rho of the changed turns": np.median(moved),
        "share of the changed turns outside of the clip": ((moved < 0.8) | (moved > 1.2)).mean(),
    }
    desk.conclude(
        "The share of changed turns", predicted, found, "share of changed turns",
        "A tokenizer agrees with itself: no text that it was taught on changes. A policy that samples does not have "
        "to agree with it. In the changed turns ρ should be 1, before the policy has learned anything.",
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Where a turn ends

    It happens without unlucky samples. The policy ends its turn with `</search>`; the loop goes on with two line feeds
    and the passages. Encoded one after the other, and encoded as one text:
    """)
    return


@app.cell
def _(tokenizer):
    def _shown(ids):
        return " ".join(f"`{tokenizer.decode([k])!r}`" for k in ids)

    turn, observation = " of Migix </search>", "\n\n<information> Doc 1"
    apart, together = encode(tokenizer, turn) + encode(tokenizer, observation), encode(tokenizer, turn + observation)
    mo.md(f"""
    apart: {_shown(apart)}

    together: {_shown(together)}

    One token of the second row holds the end of what the policy wrote and the start of what it was given. Its mask can
    be neither 1 nor 0.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A last question, without a single answer

    Inference servers speak text: an OpenAI-compatible chat API takes messages and encodes them itself, turn by turn.
    **If you had to train on episodes from such a server, what would you ask it to return, what would you check in every
    episode, and what would you do with one that fails the check: drop it, or fix it? What does either do to the policy
    in the long run?** (`engines/` has one for vLLM behind a URL; see what it sends.)
    """)
    return


if __name__ == "__main__":
    app.run()
