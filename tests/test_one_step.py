"""docs/one_step.md has the run's numbers and the sources' lines, and each relation that it states
holds."""

import ast
import copy
import dataclasses
import math
import re
import statistics
from pathlib import Path

import pytest
import torch

import inspo
from config import parse_flags
from models.model import load_policy
from tasks.search_qa import normalize

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "one_step.md").read_text()


def section(page: str, n: int) -> str:
    return page.split("\n## ")[n]


def rows(section: str) -> list[dict[str, str]]:
    """The table of a section, a dictionary a line."""
    head, *lines = [
        [cell.strip(" *") for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if line[:2] == "| "
    ]
    return [dict(zip(head, line, strict=True)) for line in lines]


def value(section: str, name: str) -> float:
    """What stands after the last `=` of the line that begins with a name."""
    return float(re.search(rf"^{re.escape(name)} +=.*= (-?[\d.]+)$", section, re.M).group(1))


def test_every_line_of_code_stands_in_its_file(page):
    parts = re.findall(r"# (\S+\.py), (\S+)\n(.*?)(?=\n\n# |\n```)", page, re.S)
    assert len(parts) > 20
    for file, function, code in parts:
        source = {" ".join(line.split()) for line in (ROOT / file).read_text().splitlines()}
        missing = [line for line in code.splitlines() if " ".join(line.split()) not in source]
        assert not missing, f"{file}, {function}: docs/one_step.md shows {missing[0].strip()}"


def test_the_five_files_have_as_many_lines_to_read_as_it_says(page):
    path = re.findall(r"^\| `(\w+\.py)` \| (.*) \| (\d+) \|$", page, re.M)
    assert len(path) == 5
    for file, names, lines in path:
        tree = ast.walk(ast.parse((ROOT / file).read_text()))
        sizes = {
            node.name: node.end_lineno - node.lineno + 1
            for node in tree
            if hasattr(node, "decorator_list")
        }
        assert abs(sum(sizes[name] for name in re.findall(r"`(\w+)`", names)) - int(lines)) <= 10, (
            file
        )


class Watched(Exception):
    """Ends the run."""


@pytest.mark.slow
def test_the_numbers_are_those_of_the_run(page, tmp_path):
    """A number may differ by one in its last digit: processors add in different orders."""
    torch.set_num_threads(1)  # sums depend on it
    command = re.search(r"step (\d+) of `python inspo.py (.*?)`", page)
    step, flags = (
        int(command[1]),
        f"{command[2]} --device cpu --engine torch --out {tmp_path / 'run'}",
    )
    seen = {}

    def watched(cfg, task, policy, evolution, checkpoints, log):
        P = evolution.P
        learner, update, optimize = policy.learner, policy.update, policy.learner.step

        def follow(t, taus):
            if t < step:
                return update(t, taus)
            groups = [taus[k : k + cfg.G] for k in range(0, len(taus), cfg.G)]
            seen["group"] = next(
                g for g in groups[cfg.mini_batch // cfg.G :] if len({tau.reward for tau in g}) > 1
            )
            seen["tau"] = tau = max(seen["group"], key=lambda tau: tau.reward)
            seen["before"], seen["logps"] = copy.deepcopy(P), [learner.logprobs([tau])[0].tolist()]
            seen["update"] = update(t, taus)
            first = copy.copy(learner)
            first.model = load_policy(cfg.model)[0]
            seen["ref"] = first.logprobs([tau])[0].tolist()
            return seen["update"]

        def stepped(*args):
            norm = optimize(*args)
            if "logps" in seen:
                seen["logps"].append(learner.logprobs([seen["tau"]])[0].tolist())
            return norm

        policy.update, learner.step = follow, stepped
        inspo.inspo(dataclasses.replace(cfg, T=step), task, policy, evolution, checkpoints, log)
        seen["P"] = P
        raise Watched

    with pytest.raises(Watched):
        inspo.train(parse_flags(flags.split()), algorithm=watched)
    group, tau, before, P = (seen[name] for name in ("group", "tau", "before", "P"))
    told = []  # (on the page, of the run)
    assert tau.question.text in page and f"drew **number {tau.instruction}**" in page
    for row, p in zip(rows(section(page, 1)), before.probabilities(), strict=True):
        told += [(row["w"], before.family[int(row["instruction"])].w), (row["p"], p)]
    advantages = {row["reward"]: row["A"] for row in rows(section(page, 4))}
    for row, other in zip(rows(section(page, 3)), group, strict=True):
        assert row["prediction"] == other.prediction
        told += [(row["reward"], other.reward), (advantages[row["reward"]], other.advantage)]
    engine = [lp for lp, m in zip(tau.logps, tau.mask, strict=True) if m]
    old, now, later = seen["logps"]
    columns = {"engine": engine, "pi_old": old, "pi": now, "pi later": later, "pi_ref": seen["ref"]}
    for row in rows(section(page, 5)):
        told += [(row[name], logps[int(row["token"])]) for name, logps in columns.items()]
    for name, words in (("loss", "to its loss:"), ("grad_norm", "gradients were")):
        both = re.search(rf"{words} (\S+) and (\S+) ", page).groups()  # of the two mini-batches
        assert abs(statistics.mean(map(float, both)) - seen["update"][name]) < 1e-4
    told += [(re.search(r"\) = ([\d.]+)\.\n\n## 6", page)[1], seen["update"]["lr"])]
    next_p = dict(zip(P.ids, P.probabilities(), strict=True))
    for row in rows(section(page, 6)):
        told += [(row["w"], P.family[int(row["instruction"])].w)]
        assert (row["p next"] == "pruned") == (int(row["instruction"]) not in next_p)
        told += (
            [(row["p next"], next_p[int(row["instruction"])])] if row["p next"] != "pruned" else []
        )
    for shown, number in told:
        assert abs(float(shown) - number) <= 1.01 * 10 ** -len(shown.partition(".")[2]), (
            shown,
            number,
        )


def test_p_is_the_softmax_of_the_weights(page):
    tau_s = float(re.search(r"tau_s = ([\d.]+)\.", section(page, 1)).group(1))
    population = rows(section(page, 1))
    exps = [math.exp(float(I["w"]) / tau_s) for I in population]
    for I, e in zip(population, exps, strict=True):
        assert math.isclose(float(I["p"]), e / sum(exps), abs_tol=2e-4)
        assert math.isclose(float(I["exp(w / tau_s)"]), e, rel_tol=5e-4)


def test_the_trajectory_has_as_many_tokens_as_its_runs(page):
    text = section(page, 2)
    total, sampled = map(int, re.search(r": (\d+) tokens, (\d+) of them", text).groups())
    runs = re.search(r"\ntokens  sampled.*?```", text, re.S).group(0)
    assert sum(int(n) for n in re.findall(r"^(\d+) ", runs, re.M)) == total
    assert sum(int(n) for n in re.findall(r"^(\d+) {1,7}\S", runs, re.M)) == sampled
    assert f"These {len(rows(section(page, 5)))} of the {sampled} tokens" in section(page, 5)


def test_rewards_follow_from_the_gold_answer_and_advantages_from_the_rewards(page):
    gold = re.search(r'normalized "(.*?)"', section(page, 3)).group(1)
    group = rows(section(page, 3))
    r = [float(tau["reward"]) for tau in group]
    assert r == [normalize(tau["prediction"]) == gold for tau in group] and set(r) == {0.0, 1.0}
    assert value(section(page, 4), "mean") == statistics.mean(r)
    assert value(section(page, 4), "std ") == round(statistics.stdev(r), 4)
    advantages = rows(section(page, 4))
    assert {float(row["reward"]) for row in advantages} == set(r)
    for row in advantages:
        A = (float(row["reward"]) - statistics.mean(r)) / (statistics.stdev(r) + 1e-6)
        assert float(row["A"]) == round(A, 4)


def test_a_token_s_term_follows_from_its_log_probabilities(page):
    text = section(page, 5)
    A = float(re.search(r"\(A = (-?[\d.]+)\)", text).group(1))
    size, trajectories = map(int, re.search(r"1 / \((\d+) x (\d+)\)", text).groups())
    low, high = map(float, re.search(r"outside ([\d.]+) to ([\d.]+)\.", text).groups())
    beta = float(re.search(r"\(S - ([\d.]+) KL\)", text).group(1))
    tokens = rows(text)
    for token in tokens:
        old, pi, rho = (float(token[name]) for name in ("pi_old", "pi", "rho"))
        assert math.isclose(rho, math.exp(pi - old), rel_tol=2e-4)
        assert low <= rho <= high
        assert abs(float(token["engine"]) - old) <= 1.01e-4
    assert max(abs(float(token["rho"]) - 1) for token in tokens) > 0.05  # there is something to see
    worked = tokens[
        [token["text"] for token in tokens].index(
            re.search(r"By hand, .*?, (`.*?`)", text).group(1)
        )
    ]
    pi, ref, rho = (float(worked[name]) for name in ("pi", "pi_ref", "rho"))
    assert value(text, "rho ") == rho
    kl = math.exp(ref - pi) - (ref - pi) - 1
    assert math.isclose(value(text, "KL "), kl, abs_tol=1e-4)
    S = min(rho * A, min(max(rho, low), high) * A)
    assert math.isclose(value(text, "S "), S, rel_tol=2e-4)
    term = -(S - beta * kl) / (size * trajectories)
    assert math.isclose(value(text, "term"), term, rel_tol=2e-3)


def test_the_instruction_s_weight_is_the_mean_of_its_window(page):
    after = rows(section(page, 6))
    drawn = re.search(r"\*\*number (\d+)\*\*", page).group(1)
    assert f"drew instruction {drawn}." in section(page, 6)
    for I in after:
        rewards = [float(r) for r in I["rewards so far"].split()]
        assert math.isclose(float(I["w"]), statistics.mean(rewards), abs_tol=6e-4)
    assert value(section(page, 6), "w    ") == float(
        next(I["w"] for I in after if I["instruction"] == drawn)
    )


def test_the_pruned_ones_have_the_lowest_weights_and_leave_their_probability_to_the_others(page):
    after = rows(section(page, 6))
    w = [float(I["w"]) for I in after]
    assert w == sorted(w, reverse=True)
    kept = [I for I in after if I["p next"] != "pruned"]
    assert kept == after[: len(kept)] and len(kept) == len(after) - len(after) // 2
    tau_s = float(re.search(r"tau_s = ([\d.]+)\.", section(page, 1)).group(1))
    exps = [math.exp(float(I["w"]) / tau_s) for I in kept]
    for I, e in zip(kept, exps, strict=True):
        assert math.isclose(float(I["p next"]), e / sum(exps), abs_tol=3e-4)
