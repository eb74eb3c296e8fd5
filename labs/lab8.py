import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 8: your own task")

with app.setup:
    from itertools import combinations
    from tempfile import TemporaryDirectory
    from types import SimpleNamespace

    import marimo as mo
    import numpy as np

    import inspo
    from config import Config
    from evaluation.agents import load_agent
    from labs import desk, play
    from population import Population
    from tasks import Question, Task, Trajectory
    from tasks.metrics import set_rewards  # noqa: F401 (for you)
    from tasks.sampling import rng_of
    from world.clauses import CLAUSES


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Lab 8: your own task

    *Paper: Algorithm 1, lines 4 to 9. docs/tasks.md. You need: all labs before. 30 minutes.*

    What is asked, what can be called and how an episode is scored is one class, a `Task`; nothing else of INSPO knows
    what it trains for. Here you write one, and then the step of Algorithm 1 that trains on it.

    The game: **invent an alliteration.** The policy is the embedded world's, which knows a few hundred made-up names
    and little else. It is asked to name somebody. Its reward is 1 if the answer is exactly two words that begin with
    the same letter, as in "kebik kivus"; else 0. No tools: it has one turn.
    """)
    return


@app.cell
def _():
    _tags, _memory = "Use <think> </think> to think and <answer> </answer> to answer.", CLAUSES["memory"].taught[0]
    instructions = [
        f"{_tags} {_memory}{more}" for more in ("", *(f" {CLAUSES[x].taught[0]}" for x in ("exact", "verbose")))
    ]
    steps = 24
    return instructions, steps


@app.cell(hide_code=True)
def _(instructions, steps):
    _list = "\n".join(f"{k}. {text.replace('<', '&lt;')}" for k, text in enumerate(instructions, 1))
    _text = f"""
    ## Before anything else: predict

    Before training, nearly all of 100 answers are different, and few of them alliterate. After {steps} steps of GRPO,
    **how many different answers will the policy give among 100?** Write a number into `predicted`. A population of
    three instructions takes part:
    """
    mo.vstack([mo.md(_text), mo.md(_list)])
    return


@app.cell
def _():
    predicted = None  # your guess
    return (predicted,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## What is asked

    A task returns the questions of the splits "train", "valid" (may be empty) and "test", each with an id of its own.
    The policy knows the words *name, the, of, director, producer, founder, mayor, employer, film, company, city,
    person*; ask for at least ten different things to train on.
    """)
    return


@app.function
def questions(split):
    """Returns a list of Question(id, text) for "train", "valid" or "test"."""
    ...


@app.function(hide_code=True)
def check_questions(questions):
    train, valid, test = (questions(split) for split in ("train", "valid", "test"))
    for split, some in (("train", train), ("test", test)):
        if not some:
            return f"there is nothing to {split} on."
        if wrong := [q for q in some if not isinstance(q, Question)]:
            return f"among those to {split} on is {wrong[0]!r}, which is not a Question."
        if len({q.id for q in some}) < len(some):
            return f"two of those to {split} on have the same id: a replay buffer could not tell them apart."
    texts = {q.text for q in train}
    if len(texts) < 10:
        return f"it has {len(texts)} different texts to train on; ten are asked for."
    if both := texts & {q.text for q in [*test, *valid]}:
        return f"'{sorted(both)[0]}' is asked in training and held out, too."
    return ""


@app.cell(hide_code=True)
def _():
    right_questions = desk.verdict(check_questions, questions)
    desk.say(r"""
    ## What it is worth

    `tau.prediction` is the text of the last complete `<answer>`, or None if there is none. A policy may write anything.
    """)
    return (right_questions,)


@app.function
def worth(tau):
    """Returns the reward of a trajectory, 1.0 or 0.0."""
    ...


@app.function(hide_code=True)
def check_worth(worth):
    for prediction, want, says in (
        ("kebik kivus", 1.0, "two words, one letter."),
        ("kebik drunis", 0.0, "the letters differ."),
        ("kebik", 0.0, "that is one word, which always alliterates with itself."),
        ("", 0.0, "it is blank."),
        ("it is kebik kivus", 0.0, "those are four words; exactly two are asked for."),
        ("kebik  kivus", 1.0, "two spaces are no third word: `split()` without an argument takes them together."),
        (None, 0.0, "it is that of an episode without an answer."),
    ):
        got = worth(Trajectory(0, Question("q", "Name the mayor of the city?"), 0, [], 0, prediction=prediction))
        if got != want:
            return f"it is worth {got} to answer {prediction!r}, not {want:g}: {says}"
    return ""


