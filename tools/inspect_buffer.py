"""Look into a run's data buffer.

    python tools/inspect_buffer.py RUN               states, drops, ages, dataset cursor, bytes
    python tools/inspect_buffer.py RUN --groups      one line per group that has tokens
    python tools/inspect_buffer.py RUN --group 17    one group: text, tokens, masks, log-probs, versions, reward
    python tools/inspect_buffer.py RUN --watch 2     the live counts, every two seconds (5 when not given)

RUN is a run folder, a checkpoint folder, or a folder of --dump-rollouts. Groups come from the newest checkpoint, from
spilled files and from dumped steps; the live counts come from metrics.jsonl. Nothing is changed. A spilled file keeps
groups that are done until all of its groups are; those that the newest checkpoint knows to be done are not listed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from slime_rl.buffer.dumps import RolloutDumps
from slime_rl.buffer.filters import reward_std, summarise
from slime_rl.buffer.ledger import Ledger, State
from slime_rl.buffer.packed import PackedGroups
from slime_rl.data.state_files import load_state
from slime_rl.types import Group, Sample


def find_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint below `run`, or None before the first."""
    for root in (run, run / "checkpoints"):
        if (root / "buffer.json").is_file():
            return root
        if (root / "latest").is_file():
            try:
                return root / (root / "latest").read_text(encoding="utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{root / 'latest'}: is damaged: {error}") from error
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The buffer's state in a checkpoint.

    Raises:
        ValueError: it is not one of the ledger buffer.
    """
    path = checkpoint / "buffer.json"
    state = load_state(path)
    if not isinstance(state, dict) or not {"ledger", "source", "payloads"} <= state.keys():
        raise ValueError(f"{path}: not the state of a ledger buffer")
    return state


def live_metrics(run: Path) -> tuple[dict[str, Any], list[str]]:
    """(the last line of metrics.jsonl that tells of the buffer, or nothing; what is wrong with other lines)."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return {}, []
    last: dict[str, Any] = {}
    broken: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if b'"buffer/' not in line or not line.endswith(b"\n"):  # the last line may still be on its way
                continue
            try:
                content = json.loads(line)
                if not isinstance(content, dict):
                    raise ValueError("not an object")
                last = content
            except (ValueError, RecursionError) as error:
                broken.append(f"{path}:{number}: passed over, it cannot be read: {error}")
    return last, broken


def spill_folder(run: Path) -> Path:
    """Where the run spills to: --buffer-spill-dir, as its config.json has it, or a folder of its own."""
    try:
        given = json.loads((run / "config.json").read_text())["buffer"]["buffer_spill_dir"]
    except (OSError, ValueError, KeyError, TypeError):  # no run folder, or one of another version
        given = None
    return Path(given) if isinstance(given, str) else run / "buffer_spill"


def all_groups(run: Path, state: dict[str, Any] | None) -> Iterator[tuple[str, Group]]:
    """(where it is, group) of every group with tokens, file by file."""
    ledger = Ledger()
    if state is not None:
        for flat in state["payloads"]:
            packed = PackedGroups.from_flat(flat)
            yield from (("checkpoint", group) for group in packed.unpack(range(len(packed))))
        ledger.load_state_dict(state["ledger"])
    for path in sorted(spill_folder(run).glob("segment_*.safetensors")):
        try:
            spilled = PackedGroups.load(path)
            groups = spilled.unpack(range(len(spilled)))
        except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:  # damaged, or gone meanwhile
            raise ValueError(f"{path}: what is there cannot be read: {type(error).__name__}: {error}") from error
        done = (State.COMMITTED, State.DROPPED)
        yield from ((path.name, group) for group in groups if ledger.state_of(group.group_index) not in done)
    dumps = RolloutDumps(run)
    for step in dumps.steps():
        yield from ((dumps.path(step).name, group) for group in dumps.read(step))


def summary_lines(run: Path, checkpoint: Path | None, state: dict[str, Any] | None) -> list[str]:
    """The overview."""
    if dumped := dump_lines(run):
        return dumped
    lines = live_lines(run)
    if state is None or checkpoint is None:
        return [*lines, f"no checkpoint below {run} yet"]
    saved = state["ledger"]
    ledger = Ledger()
    ledger.load_state_dict(saved)
    lines.append(f"checkpoint {checkpoint}")
    live = {name: sum(stop - start for start, stop in ranges) for name, ranges in saved["live"].items()}
    done = {name: ledger.count(State(name)) for name in ("committed", "dropped")}
    lines += [f"  {name:<10} {count:>10}" for name, count in {**live, **done}.items()]
    lines += [
        f"    dropped for {' '.join(reason.split())}: {count}"
        for reason, count in sorted(saved["drop_reasons"].items())
    ]
    lines += [f"  step {step} has taken groups {groups}" for step, groups in saved["admitted"]]
    lines.append(f"  last committed step {saved['last_committed_step']}, next group {saved['next_group_index']}")
    if state["replay"]["entries"] or state["replay"]["replayed"]:
        lines.append(f"  replayed {state['replay']['replayed']}, kept for replay {len(state['replay']['entries'])}")
    source = state["source"]
    if {"epoch", "position", "dataset"} <= source.keys():
        names = ", ".join(entry["name"] for entry in source["dataset"])
        lines.append(f"  dataset {names}: epoch {source['epoch']}, next row at position {source['position']}")
    blocks = [PackedGroups.from_flat(flat) for flat in state["payloads"]]
    num_groups, num_bytes = sum(map(len, blocks)), sum(packed.nbytes for packed in blocks)
    lines.append(f"  groups with tokens {num_groups}, {num_bytes:,} bytes")
    return lines + age_lines(blocks, saved["last_committed_step"])


