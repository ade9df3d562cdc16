"""A Hugging Face folder as a torch_dist checkpoint that any parallel layout loads.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint DIR --save DIR [--num-workers N]

SAVE/latest ──► SAVE/step_00000000/  model/ (torch_dist)  hf/ (config, tokenizer, code, layers that are not trained)

A run starts from it with `--hf-checkpoint DIR --load SAVE --finetune`. Weights keep their types; fp8 ones become
bfloat16. Memory stays at a few times the largest matrix for each worker, however large the model is.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.cluster.checkpoint import CheckpointMeta, CheckpointStore, model_identity
from slime_rl.config.model_folder import check_model_files


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True, type=Path, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--save", required=True, type=Path, metavar="DIR", help="checkpoint folder to write")
    parser.add_argument("--num-workers", type=int, default=1, help="processes that read and write side by side")
    parser.add_argument("--model-conversion-path", default="families", help="as in training")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python files of the checkpoint's config")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    try:
        if args.num_workers < 1:
            raise ValueError(f"--num-workers must be > 0, got {args.num_workers}")
        if args.save.exists() and (not args.save.is_dir() or any(args.save.iterdir())):
            raise ValueError(f"--save {args.save} exists already; remove it, or choose another folder")
        check_model_files("--hf-checkpoint", args.hf_checkpoint, needs_tokenizer=False)
        from slime_rl.trainer.convert import conversion_config, hf_to_torch_dist

        config = conversion_config(args.hf_checkpoint, args.model_conversion_path, args.trust_remote_code)
        model_type, shape = model_identity(str(args.hf_checkpoint))
        meta = CheckpointMeta(step=0, model_type=model_type, num_parameters_shape=shape, kind="weights")
        counts: list[int] = []
        folder = CheckpointStore(args.save, keep=1).write(
            meta, lambda aside: counts.append(hf_to_torch_dist(config, aside, args.num_workers))
        )
    except (ValueError, OSError) as error:
        print(f"convert_hf_to_torch_dist: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {counts[0]:,} parameters; a run starts from it with --load {args.save} --finetune")
    return 0


if __name__ == "__main__":
    sys.exit(main())
