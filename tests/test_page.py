"""The page's data: what is read of a run, the family tree, the sample of trajectories, the first
screen, the HTML."""

import base64
import gzip
import hashlib
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import requests
import uvicorn

import report
from journal.summary import trace_lineage
from page import html, sample
from page.curves import collect_curves, group_runs
from page.family import collect_family
from page.html import build_page, embed_json
from page.read import Run, read_run
from page.serve import make_app, stamp_files
from page.verdict import describe_gain, describe_winner, find_status, find_warnings, sum_costs
from plumbing.faults import Fault
from plumbing.servers import listen

RUN = Path(__file__).parent / "fixture" / "run"  # nine steps of the embedded world, see its README


def write(path: Path, name: str, *rows: dict) -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def instruction(id: int, text: str, parent: object = None, born: int = 0, **more: object) -> dict:
    return {"id": id, "text": text, "parent": parent, "born": born} | more


def read_lines(file: Path) -> list[dict]:
    lines = (
        gzip.open(file, "rt", encoding="utf-8")
        if file.suffix == ".gz"
        else file.open(encoding="utf-8")
    )
    return [json.loads(line) for line in lines]


def game(path: Path) -> Path:
    """Copies RUN as a run of another task would have written it.

    Its metric is "won", its tool is counted as "moves", nobody predicts an answer, and a trajectory
    that fails may be rewarded more than one that wins.
    """
    shutil.copytree(RUN, path)
    names = {"em": "won", "searches": "moves"}

    def renamed(row: dict) -> dict:
        parts = {key: [names.get(part, part) for part in key.split("/")] for key in row}
        return {"/".join(parts[key]): value for key, value in row.items() if "f1" not in parts[key]}

    rows = [renamed(row) for row in read_lines(path / "metrics.jsonl")]
    for row in filter(lambda row: "w" in row, rows):
        row |= {"reward": 4 * row["reward"] - 1, "w": {j: 4 * x - 1 for j, x in row["w"].items()}}
    rows[0] |= {"metrics": ["won", "fuel"], "tools": ["moves"]}
    write(path, "metrics.jsonl", *rows)
    summary = json.loads((path / "summary.json").read_text())
    summary["held_out"] = {name: renamed(row) for name, row in summary["held_out"].items()}
    summary |= {
        "metric": "won",
        "metrics": ["won", "fuel"],
        "tools": ["moves"],
        "end": renamed(summary["end"]),
    }
    write(path, "summary.json", summary)
    config = json.loads((path / "config.json").read_text())
    write(path, "config.json", config | {"mode": "tournament", "unheard_of": [1]})
    for file in (path / "trajectories").iterdir():
        rows = read_lines(file)
        for k, row in enumerate(rows):
            failed = row["reward"] < 1 if "I_star" not in file.name else "first" in file.name
            reward = [-1.0, 0.5, 1.5][k % 3] if failed else [3.0, 0.5][k % 2]
            row |= {
                "failed": failed,
                "reward": reward,
                "metrics": {"won": float(not failed), "fuel": 2.5},
            }
            row |= {"prediction": None, "golds": []}
        with gzip.open(file, "wt") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@contextmanager
def served(path: Path):
    """Serves the page of a run, as report.py --serve does; yields its URL."""
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app([path]), log_level="warning"))
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def scripts_of(text: str) -> list[tuple[str, str]]:
    """The script elements of a page: their attributes, and what they hold."""
    return re.findall(r"<script\b([^>]*)>(.*?)</script>", text, re.S)


def unpack(text: str) -> object:
    return json.loads(gzip.decompress(base64.b64decode(text)))


# ---- reading


