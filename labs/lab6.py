import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 6: learn from failures")

with app.setup:
    import re  # noqa: F401 (for you)
    from collections import Counter
    from contextlib import nullcontext
    from types import SimpleNamespace

    import marimo as mo

    from config import Config
    from inspo import Evolution
    from labs import desk, play
    from population import Population, RatedCandidate, ReplayBuffer
    from reflect import fold_words, read_candidates
    from tasks.task import rng_of
    from world.clauses import CLAUSES, FRAMES, read_clauses
    from world.optimizer import reply_to

    ADVICE = {name: CLAUSES[name].taught[0] for name in ("entity", "exact", "state")}


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Lab 6: learn from failures

    *Paper: §3.2, Algorithm 1, lines 16 to 23, App. E. You need: lab 5. 30 minutes.*

    Every $K_e$ steps an LLM reads some failures of the best instruction and proposes revisions. They are played on a
    few questions, $D_B$, alongside the instruction that they revise, and join if they are not below it. In `inspo.py`
    that is `Evolution`. In this lab you are the optimizer: you write the program that reads failures and proposes, and
    the project's own `verify` plays what it proposes.

    ## Before anything else: predict

    Under its first instruction the world's policy is rarely right: the next cell measures how rarely. You may change
    nothing but the instruction. **What share of unseen questions will the same weights get right under the best one
    that you find?** Write a number between 0 and 1 into `predicted`.
    """)
    return


@app.cell
def _():
    predicted = None  # your guess
    return (predicted,)


@app.cell
def _():
    cfg = play.config()
    task = play.LibraryQA(cfg)
    player = play.Player(cfg, task)  # plays questions under any instruction
    first = task.instruction
    P, B = Population(cfg), ReplayBuffer(cfg.buffer)
    P.join(first, None, 0)
    D = {q.id: q for q in task.questions("train")}
    _taus = player.play(1, "rollout", first, list(D.values())[:48])
    P.update_weights(_taus)
    B.add(1, _taus, [task.show(_tau) for _tau in _taus])
    failures = B.choose_failures(rng_of(0, 1, "lab 6"), 12, 0)
    first_reward = P.family[0].w
    return B, D, P, cfg, failures, first, first_reward, player, task


@app.cell(hide_code=True)
def _(failures, first, first_reward):
    _text = f"""
    The first instruction, with a mean reward of {first_reward:.3f} on 48 questions:

    > {first.replace("<", "&lt;")}

    Three of its failures, from the replay buffer, as the optimizer reads them. What goes wrong?
    """
    _shown = [f"```\n{e.text}\n```\nright would have been: {', '.join(e.golds)}" for e in failures[:3]]
    mo.vstack([mo.md(_text), *map(mo.md, _shown)])
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Diagnose

    Three symptoms are worth looking for, and each has a sentence against it (`ADVICE`):

    - `"entity"`: a query names the whole chain ("the founder of the producer of ..."). Sign: a query with more than one
      "of".
    - `"exact"`: the answer is a sentence where a name was asked for. Sign: more than two words in `<answer>`.
    - `"state"`: the answer is made up. Sign: the text in `<answer>` appears in no `<information>`.
    """)
    return


@app.function
def diagnose(text):
    """Returns the set of symptoms, among "entity", "exact" and "state", of a failure: question, calls, results, answer.

    `re.findall("<answer>(.*?)</answer>", text, re.S)` finds what is inside a tag.
    """
    ...


