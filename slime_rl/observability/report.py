"""RUN_DIR/report.html and PNG curves from what a run has written; the page needs no other file and no network.

python -m slime_rl.observability.report RUN_DIR

metrics.jsonl, config.json, samples.jsonl ──► RunRecord ──► charts (PNG) ──► report.html
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime_rl.observability.charts import CHARTS, write_charts
from slime_rl.observability.metrics import as_number, find_metric
from slime_rl.observability.run_record import RunRecord, load_run
from slime_rl.observability.wording import duration, number, percent

MAX_SAMPLES = 4
MAX_TEXT = 4000  # characters of one prompt or response; a page with megabytes of text does not open

STYLE = """
:root { --ink: #1c2330; --dim: #667085; --line: #e4e7ec; --blue: #2f6db3; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 19px; margin: 36px 0 12px; }
.sub { color: var(--dim); margin: 4px 0 24px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 12px; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; overflow-x: auto; }
.tile .name { color: var(--dim); font-size: 13px; overflow-wrap: anywhere; }
.tile .value { font-size: 24px; font-weight: 650; white-space: nowrap; }
.tile .note { color: var(--dim); font-size: 13px; } .arrow { color: var(--dim); font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 12px; }
.charts img { width: 100%; display: block; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; } td.n, th.n { text-align: right; white-space: nowrap; }
tr.part td { color: var(--dim); } tr.part td:first-child { padding-left: 28px; }
tr.part .bar div { opacity: 0.4; }
td.bar { width: 34%; } td.bar div { background: var(--blue); height: 10px; border-radius: 5px; min-width: 1px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.45 ui-monospace, Consolas, monospace; }
.sample { display: grid; grid-template-columns: 84px 1fr; gap: 6px 12px; margin-bottom: 12px; }
.sample .key { color: var(--dim); font-size: 13px; } .advice { border-left: 4px solid #e0a020; margin-bottom: 8px; }
summary { cursor: pointer; color: var(--blue); } code { font: 13px ui-monospace, Consolas, monospace; }
@media (max-width: 520px) { .charts { grid-template-columns: 1fr; } }
"""


def write_report(run_dir: Path) -> Path:
    """Write the curves and report.html into `run_dir` -> path of report.html.

    Works for a run without steps, without evaluation, or still going.

    Raises:
        ValueError: `run_dir` holds no metrics.jsonl, or a line in it is broken.
    """
    record = load_run(run_dir)
    charts = write_charts(record, run_dir)
    path = run_dir / "report.html"
    # Half a surrogate pair, which JSON may hold in a label, has no UTF-8.
    path.write_text(_page(record, charts), encoding="utf-8", errors="replace")
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slime_rl.observability.report", description="Report of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder with metrics.jsonl")
    try:
        print(write_report(parser.parse_args(argv).run_dir))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _page(record: RunRecord, charts: dict[str, Path]) -> str:
    title = html.escape(f"{record.folder.resolve().name}")
    sections = [
        f"<h1>{title}</h1><p class='sub'>{html.escape(_subtitle(record))}</p>",
        f"<div class='tiles'>{''.join(_tiles(record))}</div>",
        _charts(charts),
        _advice(record),
        _time_table(record),
        _samples(record),
        _flags(record),
        _metric_table(record),
    ]
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title} · slime_rl</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _subtitle(record: RunRecord) -> str:
    wanted = record.config.get("train", {}).get("num_steps")
    steps = (
        f"{record.num_steps} steps" if wanted in (None, record.num_steps) else f"{record.num_steps} of {wanted} steps"
    )
    loss = record.config.get("train", {}).get("loss")
    kind = {"policy": "reinforcement learning", "sft": "supervised training"}.get(str(loss))
    if record.num_steps == 0:
        kind, steps = "evaluation only", "no training steps"
    return " · ".join(word for word in (kind, steps, duration(record.seconds)) if word)


def _tiles(record: RunRecord) -> Iterable[str]:
    for name in record.eval_sets():
        yield _change_tile(record, f"eval/{name}/accuracy", f"accuracy · {name}")
    yield _change_tile(record, "rollout/reward_mean", "reward")
    yield _change_tile(record, "train/loss", "loss") if not record.series("rollout/reward_mean").values else ""
    if speeds := record.series("perf/tokens_per_s").values:
        yield _tile("throughput", number(sum(speeds) / len(speeds)), "tokens/s, mean over steps")
    if gaps := record.series("train/logprob_diff_mean_abs").values:
        yield _tile("log-prob gap", number(sum(gaps) / len(gaps)), f"nats, mean; worst token {_worst_gap(record)}")
    if record.num_steps:
        yield _tile("time per step", duration(record.breakdown().total_s / record.num_steps), "mean")
    peaks = [*record.series("perf/peak_rss_gib").values, as_number(record.summary.get("peak_rss_gib")) or 0.0]
    if max(peaks) > 0:
        yield _tile("peak memory", f"{max(peaks):.2f} GiB", "driver and all its children")


def _worst_gap(record: RunRecord) -> str:
    values = record.series("train/logprob_diff_max_abs").values
    return number(max(values)) if values else "unknown"


def _change_tile(record: RunRecord, metric: str, name: str) -> str:
    series = record.series(metric)
    if not series.values:
        return ""
    if len(series) == 1:
        return _tile(name, number(series.values[0]), f"at step {series.steps[0]}")
    value = f"{number(series.values[0])} <span class='arrow'>→</span> {number(series.values[-1])}"
    return _tile(name, value, f"step {series.steps[0]} → step {series.steps[-1]}")


def _tile(name: str, value: str, note: str) -> str:
    """`value` is HTML; the rest is text."""
    return (
        f"<div class='card tile'><div class='name'>{html.escape(name)}</div>"
        f"<div class='value'>{value}</div><div class='note'>{html.escape(note)}</div></div>"
    )


def _charts(charts: dict[str, Path]) -> str:
    if not charts:
        return ""
    cards = [
        f"<div class='card'><img alt='{html.escape(CHARTS[name][0])}' "
        f"src='data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}'></div>"
        for name, path in charts.items()
    ]
    return f"<h2>Curves</h2><div class='charts'>{''.join(cards)}</div>"


def _advice(record: RunRecord) -> str:
    found = record.advice()
    cards = "".join(f"<div class='card advice'>{html.escape(advice.sentence)}</div>" for advice in found)
    return f"<h2>What limits this run</h2>{cards}" if found else ""


def _time_table(record: RunRecord) -> str:
    breakdown = record.breakdown()
    if not breakdown.total_s:
        return ""
    rows = []
    for name, seconds, share, _ in breakdown.rows():
        rows.append(_time_row(name, seconds, share, record.num_steps))
        for part, part_s in record.parts(name):
            rows.append(_time_row(f"{name} / {part}", part_s, part_s / breakdown.total_s, record.num_steps, "part"))
    return (
        "<h2>Where the time goes</h2><div class='card'><table><tr><th>phase</th><th class='n'>total</th>"
        f"<th class='n'>share of steps</th><th class='n'>per step</th><th></th></tr>{''.join(rows)}</table></div>"
        f"<p class='sub'>“other” is time of the loop in no phase. {_outside_words(record)}</p>"
    )


def _time_row(name: str, seconds: float, share: float, num_steps: int, kind: str = "") -> str:
    return (
        f"<tr class='{kind}'><td>{html.escape(name)}</td><td class='n'>{duration(seconds)}</td>"
        f"<td class='n'>{percent(share)}</td><td class='n'>{duration(seconds / max(1, num_steps))}</td>"
        f"<td class='bar'><div style='width:{min(100.0, 100 * share):.1f}%'></div></td></tr>"
    )


def _outside_words(record: RunRecord) -> str:
    """What happened outside of steps: by phase when the run has ended, else as one number."""
    inside = record.breakdown()
    outside = {name: s - inside.phases_s.get(name, 0.0) for name, s in record.run_phases_s.items()}
    named = [f"{name} {duration(s)}" for name, s in outside.items() if round(s, 3) > 0.005 * record.seconds]
    if named:
        return f"{duration(inside.total_s)} in steps; outside of them: {html.escape(', '.join(named))}."
    rest = max(0.0, record.seconds - inside.total_s)
    return f"{duration(inside.total_s)} in steps, {duration(rest)} outside of them."


def _samples(record: RunRecord) -> str:
    if not record.samples:
        return ""
    cards = "".join(_sample(sample) for sample in reversed(record.samples[-MAX_SAMPLES:]))
    return f"<h2>Last samples</h2>{cards}"


def _sample(sample: dict[str, Any]) -> str:
    status = f"{sample.get('status', '')}, {sample.get('response_length', '?')} tokens"
    rows = {
        "prompt": _prompt_text(sample.get("prompt")),
        "response": str(sample.get("response", "")),
        "label": "" if sample.get("label") is None else str(sample["label"]),
        "reward": f"{json.dumps(sample.get('reward'))}  ({status}, step {sample['step']})",
    }
    body = "".join(
        f"<div class='key'>{key}</div><pre>{html.escape(_cut(text))}</pre>" for key, text in rows.items() if text != ""
    )
    return f"<div class='card sample'>{body}</div>"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n[…]\n{text[-MAX_TEXT // 2 :]}"


def _prompt_text(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in prompt)


def _flags(record: RunRecord) -> str:
    changed = record.changed_flags()
    if not changed:
        return ""
    rows = "".join(
        f"<tr><td><code>{html.escape(flag)}</code></td><td><code>{html.escape(_value_text(value))}</code></td></tr>"
        for flag, value in changed
    )
    return (
        "<h2>Flags</h2><p class='sub'>All others have their default; the whole configuration is in config.json.</p>"
        f"<div class='card'><table>{rows}</table></div>"
        f"<h2>Command</h2><div class='card'><pre>{html.escape(record.command())}</pre></div>"
    )


def _value_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _metric_table(record: RunRecord) -> str:
    rows = []
    for name in record.names():
        values, known = record.series(name).values, find_metric(name)
        if values:
            cells = "".join(
                f"<td class='n'>{number(value)}</td>" for value in (values[0], values[-1], min(values), max(values))
            )
            about = html.escape(f"{known.meaning} [{known.unit}]" if known else "")
            rows.append(f"<tr><td><code>{html.escape(name)}</code></td>{cells}<td>{about}</td></tr>")
    if not rows:
        return "<p class='sub'>No metrics were logged.</p>"
    head = "".join(f"<th class='n'>{word}</th>" for word in ("first", "last", "min", "max"))
    return (
        f"<h2>All metrics</h2><details class='card'><summary>{len(rows)} metrics</summary>"
        f"<table><tr><th>name</th>{head}<th>meaning</th></tr>{''.join(rows)}</table></details>"
    )


if __name__ == "__main__":
    sys.exit(main())
