"""The page of a run in a real headless Chromium: it draws, answers clicks and keys, and fetches
nothing."""

import gzip
import json
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
from test_page import RUN, read_lines, write

from extras.page import html

pytest.importorskip("selenium", reason="selenium is not installed: make setup")
from selenium import webdriver  # noqa: E402
from selenium.common.exceptions import WebDriverException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no Chromium with its driver here: make chromium"
    ),
]

SUMMARY = json.loads((RUN / "summary.json").read_text())
WON = SUMMARY["generations"][-1]
EVIL = "</script><img src=x onerror=document.title='broken'> Say <think> </think> once."
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
).split()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_window_size(1280, 900)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of the fixture run, whose winner and one of its trajectories say something evil."""
    path = shutil.copytree(RUN, tmp_path_factory.mktemp("page") / "run")
    rows = read_lines(path / "population.jsonl")
    for row in rows:
        row["P"] = [I | {"text": EVIL} if I["id"] == WON else I for I in row["P"]]
    write(path, "population.jsonl", *rows)
    file = path / "trajectories" / "test-first_policy-I_star.jsonl.gz"
    evil = {
        "response": f"<think> {EVIL} </think>",
        "prediction": EVIL,
        "question_text": f"Who is {EVIL}?",
    }
    rows = [
        row | evil | {"turns": [row["turns"][0] | {"text": evil["response"]}]}
        for row in read_lines(file)
    ]
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return html.write_page([path], path / "report.html")


@pytest.fixture
def open_page(browser, page):
    """Opens the page at an address; at the end no message may be in the console."""

    def go(hash="", path=page, width=1280, dark=False):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.get("about:blank")
        browser.get(f"{path.as_uri() if isinstance(path, Path) else path}{hash}")
        return browser

    browser.get_log("browser")
    yield go
    assert browser.get_log("browser") == []
    assert browser.title != "broken" and not browser.find_elements(By.TAG_NAME, "img")


def find(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def text(browser, selector):
    return find(browser, selector).text


def count(browser, selector):
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def until(browser, condition, seconds=60):
    # Any of the driver's errors: a page that reloads between finding and reading is reported in
    # several ways.
    ignored = [WebDriverException]
    return WebDriverWait(browser, seconds, poll_frequency=0.05, ignored_exceptions=ignored).until(
        condition
    )


def choose(browser, name, value):
    Select(find(browser, f"[name={name}]")).select_by_value(value)


def test_the_first_screen_answers_three_questions(open_page):
    browser = open_page()
    learned = text(browser, ".learned")
    for row in SUMMARY["held_out"].values():
        assert f"{row['em']:.2f}" in learned
    # 1 and 2 of 12 questions: 2 sqrt((11 / 144 + 20 / 144) / 12) is more than their distance
    assert "EM 0.08 → 0.17" in learned and "within noise (±0.27)" in learned
    assert not count(browser, ".learned .headline .good")
    assert f"#{WON}" in text(browser, ".winner") and EVIL in text(browser, ".winner")
    assert "93.3 % of the training rollouts" in text(browser, ".spent") and "5 calls" in text(
        browser, ".spent"
    )
    assert count(browser, ".chart canvas") >= 11


def test_a_curve_is_saved_as_a_table(open_page):
    link = find(open_page(), "#panel-reward .csv")
    assert link.get_attribute("download") == "reward.csv"
    head, *lines = unquote(link.get_attribute("href").partition(",")[2]).splitlines()
    steps = read_lines(RUN / "metrics.jsonl")
    assert head == '"step","mean reward","best weight w"' and len(lines) == len(steps)
    for line, row in zip(lines[1:], steps[1:], strict=True):
        assert [float(x) for x in line.split(",")] == [row["t"], row["reward"], row["w_best"]]


def test_a_click_in_the_tree_shows_a_text_against_its_parent_and_why_it_came(open_page):
    browser = open_page()
    events = read_lines(RUN / "population.jsonl")
    I = next(I for event in events for I in event["P"] if I["born"] == 3 and I["id"] != WON)
    find(browser, f".tree .row[data-key='{I['id']}']").click()
    assert text(browser, "#instruction h3").startswith(f"#{I['id']}")
    assert f"a revision of #{I['parent']}" in text(browser, "#instruction")
    contents = "return [...document.querySelectorAll(arguments[0])].map((x) => x.textContent)"
    shown = browser.execute_script(contents, "#instruction > .instruction > :not(del)")
    assert "".join(shown).split() == I["text"].split()
    assert count(browser, "#instruction ins") and count(browser, "#instruction del")
    until(browser, lambda b: count(b, "#instruction details"))
    rows = [row for row in read_lines(RUN / "reflections.jsonl") if "call" in row]
    details = browser.execute_script(contents, "#instruction pre")
    assert any(row["call"]["prompt"] in details for row in rows if row["t"] == 3)
    find(browser, ".tree .row.refused").click()
    assert "refused" in text(browser, "#instruction")


def test_filters_change_the_list_and_the_address_restores_it(open_page):
    browser = open_page("#trajectories")
    everything = text(browser, ".count")
    choose(browser, "kind", "training")
    choose(browser, "outcome", "solved")
    find(browser, "[name=from]").send_keys("4")
    rows = [
        row for t in range(4, 10) for row in read_lines(RUN / f"trajectories/step-{t:06d}.jsonl.gz")
    ]
    right = sum(row["reward"] == 1 for row in rows)
    assert right and text(browser, ".count").startswith(f"{right} trajector")
    assert count(browser, ".rows li") == min(60, right)
    find(browser, ".rows a").click()
    chosen = text(browser, "#trajectory .question")
    open_page("#" + browser.current_url.partition("#")[2])
    until(browser, lambda b: count(b, "#trajectory .block"))
    assert (
        text(browser, ".count").startswith(f"{right} trajector")
        and text(browser, "#trajectory .question") == chosen
    )
    assert find(browser, "[name=outcome]").get_attribute("value") == "solved"
    find(browser, ".filters button").click()
    assert text(browser, ".count") == everything


def test_one_question_stands_beside_itself_under_another_instruction(open_page):
    browser = open_page("#trajectories?kind=first%20policy%2C%20I_star")
    find(browser, ".rows a").click()
    until(browser, lambda b: EVIL in text(b, "#trajectory .question"))
    assert EVIL.partition(" Say")[0] in text(browser, "#trajectory .block.think")
    assert EVIL in text(browser, "#trajectory .verdict")
    open_page("#trajectories?kind=verification")
    find(browser, ".rows a").click()
    until(browser, lambda b: count(b, "[name=beside]"))
    Select(find(browser, "[name=beside]")).select_by_index(1)
    until(browser, lambda b: count(b, "#trajectory .pair .trajectory") == 2)
    assert "beside=" in browser.current_url
    under = browser.find_elements(By.CSS_SELECTOR, "#trajectory .trajectory .under a")
    assert len({link.text for link in under}) == 2


@pytest.mark.parametrize("width, dark", [(1280, False), (400, True)])
def test_it_fits_and_is_readable_light_and_dark_wide_and_narrow(open_page, width, dark):
    browser = open_page(width=width, dark=dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    ink, paper = browser.execute_script(
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor].map((c) => "
        "c.match(/\\d+/g).map(Number))"
    )
    assert (sum(paper) < 200) == dark and abs(sum(ink[:3]) - sum(paper[:3])) > 450


def test_several_runs_are_laid_over_each_other(open_page, tmp_path):
    config = json.loads((RUN / "config.json").read_text())
    other, static = (shutil.copytree(RUN, tmp_path / name) for name in ("other", "static"))
    write(other, "config.json", config | {"seed": 5})
    write(static, "config.json", config | {"mode": "static"})
    # it has broken off early
    (static / "summary.json").unlink()
    browser = open_page(path=html.write_page([RUN, other, static], tmp_path / "all.html"))
    legend = [row.text for row in browser.find_elements(By.CSS_SELECTOR, ".legend li")]
    assert legend == ["run (2 seeds)", "static differs in mode"]
    assert (
        "differs in mode" in text(browser, ".overview")
        and count(browser, ".overview tbody tr") == 3
    )
    Select(find(browser, "#runs select")).select_by_index(2)
    assert text(browser, "#status") == "step 9 of 9" and "run=2" in browser.current_url
