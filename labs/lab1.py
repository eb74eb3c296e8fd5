import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Lab 1: which instruction asks the next question?",
)

with app.setup:
    import marimo as mo
    import numpy as np

    from config import Config
    from labs import desk
    from population import Population
    from tasks import Question, Trajectory


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Lab 1: which instruction asks the next question?

    *Paper: §3.1, Eq. 4 and 6. You need: a softmax. 20 minutes.*

    INSPO keeps a population $P$ of instructions. Each question is asked under one that is drawn by

    $$p(I_j \mid W; P) = \frac{e^{w_j / \tau_s}}{\sum_{k \in P} e^{w_k / \tau_s}} \quad \text{(Eq. 4)}$$

    where $w_j$ is the average reward that the instruction earned lately, and $\tau_s$ says how greedy the draw is. Both
    are in `population.py`: `Instruction.w` and `Population.probabilities`.
    """)
    return


@app.cell
def _():
    w = [0.60, 0.40, 0.20, 0.10, 0.05, 0.05, 0.00]  # the weights of seven instructions
    tau_s = Config().tau_s  # the paper's
    return tau_s, w


@app.cell(hide_code=True)
def _(tau_s, w):
    mo.md(f"""
    ## Before anything else: predict

    Seven instructions have the weights {", ".join(f"{x:.2f}" for x in w)}, and $\\tau_s$ is {tau_s}. The best one is
    half as good again as the second. **What share of the questions does it get?** Write a number between 0 and 1 into
    `predicted`. Do not compute it: guess.
    """)
    return


@app.cell
def _():
    predicted = None  # your guess
    return (predicted,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The weight

    In every step an instruction earns $\bar r$, the mean reward of the trajectories that it led. Its weight is the mean
    of the last $n$ of them (Eq. 6). Two cases need some thought: an instruction that has earned fewer than $n$ so far,
    and a new one that has earned none, which has weight 0.
    """)
    return


@app.function
def weight(rewards, n):
    """Returns w of an instruction that has earned `rewards` (a list of r-bar, the latest last)."""
    ...


@app.function(hide_code=True)
def check_weight(weight):
    if (got := weight([], 3)) != 0:
        return f"without a reward it returns {got}; the weight of a new instruction is 0."
    says = desk.judge(
        "for 0, 0, 0.3, 0.6, 0.8 and a window of 4", weight([0.0, 0.0, 0.3, 0.6, 0.8], 4), 0.425,
        (0.34, "it averages all rewards. Eq. 6 has a window: only the last n."),
        (0.225, "it averages the first n rewards; the window is over the last n."),
        (1.7, "it adds up the window; divide by the number of rewards in it."),
    )
    return says or desk.judge(
        "with one reward, 0.8, and a window of 4", weight([0.8], 4), 0.8,
        (0.2, "with 1 reward and a window of 4 it divides by 4. That punishes instructions for being new; divide by "
              "the rewards that there are (CHOICE-18 in docs/choices.md)."),
    )


@app.cell(hide_code=True)
def _():
    right_weight = desk.verdict(check_weight, weight)
    desk.say(r"""
    ## The draw

    Now Eq. 4. Your function has to survive a small $\tau_s$, too: $e^{0.6 / 0.0001}$ overflows, but the probabilities
    are harmless.
    """)
    return (right_weight,)


@app.function
def probabilities(w, tau_s):
    """Returns p (|P|,), an array, of weights w (|P|,)."""
    ...


@app.function(hide_code=True)
def check_probabilities(probabilities):
    def softmax(z):
        return np.exp(z) / np.exp(z).sum()

    w = np.array([0.5, 0.3, 0.0])
    total = np.exp(w / 0.2).sum()
    with np.errstate(all="ignore"):
        says = desk.judge(
            "for w = 0.5, 0.3, 0 and tau_s = 0.2", probabilities(w, 0.2), softmax(w / 0.2),
            (softmax(w), "it forgets tau_s: the exponent is w / tau_s."),
            (softmax(-w / 0.2), "its sign is flipped: the lowest weight gets the most questions."),
            (w / w.sum(), "it shares in proportion to w. Then a weight of 0 is never drawn again; Eq. 4 takes "
                          "e^(w / tau_s)."),
            (np.exp(w / 0.2), f"its probabilities add up to {total:.3g}: Eq. 4 divides by the sum over all of P."),
        )
        return says or desk.judge(
            "with tau_s = 0.0001 and w = 0.6, 0.4", probabilities(np.array([0.6, 0.4]), 0.0001), np.array([1.0, 0]),
            (np.full(2, np.nan), "with tau_s = 0.0001 the exponential overflows. Subtract the largest exponent from "
                                 "all first; that divides numerator and denominator by the same number."),
        )


