"""Samples a second of the whole loop, against TRL's GRPOTrainer with the same model, prompts, lengths and group size.

    python benchmarks/end_to_end_vs_trl.py --model MODEL_DIR [--prompts 8 --samples 8 --new-tokens 32 --steps 3]
    python benchmarks/end_to_end_vs_trl.py --model MODEL_DIR --only ours     (or trl), to measure in two sittings

TRL runs in its own virtual environment (made once, in --venv), which sees this one's torch and transformers, so that
both compute with the same libraries; all cores, no gradient checkpointing, one update a step, no reference.
Types: --dtype bfloat16 is ours with float32 master weights; --trl-dtype autocast is TRL's bf16=True (its products in
bfloat16, weights in float32), and bfloat16 is weights and moments in it too, so that small updates are lost.
The first step of each is left out: it holds one-time costs. Last line:
`ours_samples_s=… trl_samples_s=… ratio=…`.
"""

from __future__ import annotations

import argparse
import json
import random
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from slime_rl.observability.tracker import read_jsonl

TRL = "trl==1.16.0"


def make_venv(folder: Path) -> Path:
    """The python of an environment with TRL beside this one's packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "beside.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", TRL], check=True)
    return python


def write_rows(path: Path, count: int) -> None:
    """Questions of about 45 tokens with a chat template; the same for both."""
    chance = random.Random(0)
    pairs = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(count)]
    rows = [{"prompt": f"What is {a} + {b}? Answer with just the number.", "label": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_ours(args: argparse.Namespace, rows: Path, folder: Path) -> tuple[float, str]:
    """(samples a second, remark)."""
    run = folder / "run"
    command = [
        *(sys.executable, "-m", "slime_rl.train", "--hf-checkpoint", args.model, "--prompt-data", str(rows)),
        *("--rollout-batch-size", str(args.prompts), "--n-samples-per-prompt", str(args.samples)),
        *("--max-prompt-len", "128", "--max-response-len", str(args.new_tokens), "--rm-type", "exact"),
        *("--num-steps", str(args.steps + 1), "--lr", args.lr, "--device", "cpu", "--run-dir", str(run)),
        *("--max-tokens-per-worker", str(args.max_tokens_per_worker), "--train-dtype", args.dtype, *args.flags),
    ]
    with (folder / "ours.log").open("w") as log:
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode != 0:
            raise SystemExit((folder / "ours.log").read_text()[-3000:])
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if "perf/step_s" in line][1:]
    seconds = [line["perf/step_s"] for line in lines]
    length = fmean(line["rollout/response_length_mean"] for line in lines)
    parts = {n: fmean(line.get(f"timing_s/{n}", 0.0) for line in lines) for n in ("rollout", "train", "sync")}
    shown = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
    remark = f"{args.dtype}, {fmean(seconds):.2f} s a step ({shown}), {length:.1f} tokens a response"
    return args.prompts * args.samples / fmean(seconds), remark


def run_trl(args: argparse.Namespace, rows: Path, folder: Path) -> tuple[float, str]:
    """(samples a second, remark)."""
    numbers = [args.prompts, args.samples, args.new_tokens, args.steps + 1, args.lr, args.trl_dtype]
    side = Path(__file__).with_name("trl_side.py")
    command = [str(make_venv(Path(args.venv))), str(side), args.model, str(rows), *map(str, numbers)]
    with (folder / "trl.log").open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit((folder / "trl.log").read_text()[-3000:])
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = found["seconds"][1:]
    length = fmean(found["lengths"][1:] or found["lengths"])
    remark = f"{args.trl_dtype}, {fmean(seconds):.2f} s a step, {length:.1f} tokens a response"
    return args.prompts * args.samples / fmean(seconds), remark


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="MODEL_DIR")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="measured steps; one more runs before them")
    parser.add_argument("--lr", default="1e-6")
    parser.add_argument("--max-tokens-per-worker", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of our run")
    parser.add_argument("--trl-dtype", choices=("float32", "autocast", "bfloat16"), default="float32", help="of TRL's")
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument("--venv", default=str(Path(tempfile.gettempdir()) / "slime_rl_trl_venv"), metavar="DIR")
    parser.add_argument("flags", nargs="*", help="further flags of slime_rl.train, after --")
    args = parser.parse_args()
    sides = {"ours": run_ours, "trl": run_trl}
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        rows = Path(name) / "rows.jsonl"
        write_rows(rows, args.prompts * (args.steps + 1))
        for side in [args.only] if args.only else list(sides):
            found[side], remark = sides[side](args, rows, Path(name))
            print(f"{side}: {remark}", flush=True)
    parts = [f"{side}_samples_s={value:.3f}" for side, value in found.items()]
    if len(found) == 2:
        parts.append(f"ratio={found['ours'] / found['trl']:.2f}")
    print(" ".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