@app.cell(hide_code=True)
def _():
    right_worth = desk.verdict(check_worth, worth)
    desk.say(r"""
    ## What went wrong

    The optimizer reads failures as text. By default that is question and response, `tau.response`. It does not say what
    the game is about, and an optimizer that cannot see why an episode was lost can only guess. Add the reason: no
    answer, not two words, or letters that differ.
    """)
    return (right_worth,)


@app.function
def shown(tau):
    """Returns a failure as the optimizer reads it: question, response, and why it was worth nothing."""
    ...


@app.function(hide_code=True)
def check_shown(shown):
    question, reasons = "Name the mayor of the city?", {}
    for kind, prediction in (("no answer", None), ("one word", "kivus"), ("two letters", "kebik drunis")):
        response = "<think> </think>" if prediction is None else f"<think> </think> <answer> {prediction} </answer>"
        tau = Trajectory(0, Question("q", question), 0, [], 0, prediction=prediction)
        tau.response = response
        text = shown(tau)
        if question not in text:
            return "the question is missing: `tau.question.text`."
        if response not in text:
            return "the response is missing: the optimizer has to see what the policy wrote."
        reasons[kind] = text.replace(response, "").replace(question, "")
    if len(set(reasons.values())) == 1:
        return "it says the same about every failure. Say which of the three reasons it was."
    for a, b in combinations(reasons, 2):
        if reasons[a] == reasons[b]:
            return f"it gives the same reason for '{a}' and '{b}'."
    return ""


@app.cell(hide_code=True)
def _():
    right_shown = desk.verdict(check_shown, shown)
    desk.say(r"""
    ## One step of INSPO

    Lines 5 to 9 of Algorithm 1, with the project's own parts. In `inspo.py` they are six lines; write them here without
    looking, from what each part is for:

    - `P.draw_jobs(rng, questions, G)` returns jobs: G for each question, under an instruction drawn by Eq. 4;
    - `player.rollout(t, "rollout", jobs)` plays them and returns trajectories;
    - `set_rewards(task, taus)` asks the task what they are worth and notes it in them;
    - `player.learner.set_advantages(taus)` is Eq. 3;
    - `player.learner.update(t, [taus])` is Eq. 2, with one mini-batch;
    - `P.update_weights(taus)` credits the instructions.
    """)
    return (right_shown,)


@app.function
def step(t, P, player, task, questions, rng, G):
    """Plays step t and learns from it; returns its trajectories."""
    ...


@app.function(hide_code=True)
def check_step(step):
    done = []

    def noted(name, f=lambda *args: None):
        return lambda *args: (done.append(name), f(*args))[1]

    P = Population(Config())
    P.join("Answer.", None, 0)
    P.draw_jobs, P.update_weights = noted("draw", P.draw_jobs), noted("update_weights", P.update_weights)
    player = SimpleNamespace(
        rollout=noted("rollout", lambda t, _, jobs: [Trajectory(0, job.question, job.group, [], 0) for job in jobs]),
        learner=SimpleNamespace(
            set_advantages=noted("set_advantages"), update=noted("update", lambda t, parts: list(parts[0]))
        ),
    )
    task = SimpleNamespace(
        reward=noted("reward", lambda taus: [1.0] * len(taus)), failed=lambda tau: False,
        cfg=SimpleNamespace(reward="", task="yours"),
    )  # fmt: skip
    taus = step(1, P, player, task, [Question("a", "A?"), Question("b", "B?")], np.random.default_rng(0), 3)
    for name, says in (
        ("draw", "nobody draws instructions: `P.draw_jobs`."),
        ("rollout", "nothing is played: `player.rollout`."),
        ("reward", "nothing is rewarded: every trajectory keeps the reward 0."),
        ("set_advantages", "Eq. 3 is missing: every advantage stays 0, and the update learns nothing."),
        ("update", "the policy is not updated."),
        ("update_weights", "the instructions are not credited: their weights stay 0."),
    ):
        if name not in done:
            return says
    for first, second, says in (
        ("reward", "set_advantages", "it computes advantages before there are rewards: they are all 0."),
        ("set_advantages", "update", "it updates the policy before the advantages are set."),
        ("reward", "update_weights", "it credits the instructions before there are rewards: their weights stay 0."),
    ):
        if done.index(second) < done.index(first):
            return says
    return "" if len(taus) == 6 else "it has to return the trajectories: here 3 for each of 2 questions."


