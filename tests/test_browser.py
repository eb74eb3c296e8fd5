"""The page of a run in a real headless Chromium: it draws, answers clicks and keys, and fetches nothing."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from test_page import game, read_lines, served

from page import html
from page.html import build

pytest.importorskip("selenium", reason="selenium is not installed: make setup")
from selenium import webdriver  # noqa: E402
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver here: make chromium"),
]

RUN = Path(__file__).parent / "fixture" / "run"
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
    won = json.loads((path / "summary.json").read_text())["generations"][-1]
    rows = [json.loads(line) for line in (path / "population.jsonl").open()]
    for row in rows:
        for I in row["P"]:
            I["text"] = EVIL if I["id"] == won else I["text"]
    (path / "population.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = path / "trajectories" / "test-first_policy-I_star.jsonl.gz"
    rows = [json.loads(line) for line in gzip.open(file, "rt")]
    for row in rows:
        row["response"] = row["turns"][0]["text"] = f"<think> {EVIL} </think>"
        row["turns"], row["prediction"], row["question_text"] = row["turns"][:1], EVIL, f"Who is {EVIL}?"
    with gzip.open(file, "wt") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    out = path / "report.html"
    out.write_text(build([path]))
    return out


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


def until(browser, condition, seconds=10):
    gone = (NoSuchElementException, StaleElementReferenceException)  # a page that reloads meanwhile
    return WebDriverWait(browser, seconds, poll_frequency=0.05, ignored_exceptions=gone).until(condition)


def test_the_first_screen_answers_four_questions(open_page):
    browser = open_page()
    summary = json.loads((RUN / "summary.json").read_text())
    held_out = summary["held_out"]
    learned = text(browser, ".learned")
    for row in held_out.values():
        assert f"{row['em']:.2f}" in learned
    assert learned.startswith("Did it learn?\nEM 0.08 → 0.17") and "nothing gained" in learned
    assert f"#{summary['generations'][-1]}" in text(browser, ".winner") and EVIL in text(browser, ".winner")
    assert "93.3 % of the training rollouts" in text(browser, ".spent") and "5 calls" in text(browser, ".spent")
    screens = browser.execute_script(
        "return document.querySelector('.trouble h2').getBoundingClientRect().top / innerHeight"
    )
    assert screens < 1
    assert count(browser, ".chart canvas") >= 11


def test_a_click_in_the_tree_shows_a_text_against_its_parent_and_why_it_came(open_page):
    browser = open_page()
    events = [json.loads(line) for line in (RUN / "population.jsonl").open()]
    won = json.loads((RUN / "summary.json").read_text())["generations"][-1]
    I = next(I for event in events for I in event["P"] if I["born"] == 3 and I["id"] != won)
    find(browser, f".tree .row[data-key='{I['id']}']").click()
    panel = "#instruction"
    assert text(browser, f"{panel} h3").startswith(f"#{I['id']}") and f"a revision of #{I['parent']}" in text(
        browser, panel
    )
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#instruction > .instruction > :not(del)')]"
        ".map((x) => x.textContent).join('')"
    )
    assert shown.split() == I["text"].split() and count(browser, f"{panel} ins") and count(browser, f"{panel} del")
    until(browser, lambda b: count(b, f"{panel} details"))
    calls = [json.loads(line) for line in (RUN / "reflections.jsonl").open()]
    prompts = [row["call"]["prompt"] for row in calls if "call" in row and row["t"] == 3]
    details = browser.execute_script(
        "return [...document.querySelectorAll('#instruction pre')].map((x) => x.textContent)"
    )
    assert any(prompt in details for prompt in prompts)
    assert "failures that the optimizer was shown" in text(browser, panel)
    # A refused candidate, with its reason and its score.
    find(browser, ".tree .row.refused").click()
    assert "refused" in text(browser, panel) and "Proposed" in text(browser, panel)


def test_keys_walk_the_tree_and_the_list(open_page):
    browser = open_page("#instructions")
    rows = browser.find_elements(By.CSS_SELECTOR, ".tree .row")
    browser.execute_script("arguments[0].focus()", rows[0])
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    assert text(browser, "#instruction h3").startswith(
        rows[2].get_attribute("aria-label").split(",")[0].split()[-1].join(["#", ""])
    )
    browser.execute_script("document.querySelector('.rows a').focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    until(browser, lambda b: "open=1" in b.current_url)
    until(browser, lambda b: count(b, "#trajectory .block"))


def test_filters_change_the_list_and_the_address_restores_it(open_page):
    browser = open_page("#trajectories")
    everything = text(browser, ".count")
    Select(find(browser, "[name=kind]")).select_by_value("training")
    Select(find(browser, "[name=outcome]")).select_by_value("solved")
    find(browser, "[name=from]").send_keys("4")
    rows = [
        json.loads(line) for t in range(4, 10) for line in gzip.open(RUN / f"trajectories/step-{t:06d}.jsonl.gz", "rt")
    ]
    right = sum(row["reward"] == 1 for row in rows)
    assert right and text(browser, ".count") != everything
    assert text(browser, ".count").startswith(f"{right} trajector") and count(browser, ".rows li") == min(60, right)
    find(browser, ".rows a").click()
    chosen = text(browser, "#trajectory .question")
    url = browser.current_url
    again = open_page("#" + url.partition("#")[2])
    until(again, lambda b: count(b, "#trajectory .block"))
    assert text(again, ".count").startswith(f"{right} trajector") and text(again, "#trajectory .question") == chosen
    assert Select(find(again, "[name=outcome]")).first_selected_option.get_attribute("value") == "solved"
    find(again, ".filters button").click()
    assert text(again, ".count") == everything


def test_tokens_show_their_numbers_to_pointer_and_keys(open_page):
    browser = open_page("#trajectories?kind=training")
    find(browser, ".rows a").click()
    until(browser, lambda b: count(b, "#trajectory .token"))
    rows = [json.loads(line) for line in gzip.open(RUN / "trajectories/step-000001.jsonl.gz", "rt")]
    row = next(row for row in rows if "token_data" in row)
    assert count(browser, "#trajectory .token") == row["token_data"]["n"]
    browser.execute_script("document.querySelector('#trajectory .blocks').focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    tip = text(browser, "#tip")
    for label in ("log-prob", "entropy", "ratio", "advantage", "clipped", "probability"):
        assert label in tip
    assert row["token_data"]["text"][1].strip() in tip
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not find(browser, "#tip").is_displayed()
    find(browser, "#trajectory .token:last-child").click()
    assert find(browser, "#tip").is_displayed()
    assert count(browser, "#trajectory .masked") and not count(browser, "#trajectory .masked .token")
    Select(find(browser, "[name=paint]")).select_by_value("entropy")
    assert "paint=entropy" in browser.current_url


def test_one_question_stands_beside_itself_under_another_instruction(open_page):
    browser = open_page("#trajectories?kind=first policy, I_star".replace(" ", "%20").replace(",", "%2C"))
    find(browser, ".rows a").click()
    until(browser, lambda b: EVIL in text(b, "#trajectory .question"))
    assert EVIL.partition(" Say")[0] in text(browser, "#trajectory .block.think")
    assert EVIL in text(browser, "#trajectory .verdict")
    browser = open_page("#trajectories?kind=verification")
    find(browser, ".rows a").click()
    until(browser, lambda b: count(b, "[name=beside]"))
    Select(find(browser, "[name=beside]")).select_by_index(1)
    until(browser, lambda b: count(b, "#trajectory .pair .trajectory") == 2)
    assert "beside=" in browser.current_url
    names = [link.text for link in browser.find_elements(By.CSS_SELECTOR, "#trajectory .trajectory .under a")]
    assert len(set(names)) == 2


def test_prices_make_a_cost(open_page):
    browser = open_page("#cost?price=2,8")
    calls = [row["call"] for row in map(json.loads, (RUN / "reflections.jsonl").open()) if "call" in row]
    dollars = sum(2 * call["prompt_tokens"] + 8 * call["completion_tokens"] for call in calls) / 1e6
    assert text(browser, "#cost .amount") == f"${dollars:.2f}" and "1.4 to 7 %" in text(browser, "#cost")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_readable_light_and_dark_wide_and_narrow(open_page, width, dark):
    browser = open_page(width=width, dark=dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    ink, paper = browser.execute_script(
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor].map((c) => "
        "c.match(/\\d+/g).map(Number))"
    )
    assert contrast(ink, paper) > 7 and (sum(paper) < 200) == dark
    muted, panel = browser.execute_script(
        "return [getComputedStyle(document.querySelector('.under')).color, "
        "getComputedStyle(document.querySelector('.card')).backgroundColor].map((c) => c.match(/\\d+/g).map(Number))"
    )
    assert contrast(muted, panel) > 4.5
    small = browser.execute_script(
        "return [...document.querySelectorAll('main *')].filter((e) => e.textContent.trim() && !e.childElementCount)"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize)).filter((size) => size < 10).length"
    )
    assert small == 0


def contrast(a, b):
    """Returns the contrast ratio of two colours, as WCAG 2 defines it."""

    def luminance(rgb):
        linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb[:3]]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_several_runs_are_laid_over_each_other(open_page, tmp_path):
    other = shutil.copytree(RUN, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"seed": 5}))
    static = shutil.copytree(RUN, tmp_path / "static")
    (static / "config.json").write_text(json.dumps(config | {"mode": "static"}))
    for name in ("summary.json", "reflections.jsonl", "population.jsonl"):  # it has broken off early
        (static / name).unlink()
    out = tmp_path / "both.html"
    out.write_text(build([RUN, other, static]))
    browser = open_page(path=out)
    assert [row.text for row in browser.find_elements(By.CSS_SELECTOR, ".legend li")] == [
        "run (2 seeds)",
        "static differs in mode",
    ]
    assert count(browser, ".overview tbody tr") == 3
    Select(find(browser, "#runs select")).select_by_index(2)
    assert "population.jsonl is missing" in text(browser, ".trouble") and "run=2" in browser.current_url


def test_a_run_of_another_task_reads_as_well(open_page, tmp_path):
    path = game(tmp_path / "run")
    out = html.write([path], path / "report.html")
    browser = open_page(path=out)
    held_out = json.loads((path / "summary.json").read_text())["held_out"]
    for row in held_out.values():
        assert f"{row['won']:.2f}" in text(browser, ".corners")
    assert text(browser, ".learned .headline") == "won 0.08 → 0.17" and "1.0 moves" in text(browser, ".corners")
    assert count(browser, "#panel-won canvas") == 1
    assert browser.execute_script("return !/\\bEM\\b|NaN|undefined/.test(document.querySelector('main').textContent)")
    weights = {w for row in read_lines(path / "metrics.jsonl") for w in row.get("w", {}).values()}
    colours = (
        "return new Set([...document.querySelectorAll('.tree rect[fill]')].map((r) => r.getAttribute('fill'))).size"
    )
    assert browser.execute_script(colours) > 1 + sum(w > 0 for w in weights)  # those below zero differ too
    browser.find_elements(By.CSS_SELECTOR, ".tree .refused")[0].click()
    assert "below its parent" in text(browser, "#instruction")
    outcomes = [one.text for one in browser.find_elements(By.CSS_SELECTOR, "#trajectory .pair .verdict b")]
    assert outcomes == ["failed", "solved"]  # a question before and after training
    browser = open_page("#trajectories?outcome=solved", out)
    files = (path / "trajectories").iterdir()
    solved = sum(not row["failed"] for file in files for row in read_lines(file))
    assert text(browser, ".count").startswith(f"{solved} trajector")
    assert not count(browser, ".rows .mark.bad")
    next(row for row in browser.find_elements(By.CSS_SELECTOR, ".rows a") if "reward 0.5" in row.text).click()
    until(browser, lambda b: "reward 0.5" in text(b, "#trajectory"))
    shown = text(browser, "#trajectory")
    assert "solved" in shown and "fuel 2.5" in shown and "Gold" not in shown and "Answer:" not in shown
    assert count(browser, "#trajectory .verdict .good") and not count(browser, "#trajectory .verdict .bad")
    browser = open_page(path=html.write([RUN, path], tmp_path / "both.html"))  # beside a run of exact match
    for metric in ("EM", "won"):
        assert metric in text(browser, ".overview") and metric in text(browser, "#curves")


def test_a_served_page_follows_its_run(open_page, tmp_path):
    path = shutil.copytree(RUN, tmp_path / "run")
    (path / "summary.json").unlink()
    (path / "metrics.jsonl").touch()  # a run that has written nothing for ten minutes counts as stopped
    with served(path) as url:
        browser = open_page("#curves", f"{url}/")
        assert "running, step 9 of 9" in text(browser, "#status")
        with (path / "metrics.jsonl").open("a") as f:
            f.write('{"t": 10, "reward": 0.5, "em": 0.5}\n')
        until(browser, lambda b: "step 10" in text(b, "#status"))
        assert browser.current_url.endswith("#curves")
        browser.get("about:blank")


def test_a_page_of_thousands_lists_them_a_screen_at_a_time(open_page, tmp_path):
    path = shutil.copytree(RUN, tmp_path / "run")
    lines = gzip.open(path / "trajectories" / "step-000009.jsonl.gz", "rt").readlines()
    for t in range(10, 110):
        with gzip.open(path / "trajectories" / f"step-{t:06d}.jsonl.gz", "wt") as f:
            f.writelines(lines * 2)
    out = path / "report.html"
    out.write_text(build([path], limit=4000))
    browser = open_page(path=out)
    assert int(text(browser, ".count").split()[0]) > 4000 and count(browser, ".rows li") == 60
