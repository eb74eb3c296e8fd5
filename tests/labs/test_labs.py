"""Every lab: as it is shipped, with its solution, with one blank left empty, with the mistakes that
readers make."""

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import requests
from json_server import free_port
from marimo._ast import codegen
from marimo._ast.parse import parse_notebook
from requests.adapters import HTTPAdapter
from scipy.stats import binom
from urllib3.util import Retry

from labs import desk
from labs.__main__ import main
from plumbing.faults import Fault
from tasks import Question

ROOT = Path(__file__).parents[2]
solution_of = cache(desk.solution)


@cache
def checks(n):
    """Returns the checks of a lab by the blank that they are of."""
    module = desk.lab(n)
    return {
        name.removeprefix("check_"): getattr(module, name)
        for name in vars(module)
        if name.startswith("check_")
    }


# transformers takes a process that has it for a notebook, whose Trainer wants IPython
sys.modules.pop("marimo")


@pytest.fixture(scope="module", autouse=True)
def no_notebook_afterwards():
    yield
    sys.modules.pop("marimo", None)


@pytest.mark.parametrize("n", desk.NUMBERS)
def test_a_lab_as_it_is_shipped_runs_says_that_every_blank_is_empty_and_draws_nothing(n):
    defined = desk.run(n)
    found = desk.verdicts(defined)
    assert sorted(v.blank for v in found) == sorted(checks(n)) and not any(v.right for v in found)
    # Each says the same, that it is empty; but for those that wait for another.
    assert (
        len({v.says for v in found if not any(f"`{blank}`" in v.says for blank in checks(n))}) == 1
    )
    assert "found" not in defined
    guesses = defined["predicted"]
    assert set(guesses.values() if isinstance(guesses, dict) else [guesses]) == {None}
    text = (ROOT / "labs" / f"lab{n}.py").read_text()  # saving it in the notebook changes nothing
    assert codegen.generate_filecontents_from_ir(parse_notebook(text)) == text


@pytest.mark.parametrize("n", desk.NUMBERS)
def test_a_solution_has_what_the_blanks_and_the_prediction_want_and_a_sentence_for_each(n):
    solution = solution_of(n)
    assert set(solution) == {*checks(n), "predicted"}
    assert {blank for of, blank in MISTAKES if of == n} == set(checks(n))
    for blank, check in checks(n).items():
        assert desk.verdict(check, solution[blank]).says == ""
        assert len(solution[blank].__doc__.split()) > 5


# ---- the mistakes that readers make: a function, and a word of the sentence that names the mistake


def softmax(z):
    return np.exp(z) / np.exp(z).sum()


def nonclipping_gradient(z, y, old, A, eps):
    return np.exp(np.log(softmax(z)[y]) - old) * A * (softmax(z) - np.eye(len(z))[y])


def pruned(n, best, other, N, keep, ties=1):
    x = np.arange(n + 1)
    return float(binom.pmf(x, n, best) @ binom.sf(keep - 1, N - 1, binom.sf(x - ties, n, other)))


ALIKE = [Question(f"q{k}", f"Name the film {k}?") for k in range(12)]


def with_step(*calls):
    """Returns a step of INSPO that makes these calls in this order."""
    from tasks.task import set_rewards

    def step(t, P, player, task, questions, rng, G):
        taus = player.rollout(t, "rollout", P.draw_jobs(rng, questions, G))
        moves = {
            "reward": lambda: set_rewards(task, taus),
            "advantages": lambda: player.learner.set_advantages(taus),
            "update": lambda: player.learner.update(t, [taus]),
        }
        for call in calls:
            moves[call]()
        return taus

    return step