@app.function(hide_code=True)
def check_diagnose(diagnose):
    def episode(query, passage, answer):
        return (
            f"Question: Name the founder of the producer of the film Ab?\n<think> </think> <search> {query} </search> "
            f"<information> Doc 1(Title: ab ) {passage} </information> <answer> {answer} </answer>"
        )

    for want, text in (
        (set(), episode("producer of ab", "a film with producer tolo corp", "tolo corp")),
        ({"entity"}, episode("founder of the producer of ab", "a film with producer tolo corp", "tolo corp")),
        ({"exact"}, episode("producer of ab", "they say it is tolo corp", "it is tolo corp")),
        ({"state"}, episode("producer of ab", "a film with producer tolo corp", "mika nol")),
        ({"entity", "exact", "state"}, episode("founder of the producer of ab", "a film", "it is mika nol")),
    ):
        got, shown = diagnose(text), text.partition("</think> ")[2]
        if not isinstance(got, set):
            return f"it returns a {type(got).__name__}; a set is asked for, such as {{'exact'}}."
        if "entity" in got - want:
            return "it finds 'entity' where the query has one 'of'. Look at the queries alone: the question has two."
        if got != want:
            hint = ": one must not hide the others" * (len(want) == 3)
            return f"it finds {sorted(got)}, not {sorted(want)}{hint}, in: {shown}"
    return ""


@app.cell(hide_code=True)
def _():
    right_diagnose = desk.verdict(check_diagnose, diagnose)
    desk.say(r"""
    ## Propose

    You get the instruction and how many failures show each symptom. Return up to $n$ instructions, all different.
    `advised` writes an instruction that takes some advice, in place of what contradicts it. You may use it or write
    sentences of your own, but `reflect.py` refuses what loses a tag, repeats an instruction or gives an answer away.
    """)
    return (right_diagnose,)


@app.function
def advised(instruction, names):
    """Returns the instruction with the sentences of ADVICE of these names, in place of those that contradict them."""
    slots = {CLAUSES[name].slot for name in names}
    kept = [CLAUSES[name].taught[0] for name in read_clauses(instruction) if CLAUSES[name].slot not in slots]
    frame = next((frame for frame in FRAMES if frame in instruction), instruction)
    return " ".join([frame, *kept, *(ADVICE[name] for name in names)])


@app.function
def propose(instruction, counts, n):
    """Returns at most n revisions; counts: {"entity": how many failures show it, ...}."""
    ...


@app.function(hide_code=True)
def check_propose(propose):
    cfg = play.config()
    task = play.LibraryQA(cfg)
    parent, unfit = task.instruction, task.make_format().find_unfit
    got = propose(parent, {"entity": 9, "exact": 5, "state": 2}, 4)
    if isinstance(got, str) or not all(isinstance(text, str) for text in got):
        return "it has to return a list of texts."
    if not got:
        return "it proposes nothing."
    if len(got) > 4:
        return f"4 were asked for, and it returns {len(got)}."
    reply = "\n".join(f"<ins_{k}>{text}</ins_{k}>" for k, text in enumerate(got, 1))
    _, refused = read_candidates(reply, parent, {fold_words(parent)}, [], cfg.max_instruction, 4, unfit)
    if refused:
        says = {"duplicate": "it is the instruction in use, or another one of yours"}
        return f"number {refused[0]['k']} is refused: {says.get(refused[0]['reason'], refused[0]['reason'])}."
    if len(got) < 3:
        return f"it proposes {len(got)}. Three symptoms, alone and together, give more; verification will choose."
    if not any("entity" in read_clauses(text) or ADVICE["entity"] in text for text in got):
        return "none of them has advice against 'entity', which 9 failures show."
    if any({"entity", "whole"} <= set(read_clauses(text)) for text in got):
        return (
            "one of them asks for single entities and for the whole question at once: `advised` leaves out the latter."
        )
    return ""


@app.cell(hide_code=True)
def _():
    right_propose = desk.verdict(check_propose, propose)
    desk.say(r"""
    ## Let them in

    `verify` returns candidates by falling mean reward `r`, each with `r_parent`, its parent's mean on the same
    questions. Who joins? The best first, at most as many as there is room for, and none below its parent (CHOICE-12).
    """)
    return (right_propose,)


@app.function
def choose_joining(verified, room):
    """Returns those of the candidates, best first, that join."""
    ...


