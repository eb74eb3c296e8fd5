"""docs/one_step.md has the numbers of the run and the lines of the sources."""

import copy
import dataclasses
import re
import statistics
from pathlib import Path

import pytest
import torch

import inspo
from config import parse_flags
from models.model import load_model

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


def test_every_line_of_code_stands_in_its_file(page):
    parts = re.findall(r"# (\S+\.py), (\S+)\n(.*?)(?=\n\n# |\n```)", page, re.S)
    assert len(parts) > 20
    for file, function, code in parts:
        source = {" ".join(line.split()) for line in (ROOT / file).read_text().splitlines()}
        missing = [line for line in code.splitlines() if " ".join(line.split()) not in source]
        assert not missing, f"{file}, {function}: docs/one_step.md shows {missing[0].strip()}"


class Watched(Exception):
    """Ends the run."""


@pytest.mark.slow
def test_the_numbers_are_those_of_the_run(page, tmp_path):
    """A number may differ by one in its last digit: processors add in different orders."""
    torch.set_num_threads(1)  # sums depend on it
    command = re.search(r"step (\d+) of `python inspo.py\s(.*?)`", page, re.S)
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
            seen["before"] = copy.deepcopy(P)
            seen["logps"] = [learner.score_tokens([tau])[0].tolist()]
            seen["update"] = update(t, taus)
            first = copy.copy(learner)
            first.model = load_model(cfg.model)
            seen["ref"] = first.score_tokens([tau])[0].tolist()
            return seen["update"]

        def stepped(*args):
            norm = optimize(*args)
            if "logps" in seen:
                seen["logps"].append(learner.score_tokens([seen["tau"]])[0].tolist())
            return norm

        policy.update, learner.step = follow, stepped
        inspo.inspo(dataclasses.replace(cfg, T=step), task, policy, evolution, checkpoints, log)
        seen["P"] = P
        raise Watched

    with pytest.raises(Watched):
        inspo.train(parse_flags(flags.split()), algorithm=watched)
    group, tau, before, P = (seen[name] for name in ("group", "tau", "before", "P"))
    told = []  # (on the page, of the run)
    assert tau.question.text in page and f"drew **number {tau.instruction_id}**" in page
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
