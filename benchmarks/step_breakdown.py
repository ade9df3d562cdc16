"""Where the time of a run's steps went, as a table; start-up, evaluation and export are not steps.

    python benchmarks/step_breakdown.py [RUN_DIR]        RUN_DIR is runs/quickstart when not given

The first step is left out: it holds one-time costs. Indented rows are parts of the row above them. Last line:
`steps=… step_s=… overhead_share=…`, the last being the share of a step that no phase accounts for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_rl.observability.tracker import METRICS_FILE, read_jsonl

PARTS = {"rollout": {"rewards, summed over groups": "rollout/reward_seconds"}}


def step_lines(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of every training step but the first.

    Raises:
        ValueError: there are not two steps, or no run.
    """
    if not (run_dir / METRICS_FILE).is_file():
        raise ValueError(f"{run_dir}: must be the folder of a run, with {METRICS_FILE} in it")
    lines = [line for line in read_jsonl(run_dir / METRICS_FILE) if line.get("perf/step_s") is not None]
    if len(lines) < 2:
        raise ValueError(f"{run_dir}: needs at least 2 training steps, found {len(lines)}")
    return lines[1:]


def rows(lines: list[dict[str, float]]) -> list[tuple[str, float]]:
    """(name, seconds per step) of every phase and its parts, phases by time."""
    mean = {name: sum(line.get(name) or 0.0 for line in lines) / len(lines) for line in lines for name in line}
    phases = {
        n.removeprefix("timing_s/"): s for n, s in mean.items() if n.startswith("timing_s/") and n.count("/") == 1
    }
    table: list[tuple[str, float]] = []
    for phase, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        table.append(("no phase" if phase == "other" else phase, seconds))
        parts = {n.rsplit("/", 1)[1]: s for n, s in mean.items() if n.startswith(f"timing_s/{phase}/")}
        parts |= {label: mean[name] for label, name in PARTS.get(phase, {}).items() if name in mean}
        table += [(f"  {name}", s) for name, s in sorted(parts.items(), key=lambda item: -item[1])]
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", nargs="?", default="runs/quickstart", type=Path)
    try:
        lines = step_lines(parser.parse_args(argv).run_dir)
    except ValueError as error:
        print(f"step_breakdown: {error}", file=sys.stderr)
        return 2
    total = sum(line["perf/step_s"] for line in lines) / len(lines)
    other = sum(line.get("timing_s/other") or 0.0 for line in lines) / len(lines)
    print("| part of a step | seconds | share |\n|---|---:|---:|")
    for name, seconds in rows(lines):
        print(f"| {name.replace('  ', '&nbsp;&nbsp;')} | {seconds:.3f} | {100 * seconds / total:.1f} % |")
    print(f"| **step** | {total:.3f} | 100 % |")
    print(f"steps={len(lines)} step_s={total:.3f} overhead_share={other / total:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
