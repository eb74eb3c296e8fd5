import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 2: better than what?")

with app.setup:
    import marimo as mo
    import numpy as np

    from grpo import group_advantages
    from labs import desk, play


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Lab 2: better than what?

    *Paper: §2.2, Eq. 3. You need: mean and standard deviation. 25 minutes.*

    GRPO has no value network to say how good a reward is. It asks the same question $G$ times, under the same
    instruction, and compares the answers with each other:

    $$\hat A_i = \frac{r_i - \operatorname{mean}(r_1, \dots, r_G)}{\operatorname{std}(r_1, \dots, r_G)}
    \quad \text{(Eq. 3)}$$

    The project's version is `group_advantages` in `grpo.py`. You write your own first.

    ## Before anything else: predict

    The embedded world's policy, before any training, answers 48 questions 5 times each. A reward is 0 or 1, and 1 is
    rare. **What share of the 48 groups teaches the policy anything at all?** Write a number between 0 and 1 into
    `predicted`.
    """)
    return


@app.cell
def _():
    predicted = None  # your guess
    return (predicted,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## By hand

    Take paper and pencil: one right answer of five, $r = (1, 0, 0, 0, 0)$. The mean is 0.2. The paper says std and not
    which: this project divides the squares by $G - 1$, as torch does, and adds $10^{-6}$ to std (CHOICE-19 in
    docs/choices.md). Write that down as a function, and do not forget a group of equals.
    """)
    return


@app.function
def advantages(r):
    """Returns A (G,), an array, of the rewards r (G,) of a group."""
    ...


@app.function(hide_code=True)
def check_advantages(advantages):
    r = np.array([1.0, 0, 0, 0, 0])
    mean, std = r.mean(), r.std(ddof=1)
    with np.errstate(all="ignore"):
        says = desk.judge(
            "for r = 1, 0, 0, 0, 0", advantages(r), (r - mean) / std,
            (r / std, "it does not subtract the mean. Then no answer is ever worse than nothing: A is never below 0."),
            (r - mean, "it does not divide by std."),
            ((r - mean) / r.std(), "its std divides the squares by G. This project's divides by G - 1: `ddof=1`, "
                                   "CHOICE-19."),
        )
        return says or desk.judge(
            "for a group of equals", advantages(np.full(5, 0.3)), np.zeros(5),
            (np.full(5, np.nan), "the group of equals has advantage nan: std is 0 there. Add 1e-6 (CHOICE-19)."),
        )


@app.cell(hide_code=True)
def _():
    right_advantages = desk.verdict(check_advantages, advantages)
    desk.say(r"""
    ## A group of equals

    If all $G$ answers are right, or all wrong, every advantage is 0, and $G$ rollouts were played for nothing. Suppose
    that each answer is right with probability $p$, independently. With what probability is a group useful?
    """)
    return (right_advantages,)


@app.function
def useful(p, G):
    """Returns the probability that G rewards, each 1 with probability p and else 0, are not all the same."""
    ...


@app.function(hide_code=True)
def check_useful(useful):
    says = desk.judge(
        "for p = 0.3 and G = 5", useful(0.3, 5), 1 - 0.3**5 - 0.7**5,
        (1 - 0.7**5, "it counts groups that are all right as useful: their rewards are equal, too."),
        (1 - 0.3**5, "it counts groups that are all wrong as useful: their rewards are equal, too."),
        (0.3**5 + 0.7**5, "that is the probability of a group of equals; a useful one is the opposite."),
    )
    return says or desk.judge("for p = 0.4 and G = 3", useful(0.4, 3), 1 - 0.4**3 - 0.6**3)


@app.cell(hide_code=True)
def _():
    right_useful = desk.verdict(check_useful, useful)
    desk.say(r"""
    ## What std does

    With rewards 0 and 1 and $k$ right answers of $G$, all the right ones have the same advantage. Find it as a formula
    in $k$ and $G$ (leave out the $10^{-6}$). It says how hard one rare success is pushed, and how hard one of many.
    """)
    return (right_useful,)


@app.function
def of_a_success(k, G):
    """Returns A of each of the k right answers (reward 1) in a group of G whose others have reward 0; 0 < k < G."""
    ...


@app.function(hide_code=True)
def check_of_a_success(of_a_success):
    mistakes = (
        (1 - 1 / 5, "that is its distance to the mean, 1 - k / G; divide it by std."),
        (2.0, "its std has G below the sum of squares; this project's has G - 1."),
    )
    for k, G in ((1, 5), (4, 5), (3, 8)):
        want = np.sqrt((G - k) * (G - 1) / (G * k))
        if says := desk.judge(f"with {k} of {G} right", of_a_success(k, G), want, *mistakes):
            return says
    return ""


@app.cell(hide_code=True)
def _():
    right_success = desk.verdict(check_of_a_success, of_a_success)
    return (right_success,)


@app.cell
def _(right_advantages, right_success, right_useful):
    desk.need("The figure", right_advantages, right_useful, right_success)
    G = 8
    _k = np.arange(1, G)
    _p = np.linspace(0, 1, 101)
    mo.hstack(
        [
            desk.draw(
                "share of right answers in the group", "advantage of a right one",
                ("Eq. 3: divided by std", _k / G, [of_a_success(k, G) for k in _k], "o-"),
                ("not divided", _k / G, 1 - _k / G, "s--"),
            ),
            desk.draw(
                "p, how often an answer is right", "share of useful groups",
                *((f"G = {size}", _p, [useful(p, size) for p in _p]) for size in (2, 5, 16)),
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## In the world

    Now the real policy: 48 training questions, 5 rollouts each at temperature 1, under the first instruction. Your
    `advantages` get the rewards, and so does the project's function.
    """)
    return


@app.cell
def _(right_advantages, right_success, right_useful):
    desk.need("The run", right_advantages, right_useful, right_success)
    _cfg = play.config()
    _task = play.LibraryQA(_cfg)
    _some = _task.questions("train")[:48]
    _taus = play.Player(_cfg, _task).play(1, "lab 2", _task.instruction, _some, _cfg.G)
    rewards = np.array([tau.reward for tau in _taus]).reshape(-1, _cfg.G)
    _theirs = np.array([tau.advantage for tau in _taus]).reshape(rewards.shape)
    gap = max(abs(advantages(r) - A).max() for r, A in zip(rewards, _theirs, strict=True))
    return gap, rewards


@app.cell(hide_code=True)
def _(gap, predicted, rewards):
    _groups, _G = rewards.shape
    _p = rewards.mean()
    found = {
        "mean reward": _p,
        "share of useful groups": (rewards.std(1) > 0).mean(),
        "the same if all questions were equally hard": useful(_p, _G),
        "largest distance to grpo.py": gap,
        "A of one right answer of five": group_advantages(np.array([1.0, 0, 0, 0, 0]))[0],
    }
    desk.conclude(
        "The share of useful groups", predicted, found, "share of useful groups",
        "If all questions were equally hard, more of the groups would be useful; the more a question is always or "
        "never answered, the fewer groups are.",
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A last question, without a single answer

    Division by std pushes one success among many failures the hardest: it makes rare successes loud. If a reward is
    sometimes 1 by luck or by mistake, it makes the mistake loud, too. Dr. GRPO leaves std out, DAPO plays questions
    again until the group is useful (docs/objectives.md has more). In INSPO a group has one instruction as well as one
    question. **Should answers to one question under different instructions be one group? What would be compared
    then?**
    """)
    return


if __name__ == "__main__":
    app.run()
