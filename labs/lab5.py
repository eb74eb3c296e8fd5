import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 5: pruning in the fog")

with app.setup:
    import marimo as mo
    import numpy as np
    from scipy.stats import binom

    from config import Config
    from labs import desk, play
    from population import Population
    from tasks import Question, Trajectory


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Lab 5: pruning in the fog

    *Paper: Algorithm 1, lines 9 to 13. You need: lab 1, the binomial distribution. 30 minutes.*

    Every $K_p$ steps INSPO ranks its instructions by their weights and prunes the lower half (`Population.prune`). The
    weights are averages of rewards that are 0 or 1, most of them 0. The best instruction may have bad luck.
    """)
    return


@app.cell
def _():
    cfg = play.config()  # the embedded world's: config.py
    best, other = 0.3, 0.2  # true mean rewards: of one instruction, of all others
    return best, cfg, other


@app.cell(hide_code=True)
def _(best, cfg, other):
    mo.md(f"""
    ## Before anything else: predict

    {cfg.N_P} instructions. The best is truly right in a share of {best} of its answers, each of the others in {other}.
    For {cfg.K_p} steps, {cfg.batch} questions a step are asked under instructions drawn by Eq. 4, each {cfg.G} times;
    then the lower half goes. **How often is the best one among those pruned?** Write a number between 0 and 1 into
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
    ## Who stays

    "Prune bottom N/2 instructions", says line 12. $N$ is the population of the moment, and seven has no half. This
    project rounds the number of those that go down, and never keeps fewer than $N_{\mathrm{parent}}$ (CHOICE-3): from 7
    to 4 to 2 to 1.
    """)
    return


@app.function
def survivors(N, N_parent):
    """Returns how many of N instructions stay at a pruning."""
    ...


@app.function(hide_code=True)
def check_survivors(survivors):
    if survivors(7, 1) == 3:
        return "of 7 it keeps 3: it rounds the number that goes up. 3 go, 4 stay."
    for N, N_parent in ((7, 1), (4, 1), (2, 1), (1, 1), (7, 5), (4, 3)):
        P = Population(Config())
        for _ in range(N):
            P.join("", None, 0)
        P.prune(P.ranked(), N_parent, 1)
        if (got := survivors(N, N_parent)) != len(P):
            if got < N_parent:
                return f"of {N} it keeps {got}, fewer than N_parent = {N_parent}."
            return f"of {N} instructions with N_parent = {N_parent} it keeps {got}; `Population.prune` keeps {len(P)}."
    return ""


@app.cell(hide_code=True)
def _():
    right_survivors = desk.verdict(check_survivors, survivors)
    desk.say(r"""
    ## With paper and pencil

    Let every instruction earn exactly $n$ rewards, independent of each other. The best has $X \sim
    \mathrm{Bin}(n, p_{\text{best}})$ right answers, each other one $Y \sim \mathrm{Bin}(n, p_{\text{other}})$. A tie
    goes against the best: newcomers rank last. So, given $X = x$:

    - one other is ahead with probability $q(x) = P(Y \ge x)$;
    - the number of others ahead is $\mathrm{Bin}(N - 1, q(x))$;
    - the best is pruned if at least `keep` of them are ahead.

    Add up over $x$. `binom.pmf(k, n, p)` is $P(X = k)$, `binom.sf(k, n, p)` is $P(X > k)$, and both take arrays.
    """)
    return (right_survivors,)


@app.function
def drop_probability(n, best, other, N, keep):
    """Returns how often the best of N is pruned when `keep` stay and each has earned n rewards."""
    ...


@app.function(hide_code=True)
def check_drop_probability(drop_probability):
    def variant(ties=1, others=1, keep=4):
        x = np.arange(21)
        return float(binom.pmf(x, 20, 0.3) @ binom.sf(keep - 1, 7 - others, binom.sf(x - ties, 20, 0.2)))

    says = desk.judge(
        "with 20 rewards each, 0.3 against 0.2, 4 of 7 kept,", drop_probability(20, 0.3, 0.2, 7, 4), variant(),
        (variant(ties=0), "it lets the best win ties: P(Y >= x) is P(Y > x - 1)."),
        (variant(others=0), "it counts the best among the others: N - 1 of them can be ahead."),
        (variant(keep=5), "it asks for more than `keep` ahead; with exactly `keep` the best goes."),
    )
    return says or desk.judge(  # the other is ahead unless the best is right and it is wrong
        "with one coin each, two instructions, one stays,", drop_probability(1, 0.5, 0.5, 2, 1), 0.75
    )


@app.cell(hide_code=True)
def _():
    right_drop = desk.verdict(check_drop_probability, drop_probability)
    desk.say(r"""
    ## The run

    Paper and pencil left out two things. Eq. 4 does not share the questions equally: an instruction that does well
    early is asked more. And the $G$ answers of a group have their question in common: a hard question is hard for all
    five. Three simulations with the project's `Population`, which add one thing after the other, next to your formula.
    A question's difficulty is drawn from a Beta distribution around the instruction's true reward.
    """)
    return (right_drop,)


@app.cell
def _(best, cfg, other, right_drop, right_survivors):
    desk.need("The run", right_survivors, right_drop)
    keep, trials, batches = survivors(cfg.N_P, cfg.N_parent), 600, (4, 8, 16, 32, 64)
    true = np.array([other] * (cfg.N_P - 1) + [best])  # the best one is the last newcomer

    def lost(batch, shares, alike):
        """Returns how often the best is pruned after K_p steps of `batch` questions."""
        rng, times = np.random.default_rng(0), 0
        for _ in range(trials):
            P = Population(cfg)
            for _ in true:
                P.join("", None, 0)
            for _ in range(cfg.K_p):
                drawn = np.array([I.id for I in P.sample(rng, batch)]) if shares else np.arange(batch) % cfg.N_P
                p = rng.beta(0.5 * true[drawn], 0.5 * (1 - true[drawn])) if alike else true[drawn]
                r = rng.binomial(cfg.G, p) / cfg.G  # the mean reward of each group
                # One trajectory with the mean reward stands for all of an instruction's in this step.
                means = {int(j): float(r[drawn == j].mean()) for j in np.unique(drawn)}
                P.update_weights(Trajectory(j, Question("", ""), 0, [], 0, reward=mean) for j, mean in means.items())
            times += any(I.id == cfg.N_P - 1 for I in P.prune(P.ranked(), cfg.N_parent, cfg.K_p))
        return times / trials

    n = [round(batch * cfg.G * cfg.K_p / cfg.N_P) for batch in batches]
    computed = [drop_probability(k, best, other, cfg.N_P, keep) for k in n]
    equal = [lost(batch, False, False) for batch in batches]
    drawn_by_weight = [lost(batch, True, False) for batch in batches]
    alike = [lost(batch, True, True) for batch in batches]
    desk.draw(
        "questions a step", "the best is pruned", ("your formula", batches, computed, "k-"),
        ("equal shares, independent rewards", batches, equal, "o"), ("drawn by Eq. 4", batches, drawn_by_weight, "s--"),
        ("and questions differ in difficulty", batches, alike, "^--"), ylim=(0, 0.6),
    )
    return alike, batches, computed, drawn_by_weight, equal


@app.cell(hide_code=True)
def _(alike, batches, cfg, computed, drawn_by_weight, equal, predicted):
    _k = batches.index(cfg.batch)
    found = {
        "computed": computed[_k],
        "equal shares": equal[_k],
        "drawn by Eq. 4": drawn_by_weight[_k],
        "and questions that differ": alike[_k],
    }
    desk.conclude(
        "The best one is pruned", predicted, found, "and questions that differ",
        "Your formula describes the simulation with equal shares. Eq. 4, and questions that differ, do what it leaves "
        "out.",
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(f"""
    ## A last question, without a single answer

    In the paper a step has {Config().batch} questions, and the fog is thinner; here it has {play.config().batch}.
    Then again, a pruned instruction is not gone: its parent lives, and the optimizer may propose it again. And a policy
    that trains under the survivors gets better at *them*. **Is it worse to prune the best one, or to keep four mediocre
    ones for another ten steps? What would you measure to decide?** (`extras/examples/margin.py` is another rule.)
    """)
    return


if __name__ == "__main__":
    app.run()
