"""How long the dashboard takes to show a long run, in a real browser: from asking for the page to the finished drawing.

    python benchmarks/dashboard_load.py            1000 steps, 80 metrics, 100,000 logged samples, 100,000 requests

Makes such a run in a temporary folder. The first look at a tab finds nothing read; later ones are what a user sees who
goes from tab to tab. Last line: `overview_s=… slowest_s=…` (first looks). Needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.dashboard_screenshots import dashboard  # noqa: E402
from tools.headless_browser import Browser, find_programs  # noqa: E402

TABS = ("overview", "time", "data", "engines", "rollouts", "compare")
AGAIN = 3


def write_long_run(
    folder: Path, steps: int, *, num_metrics: int = 80, samples_per_step: int = 0, requests_per_step: int = 0
) -> Path:
    """A run folder with the files of a long run, made of sines."""
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    phases = {"timing_s/rollout": 1.5, "timing_s/train": 0.5, "perf/step_s": 2.0}
    names = [f"train/number_{i}" for i in range(num_metrics - 2 - len(phases))]
    with (
        (folder / "metrics.jsonl").open("w") as metrics,
        (folder / "samples.jsonl").open("w") as samples,
        (folder / "trace" / "trainer_0.jsonl").open("w") as trainer,
        (folder / "trace" / "rollout.jsonl").open("w") as rollout,
    ):
        for step in range(steps):
            line = {"step": step, "time_s": 2.0 * step, "rollout/reward_mean": step / steps, "train/loss": 0.1}
            line |= phases | {name: math.sin(step / 20 + i) for i, name in enumerate(names)}
            metrics.write(json.dumps(line) + "\n")
            for i in range(samples_per_step):
                samples.write(json.dumps(_sample(step, i, samples_per_step)) + "\n")
            for i in range(requests_per_step):
                start = 2.0 * step + i / requests_per_step
                rollout.write(json.dumps(_span("requests", "request", start, start + 0.4)) + "\n")
            trainer.write(json.dumps(_span("steps", f"step {step}", 2.0 * step + 1.5, 2.0 * step + 2)) + "\n")
    return folder


def _sample(step: int, i: int, per_step: int, tokens: int = 64) -> dict[str, object]:
    numbers = [-0.25 * (k % 9) for k in range(tokens)]
    return {
        "step": step, "kind": "training", "index": step * per_step + i, "group_index": (step * per_step + i) // 8,
        "prompt": "How many apples are left?", "response": "word " * tokens, "label": "4", "reward": float(i % 3 == 0),
        "status": "completed", "response_length": tokens, "weight_versions": [step, step],
        "tokens": ["word "] * tokens, "log_probs": numbers, "loss_mask": [1] * tokens,
        "weight_versions_by_token": [step] * tokens, "train_log_probs": numbers, "advantages": [0.5] * tokens,
    }  # fmt: skip


def _span(track: str, name: str, start: float, end: float) -> dict[str, object]:
    return {"track": track, "name": name, "start": start, "end": end, "args": {}}


def drawn_after_s(browser: Browser, url: str, tab: str) -> float:
    """Seconds from the request for the page to the end of the first drawing, painted."""
    browser.open("about:blank")
    browser.open(f"{url}/#tab={tab}")
    browser.wait("return document.documentElement.dataset.ready", timeout_s=120)
    return browser.run("return performance.getEntriesByName('drawn')[0].startTime") / 1000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples-per-step", type=int, default=100)
    parser.add_argument("--requests-per-step", type=int, default=100)
    args = parser.parse_args(argv)
    try:
        find_programs()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"samples_per_step": args.samples_per_step, "requests_per_step": args.requests_per_step}
        run = write_long_run(Path(folder) / "long", args.steps, **sizes)
        mib = sum(path.stat().st_size for path in run.rglob("*.jsonl")) / 2**20
        print(f"{args.steps} steps, 80 metrics, {sizes}: {mib:.0f} MiB")
        firsts = {}
        with Browser() as browser:
            for tab in TABS:
                with dashboard([str(run)]) as url:  # a new one each time, which has read nothing
                    time.sleep(1.0)
                    firsts[tab] = drawn_after_s(browser, url, tab)
                    later = median(drawn_after_s(browser, url, tab) for _ in range(AGAIN))
                print(f"{tab:<10} first {firsts[tab]:6.2f} s   later {later:6.2f} s", flush=True)
    print(f"overview_s={firsts['overview']:.2f} slowest_s={max(firsts.values()):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
