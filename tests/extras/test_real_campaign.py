"""The campaign on the real model: arms take the same trajectories, tables have what the rows say."""

import re

import pytest

from config import parse
from extras.real import campaign
from extras.real.pace import NAME
from world.clauses import read


def flags(arm):
    return parse(["--preset", NAME, "--model", "m", *campaign.ARMS[arm][1].split()])


def test_static_takes_as_many_trajectories_as_inspo_with_its_verifications():
    inspo, static = flags("inspo"), flags("static")
    evolutions = sum(t % inspo.K_e == 0 for t in range(1, inspo.T_e))
    verified = evolutions * inspo.rounds * (1 + inspo.N_P - inspo.N_parent) * inspo.D_B
    trained, alone = (cfg.T * cfg.batch * cfg.G for cfg in (inspo, static))
    assert abs(trained + verified - alone) < static.batch * static.G and static.mode == "static"
    assert flags("frozen").lr == 0 and flags("guessing").optimizer_model == "guessing"


def test_ten_kinds_say_what_they_are_called_and_ten_wordings_the_same():
    kinds, wordings = campaign.family(False), campaign.family(True)
    assert len(set(kinds.values())) == len(set(wordings.values())) == 10
    assert all(set(read(text)) == set(campaign.KINDS[kind]) for kind, text in kinds.items())
    assert {frozenset(read(text)) for text in wordings.values()} == {frozenset({"entity", "cont", "exact"})}


def row(arm, seed, em, first=0.2):
    held = {"first policy, first instruction": 0.1, "trained policy, first instruction": first}
    return {
        "arm": arm, "seed": seed, "em": em, "commit": "abc", "machine": "2 cores", "questions": 100, "searches": 1.5,
        "trajectories": 768, "cpu_seconds": 600.0, "held_out": held,
    }  # fmt: skip


def test_the_page_compares_inspo_with_each_arm():
    rows = [row("inspo", 1, 0.9), row("static", 1, 0.3), row("inspo", 2, 0.8), row("static", 2, 0.5)]
    ten = {kind: [0.1 * k, 1.0] for k, kind in enumerate(campaign.KINDS)}
    text = campaign.page(rows, [{"policy": "cold", "kinds": ten, "wordings": ten}])
    inspo, static = (next(x for x in text.splitlines() if x.startswith(f"| {arm}:")) for arm in ("inspo", "static"))
    assert "| 0.90, 0.80 | 0.850" in inspo and "| 0.30, 0.50 | 0.400" in static
    # by hand: se = sqrt(0.005 / 2 + 0.02 / 2) = 0.112, t = 0.45 / 0.112 = 4.02 with 1.47 degrees of freedom
    assert "+0.450" in static and float(re.search(r"\| (0\.\d{3}) \|", static)[1]) == pytest.approx(0.09, abs=0.02)
    assert "0.00 to 0.90, sd 0.303" in text and "| entity | 0.20 (1.00) |" in text
    assert "would have shown" in text and "p above 0.05" in text


def test_every_run_is_a_line_of_the_picture(tmp_path, monkeypatch):
    import matplotlib.axes

    axes, drawn = matplotlib.axes.Axes, []
    plot = axes.plot
    monkeypatch.setattr(axes, "plot", lambda ax, x, y, **kw: drawn.append(list(y)) or plot(ax, x, y, **kw))
    curves = [{"reward": [0.1, 0.2], "searches": [1.0, k]} for k in (1.5, 2.5)]
    rows = [row("inspo", 1, 0.9) | {"curves": curves[0]}, row("static", 1, 0.3) | {"curves": curves[1]}]
    campaign.draw(rows, tmp_path / "real.png")
    assert drawn == [[0.1, 0.2], [0.1, 0.2], [1.0, 1.5], [1.0, 2.5]] and (tmp_path / "real.png").stat().st_size > 5000


def test_a_page_without_inspo_s_runs_compares_nothing():
    text = campaign.page([row("static", 1, 0.3)], [])
    assert "| 0.30 | 0.300 |" in text and "+0" not in text and "ten instructions" not in text.split("## The plan")[0]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no cold-started policy; `make real`"):
        campaign.main(["--cold", str(tmp_path / "none")])
