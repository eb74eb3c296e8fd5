import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 7: break it")

with app.setup:
    from contextlib import redirect_stderr
    from dataclasses import replace
    from io import StringIO

    import marimo as mo
    import numpy as np

    from config import HERE, parse_flags
    from labs import desk, play
    from plumbing.files import read_jsonl
    from tasks.task import rng_of
    from world.clauses import CLAUSES, FRAMES


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Lab 7: break it

    *Paper: Algorithm 1 whole, §4 (ablations). You need: labs 2 to 6. 30 minutes.*

    A method is understood when it can be broken on purpose and the damage predicted. Four ways to break INSPO:

    1. **freeze the policy**: instructions evolve, the weights stay;
    2. **freeze the instruction**: the weights train, under the first instruction (that is Search-R1);
    3. **shuffle the rewards**: each trajectory gets the reward of another one of the step;
    4. **remove the mask**: the policy also learns the tokens that it was given.

    The first two take whole runs, hours on this machine: their committed results are read. The others are run here.
    """)
    return


@app.cell
def _():
    rows = read_jsonl(HERE / "docs" / "results" / "rows" / "default.jsonl")
    _at = {arm: [row["evals"] for row in rows if row["arm"] == arm] for arm in ("inspo", "static", "frozen")}
    steps = [t for t, *_ in _at["inspo"][0]]  # at which the runs were evaluated
    curves = {
        arm: np.array([[em for _, em, *_ in evals] for evals in runs]) for arm, runs in _at.items()
    }  # (runs, len)
    return curves, steps


@app.cell(hide_code=True)
def _(curves, steps):
    mo.md(f"""
    ## Before anything else: predict

    INSPO's {len(curves["inspo"])} runs go from {curves["inspo"][:, 0].mean():.2f} held-out exact match to
    {curves["inspo"][:, -1].mean():.2f} in {steps[-1]} steps. Write your four guesses into `predicted`:

    - `"frozen policy"`, `"frozen instruction"`: held-out exact match at the end;
    - `"shuffled rewards"`: by how much the exact match changes in 3 steps of GRPO under one good instruction;
    - `"no mask"`: updates on one batch make what right trajectories wrote likelier than what wrong ones wrote. Of the
      gap that opens with the mask, what share opens without it?
    """)
    return


@app.cell
def _():
    predicted = {"frozen policy": None, "frozen instruction": None, "shuffled rewards": None, "no mask": None}
    return (predicted,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Freeze

    Both controls are flags of `inspo.py`; `python inspo.py --help` lists them. Which?
    """)
    return


@app.function
def flags():
    """Returns {"frozen policy": [...], "frozen instruction": [...]}: what to write after `python inspo.py`."""
    ...


@app.function(hide_code=True)
def check_flags(flags):
    got = flags()
    if not isinstance(got, dict) or set(got) != {"frozen policy", "frozen instruction"}:
        return "it has to return a dict with the keys 'frozen policy' and 'frozen instruction'."
    parsed = {}
    for name, argv in got.items():
        if isinstance(argv, str):
            return f"'{name}' is one text; return a list, as a shell would split it: ['--seed', '1']."
        try:
            with redirect_stderr(StringIO()) as said:
                parsed[name] = parse_flags([str(word) for word in argv])
        except SystemExit as e:
            return f"inspo.py refuses the flags of '{name}': {[str(e), *said.getvalue().splitlines()][-1]}."
    policy, instruction = parsed["frozen policy"], parsed["frozen instruction"]
    if policy.mode == "static" and instruction.lr == 0:
        return "they are the wrong way round."
    if policy.lr != 0 or policy.mode == "static":
        return f"with the flags of 'frozen policy' the learning rate is {policy.lr:g}, the mode {policy.mode}: only "\
               "the weights may stay."  # fmt: skip
    if instruction.mode != "static" or instruction.lr == 0:
        return "with the flags of 'frozen instruction' only that may stay: which --mode is the baseline?"
    return ""


@app.cell(hide_code=True)
def _():
    right_flags = desk.verdict(check_flags, flags)
    return (right_flags,)


@app.cell
def _(curves, right_flags, steps):
    desk.need("The figure", right_flags)
    _arms = (("INSPO", "inspo"), ("instruction frozen", "static"), ("policy frozen", "frozen"))
    desk.draw(
        "step", "held-out exact match", *((name, steps, curves[arm].mean(0), "o-") for name, arm in _arms), ylim=(0, 1)
    )
    return


@app.cell(hide_code=True)
def _(curves, right_flags):
    desk.need("The text", right_flags)
    mo.md(f"""
    Each line is the mean of {len(curves["static"])} runs on two cores. Neither half gets there alone. But mind what
    this can show: the world was built so that it takes both (world/README.md), and its reward needs an instruction that
    the static arm is never shown. A real task need not be like that (docs/real.md has one that is not).

    ## Shuffle

    The rewards of a step in another order: their mean and spread are the same, and nothing is lost but whose each was.
    """)
    return


