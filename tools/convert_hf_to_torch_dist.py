"""A Hugging Face folder as a torch_dist checkpoint that any parallel layout loads.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint DIR --save DIR [--num-workers N]

SAVE/latest ──► SAVE/step_00000000/  model/ (torch_dist)  hf/ (config, tokenizer, code, layers that are not trained)

A run starts from it with `--hf-checkpoint DIR --load SAVE --finetune`. Weights keep their types; fp8 ones become
bfloat16, and where Megatron keeps several of different types under one name, all get the one that holds every value.
Memory stays at a few times the largest matrix for each worker, however large the model is.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.cluster.checkpoint import CheckpointMeta, CheckpointStore, hold_folder, model_identity, read_model_config
from slime_rl.cluster.folders import check_writable, told
from slime_rl.cluster.signals import run_command
from slime_rl.config.model_folder import check_model_files


def check_empty(folder: Path) -> None:
    """Nothing but what a conversion that was killed has left may be there: ValueError says that there is."""
    is_empty = folder.is_dir() and all(path.name.endswith(".partial") for path in folder.iterdir())
    if (folder.exists() or folder.is_symlink()) and not is_empty:
        raise ValueError(f"--save {folder} exists already; remove it, or choose another folder")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True, type=Path, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--save", required=True, type=Path, metavar="DIR", help="checkpoint folder to write")
    parser.add_argument("--num-workers", type=int, default=2, help="threads that read and write side by side")
    parser.add_argument("--model-conversion-path", default="families", help="as in training")
    parser.add_argument("--model-provider-path", help="as in training")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python files of the checkpoint's config")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    try:
        if args.num_workers < 1:
            raise ValueError(f"--num-workers must be > 0, got {args.num_workers}")
        check_empty(args.save)
        check_writable("--save", args.save)
        check_model_files("--hf-checkpoint", args.hf_checkpoint, needs_tokenizer=False)
        from slime_rl.trainer.convert import conversion_config, hf_to_torch_dist

        config = conversion_config(
            args.hf_checkpoint, args.model_conversion_path, args.trust_remote_code, args.model_provider_path
        )
        model_type, shape = model_identity(str(args.hf_checkpoint))
        meta = CheckpointMeta(
            step=0,
            model_type=model_type,
            num_parameters_shape=shape,
            kind="weights",
            model_config=read_model_config(str(args.hf_checkpoint)),
        )
        counts: list[int] = []
        with hold_folder("--save", args.save):
            check_empty(args.save)
            folder = CheckpointStore(args.save, keep=1).write(
                meta, lambda aside: counts.append(hf_to_torch_dist(config, aside, args.num_workers))
            )
    except (ValueError, OSError) as error:
        message = told(error, "--save", args.save) if isinstance(error, OSError) else error
        print(f"convert_hf_to_torch_dist: {message}", file=sys.stderr)
        return 2
    print(f"{folder}: {counts[0]:,} parameters; a run starts from it with --load {args.save} --finetune")
    return 0


if __name__ == "__main__":
    run_command(main)