@app.cell(hide_code=True)
def _():
    right_step = desk.verdict(check_step, step)
    desk.say(r"""
    ## The run

    Your functions in a `Task`, and your step, again and again. In its own file, the class would be all that
    `python inspo.py --task game:Alliteration` needs.
    """)
    return (right_step,)


@app.cell
def _(
    instructions,
    right_questions,
    right_shown,
    right_step,
    right_worth,
    steps,
):
    desk.need("The run", right_questions, right_worth, right_shown, right_step)

    class Alliteration(Task):
        instruction = instructions[0]
        tools = ()

        def questions(self, split):
            return questions(split)

        def reward(self, taus):
            return [worth(tau) for tau in taus]

        def show(self, tau):
            return shown(tau)

    cfg = play.config(T=60, warmup=0.05, lr=2e-3)
    task = Alliteration(cfg)
    player, P = play.Player(cfg, task), Population(cfg)
    for _text in instructions:
        P.join(_text, None, 0)
    train, history, asked = task.questions("train"), [], 20
    for t in range(1, steps + 1):
        _rng = rng_of(0, t, "lab 8")
        _some = [train[k] for k in _rng.choice(len(train), asked)]
        taus = step(t, P, player, task, _some, _rng, cfg.G)
        history.append(
            {
                "reward": np.mean([tau.reward for tau in taus]),
                "different": len({tau.prediction for tau in taus}),
                "p": P.probabilities(),
            }
        )
    return Alliteration, history, task, taus


@app.cell
def _(history, instructions):
    _x, _p = range(1, len(history) + 1), np.array([row["p"] for row in history]).T
    mo.hstack(
        [
            desk.draw(
                "step", "", ("mean reward", _x, [row["reward"] for row in history]),
                ("different answers / 100", _x, [row["different"] / 100 for row in history]),
            ),
            desk.draw(
                "step", "share of the next questions (Eq. 4)",
                *((f"instruction {k} of {len(instructions)}", _x, p) for k, p in enumerate(_p, 1)),
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _(history, predicted, task, taus):
    _answers = [tau.prediction for tau in taus if tau.prediction]
    found = {
        "reward, first step": history[0]["reward"],
        "reward, last step": history[-1]["reward"],
        "different answers, first step": history[0]["different"],
        "different answers, last step": history[-1]["different"],
    }
    _lost = next((tau for tau in taus if tau.failed), None)
    desk.conclude(
        "Different answers among 100", predicted, found, "different answers, last step",
        f"The most frequent answer of the last step: {max(_answers, key=_answers.count, default='none')}.",
        f"A failure as the optimizer would read it:\n\n```\n{task.show(_lost)}\n```" if _lost else "", form=".0f",
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The same from Python

    `inspo.train` is what `python inspo.py` calls: all of Algorithm 1, with evaluations, files and a page. It takes your
    class, and settings by the names of the flags (docs/python.md). Two steps, and a question to the agent they leave.
    """)
    return


@app.cell
def _(Alliteration):
    with TemporaryDirectory() as _folder:
        _run = inspo.train(task=Alliteration, preset="world", mode="static", T=2, batch=2, out=f"{_folder}/run")
        with load_agent(_run.path) as _agent:
            answer = _agent.ask("Name the mayor of the city?").prediction
    answer
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A last question, without a single answer

    **Is a policy with the highest reward a good one here? If not: is the reward wrong, the question, the algorithm, or
    nothing at all? Change one of them so that the policy stays inventive, and say what your change costs.** A group's
    answers are compared with each other, so a reward may look at all trajectories of a step: `Task.reward` gets them
    together. And what became of the instructions: did the population have anything left to choose?
    """)
    return


if __name__ == "__main__":
    app.run()
