"""Does it fit, and how long will a step take? From a checkpoint's config.json, the flags of a run, and a kind of GPU.

    python -m slime_rl.plan --shape qwen3-8b --gpu h100-80g --train-num-workers 8 --rollout-num-engines 8 …
    python -m slime_rl.plan --hf-checkpoint MODEL_DIR --rates runs/small …     rates measured by that run

Takes every flag of `slime_rl.train`; --prompt-data is not needed. Exit code 1 when something does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from slime_rl.config import Config, parse_config
from slime_rl.observability.streams import say
from slime_rl.plan.hardware import ACCELERATORS
from slime_rl.plan.plan import CPU, find_lengths, find_site, make_plan, measured_rates
from slime_rl.plan.text import as_json, as_text

SHAPES = Path(__file__).parent / "shapes"


def known_shapes() -> list[str]:
    """Names that --shape takes: folders with the config.json of a published model."""
    return sorted(path.name for path in SHAPES.iterdir() if (path / "config.json").is_file())


def make_plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slime_rl.plan",
        description="Plan a run before GPUs are rented. All other flags are those of slime_rl.train.",
        allow_abbrev=False,
    )
    parser.add_argument("--shape", metavar="NAME", help=f"a published model instead of --hf-checkpoint: "
                        f"{', '.join(known_shapes())}")  # fmt: skip
    parser.add_argument("--gpu", metavar="NAME", help=f"kind of GPU: {', '.join([CPU, *ACCELERATORS])}")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of one machine (default: 8)")
    parser.add_argument("--num-gpus", type=int, metavar="N", help="GPUs that there are; a plan that needs more fails")
    parser.add_argument("--mean-prompt-len", type=float, metavar="TOKENS", help="typical prompt (default: half)")
    parser.add_argument("--mean-response-len", type=float, metavar="TOKENS", help="typical response (default: half)")
    parser.add_argument("--rates", metavar="RUN_DIR", help="take rates and lengths from this run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def planned_config(shape: str | None, rest: list[str]) -> Config:
    """The Config of the other flags; data is not looked at.

    Raises:
        ValueError: an unknown shape, or flags that do not fit together.
    """
    if shape is not None:
        if shape not in known_shapes():
            raise ValueError(f"--shape must be one of {', '.join(known_shapes())}, got {shape!r}")
        if any(word.partition("=")[0] == "--hf-checkpoint" for word in rest):
            raise ValueError(f"--shape stands in for --hf-checkpoint; give one of them, got --shape {shape} and both")
        rest = ["--hf-checkpoint", str(SHAPES / shape), *rest]
    if "--prompt-data" not in rest and not any(word.startswith("--prompt-data=") for word in rest):
        rest = ["--data-source-path", "none:needed", *rest]  # never loaded: nothing here reads data
    return parse_config(rest)


def main(argv: list[str] | None = None) -> int:
    """0 when all fits, 1 when something does not, 2 for flags that do not fit together."""
    args, rest = make_plan_parser().parse_known_args(argv)
    try:
        config = planned_config(args.shape, rest)
        site = find_site(config, args.gpu, args.gpus_per_node, args.num_gpus)
        rates, lengths = None, find_lengths(config, args.mean_prompt_len, args.mean_response_len)
        if args.rates is not None:
            rates, lengths = measured_rates(Path(args.rates), config)
        plan = make_plan(config, site, lengths, rates)
    except ValueError as error:
        print(f"slime_rl.plan: {error}", file=sys.stderr)
        return 2
    say(json.dumps(as_json(plan), indent=2) if args.json else as_text(plan))
    return 1 if plan.problems else 0


if __name__ == "__main__":
    sys.exit(main())