@app.function(hide_code=True)
def check_choose_joining(choose_joining):
    def named(*r, parent=0.2):
        return [RatedCandidate(str(x), 0, [x], [parent]) for x in r]

    cases = [(named(0.5, 0.2, 0.1), 3), (named(0.5, 0.4, 0.3), 2), (named(0.1, 0.0), 2), (named(0.0, parent=0.0), 1)]
    for verified, room in cases:
        got, want = choose_joining(verified, room), Population(Config()).choose_joining(verified, room)
        if [c.text for c in got] == [c.text for c in want]:
            continue
        if len(got) > room:
            return f"{len(got)} join where there is room for {room}."
        if any(c.r < c.r_parent for c in got):
            return "one joins with a lower mean than its parent's on the same questions."
        if {c.text for c in want} - {c.text for c in got} and any(c.r == c.r_parent for c in want):
            return "it turns away a candidate that is as good as its parent; equals join."
        return f"of {[c.r for c in verified]} with parent {verified[0].r_parent} and room {room} it lets {len(got)} in."
    return ""


@app.cell(hide_code=True)
def _():
    right_choose_joining = desk.verdict(check_choose_joining, choose_joining)
    desk.say(r"""
    ## The run

    Your program reads twelve failures and proposes; `Evolution.verify` plays its proposals and the parent on $D_B$. The
    world's own optimizer gets the same failures in the paper's prompt, and its proposals are verified alongside yours.
    Finally the best of each and the parent are played on the test questions, which have decided nothing so far.
    """)
    return (right_choose_joining,)


@app.cell
def _(
    B,
    D,
    P,
    cfg,
    failures,
    first,
    player,
    right_choose_joining,
    right_diagnose,
    right_propose,
    task,
):
    desk.need("The run", right_diagnose, right_propose, right_choose_joining)
    counts = Counter(name for e in failures for name in diagnose(e.text))
    room = cfg.N_P - cfg.N_parent
    # a run would keep its trajectories
    _log = SimpleNamespace(
        timing=lambda phase: nullcontext(), write_trials=lambda *sample: None
    )
    _evolution = Evolution(cfg, task, None, P, _log)
    _prompt = _evolution.prompt(P.family[0], failures, room)
    _replies = {
        "yours": "\n".join(f"<ins_{k}>{text}</ins_{k}>" for k, text in enumerate(propose(first, counts, room), 1)),
        "the world's": reply_to(_prompt, seed=0),
    }
    _golds = [gold for e in failures for gold in e.golds]
    D_B = [D[q] for q in B.choose_question_ids(rng_of(0, 1, "D_B"), cfg.D_B, failures)]
    verified, joined = {}, {}
    for _name, _reply in _replies.items():
        _used = {fold_words(first)}
        _unfit = task.make_format().find_unfit
        _texts, _ = read_candidates(_reply, first, _used, _golds, cfg.max_instruction, room, _unfit)
        verified[_name] = _evolution.verify(player, P.family[0], list(_texts.values()), D_B)
        joined[_name] = choose_joining(verified[_name], room)

    on_test = {"the parent": player.measure(first, task.questions("test"))}
    for _name, _some in joined.items():
        on_test[_name] = player.measure(_some[0].text if _some else first, task.questions("test"))
    return counts, joined, on_test, verified


@app.cell(hide_code=True)
def _(counts, joined, on_test, predicted, verified):
    _best = verified["yours"][0]
    found = {
        **{f"failures with '{name}'": k for name, k in counts.items()},
        "the parent on test": on_test["the parent"],
        "your best on D_B": _best.r,
        "your best on test": on_test["yours"],
        "the world's best on D_B": verified["the world's"][0].r,
        "the world's best on test": on_test["the world's"],
        "yours that joined": len(joined["yours"]),
    }
    desk.conclude(
        "Your best instruction, on test questions", predicted, found, "your best on test",
        f"Yours: {_best.text.replace('<', '&lt;')}",
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A last question, without a single answer

    The best of several noisy means is too high on average: it was chosen for its luck, too. And $D_B$ asks the policy
    of today, which has never been trained under the revision. **How would you verify if each question cost a cent? And
    is an instruction that a weak policy cannot follow yet a bad instruction?** (docs/results/README.md says what
    campaigns could and could not tell.)
    """)
    return


if __name__ == "__main__":
    app.run()
