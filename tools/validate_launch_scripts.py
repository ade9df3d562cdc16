"""Dry-runs every launch script in scripts/ without weights: what `bash scripts/validate_launch_scripts.sh` runs.

Each script is run by bash with `python` replaced by a recorder, so what is checked is what the script really asks for.
Its model is a folder with the published config.json named in the script's `# shape:` line and a stand-in tokenizer; its
data are made up. Then, in this one process, each recorded command goes through the checks of `--dry-run`, and its plan
must fit the GPUs of the `# gpus:` line. Not checked: weights, the real tokenizer, GPUs; the last lines say so.

The script's own line may give its arguments: `# dry run: grpo DATA RUN MODEL`, one line a call; capital words are
replaced by folders made here. `# dry run: none (why)` leaves a script out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime_rl.config import parse_config  # noqa: E402
from slime_rl.plan.__main__ import SHAPES  # noqa: E402
from slime_rl.plan.plan import CPU, find_lengths, find_site, make_plan  # noqa: E402
from slime_rl.preflight import Finding, Verdict, run_checks  # noqa: E402
from tools.make_quickstart import main as make_quickstart  # noqa: E402

ROWS = 500

# `source` and `bash` do nothing, so that no script installs anything or enters another environment.
RECORDER = r"""
python() { printf '%s\0' "$@" $'\n' >>"$RECORD"; }
source() { :; }
bash() { :; }
export -f python source bash
exec /usr/bin/env bash "$@"
"""


@dataclass(frozen=True)
class Launch:
    """One call of a script, with what its head says."""

    script: Path
    arguments: list[str]
    shape: str | None
    gpus: str | None  # "8 x h100-80g", "cpu", or None

    @property
    def name(self) -> str:
        return " ".join([str(self.script.relative_to(ROOT / "scripts")), *self.arguments[:1]])


def launches() -> Iterator[Launch]:
    """Every call of every script that starts slime_rl.train."""
    for script in sorted((ROOT / "scripts").rglob("*.sh")):
        text = script.read_text()
        if "-m slime_rl.train" not in text or re.search(r"^# dry run: none", text, re.MULTILINE):
            continue
        shape, gpus = (_head(text, key) for key in ("shape", "gpus"))
        for arguments in re.findall(r"^# dry run: (.*)$", text, re.MULTILINE) or [""]:
            yield Launch(script, arguments.split(), shape, gpus)


def _head(text: str, key: str) -> str | None:
    found = re.search(rf"^# {key}: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def record(launch: Launch, folder: Path) -> list[list[str]]:
    """The arguments of every `python -m slime_rl.train` that the script would run."""
    model = folder / "model"
    if launch.shape is not None:
        model = folder / launch.shape
        shutil.copytree(folder / "model", model, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        shutil.copy(SHAPES / launch.shape / "config.json", model / "config.json")
    places = {"DATA": folder, "RUN": folder / "run", "MODEL": model}
    words = [str(places.get(word, word)) for word in launch.arguments]
    log = folder / "record"
    log.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "RECORD": str(log),
        "MODEL_DIR": str(model),
        "PROMPT_DATA": str(folder / "train.jsonl"),
        "HELDOUT": str(folder / "heldout.jsonl"),
        "DATA": str(folder),
        "WARMUP": str(folder / "warmup"),
        "RUN": str(folder / "run"),
        "RUN_DIR": str(folder / "run"),
    }
    command = ["/usr/bin/env", "bash", "-c", RECORDER, "recorder", str(launch.script), *words]
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    if outcome.returncode != 0:
        raise ValueError(f"ends with exit code {outcome.returncode}: {outcome.stderr.strip()[-300:]}")
    calls = [call.split("\0") for call in (log.read_text() if log.exists() else "").split("\n\0") if call]
    found = [call[2:-1] for call in calls if call[:2] == ["-m", "slime_rl.train"]]
    if not found:
        raise ValueError("starts no slime_rl.train")
    return found


def check(launch: Launch, folder: Path) -> tuple[str, list[Finding]]:
    """(one line about the plan, findings).

    Raises:
        ValueError: the script, a check, or the plan fails.
    """
    said, findings = "", []
    for argv in record(launch, folder):
        config = parse_config(argv)
        found = run_checks(config)
        failed = [f"{finding.name}: {finding.text}" for finding in found if finding.verdict is Verdict.FAILED]
        count, _, kind = (launch.gpus or CPU).partition(" x ")
        plan = make_plan(config, find_site(config, kind or CPU), find_lengths(config))
        if kind and plan.num_gpus != int(count):
            failed.append(f"asks for {plan.num_gpus} GPUs, its head says {count}")
        failed += plan.problems
        if failed:
            raise ValueError("; ".join(failed))
        findings += found
        said = f"training {plan.training.total_bytes / plan.training.available_bytes:.0%} of memory"
        if plan.engine is not None:
            said += f", engine {plan.engine.memory.total_bytes / plan.engine.memory.available_bytes:.0%}"
    return said, findings


def main() -> int:
    checked, good = 0, 0
    unchecked: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_quickstart(["--output", str(folder)])
        train = folder / "train.jsonl"
        train.write_text("".join(train.read_text().splitlines(keepends=True)[:ROWS]))  # every script reads them all
        shutil.copytree(folder / "model", folder / "warmup" / "hf")
        for launch in launches():
            checked += 1
            try:
                said, findings = check(launch, folder)
            except ValueError as error:
                print(f"FAIL  {launch.name}: {error}")
                continue
            good += 1
            print(f"ok    {launch.name}: {launch.gpus or 'cpu'}, {said}")
            for finding in findings:
                if finding.verdict is Verdict.NOT_CHECKED:
                    unchecked[finding.name] = unchecked.get(finding.name, 0) + 1
    print("prompts were rendered with a stand-in tokenizer; memory is a plan, not a measurement")
    for what, count in unchecked.items():
        print(f"not checked here: {what} ({count} scripts)")
    print(f"scripts={checked} ok={good}")
    return 0 if good == checked > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