@app.cell(hide_code=True)
def _():
    right_probabilities = desk.verdict(check_probabilities, probabilities)
    desk.say(r"""
    ## What $\tau_s$ does

    Your function over three decades of $\tau_s$; the answer below compares it with the project's own,
    `Population.probabilities`.
    """)
    return (right_probabilities,)


@app.cell
def _(right_probabilities, w):
    desk.need("The figure", right_probabilities)

    def theirs(tau):
        P = Population(Config(tau_s=tau, window=1))
        for x in w:
            P.join("", None, 0).rewards = [x]
        return P.probabilities()

    taus = np.geomspace(0.01, 10, 100)
    gap = max(abs(probabilities(np.array(w), tau) - theirs(tau)).max() for tau in taus)
    _shares = np.array([probabilities(np.array(w), tau) for tau in taus]).T
    desk.draw(
        "tau_s", "share of the questions", *((f"w = {x:.2f}", taus, p) for x, p in zip(w, _shares, strict=True)),
        xscale="log",
    )
    return gap, taus


@app.cell(hide_code=True)
def _(gap, predicted, right_probabilities, right_weight, tau_s, taus, w):
    desk.need("The answer", right_weight, right_probabilities)
    _best = [probabilities(np.array(w), tau)[0] for tau in taus]
    _p = probabilities(np.array(w), tau_s)
    found = {
        "share of the best": _p[0],
        "share of the worst": _p[-1],
        "tau_s at which the best gets half": taus[np.abs(np.array(_best) - 0.5).argmin()],
        "largest distance to Population": gap,
    }
    desk.conclude("The share of the best", predicted, found, "share of the best")
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Weights that move

    The draw decides who earns rewards, and rewards decide the draw. Here each instruction has a true mean reward, the
    numbers above; nobody knows them, all start at weight 0, and 24 questions a step are asked under the project's own
    `Population`. On the right is the same with a tenth of $\tau_s$.
    """)
    return


@app.cell
def _(right_probabilities, right_weight, tau_s, w):
    desk.need("The figure", right_weight, right_probabilities)

    def shares(tau, seed):
        """Returns p (20, |P|) of a population whose true mean rewards are w."""
        rng, P = np.random.default_rng(seed), Population(Config(tau_s=tau))
        for _ in w:
            P.join("", None, 0)
        seen = []
        for _ in range(20):
            seen.append(P.probabilities())
            drawn, taus = [I.id for I in P.sample(rng, 24)], []
            for j in drawn:
                taus.append(Trajectory(j, Question("", ""), 0, [], 0, reward=float(rng.random() < w[j])))
            P.update_weights(taus)
        return np.array(seen)

    greedy = float(np.mean([shares(tau_s / 10, seed)[-1].argmax() != 0 for seed in range(200)]))

    def _run(tau):
        series = ((f"true reward {x}", range(20), p) for x, p in zip(w, shares(tau, 0).T, strict=True))
        return desk.draw(f"step, with tau_s = {tau:g}", "share of the questions", *series)

    mo.hstack([_run(tau_s), _run(tau_s / 10)])
    return (greedy,)


@app.cell(hide_code=True)
def _(greedy, tau_s):
    mo.md(f"""
    With τ_s = {tau_s / 10:g} a wrong instruction was the favourite after 20 steps in {greedy:.0%} of 200 simulated
    runs.

    ## A last question, without a single answer

    The weights are averages of few, noisy rewards. Early on, when nobody knows anything, a greedy draw is
    overconfident; late, a soft draw wastes questions on instructions known to be bad. A bandit algorithm would count
    how often each was tried; the paper does not. **Would you change Eq. 4? The policy learns from the same
    trajectories: what would your change do to it?** (`extras/examples/ucb.py` is one answer.)
    """)
    return


if __name__ == "__main__":
    app.run()
