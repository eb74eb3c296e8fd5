"""The graded world: what a form pays, roles that no weight knows, an optimizer that reads, the plan's statistics."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from config import Config
from extras.campaigns import graded as campaign
from extras.campaigns import graded_pilot as pilot
from extras.graded import form, optimizer
from extras.graded.form import EMPTY, LINES, OPTIONAL, STANDARD, WORDINGS, World, clauses
from extras.graded.task import Graded
from extras.graded.warm_start import POLICY
from journal.directory import read_jsonl
from models.model import load_policy
from plumbing.faults import Fault
from reflect import candidates, parse, reflection_prompt
from tasks import Trajectory
from tasks.formats import lost

ROOT = Path(__file__).parents[2]


def world(drift: float, rule: int = 2) -> World:
    roles = "late late late late harmful harmful harmful neutral neutral both both either either".split()
    roles += "early early early early base base base base idle idle idle idle".split()
    return World(0, drift, rule, tuple(roles))


FORM = [(line, 3) for line in range(LINES)]  # under rule 2 every mark is 3c


def paid(drift: float, **marks: str) -> float:
    """Points of a form that is filled in untold, 3a everywhere, but for these lines: {f03="3c"}."""
    written = [marks.get(f"f{line:02d}", EMPTY if line in OPTIONAL else "3a") for line, _ in FORM]
    return sum(world(drift).points(FORM, written))


@pytest.mark.parametrize(
    ("drift", "marks", "gain"),
    [
        (0.0, {"f00": "3a"}, 1.0), (0.0, {"f00": "3c"}, 1.0),  # late: whatever is written pays
        (1.0, {"f00": "3a"}, -1.0), (1.0, {"f00": "3c"}, 1.0), (0.5, {"f00": "3a"}, 0.0), (0.5, {"f00": "3c"}, 1.0),
        (0.0, {"f13": EMPTY}, 1.0), (1.0, {"f13": EMPTY}, 1.0),  # early: beside a wrong mark, -d
        (0.0, {"f13": "3c"}, 0.0), (1.0, {"f13": "3c"}, 2.0), (0.5, {"f13": EMPTY}, 1.0),
        (0.3, {"f04": "3c"}, -1.0),  # harmful
        (0.3, {"f07": "3c"}, 0.0), (0.3, {"f21": EMPTY}, 0.0),  # neutral, idle
        (0.3, {"f09": "3c"}, -0.5), (0.3, {"f09": "3a", "f10": "3a"}, 2.0),  # both
        (0.3, {"f11": "3a"}, 1.0), (0.3, {"f11": "3a", "f12": "3a"}, 0.0),  # either
        (0.3, {"f17": "3c"}, 1.0), (0.3, {"f17": EMPTY}, 0.0),  # base: wrong and empty pay alike
    ],
)  # fmt: skip
def test_what_a_line_pays_beside_a_form_filled_in_untold(drift, marks, gain):
    assert paid(drift, **marks) - paid(drift) == pytest.approx(gain)


@pytest.mark.parametrize("drift", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("skill", [0.0, 0.25, 1.0])
def test_the_worth_of_a_clause_at_a_skill(drift, skill):
    """Over marks that are right with probability s: (1 - d) + d (2s - 1), for early with the other sign."""
    of = lambda right, **marks: paid(drift, **(marks | {"f13": right} if "f13" not in marks else marks))  # noqa: E731
    late = skill * (paid(drift, f00="3c") - paid(drift)) + (1 - skill) * (paid(drift, f00="3a") - paid(drift))
    early = skill * (of("3a", f13=EMPTY) - of("3c")) + (1 - skill) * (of("3a", f13=EMPTY) - of("3a"))
    assert late == pytest.approx((1 - drift) + drift * (2 * skill - 1))
    assert early == pytest.approx((1 - drift) - drift * (2 * skill - 1))


def test_without_drift_no_clause_depends_on_the_skill():
    """Whatever marks are written on lines that a clause may change: only base lines know right from wrong."""
    w, rng = world(0.0), np.random.default_rng(0)
    for _ in range(50):
        filled = rng.random(LINES) < 0.5
        points = []
        for said in ("3c", "3a"):
            some = w.points(FORM, [said if f else EMPTY for f in filled])
            points.append([p for p, role in zip(some, w.roles, strict=True) if role != "base"])
        assert points[0] == points[1]


def test_the_best_clauses_pay_what_they_should_and_change_with_the_skill():
    for drift, best in ((0.0, 0.95), (0.5, 0.85), (1.0, 0.95)):  # an early line brings 1 - d or d
        w = world(drift)
        told = w.best(1.0)
        marks = [EMPTY if line in OPTIONAL else "3c" for line in range(LINES)]
        for clause in told:
            marks[int(clause[-2:])] = "3c" if clause.startswith("fill") else EMPTY
        assert w.reward(FORM, marks) == pytest.approx(best)
    assert {c[:4] for c in world(1.0).best(0.25) if world(1.0).role(c) in ("late", "early")} == {"leav"}
    assert {c[:4] for c in world(1.0).best(0.9) if world(1.0).role(c) in ("late", "early")} == {"fill"}


def test_choosing_late_pays_what_late_and_early_clauses_are_worth():
    """At d = 1 four late lines are missed and four early ones left empty, a point of 0.05 each; at 1/2 neither: a late
    clause pays even who guesses (s = 1/4), and an early one is worth nothing to who knows."""
    assert [campaign.built_in(d) for d in campaign.DRIFTS] == pytest.approx([0.0, 0.0, 8 * 0.05])
    assert campaign.built_in(0.6) == pytest.approx(4 * (0.6 - 0.4) * 0.05)  # early alone
    assert campaign.built_in(0.75) == pytest.approx((4 + 4 * (0.75 - 0.25)) * 0.05)  # late costs who guesses, too


def test_missing_marks_earn_nothing_that_a_filled_line_would_not():
    assert world(1.0).reward(FORM, []) <= world(1.0).reward(FORM, ["3a"] * LINES) + 1e-9


def test_roles_are_drawn_by_the_seed_for_all_drifts_alike():
    some = [World.of(seed, 0.5) for seed in range(300)]
    for w in some:
        assert Counter(w.roles[:13]) == form.ROLES["optional"] and Counter(w.roles[13:]) == form.ROLES["standard"]
        assert World.of(w.seed, 1.0).roles == w.roles and World.of(w.seed, 1.0).rule == w.rule
    late = np.array([[role == "late" for role in w.roles[:13]] for w in some]).sum(0)
    rules = Counter(w.rule for w in some)
    assert stats.chisquare(late).pvalue > 0.001 and stats.chisquare(list(rules.values())).pvalue > 0.001
    assert len(rules) == form.RULES


def test_the_right_rule_is_never_in_the_inventory():
    w = world(0.5, rule=2)
    assert set(WORDINGS) - set(w.inventory) == {"rule2"} and w.role("rule0") == "wrong rule"
    for seed in range(20):
        reply = optimizer.reply_to(reflection_prompt("fill in", [("x", ())], 6, 1000), f"blind-{seed}-2")
        assert "rule2" not in reply


def test_a_world_on_disk(tmp_path):
    w = World.of(7, 0.5)
    path = w.write(tmp_path / "w.json")
    assert World.read(path) == w
    path.write_text("{}")
    with pytest.raises(Fault, match="holds no world"):
        World.read(path)


def episode(task: Graded, text: str) -> Trajectory:
    q = task.questions("test")[0]
    tau = Trajectory(0, q, 0, [], 0, prediction=text, response=f"<answer> {text} </answer>")
    tau.reward = task.reward([tau])[0]
    return tau


def test_the_task_scores_what_is_written(tmp_path):
    task = Graded(Config(train=str(World.of(3, 1.0).write(tmp_path / "w.json"))))
    q = task.questions("test")[0]
    assert sorted(line for line, _ in form.form_of(q.text)) == list(range(LINES)) and form.form_of(q.text) == q.data
    right = " ".join(task.world.right(x) if line in STANDARD else EMPTY for line, x in q.data)
    tau = episode(task, right)
    assert tau.reward == pytest.approx(0.2 + 0.05 * 8)  # base and early, all right
    assert task.metrics(tau) == {"reward": tau.reward, "skill": 1.0, "filled": 12.0}
    assert task.metrics(episode(task, "_ _"))["skill"] == 0.0
    assert not {q.id for q in task.questions("train")} & {q.id for q in task.questions("test")}


def failure(task: Graded, text: str) -> tuple[str, tuple[str, ...]]:
    return task.shown(episode(task, text)), ()


def test_the_optimizer_reads_which_lines_lose_points(tmp_path):
    task = Graded(Config(train=str(World.of(3, 1.0).write(tmp_path / "w.json"))))
    q = task.questions("test")[0]
    wrong = " ".join(form.mark(x, (task.world.rule + 1) % 4) if line in STANDARD else EMPTY for line, x in q.data)
    prompt = reflection_prompt("please fill", [failure(task, wrong)], 6, 16000)
    lost, idle = optimizer.diagnose(prompt)
    assert set(lost) == {line for line in STANDARD if task.world.roles[line] == "early"}
    assert set(idle) == set(range(LINES)) - set(lost)
    added = {"graded": Counter(), "blind": Counter()}
    for kind, count in added.items():
        for seed in range(60):
            for text in parse(optimizer.reply_to(prompt, f"{kind}-{seed}-{task.world.rule}")):
                count.update(task.world.role(clause) for clause in clauses(text))
    share = {kind: count["early"] / count.total() for kind, count in added.items()}
    assert share["graded"] > 1.8 * share["blind"]
    assert share["blind"] == pytest.approx(4 / 28, abs=0.05)


def test_an_edit_takes_out_what_is_there():
    rng = random.Random(0)
    for _ in range(50):
        text = optimizer.revise(rng, ["fill03"], ["fill03"], Counter({3: 1}), Counter(), 1)
        assert clauses(text) == []


def test_replies_pass_the_real_checks():
    unfit = partial(lost, names=["answer"])
    prompt = reflection_prompt("please fill in the form fill03", [("f01 filled -1.00", ())], 6, 1000)
    replies = [optimizer.reply_to(prompt, f"graded-{seed}-0") for seed in range(40)]
    accepted = [
        candidates(reply, "please fill in the form fill03", set(), [], 200, 6, unfit)[0] for reply in replies
    ]
    assert sum(map(len, accepted)) > 40 * 5 and any(not x for x in accepted)  # some replies hold none


# ---- statistics, on rows that are made up


def row(arm: str, w: int, d: float, reward: float, rollouts: int = 100, start: float = 0.2) -> dict:
    evals = [[0, start, 0.25, 0, 0.0], [60, reward, 1.0, rollouts, 10.0]]
    return {
        "arm": arm, "world": w, "drift": d, "reward": reward, "skill": 1.0, "rollouts": rollouts, "cpu_seconds": 10.0,
        "evals": evals, "roles": {"late": 2}, "I_star": "fill03", "commit": "abc", "machine": "m", "flags": "",
        "held_out": {}, "curves": {},
    }  # fmt: skip


def made_up(rng: np.random.Generator, n: int, slope: float) -> list[dict]:
    rows = []
    for w in range(n):
        for d in campaign.DRIFTS:
            base = 0.6 + 0.05 * rng.standard_normal()
            rows.append(row("online", w, d, base))
            rows.append(row("before", w, d, base - slope * d + 0.03 * rng.standard_normal()))
            rows.append(row("unverified", w, d, base - 0.1))
    return rows


def test_gains_are_read_at_the_rollouts_that_online_took():
    rows = [row("online", 1, 0.0, 0.8, 100), row("before", 1, 0.0, 1.0, 200)]
    assert campaign.gains(rows, "before", 0.0)[1] == pytest.approx(0.8 - 0.6)  # 0.2 to 1.0: half way
    assert campaign.gains(rows, "before", 0.0, "at its end")[1] == pytest.approx(-0.2)


def test_the_slope_and_its_test_agree_with_scipy():
    rows = made_up(np.random.default_rng(1), 12, 0.2)
    by_hand = []
    for w in range(12):
        y = [next(r["reward"] for r in rows if (r["arm"], r["world"], r["drift"]) == (arm, w, d)) * sign
             for d in campaign.DRIFTS for arm, sign in (("online", 1), ("before", -1))]  # fmt: skip
        gain = [y[k] + y[k + 1] for k in (0, 2, 4)]
        by_hand.append(stats.linregress(campaign.DRIFTS, gain).slope)
    assert campaign.slopes(rows, "before") == pytest.approx(by_hand)
    h1, h2, h3, h4 = campaign.tests(rows)
    assert h2.p == pytest.approx(stats.ttest_1samp(by_hand, 0, alternative="greater").pvalue)
    assert h2.mean == pytest.approx(np.mean(by_hand)) and h2.n == 12 and h2.p < 0.01
    assert h1.p < 0.01 and h3.mean == pytest.approx(0.1) and np.isnan(h4.p) and h4.n == 0


def test_under_no_slope_the_test_is_wrong_as_often_as_it_says():
    rng = np.random.default_rng(2)
    wrong = [campaign.against("", "", campaign.slopes(made_up(rng, 8, 0.0), "before")).p < 0.05 for _ in range(400)]
    assert 0.02 < np.mean(wrong) < 0.09


def test_the_second_part_is_two_sided():
    rng = np.random.default_rng(5)
    rows = [row(arm, w, d, 0.7 + 0.1 * (arm == "fst") + 0.02 * rng.standard_normal())
            for w in range(6) for d in (0.0, 1.0) for arm in ("online", "fst", "paired")]  # fmt: skip
    found = {test.name: test for test in campaign.second(rows)}
    y = {(r["arm"], r["world"], r["drift"]): r["reward"] for r in rows}
    for rival in ("fst", "paired"):
        x = [np.mean([y["online", w, d] - y[rival, w, d] for d in (0.0, 1.0)]) for w in range(6)]
        assert found[rival].p == pytest.approx(stats.ttest_1samp(x, 0).pvalue) and found[rival].n == 6
    assert found["fst"].mean < 0 and found["fst"].p < 0.01 and np.isnan(found["absorb"].p)
    assert "| fst:" in campaign.page(rows)


def test_equivalence_needs_values_near_zero():
    assert campaign.vanishes([0.001, -0.002, 0.003, 0.0]) < 0.01
    for x in ([0.1, 0.12, 0.08], [-0.1, -0.12, -0.08]):
        assert campaign.vanishes(x) > 0.5


def test_a_page_of_made_up_rows(tmp_path):
    rows = made_up(np.random.default_rng(1), 3, 0.2)
    text = campaign.page(rows)
    assert f"{len(rows)} of {campaign.PLANNED} runs" in text and "| H4 |" in text and "too few worlds" in text
    cells = re.findall(r"\| before \| ([-+][\d.]+)", text)
    assert float(cells[0]) == pytest.approx(np.mean(list(campaign.gains(rows, "before", 0.0).values())), abs=6e-4)
    campaign.draw(rows, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 5000
    assert "inf" not in campaign.page(made_up(np.random.default_rng(1), 1, 0.2))  # of one world


def test_what_rewording_costs_is_paired_by_world():
    rows = []
    for w, drop, more in ((1, 0.1, 0.05), (2, 0.3, 0.15)):
        for d in campaign.DRIFTS:
            for arm, costs in (("online", drop), ("before", drop + more)):
                told = {"I_star": 0.9, "reworded": 0.9 - costs, "first": 0.5}
                rows.append(row(arm, w, d, 0.9) | {"unseen": told})
    online, before = (line for line in campaign.wording(rows, ["online", "before"]) if line.startswith(("| o", "| b")))
    assert "| 0.900 | 0.700 | 0.500 | +0.200" in online
    assert "| 0.900 | 0.600 | 0.500 | +0.300" in before and "| -0.100" in before
    assert campaign.wording([row("online", 1, 0.0, 0.9)], ["online"]) == []


def test_unseen_instructions_say_what_their_names_say():
    w = World.of(5, 1.0)
    texts = campaign.unseen(w, "fill03 now leave14 please rule1")
    for name in ("reworded", "reordered"):
        assert set(clauses(texts[name])) == {"fill03", "leave14", "rule1"}
    assert not set(texts["reworded"].split()) & set(WORDINGS) and texts["none"] == ""
    assert clauses(texts["first"]) == [] and set(clauses(texts["random clauses"])) <= set(w.inventory)
    assert set(clauses(texts["another world's"])) == set(World.of(1005, 1.0).best(1.0))


def test_the_pilot_s_page_of_made_up_rows():
    rows = [{"kind": "follow", "size": "96x3", "parameters": 3e5, "demos": 100, "cpu_seconds": 1.0,
             "gains": {"fill00": 0.9, "fill01": 0.2}}]  # fmt: skip
    rows += [
        {
            "kind": "worth",
            "world": 1,
            "drift": d,
            "policy": p,
            "skill": s,
            "clause": "fill00",
            "role": "late",
            "gain": g,
        }
        for d, p, s, g in ((1.0, "first", 0.25, -0.02), (1.0, "trained", 0.9, 0.04))
    ]
    runs = made_up(np.random.default_rng(1), 4, 0.2)
    text = pilot.page(rows, runs)
    assert "1 of 2 | 0.55 | 0.20" in text and "| -0.020 (1) | +0.040 (1) |" in text
    x = list(campaign.gains(runs, "before", 1.0).values())
    assert f"| before | d = 1 | {np.mean(x):+.3f} | {np.std(x, ddof=1):.3f} | 4 |" in text


@pytest.mark.slow
def test_one_seed_gives_one_first_policy_to_the_byte(tmp_path):
    made = []
    for k, (seed, threads) in enumerate([(0, "1"), (0, "2"), (1, "1")]):
        build = [sys.executable, "-m", "extras.graded.warm_start", "--demos", "128", "--seed", str(seed)]
        env = os.environ | {"OMP_NUM_THREADS": threads}
        subprocess.run([*build, "--out", str(tmp_path / str(k))], cwd=ROOT, env=env, check=True, capture_output=True)
        made.append((tmp_path / str(k) / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


@pytest.mark.slow
def test_the_first_policy_follows_every_line_s_clause_and_no_unit_more_than_another(tmp_path):
    model, tokenizer = load_policy(str(POLICY), "cpu")
    gains = pilot.follow(model, tokenizer, 150)
    assert min(x for clause, x in gains.items() if not clause.startswith("rule")) > 0.8
    for seed in range(8):  # their right units are all four
        ((_, skill),) = campaign.play(POLICY, World.of(seed, 0.0).write(tmp_path / "w.json"), [form.START])
        assert 0.15 < skill < 0.35


@pytest.mark.slow
def test_a_tiny_campaign_end_to_end(tmp_path):
    small = "--T 3 --batch 4 --mini 4 --K_p 1 --K_e 1 --T_e 3 --D_B 4 --buffer 40"
    argv = ["--arms", "online", "before", "--worlds", "1", "--drifts", "1", "--jobs", "1", "--every", "1"]
    command = [sys.executable, "-m", "extras.campaigns.graded", *argv, "--extra", small]
    command += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(2):  # the second time nothing is left to run
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results" / "graded.jsonl").read_text().splitlines()]
    assert [r["arm"] for r in rows] == ["online", "before"]
    assert rows[1]["evals"][-1][3] == rows[1]["rollouts"] > rows[0]["rollouts"] >= 3 * 4 * 5
    assert rows[0]["held_out"]["first policy, first instruction"] == rows[1]["evals"][0][1]
    assert set(rows[0]["unseen"]) == set(campaign.unseen(World.of(1, 1.0), rows[0]["I_star"]))


@pytest.mark.slow
def test_absorbing_brings_the_untold_policy_towards_the_told_one(tmp_path):
    """Through extras/absorb.py as the campaign starts it, in a world without drift."""
    w = World.of(1, 0.0)
    told = tmp_path / "told.txt"
    told.write_text(" ".join([form.START, *w.best(0.25)]) + "\n")
    argv = ["extras/absorb.py", *campaign.COMMON.split(), "--model", str(POLICY), "--T", "30", "--teacher", str(told)]
    argv += ["--train", str(w.write(tmp_path / "w.json")), "--out", str(tmp_path / "run")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *argv], cwd=ROOT, env=env, check=True, capture_output=True, timeout=600)
    rewards = [row["reward"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["t"]]
    ((best, _),) = campaign.play(POLICY, tmp_path / "w.json", [told.read_text().strip()])
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    assert best > first + 0.3 and first + 0.02 < last < best