def dump_lines(folder: Path) -> list[str]:
    """One line per dumped step."""
    dumps = RolloutDumps(folder)
    lines = []
    for step in dumps.steps():
        samples = [sample for group in dumps.read(step) for sample in group.samples]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        tokens = sum(sample.response_length for sample in samples)
        groups = len({sample.group_index for sample in samples})
        lines.append(
            f"step {step:>5}  {groups:>5} groups {len(samples):>6} samples {tokens:>9} tokens  "
            f"reward {sum(rewards) / max(1, len(rewards)):.3f} ± {reward_std(rewards):.3f}"
        )
    return lines


def age_lines(blocks: Sequence[PackedGroups], last_step: int | None) -> list[str]:
    """How many groups wait, by the age of their oldest token in weight versions."""
    next_step = 0 if last_step is None else last_step + 1
    ages: dict[int, int] = {}
    for group in (group for packed in blocks for group in packed.unpack(range(len(packed)))):
        if group.oldest_version is not None:
            age = next_step - group.oldest_version
            ages[age] = ages.get(age, 0) + 1
    return [f"    {count} groups are {age} weight versions old" for age, count in sorted(ages.items())]


def live_lines(run: Path) -> list[str]:
    """What metrics.jsonl and the spill folder say now."""
    metrics, lines = live_metrics(run)
    files = list(spill_folder(run).glob("segment_*"))
    spilled = sum(path.stat().st_size for path in files if path.exists())
    if metrics:
        states = {k.removeprefix("buffer/"): v for k, v in metrics.items() if k.startswith("buffer/")}
        shown = (f"{k} {v:g}" if isinstance(v, int | float) else f"{k} {v}" for k, v in states.items())
        lines.append(f"live, step {metrics.get('step')}: " + ", ".join(shown))
    lines.append(f"spilled: {spilled:,} bytes in {len(files)} files")
    return lines


def group_line(where: str, group: Group) -> str:
    summary = summarise(group)
    tokens = sum(sample.response_length for sample in group.samples)
    reward = f"{summary.reward_mean:.3f} ± {summary.reward_std:.3f}"
    return (
        f"group {group.group_index:>7}  row {group.source_index:>7}  epoch {group.epoch}  {len(group.samples)} samples "
        f"{tokens:>7} tokens  reward {reward}  oldest version {summary.oldest_version}  in {where}"
    )


def group_lines(where: str, group: Group) -> list[str]:
    """Everything in a group."""
    if not group.samples:
        return [group_line(where, group), f"no sample is left of it; left out: {group.left_out or 'none'}"]
    first = group.samples[0]
    lines = [group_line(where, group), f"prompt: {first.prompt!r}", f"label: {first.label!r}"]
    if first.metadata:
        lines.append(f"metadata: {first.metadata!r}")
    for sample in group.samples:
        info = f"  {sample.reward_info}" if sample.reward_info else ""
        lines += ["", f"sample {sample.index}  {sample.status}  reward {sample.reward}{info}"]
        lines += [f"  response: {sample.response!r}", f"  prompt tokens: {sample.tokens[: sample.prompt_length]}"]
        lines += token_lines(sample)
    return lines


def token_lines(sample: Sample) -> list[str]:
    """One line per run of response tokens with the same mask and version."""
    lines, start = [], 0
    keys = list(zip(sample.loss_mask, sample.weight_versions, strict=True))
    for end in range(1, len(keys) + 1):
        if end < len(keys) and keys[end] == keys[start]:
            continue
        mask, version = keys[start]
        log_probs = ", ".join(f"{value:.4g}" for value in sample.rollout_log_probs[start:end])
        kind = "trained on" if mask else "masked"
        by = f"sampled by version {version}" if version >= 0 else "not sampled"
        lines.append(f"  tokens {start}:{end} ({kind}, {by}): {sample.response_tokens[start:end]}")
        lines.append(f"    log-probs: {log_probs}")
        start = end
    return lines


def watch(run: Path, seconds: float) -> None:
    """Print the live lines until interrupted."""
    while True:
        print(time.strftime("%H:%M:%S"), *live_lines(run), sep="\n  ", flush=True)
        time.sleep(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder, checkpoint folder, or folder of --dump-rollouts")
    parser.add_argument("--groups", action="store_true", help="one line per group that has tokens")
    parser.add_argument("--group", type=int, metavar="N", help="print one group")
    parser.add_argument(
        "--watch", type=float, nargs="?", const=5.0, metavar="SECONDS", help="print the live counts again and again"
    )
    args = parser.parse_args(argv)
    try:
        if not args.run.is_dir():
            raise ValueError(f"{args.run}: must be a folder that exists")
        if args.watch is not None:
            if not 0 < args.watch < math.inf:
                raise ValueError(f"--watch must be a number of seconds > 0, got {args.watch:g}")
            watch(args.run, args.watch)
        checkpoint = find_checkpoint(args.run)
        state = None if checkpoint is None else read_state(checkpoint)
        if args.group is not None:
            found = [(where, g) for where, g in all_groups(args.run, state) if g.group_index == args.group]
            if not found:
                raise ValueError(f"group {args.group} has no tokens here; --groups lists those that have")
            print("\n".join(group_lines(*found[-1])))
        elif args.groups:
            for where, group in all_groups(args.run, state):
                print(group_line(where, group))
        else:
            print("\n".join(summary_lines(args.run, checkpoint, state)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyError, TypeError, AttributeError, IndexError, OSError, SafetensorError) as error:
        # A damaged state, or a spilled file that went while it was looked at.
        what = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        print(f"error: {args.run}: what is there cannot be read: {what}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