MISTAKES = {
    (1, "weight"): (lambda r, n: sum(r) / len(r) if r else 0, "window"),
    (1, "probabilities"): (lambda w, tau_s: softmax(np.asarray(w) / tau_s), "overflows"),
    (2, "advantages"): (lambda r: (r - r.mean()) / (r.std() + 1e-6), "ddof"),
    (2, "useful"): (lambda p, G: 1 - (1 - p) ** G, "all right"),
    (2, "of_a_success"): (lambda k, G: 1 - k / G, "distance to the mean"),
    (3, "surrogate"): (lambda rho, A, eps: np.clip(rho, 1 - eps, 1 + eps) * A, "always clips"),
    (3, "k3"): (lambda logp, ref: np.exp(logp - ref) - (logp - ref) - 1, "wrong way round"),
    (3, "average"): (lambda x, mask: (x * mask).sum() / mask.sum(), "all tokens at once"),
    (3, "gradient"): (nonclipping_gradient, "instead of zeros"),
    (4, "again"): (lambda tokenizer, ids: ids, "as they came"),
    (4, "rho"): (lambda new, old: float(np.sum(new) - np.sum(old)), "log of rho"),
    (5, "survivors"): (lambda N, N_parent: max(N_parent, N // 2), "rounds"),
    (5, "drop_probability"): (lambda *a: pruned(*a, ties=0), "ties"),
    (6, "diagnose"): (
        lambda text: {"entity"} if text.count(" of ") > 1 else set(),
        "queries alone",
    ),
    (6, "propose"): (lambda instruction, counts, n: [instruction], "instruction in use"),
    (6, "choose_joining"): (lambda tested, room: [c for c in tested if c.r >= c.r_parent], "room"),
    (7, "flags"): (
        lambda: {"frozen policy": ["--mode", "static"], "frozen instruction": ["--lr", "0"]},
        "wrong way round",
    ),
    (7, "unmasked"): (lambda mask, k: [1] * len(mask), "prompt"),
    (8, "questions"): (lambda split: ALIKE, "trained|held out"),
    (8, "worth"): (lambda tau: float(len({w[0] for w in tau.prediction.split()}) == 1), "one word"),
    (8, "shown"): (lambda tau: tau.response, "question is missing"),
    (8, "step"): (with_step("reward", "advantages", "update"), "not credited"),
}


@pytest.mark.parametrize("n, blank", MISTAKES)
def test_a_check_names_the_mistake(n, blank):
    wrong, word = MISTAKES[n, blank]
    with np.errstate(all="ignore"):
        assert re.search(word, desk.verdict(checks(n)[blank], wrong).says)


@pytest.mark.parametrize("n, blank", MISTAKES)
def test_with_one_blank_left_empty_its_verdict_alone_fails_and_the_lab_goes_no_further(n, blank):
    defined = desk.run(n, {name: x for name, x in solution_of(n).items() if name != blank})
    wrong = [v for v in desk.verdicts(defined) if not v.right]
    assert blank in [v.blank for v in wrong] and "found" not in defined
    for v in wrong:  # another one may wait for it, and says so
        assert v.blank == blank or f"`{blank}`" in v.says
    assert len(desk.verdicts(defined)) == len(checks(n))


# ---- whole labs


W = np.array([0.60, 0.40, 0.20, 0.10, 0.05, 0.05, 0.00])
SHOWS = {  # lab -> what the numbers of its run with the solution show
    1: lambda x: [
        x["share of the best"] == pytest.approx(softmax(W / 0.2)[0]), x["largest distance to Population"] < 1e-12,
    ],
    2: lambda x: [
        x["A of one right answer of five"] == pytest.approx(0.8 / 0.2**0.5, abs=1e-5),
        0 < x["share of useful groups"] < 0.5, x["largest distance to grpo.py"] < 1e-9,
    ],
    3: lambda x: [
        x["S of the predicted token"] == -1.5, 0 < x["clipped tokens"] < 16,
        max(x["largest distance of a gradient"], x["largest distance of a KL"]) < 1e-5,
    ],
    4: lambda x: [  # sampled tokens have rho 1; ids that changed on the way through text have not
        x["share of changed texts among those it was taught"] == 0 < x["share of changed turns"],
        x["largest |log rho| as sampled"] < 1e-3, x["share of the changed turns outside of the clip"] > 0.5,
    ],
    # the formula describes its own simulation, of 600 trials, and is too hopeful for the world
    5: lambda x: [
        abs(x["computed"] - x["equal shares"]) < 4 * (0.025 / 600) ** 0.5,
        x["and questions that differ"] > 2 * x["computed"],
    ],
    6: lambda x: [x["your best on test"] > 2 * x["the parent on test"], x["yours that joined"] > 0],
    7: lambda x: [
        x["inspo"] > 0.8 > 0.3 > max(x["frozen policy"], x["frozen instruction"]),
        x["shuffled rewards"] < x["true rewards"], x["no mask"] < 1,
        abs(x["given tokens, without"]) > abs(x["given tokens, with the mask"]),
    ],
    8: lambda x: [
        x["reward, last step"] > 0.8 > 0.3 > x["reward, first step"],
        x["different answers, last step"] < x["different answers, first step"] / 2,
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("n", desk.NUMBERS)
def test_a_lab_with_its_solution(n):
    defined = desk.run(n, solution_of(n))
    assert all(v.right for v in desk.verdicts(defined))
    assert all(np.isfinite(value) for value in defined["found"].values())
    assert all(SHOWS[n](defined["found"])), defined["found"]


# ---- files and doors


def test_a_class_s_files_are_checked_and_a_wrong_one_is_the_exit_status(tmp_path, capsys):
    shipped, weight = (
        (ROOT / "labs" / "lab1.py").read_text(),
        "sum(rewards[-n:]) / max(1, len(rewards[-n:]))",
    )
    half = tmp_path / "ann.py"
    half.write_text(shipped.replace("    ...\n", f"    return {weight}\n", 1))
    with pytest.raises(SystemExit) as end:
        main([str(half)])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 1
    assert any("right" in line and "weight" in line for line in lines)
    assert any("WRONG" in line and "probabilities" in line for line in lines)
    with pytest.raises(SystemExit) as end:
        main(["1", "--solution"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "WRONG" not in said and "found" in said


@pytest.mark.parametrize("argv", [("9",), ("nobody.py",), ("lab1.py", "--solution")])
def test_what_cannot_be_run_is_one_line(argv):
    with pytest.raises(Fault, match=argv[0].removesuffix(".py")) as fault:
        main(list(argv))
    assert len(str(fault.value).splitlines()) == 1


def test_a_prediction_comes_before_its_answer():
    assert "0.31" not in desk.compare("It", None, 0.31).text
    assert all(number in desk.compare("It", 0.7, 0.31).text for number in ("0.70", "0.31"))
    assert "0.31" not in desk.list_found({"it": 0.31}, 0.5, None).text
    assert "0.31" in desk.list_found({"it": 0.31}, 0.5).text


@pytest.fixture(scope="module")
def url():
    """The address of the notebooks that `make labs` serves."""
    at = f"http://127.0.0.1:{(port := free_port())}/"
    flags = f"ARGS=--headless --no-token --port {port}"
    argv = ["make", "-o", "setup", "labs", f"PY={sys.executable}", flags]
    server = subprocess.Popen(argv, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        with requests.Session() as session:
            # for up to 100 s
            session.mount(at, HTTPAdapter(max_retries=Retry(connect=9, backoff_factor=0.2)))
            assert "marimo" in session.get(at).text
        yield at
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_make_labs_serves_the_notebooks(url):
    assert requests.get(f"{url}?file=lab1.py").ok


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("chromedriver"), reason="no Chromium with its driver here: make chromium"
)
def test_a_lab_runs_when_it_is_opened(url, tmp_path):
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    before = (ROOT / "labs" / "lab1.py").read_bytes()
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as driver:
        driver.get(f"{url}?file=lab1.py")
        WebDriverWait(driver, 200).until(lambda d: "it returns nothing yet" in d.page_source)
        assert "Traceback" not in driver.page_source
    assert (ROOT / "labs" / "lab1.py").read_bytes() == before