def test_lines_cut_short_and_damaged_are_counted_and_left_out(tmp_path):
    write(tmp_path, "config.json", {"T": 5})
    rows = [
        '{"t": 1, "reward": 0.5}',
        "not json",
        '{"reward": 1}',
        "[1]",
        '{"t": 1, "reward": 0.75}',
        "[" * 5000,
        '{"t": "2"}',
        '{"t": null}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"t": 2, "rew']))
    run = read_run(tmp_path)
    # of two rows of a step the later one
    assert run.steps == [{"t": 1, "reward": 0.75}] and (run.t, run.T) == (1, 5)
    assert "metrics.jsonl: 7 lines cut short or damaged" in " ".join(run.missing)


@pytest.mark.parametrize(
    "gone", [[p.name] for p in RUN.iterdir()] + [["config.json", "reflections.jsonl"]]
)
def test_whatever_is_missing_a_page_is_made_that_says_so(tmp_path, gone):
    path = shutil.copytree(RUN, tmp_path / "run")
    for name in gone:
        (shutil.rmtree if (path / name).is_dir() else Path.unlink)(path / name)
    page, _ = html.describe_run(read_run(path), 100)
    silent = {"README.md", "summary.json"}  # without the last one it is a run that has not finished
    assert {text.partition(".")[0].partition("/")[0] for text in page["missing"]} == {
        name.partition(".")[0] for name in gone if name not in silent
    }
    assert (page["status"]["state"] == "finished") == (gone != ["summary.json"])