@app.function
def shuffled(rewards, rng):
    """Returns the same rewards in random order; `rng` is a numpy Generator."""
    return [rewards[k] for k in rng.permutation(len(rewards))]


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Unmask

    A trajectory's mask is 0 on the prompt, 1 on what the policy sampled, 0 on what the search returned. Set it to 1
    everywhere but on the prompt.
    """)
    return


@app.function
def unmasked(mask, prompt_tokens):
    """Returns the mask, a list of 0 and 1, with 1 on all tokens after the first `prompt_tokens`."""
    ...


@app.function(hide_code=True)
def check_unmasked(unmasked):
    mask = [0, 0, 0, 1, 1, 0, 0, 1]
    given = mask.copy()
    says = desk.judge(
        f"for {mask} with 3 tokens of prompt", unmasked(given, 3), [0] * 3 + [1] * 5,
        (mask, "it leaves the mask as it is: the two tokens of the observation are still 0."),
        ([1] * 8, "it includes the prompt. Then the policy would learn to write questions."),
    )  # fmt: skip
    return says if given == mask else "it writes into the mask that it was given; return a new one."


@app.cell(hide_code=True)
def _():
    right_unmasked = desk.verdict(check_unmasked, unmasked)
    desk.say(r"""
    ## The runs

    The world's policy under one good instruction, twice 3 steps of 8 questions with the project's own rollout and
    learner: with its rewards, and with yours. Then 4 updates on one batch, with the mask and without.
    """)
    return (right_unmasked,)


@app.cell
def _(right_flags, right_unmasked):
    desk.need("The run", right_flags, right_unmasked)
    cfg = play.config(warmup=0.05)
    task = play.LibraryQA(cfg)
    good = " ".join([FRAMES[0], *(CLAUSES[name].taught[0] for name in ("entity", "exact", "state"))])
    train, _test = task.questions("train"), task.questions("test")[:60]

    def step(player, t, change):
        """Plays 8 questions of step t, lets `change` break the rewards, and updates."""
        drawn = rng_of(0, t, "lab 7").choice(len(train), 8, replace=False)
        taus = player.play(t, "rollout", good, [train[k] for k in drawn], cfg.G)
        for tau, r in zip(taus, change([tau.reward for tau in taus], rng_of(0, t, "shuffle")), strict=True):
            tau.reward = r
        player.learner.set_advantages(taus)
        player.learner.update(cfg.T // 10 + t, [taus])  # after the warm-up of the learning rate

    first, after = play.Player(cfg, task), {}
    before = first.measure(good, _test)
    for name, change in (("true rewards", lambda rewards, rng: rewards), ("shuffled rewards", shuffled)):
        _player = play.Player(cfg, task)
        for t in range(1, 4):
            step(_player, t, change)
        after[name] = _player.measure(good, _test)
    return after, before, cfg, first, good, task, train


@app.cell
def _(cfg, first, good, task, train):
    def logps(player, taus, masks):
        """Returns the log-probs of each trajectory's tokens that are 1 in its mask of `masks`, under the policy now."""
        masked = [replace(tau, mask=mask) for tau, mask in zip(taus, masks, strict=True)]
        return play.score(player.learner, masked)

    gap, given = {}, {}
    _taus = first.play(1, "rollout", good, train[:8], cfg.G)
    _written = [tau.mask for tau in _taus]
    _given = [[0] * tau.prompt_tokens + [1 - m for m in tau.mask[tau.prompt_tokens :]] for tau in _taus]
    _old = logps(first, _taus, _written), logps(first, _taus, _given)
    _unmasked = [replace(tau, mask=unmasked(tau.mask, tau.prompt_tokens)) for tau in _taus]
    for _name, _batch in (("with the mask", _taus), ("without", _unmasked)):
        _player = play.Player(cfg, task)
        for _t in range(1, 5):
            _player.learner.update(cfg.T // 10 + _t, [_batch])
        _moved = [y - x for x, y in zip(_old[0], logps(_player, _taus, _written), strict=True)]
        _right, _wrong = (
            np.concatenate([x for x, tau in zip(_moved, _taus, strict=True) if sign * tau.advantage > 0])
            for sign in (1, -1)
        )
        gap[_name] = _right.mean() - _wrong.mean()
        given[_name] = np.mean(np.concatenate(logps(_player, _taus, _given)) - np.concatenate(_old[1]))
    return gap, given


@app.cell(hide_code=True)
def _(after, before, curves, gap, given, predicted):
    found = {
        "frozen policy": curves["frozen"][:, -1].mean(),
        "frozen instruction": curves["static"][:, -1].mean(),
        "inspo": curves["inspo"][:, -1].mean(),
        "shuffled rewards": after["shuffled rewards"] - before,
        "true rewards": after["true rewards"] - before,
        "no mask": gap["without"] / gap["with the mask"],
        "given tokens, with the mask": given["with the mask"],
        "given tokens, without": given["without"],
    }
    mo.vstack(
        [
            *(desk.compare(name.capitalize(), guess, found[name]) for name, guess in predicted.items()),
            desk.list_found(found, *predicted.values()),
            mo.md(
                "Without the mask the log-probability of a given token changes, too: the policy's effort goes into the "
                "passages, which it will never have to write. They also count in |τ|, so what it did write weighs less."
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    What these runs cannot show: 3 steps with one seed and 60 test questions tell a collapse from a gain, not a gain
    from a slightly smaller one. Updates on one batch say where the missing mask pushes, not whether it ruins a policy
    in a whole run. Raise the numbers and see.

    ## A last question, without a single answer

    Shuffled rewards have the same mean and no information. Were you surprised by what they did? Advantages then point
    nowhere, but the optimizer still takes steps of full size. **In which other ways can training break
    while every curve of the loss looks healthy, and which number would you log to see each of them?** (A run's
    page has some: docs/one_step.md, extras/page/README.md.)
    """)
    return


if __name__ == "__main__":
    app.run()
