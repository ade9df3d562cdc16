"""Pictures of every view of the dashboard, of real runs, as docs/dashboard.md shows them. Needs Chromium.

    python tools/dashboard_screenshots.py runs/quickstart runs/quickstart-async --output docs/pictures

The first run is shown in the views of one run; all of them are compared. The last line says how much was written.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.headless_browser import Browser, find_programs  # noqa: E402

WIDTH = 1180
COLOURS = 256  # of a picture: a third of the bytes. Rare colours, as of one token, must not be merged away


@dataclass(frozen=True)
class View:
    """One picture."""

    name: str
    address: str
    height: int
    theme: str = "light"
    hover: str = ""  # what the mouse is over


# {step} is a step in the middle of the run, {last} the number of the last run given.
VIEWS = (
    View("overview", "tab=overview", 760),
    View("time", "tab=time&run={last}", 700),
    View("data", "tab=data&run={last}", 1200),
    View("engines", "tab=engines&run={last}", 640),
    View("rollouts", "tab=rollouts&step={step}", 760, hover=".tokens span:nth-child(2)"),
    View("advantage", "tab=rollouts&step={step}&colour=advantage", 760, "dark", hover=".tokens span"),
    View("ratio", "tab=rollouts&run={last}&step={step}&colour=ratio&order=largest spread", 760, hover=".tokens span"),
    View("conversation", "tab=rollouts&step={step}&view=conversation", 640, "dark"),
    View("compare", "tab=compare", 760, "dark"),
)


@contextmanager
def dashboard(runs: list[str]) -> Iterator[str]:
    """Its address, while it runs on a free port.

    Raises:
        ValueError: it does not start; says why.
    """
    command = [sys.executable, "-m", "slime_rl.dashboard", *runs, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise ValueError(line.strip())
        yield found[0]
    finally:
        process.terminate()
        process.wait(10)


def take(browser: Browser, url: str, view: View, path: Path) -> int:
    """Bytes of the picture."""
    browser.theme(view.theme)
    browser.resize(WIDTH, view.height)
    browser.open("about:blank")
    browser.open(f"{url}/#{view.address}")
    browser.wait("return document.documentElement.dataset.ready")
    if view.hover and browser.run("return !!document.querySelector(arguments[0])", view.hover):
        browser.move_to(view.hover)
        browser.run("scrollTo(0, 0)")
        browser.wait("return !document.getElementById('tip').hidden")
    browser.screenshot(path)
    return shrink(path)


def shrink(path: Path) -> int:
    """Write the picture again with few colours -> its bytes."""
    from PIL import Image

    picture = Image.open(path).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    return path.write_bytes(content.getvalue())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--step", type=int, default=5, help="step of the rollouts (default: 5)")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        find_programs()
        total = 0
        with dashboard(args.runs) as url, Browser() as browser:
            for view in VIEWS:
                address = view.address.format(step=args.step, last=len(args.runs) - 1)
                path = args.output / f"dashboard_{view.name}.png"
                size = take(browser, url, View(view.name, address, view.height, view.theme, view.hover), path)
                print(f"{path}  {size / 1024:.0f} KiB", flush=True)
                total += size
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"pictures={len(VIEWS)} kib={total / 1024:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