@pytest.mark.parametrize("cut", range(0, 9))
def test_files_cut_anywhere_make_a_page(tmp_path, cut):
    path = shutil.copytree(RUN, tmp_path / "run")
    for file in path.rglob("*"):
        if file.is_file() and file.suffix in (".json", ".jsonl", ".gz"):
            data = file.read_bytes()
            file.write_bytes(data[: len(data) * cut // 9 + cut % 3])
    (path / "metrics.jsonl").write_bytes((RUN / "metrics.jsonl").read_bytes())
    assert len(build_page([path])) > 100_000


@pytest.mark.parametrize("name, row", [
    ("metrics.jsonl", {"t": 3, "w": [1], "reward": "high"}), ("reflections.jsonl", {"t": 3, "verified": [1]}),
    ("population.jsonl", {"t": 1, "event": "prune", "P": [3]}),
    ("population.jsonl", {"t": 0, "event": "start", "P": [instruction(2, "a", 2)]}),
    ("summary.json", {"generations": 3}),
])  # fmt: skip
def test_what_no_run_writes_is_a_fault(tmp_path, name, row):
    path = shutil.copytree(RUN, tmp_path / "run")
    write(path, name, row)
    with pytest.raises(Fault, match=f"^{path} holds what no run writes .*: restore it, or "):
        build_page([path])


def test_numbers_that_json_lacks_do_not_reach_the_page(tmp_path):
    path = shutil.copytree(RUN, tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as f:
        f.write('{"t": 10, "reward": NaN, "loss": Infinity, "logp_gap": NaN}\n')
    found, _ = html.describe_run(read_run(path), 100)
    assert "NaN" not in embed_json(found) and found["curves"]["series"]["reward"][-1] is None
    assert {w["panel"] for w in found["warnings"]} >= {"reward", "loss"}


# ---- the family tree


def test_the_tree_says_who_left_when_and_who_was_refused(tmp_path):
    a, b = instruction(0, "a"), instruction(1, "b", 0)
    c, d = instruction(2, "c", 1, born=4), instruction(3, "d", 1, born=4)
    write(
        tmp_path,
        "population.jsonl",
        {"t": 0, "event": "start", "P": [a, b]},
        {"t": 2, "event": "prune", "P": [b]},
        {"t": 4, "event": "evolve", "P": [c, d]},
    )
    write(
        tmp_path,
        "metrics.jsonl",
        {"t": 1, "w": {"0": 0.1, "1": 0.5}, "p": {"0": 0.2, "1": 0.8}, "n": {"1": 10}},
        {"t": 2, "w": {"1": 0.6}, "p": {"1": 1.0}, "n": {"1": 10}},
    )
    blocks = "".join(f"<ins_{k}> {text} </ins_{k}>\n" for k, text in enumerate("chdeg", 1))
    call = {
        "prompt": "<example>\nResponse: Question: q?\nx\nCorrect answer: g\n</example>",
        "prompt_tokens": 7,
    }
    call |= {"reply": f"Because.\n{blocks}<ins_7> j </in", "completion_tokens": 2, "seconds": 0.5}
    verified = [
        {"text": text, "r": r, "r_parent": 0.4}
        for text, r in zip("cdeg", (0.5, 0.3, 0.3, 0.4), strict=True)
    ]
    write(
        tmp_path,
        "reflections.jsonl",
        {"t": 4, "round": 1, "parent": 1, "call": call},
        {
            "t": 4,
            "round": 1,
            "parent": 1,
            "accepted": [1, 3, 4, 5],
            "rejected": [{"k": 2, "reason": "duplicate"}],
        },
        {"t": 4, "round": 1, "parent": 1, "D_B": ["q"] * 20, "verified": verified},
    )
    tree = collect_family(read_run(tmp_path))
    by_id = {I["id"]: I for I in tree["instructions"]}
    assert [(I["left"], I["why"]) for I in by_id.values()] == [
        (2, "pruned"),
        (4, "succeeded"),
        (None, ""),
        (None, ""),
    ]
    assert [I["parents"] for I in by_id.values()] == [[], [0], [1], [1]]
    assert (
        by_id[1]["history"] == [[1, 0.5, 0.8, 10], [2, 0.6, 1.0, 10]]
        and by_id[0]["history"][0][3] == 0
    )
    assert (by_id[2]["r"], by_id[2]["questions"], by_id[3]["r"]) == (0.5, 20, 0.3)
    assert [(c["text"], c["why"]) for c in tree["refused"]] == [
        ("h", "duplicate"),
        ("e", "below its parent"),
        ("g", "no place was left"),
    ]
    assert tree["candidates"] == {"4.1.1": "2", "4.1.2": "3", "4.1.3": "r1", "4.1.4": "r2"}
    told = tree["calls"][by_id[2]["call"]]
    assert told["analysis"] == "Because." and told["failures"] == [
        {"text": "Question: q?\nx", "gold": "g"}
    ]
    assert trace_lineage({0: None, 1: 0, 2: 1, 3: 1}, 2) == [0, 1, 2]


# ---- trajectories


def rows_of(index: dict) -> list[dict]:
    return [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]


def test_the_sample_takes_whole_groups_and_says_how_many_there_were():
    run = read_run(RUN)
    index, pages = sample.sample_trajectories(run, collect_family(run), 45)
    rows = rows_of(index)
    # 9 steps, one group of five each
    assert len([row for row in rows if row["kind"] == "training"]) == 45
    everything, _ = sample.sample_trajectories(run, collect_family(run), 10**6)
    assert everything["all"] == len(everything["rows"]) == index["all"] > len(rows)
    contents = [unpack(page) for page in pages.values()]
    for row in rows:
        assert contents[row["page"]][row["place"]]["parts"][0][0] == "act"


def test_rollouts_of_a_verification_are_played_under_a_parent_and_its_candidates():
    run = read_run(RUN)
    tree = collect_family(run)
    rows = rows_of(sample.sample_trajectories(run, tree, 1)[0])
    parents = {(row["t"], row["round"]): str(row["parent"]) for row in run.reflections}
    wanted = []
    for file in sorted((RUN / "trajectories").glob("verify-*")):
        t, turn = map(int, file.name.removesuffix(".jsonl.gz").split("-")[1:])
        for row in read_lines(file):
            place = f"{t}.{turn}.{row['candidate']}"
            wanted.append(tree["candidates"][place] if row["candidate"] else parents[t, turn])
    assert [row["ins"] for row in rows if row["kind"] == "verification"] == wanted
    assert len(set(wanted)) > 10 and any(name[0] == "r" for name in wanted)
    assert {row["t"] for row in rows if row["kind"].startswith("trained policy")} == {9}


def test_a_response_is_cut_where_the_policy_stops_and_a_tool_speaks():
    parts = [
        ["act", "<search> x </search>"],
        ["obs", "<information>Doc</information>"],
        ["act", "what"],
    ]
    parts += [["obs", "\n\nThat was neither\n\n"], ["act", "<answer> x </answer>"]]
    turns = [{"text": text} for kind, text in parts if kind == "act"]
    assert (
        sample.split_response({"response": "".join(text for _, text in parts), "turns": turns})
        == parts
    )
    assert sample.split_response({"response": "all of it", "turns": [{"text": "elsewhere"}]}) == [
        ["act", "all of it"]
    ]


# ---- the first screen

GOOD = {
    "reward": 0.5,
    "entropy": 0.3,
    "answered": 0.9,
    "zero_variance_groups": 0.4,
    "logp_gap": 1e-6,
}
GOOD |= {"search/faults": 0, "loss": 0.1, "grad_norm": 1.0}


def named(name: str, config: dict | None = None, steps: list[dict] | None = None) -> Run:
    """Returns what a run has written so far: its configuration and its steps."""
    return Run(Path(name), config or {}, steps or [], [], [], {}, 0.0, [])


def run_of(*rows: dict) -> Run:
    return named("x", {"T": 20}, [{"t": t} | row for t, row in enumerate(rows, 1)])


FALLS = [
    (np.linspace(-1, 3, 20), False),
    (-0.5 + 0.05 * (-1.0) ** np.arange(20), False),  # hovers below zero
    ([*np.linspace(-1, 3, 10), *np.linspace(3, 0, 10)], True),
    (np.linspace(-0.2, -1, 20), True),
]


@pytest.mark.parametrize(
    "rows, panels, numbers",
    [
        ([GOOD] * 20, [], []),
        ([GOOD] * 10 + [GOOD | {"entropy": 0.01}] * 10, ["entropy"], ["0.3", "0.01"]),
        ([GOOD] * 10 + [GOOD | {"logp_gap": 0.2}] * 10, ["logp_gap"], ["0.2", "step 11"]),
        ([GOOD] * 10 + [GOOD | {"loss": float("nan")}] * 10, ["loss"], ["step 11"]),
        ([GOOD] * 10 + [GOOD | {"reward": 0.1}] * 10, ["reward"], ["0.50", "0.10"]),
        (
            [GOOD] * 10 + [GOOD | {"skipped_updates": 2}] * 10,
            ["skipped_updates"],
            ["20 optimizer steps"],
        ),
        ([], [""], ["No step"]),
        *(
            ([GOOD | {"reward": float(r)} for r in rewards], ["reward"] * fell, [])
            for rewards, fell in FALLS
        ),
    ],
)
def test_what_a_person_would_point_at_is_a_warning(rows, panels, numbers):
    out = find_warnings(run_of(*rows))
    assert [warning["panel"] for warning in out] == panels
    assert all(number in out[0]["text"] for number in numbers)


def test_the_cost_of_an_unfinished_run_is_that_of_the_finished_one():
    run, rows = read_run(RUN), read_lines(RUN / "metrics.jsonl")
    whole, summary = sum_costs(run), run.summary
    run.summary = {}
    part = sum_costs(run)
    names = ("optimizer_calls", "training_rollouts", "verification_rollouts")
    for name in (*names, "prompt_tokens", "completion_tokens"):
        assert part[name] == whole[name] > 0, name
    assert (
        whole["prompt_tokens"] + whole["completion_tokens"] == summary["ledger"]["optimizer_tokens"]
    )
    phases, evolve = whole["phases"], sum(row.get("time/evolve", 0) for row in rows)
    assert whole["training_rollouts"] == sum(sum(row["n"].values()) for row in rows if row["t"])
    assert sum(phases.values()) == pytest.approx(whole["seconds"]) and min(phases.values()) >= 0
    # it is a part of time/evolve
    assert phases["verify"] == sum(row.get("time/verify", 0) for row in rows) > 0
    assert phases["verify"] + phases["evolve"] == pytest.approx(evolve)


def test_the_first_screen_of_a_real_run():
    run = read_run(RUN)
    tree, summary = collect_family(run), run.summary
    assert describe_winner(run, tree)["lineage"] == summary["generations"]
    assert describe_gain(run)["table"] == summary["held_out"]
    assert find_status(run)["state"] == "finished" and find_status(run)["t"] == 9
    run.summary, run.written = {}, 0.0
    weights = run.steps[-1]["w"] = run.steps[-1]["w"] | {"0": 0.1}  # behind the two that it has
    best = describe_winner(run, tree)
    assert sorted(weights.values()) == [0.1, best["second"][0], best["w"]]
    assert [weights[str(best["id"])], weights[best["second"][1]]] == [best["w"], best["second"][0]]
    assert find_status(run)["state"] == "stopped" and describe_gain(run)["table"] == {}


def test_a_run_of_another_task_is_shown_by_its_own_metric(tmp_path):
    path = game(tmp_path / "run")
    summary = json.loads((path / "summary.json").read_text())
    page, pages = html.describe_run(read_run(path), 10**6)
    assert (page["metric"], page["metrics"], page["tools"]) == ("won", ["won", "fuel"], ["moves"])
    assert (
        page["learned"]["table"] == summary["held_out"]
        and page["missing"] == page["warnings"] == []
    )
    series = page["curves"]["series"]
    assert (
        "em" not in series
        and series["test/won"][-1] == summary["held_out"]["trained policy, I_star"]["won"]
    )
    instructions, refused = page["tree"]["instructions"], page["tree"]["refused"]
    assert min(w for I in instructions for _, w, *_ in I["history"]) == -1
    assert {c["why"] for c in refused} == {"below its parent"}
    [shown, *_] = unpack(pages["test-trained_policy-I_star"])
    assert shown["prediction"] is None and shown["golds"] == [] and shown["metrics"]["fuel"] == 2.5
    stored = [
        row
        for name in pages
        if name != "calls"
        for row in read_lines(path / f"trajectories/{name}.jsonl.gz")
    ]
    entries = [(row["reward"], row["failed"]) for row in rows_of(page["index"])]
    # a failure is what its row says
    assert entries == [(row["reward"], row["failed"]) for row in stored]
    (path / "summary.json").unlink()
    unfinished = read_run(path)
    assert unfinished.metrics == ["won", "fuel"] and unfinished.tools == ["moves"]
    assert named("x").metrics == ["em"]


def test_runs_that_differ_by_their_seed_are_one_group():
    def run(name, **config):
        return named(name, {"lr": 0.1, "mode": "inspo"} | config)

    runs = [
        run("a", seed=0), run("b", seed=1, test="other.jsonl"), run("c", mode="static"),
        run("d", seed=2, commit="x", out="elsewhere"),
    ]  # fmt: skip
    assert group_runs(runs) == [
        {"label": "a (2 seeds)", "runs": [0, 3], "unlike": ["commit"]},
        {"label": "b", "runs": [1], "unlike": ["test"]},
        {"label": "c", "runs": [2], "unlike": ["mode"]},
    ]
    assert [g["label"] for g in group_runs([named("a"), named("b")])] == ["a", "b"]
    assert collect_curves(run_of({"reward": 1.0, "w": {}}, {"kl": float("inf")})) == {
        "t": [1, 2],
        "series": {"reward": [1.0, None]},
    }


# ---- the HTML


def test_text_of_a_model_cannot_leave_its_element_nor_a_password_reach_the_page(tmp_path):
    evil = "</script><img src=x onerror=alert(1)><!--<script>{{data}}\u2028"
    path = shutil.copytree(RUN, tmp_path / "run")
    rows = read_lines(path / "population.jsonl")
    for row in rows:
        row["P"] = [I | {"text": evil} for I in row["P"]]
    write(path, "population.jsonl", *rows)
    config = json.loads((path / "config.json").read_text()) | {
        "retriever": "https://ann:Geheim7@host:8000"
    }
    write(path, "config.json", config | {"model": evil, evil: 1})
    text = build_page([path])
    data = next(
        json.loads(body) for attributes, body in scripts_of(text) if 'id="data"' in attributes
    )
    assert "<img" not in text and "<!--<" not in text and "{{data}}" in text
    assert (
        data["runs"][0]["tree"]["instructions"][0]["text"]
        == evil
        == data["runs"][0]["config"]["model"]
    )
    assert data["runs"][0]["config"]["retriever"] == "https://host:8000" and "Geheim7" not in text


def test_only_the_page_s_own_script_may_run_and_nothing_is_fetched():
    page = build_page([RUN])
    data_only = ('type="application/json"', 'type="text/plain"')
    [running] = [
        body
        for attributes, body in scripts_of(page)
        if not attributes.strip().startswith(data_only)
    ]
    digest = base64.b64encode(hashlib.sha256(running.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in page
    assert not any("src=" in attributes for attributes, _ in scripts_of(page))
    assert "Leon Sorokin" in page  # the licence of the chart library


def test_report_py_writes_where_it_is_told(tmp_path, capsys):
    path = shutil.copytree(RUN, tmp_path / "run")
    report.main([str(path)])
    assert (path / "report.html").read_text().startswith(
        "<!doctype html>"
    ) and "report.html" in capsys.readouterr().out
    report.main([str(path), str(RUN), "--out", str(tmp_path / "two.html")])
    assert (tmp_path / "two.html").read_text().count('"curves":') == 2


@pytest.mark.parametrize(
    "argv, says",
    [
        (["nowhere"], "report.py: nowhere: no such directory"),
        ([str(RUN.parent)], "fixture holds no run: none of config.json"),
        ([str(RUN), "--out", "/nowhere/x.html"], "cannot write /nowhere/x.html"),
    ],
)
def test_a_fault_of_report_py_is_one_line(argv, says, capsys):
    with pytest.raises(SystemExit) as ended:
        report.main(argv)
    assert says in str(ended.value) and "\n" not in str(ended.value)


def test_of_a_page_that_does_not_fit_nothing_is_left(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the write fails half way, as on a disk that is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(Fault, match="cannot write"):
            html.write_page([RUN], tmp_path / "page.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_the_server_answers_this_machine_alone_and_follows_the_run(tmp_path):
    path = shutil.copytree(RUN, tmp_path / "run")
    with served(path) as url:

        def get(where, **headers):
            reply = requests.get(url + where, headers=headers, timeout=60)
            return reply.status_code, reply.text

        before = get("/stamp")[1]
        assert (
            get("/")[0] == 200
            and f'"live":"{before}"' in get("/")[1]
            and before == stamp_files([path])
        )
        assert get("/etc/passwd")[0] == 404 and get("/", Host="evil.example:80")[0] == 400
        with (path / "metrics.jsonl").open("a") as f:
            f.write('{"t": 10, "reward": 0.987654}\n')
        assert get("/stamp")[1] != before and "0.987654" in get("/")[1]
        shutil.rmtree(path)
        assert get("/") == (503, f"{path}: no such directory; give a run's, runs/<name>")


def test_report_py_serves_until_it_is_interrupted(tmp_path):
    command = [sys.executable, "report.py", str(RUN), "--serve", "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=RUN.parents[2]
    )
    url = process.stdout.readline().strip().removeprefix("listening on ")
    assert (
        url.startswith("http://127.0.0.1:")
        and "<!doctype html>" in requests.get(url, timeout=60).text
    )
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=100) == ("", "")
