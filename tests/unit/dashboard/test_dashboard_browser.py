"""Every view in a real browser: what it shows, what can be clicked, and that nothing of a sample runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_runs import ATTACK, make_sample, write_run
from dashboard_site import look, open_browser, serve

from benchmarks.dashboard_load import drawn_after_s, write_long_run
from tools.headless_browser import Browser, find_programs

HOSTILE = "</script><script>window.broken = 1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


def count(browser: Browser, selector: str) -> int:
    return browser.run("return document.querySelectorAll(arguments[0]).length", selector)


def tip(browser: Browser, selector: str) -> str:
    browser.move_to(selector)
    browser.wait("return !document.getElementById('tip').hidden")
    return browser.run("return document.getElementById('tip').innerText")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("tab=overview", ["4 of 100 steps", "trainers idle 80%", "train/loss", "accuracy · held", "0.25"]),
        (
            "tab=time",
            [
                "Seconds of each step",
                "trainer_0 · training",
                "36 in all, up to 12 at once",
                "idle: a bubble",
                "step 3 ends",
            ],
        ),
        ("tab=data", ["response length", "age of trained tokens", "reserved", "3 samples (--log-samples) of step 3"]),
        ("tab=engines", ["serving", "engine 0 is down: it has ended", "engine_0.log"]),
        ("tab=rollouts&step=2", ["group 7", "2 samples logged", "mean reward of those 0.5", "<b>", ATTACK]),
        ("tab=rollouts&step=2&view=conversation", ["user", "assistant", "tool or environment"]),
        ("tab=rollouts&kind=evaluation", ["1 sample logged", "evaluation logs texts only"]),
        ("tab=compare", ["one run: give several folders"]),
        ("tab=__proto__", ["What limits it"]),
        ("tab=rollouts&step=2&colour=constructor", ["group 7"]),
    ],
)
def test_every_view_is_drawn(browser: Browser, url: str, theme: str, address: str, shown: list[str]) -> None:
    browser.theme(theme)
    text = look(browser, url, address)
    for words in shown:
        assert words in text, text
    assert count(browser, "main img") == 0 and browser.run("return window.broken") is None
    browser.theme("light")


def contrast(browser: Browser, selector: str) -> float:
    """Of an element's text against what is behind it (WCAG's ratio), at its worst over all such elements."""
    return browser.run(
        """
        const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        const light = ([r, g, b]) => {
          const f = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
          return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
        let worst = 99;
        for (const element of document.querySelectorAll(arguments[0])) {
          const layers = [];
          for (let at = element; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
          for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
          const back = light(canvas.getImageData(0, 0, 1, 1).data);
          canvas.fillStyle = getComputedStyle(element).color; canvas.fillRect(0, 0, 1, 1);
          const ink = light(canvas.getImageData(0, 0, 1, 1).data);
          worst = Math.min(worst, (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05));
        }
        return worst;
        """,
        selector,
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("colour", ["log-prob", "ratio", "advantage", "mask", "version"])
def test_tokens_are_legible_in_every_colour_and_theme(browser: Browser, url: str, theme: str, colour: str) -> None:
    browser.theme(theme)
    look(browser, url, f"tab=rollouts&step=2&colour={colour}")
    assert count(browser, ".tokens span[style]") >= 2
    assert contrast(browser, ".tokens span[data-tip]") >= 4.5
    assert contrast(browser, "nav button, .quiet, h3, td, #state") >= 4.5
    browser.theme("light")


def test_a_token_tells_ratio_and_advantage(browser: Browser, url: str) -> None:
    text = look(browser, url, "tab=rollouts&step=2&colour=ratio")
    assert "furthest from 1 on this page: \N{MULTIPLICATION SIGN}2.000" in text
    told = tip(browser, ".tokens span:nth-child(2)")
    assert "ratio trainer / engine: 2.000" in told and "advantage 0.5" in told
    assert "weights of version 1 (1 old)" in told and "trained on" in told
    shades = browser.run("return [...document.querySelectorAll('.tokens')][0].innerHTML.match(/--a:([0-9.]+)/g)")
    assert shades == ["--a:0.00", "--a:0.62"]  # ratio 1 has no colour, the largest has all; the last was not sampled
    assert "not sampled by a model" in tip(browser, ".tokens span:nth-child(3)")


def test_samples_that_training_told_nothing_of_say_so(browser: Browser, url: str, run_dir: Path) -> None:
    sample = make_sample(90, 1.0)
    line = {"step": 9, "index": 90, "group_index": 3, "prompt": sample.prompt, "response": "x", "tokens": ["x"]}
    line |= {"log_probs": [-1.0], "loss_mask": [1], "weight_versions_by_token": [9], "reward": 1.0}
    with (run_dir / "samples.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert "these samples have no advantage" in look(browser, url, "tab=rollouts&colour=advantage")


def test_equal_rewards_of_some_samples_say_nothing_of_the_whole_group(
    browser: Browser, url: str, run_dir: Path
) -> None:
    told = {1: [0.25], 2: [0.0], 3: None}
    with (run_dir / "samples.jsonl").open("a") as file:
        for group, advantages in told.items():
            for index in range(2):
                line = {"step": 9, "index": index, "group_index": group, "prompt": "p", "response": "x", "reward": 1.0}
                file.write(json.dumps(line | {"tokens": ["x"], "loss_mask": [1], "advantages": advantages}) + "\n")
    text = look(browser, url, "tab=rollouts")
    groups = text.split("group ")[1:]
    assert "rewards are equal, those of the others are not" in next(g for g in groups if g.startswith("1"))
    assert "rewards are equal: nothing to learn for GRPO" in next(g for g in groups if g.startswith("2"))
    assert "rewards are equal · " in next(g for g in groups if g.startswith("3")).replace("\n", " · ")


def test_megabytes_of_text_are_cut_and_stay_within_the_page(browser: Browser, url: str, run_dir: Path) -> None:
    line = {"step": 9, "index": 0, "group_index": 0, "prompt": HOSTILE * 50_000, "response": "end\u2028 " * 400_000}
    line |= {"label": "L" * 1_000_000, "reward": 1.0, "reward_info": {"why": "y" * 1_000_000}}
    with (run_dir / "samples.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    for view in ("tokens", "conversation"):
        text = look(browser, url, f"tab=rollouts&view={view}&find=end")  # all of a text is searched
        assert len(text) < 100_000 and f"{50_000 * len(HOSTILE) - 20_000:,} characters" in text
        assert browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        assert browser.run("return window.broken") is None


def test_views_can_be_changed_by_hand_and_back(browser: Browser, url: str) -> None:
    look(browser, url, "tab=overview")
    browser.click("[data-tab=rollouts]")
    browser.wait("return document.querySelector('.group')")
    assert browser.run("return location.hash") == "#tab=rollouts"
    browser.click("button[title='step before']")
    browser.wait("return document.getElementById('step').value === '2'")
    browser.run("const e = document.getElementById('colour'); e.value = 'version'; "
                "e.dispatchEvent(new Event('change', {bubbles: true}))")  # fmt: skip
    browser.wait("return document.querySelector('.scale')?.innerText.includes('current weights')")
    assert "step=2" in browser.run("return location.hash")
    browser.run("history.back()")
    browser.wait("return document.querySelector('.tiles')")
    browser.type("#find", "staleness")
    browser.wait("return document.querySelectorAll('.card').length === 1")
    assert browser.run("return document.activeElement.id") == "find"  # typing goes on
    browser.click(".card .head")
    browser.wait("return document.querySelector('.card.big .about')")
    assert browser.problems() == []


def test_a_chart_tells_the_values_under_the_pointer(browser: Browser, url: str) -> None:
    look(browser, url, "tab=overview&find=train/loss")
    assert tip(browser, ".card svg").startswith("step ")
    assert "train/loss: 0." in tip(browser, ".card svg")
    look(browser, url, "tab=time")
    told = tip(browser, "svg[data-chart]")
    assert "rollout: 2.4 s" in told and "together: 3 s" in told
    assert "idle for" in tip(browser, "rect.gap")


def test_no_number_beside_a_chart_is_cut_off(browser: Browser, url: str) -> None:
    outside = """return [...document.querySelectorAll("svg text")].filter((text) => {
      const [box, whole] = [text.getBBox(), text.ownerSVGElement.viewBox.baseVal];
      return box.x < 0 || box.x + box.width > whole.width;
    }).map((text) => text.textContent)"""
    for tab in ("overview&find=loss", "time", "data", "engines"):
        text = look(browser, url, f"tab={tab}")
        assert browser.run(outside) == [], tab
        assert "loss" not in tab or ("-0.0101" in text and "-370368" in text)


def test_no_main_figure_is_cut_off_at_any_width(browser: Browser, url: str, run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time_s": 9, "eval/held/accuracy": 0.0825}\n')
    cut = "return [...document.querySelectorAll('.tile b')].filter((b) => b.scrollWidth > b.clientWidth).length"
    for width in (420, 900, 1180, 1280):
        browser.resize(width, 800)
        assert "0.25 → 0.0825" in look(browser, url, "tab=overview")
        assert browser.run(cut) == 0, width
    browser.resize(1280, 800)


def test_numbers_at_an_axis_differ_and_bytes_have_their_unit(browser: Browser, url: str, run_dir: Path) -> None:
    lines = [{"train/tokens": 117, "sync/bytes": 3 * 2**20}, {"train/tokens": 118, "sync/bytes": 1536}]
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step, metrics in enumerate(lines, 4):
            file.write(json.dumps({"step": step, "time_s": 9, **metrics}) + "\n")
    ticks = "return [...document.querySelectorAll('svg text[text-anchor=end]')].slice(0, 3).map((t) => t.textContent)"
    look(browser, url, "tab=overview&find=train/tokens")
    assert browser.run(ticks) == ["117", "117.5", "118"]
    assert "1.5 KiB" in look(browser, url, "tab=overview&find=sync/bytes")
    assert browser.run(ticks) == ["1.5 KiB", "1.5 MiB", "3 MiB"]
    assert "sync/bytes: " in (told := tip(browser, ".card svg")) and "iB" in told


def test_a_running_run_tells_how_long_it_still_takes(browser: Browser, url: str, run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "time_s": 10 + 2 * n, "perf/step_s": 1.5}) + "\n" for n in range(20))
    )
    assert "20 of 100 steps · about 2 min 40 s left" in look(browser, url, "tab=overview")
    (run_dir / "summary.json").write_text("{}")
    assert "left" not in look(browser, url, "tab=overview").split("\n")[0]


def test_a_supervised_run_has_no_empty_charts(browser: Browser, url: str, run_dir: Path) -> None:
    line = {"step": 0, "time_s": 1, "rollout/response_length_mean": 3.0, "rollout/truncated_fraction": 0.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    sample = {"step": 0, "index": 0, "group_index": 0, "prompt": "p", "response": "x", "reward": 0.0}
    (run_dir / "samples.jsonl").write_text(json.dumps(sample | {"response_length": 3}) + "\n")
    text = look(browser, url, "tab=data")
    assert "no values" not in text
    assert "staleness" not in text and "age of" not in text and "reward" not in text and "truncated" in text


def test_a_live_run_is_drawn_again_without_a_reload(browser: Browser, url: str, run_dir: Path) -> None:
    look(browser, url, "tab=overview")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time_s": 9, "perf/step_s": 1.0, "train/loss": 0.125}\n')
    browser.wait("return document.getElementById('main').innerText.includes('5 of 100 steps')")
    assert browser.run("return document.getElementById('when').innerText").startswith("live")
    (run_dir / "error.log").write_text(f"Traceback: {HOSTILE} engine lost\n")
    browser.wait("return document.getElementById('state').innerText === 'failed'")
    browser.wait("return document.querySelector('.error')?.innerText.includes('engine lost')")
    assert browser.run("return window.broken") is None


def test_a_folder_that_goes_away_and_a_server_that_ends_are_told(browser: Browser, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    with serve([run_dir]) as url:
        look(browser, url, "tab=overview")
        shutil.rmtree(run_dir)
        browser.wait("return document.getElementById('main').innerText.includes('is not there any more')")
        assert count(browser, ".card svg") == 0
    browser.wait("return document.getElementById('when').innerText.includes('server does not answer')")
    assert "is not there any more" in browser.run("return document.getElementById('main').innerText")
    browser.problems()


def test_runs_of_different_length_are_compared(browser: Browser, tmp_path: Path) -> None:
    long_name = "a_run_with_a_name_that_says_everything_about_its_flags_lr1e-6_kl0.01_seed17_second_try"
    write_run(tmp_path / "one", "--seed", "5", steps=9).rename(tmp_path / long_name)
    write_run(tmp_path / "two", steps=3).rename(tmp_path / "short")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text("{")
    (tmp_path / "begun" / "error.log").write_text(f"ValueError: no engine {HOSTILE}")
    with serve([tmp_path / long_name, tmp_path / "short", tmp_path / "begun"]) as url:
        text = look(browser, url, "tab=compare")
        assert long_name in text and "held 0.25 → 0.25" in text and "begun\tfailed\t0" in text
        assert "--seed" in text
        assert count(browser, ".card svg path[stroke]") > 2
        told = tip(browser, ".card:nth-of-type(2) svg")
        assert long_name in told or "short" in told
        browser.click("[data-hide='0']")
        browser.wait("return !document.querySelector('table').innerText.includes('seed17')")
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        for tab in ("overview", "time", "data", "engines", "rollouts", "compare"):
            for run in (0, 2):
                look(browser, url, f"tab={tab}&run={run}")
                assert browser.run(overflow) <= 0, tab
        text = look(browser, url, "tab=overview&run=2")
        assert (
            "no engine </script>" in text and "has not been written yet" in text and "config.json:1: not JSON" in text
        )


def test_a_narrow_window_has_no_horizontal_scrolling(browser: Browser, url: str) -> None:
    browser.resize(420, 800)
    for tab in ("overview", "time", "data", "rollouts"):
        look(browser, url, f"tab={tab}")
        assert browser.run("return document.documentElement.scrollWidth") <= 420, tab
        narrow = "return [...document.querySelectorAll('.wide svg')].filter((svg) => svg.clientWidth < 700).length"
        assert browser.run(narrow) == 0, tab  # wide pictures scroll on their own, and can be read
    browser.resize(1280, 800)


def test_a_run_of_a_thousand_steps_is_drawn_quickly(browser: Browser, tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "long", 1000, samples_per_step=8, requests_per_step=50)
    with serve([run]) as url:
        for tab in ("overview", "time", "data", "rollouts"):
            assert drawn_after_s(browser, url, tab) < 10, tab  # well below 1 s when the machine is quiet


def test_without_a_browser_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "no-such-browser")
    with pytest.raises(ValueError, match="no no-such-browser here: apt-get install chromium chromium-driver"):
        find_programs()
