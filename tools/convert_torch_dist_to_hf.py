"""A checkpoint of a run, or of convert_hf_to_torch_dist.py, as a Hugging Face folder that transformers and SGLang load.

    python tools/convert_torch_dist_to_hf.py --input-dir RUN_DIR/checkpoints --output-dir DIR [--origin-hf-dir DIR]

INPUT_DIR is a checkpoint folder with `latest`, one checkpoint in it, or the folder of the torch_dist files. Config,
tokenizer, chat template, custom code and layers that are not trained come from --origin-hf-dir; without it, from what
the checkpoint carries or names. The checkpoint's checksums are verified. OUTPUT_DIR is written aside and renamed when
it is whole.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.cluster.checkpoint import find_model_folder
from slime_rl.cluster.folders import check_writable, told
from slime_rl.cluster.signals import run_command
from slime_rl.config.checks import check_model_folder, check_positive


def check_output(output: Path, force: bool, inputs: dict[str, Path | None]) -> None:
    """Check that OUTPUT_DIR can take its place without taking away what is read.

    Raises:
        ValueError: it is there and is not to be replaced, is no folder, has no name, or holds one of the inputs.
    """
    if output.name in ("", ".."):
        raise ValueError(f"--output-dir must be a folder with a name, got {output}")
    if output.is_symlink() and not output.exists():
        raise ValueError(f"--output-dir {output} is a link to a folder that is not there; remove it")
    if output.exists() and not force:
        raise ValueError(f"--output-dir {output} exists already; --force replaces it")
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output-dir {output} is a file, which --force does not replace")
    for name, path in inputs.items():
        if path is not None and path.resolve().is_relative_to(output.resolve()):
            raise ValueError(f"--output-dir {output} would replace {name} {path}; choose another folder")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True, type=Path, metavar="DIR", help="checkpoint folder")
    parser.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="Hugging Face folder to write")
    parser.add_argument("--origin-hf-dir", type=Path, metavar="DIR", help="Hugging Face folder the model came from")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; as they are stored"
    )
    parser.add_argument("--shard-size-gb", type=float, default=5.0, help="most GB (10^9 bytes) in one file")
    parser.add_argument("--num-workers", type=int, default=2, help="threads that write files side by side")
    parser.add_argument("--model-conversion-path", default="families", help="as in training")
    parser.add_argument("--model-provider-path", help="as in training")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python files of the checkpoint's config")
    parser.add_argument("-f", "--force", action="store_true", help="replace OUTPUT_DIR")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    try:
        check_positive(num_workers=args.num_workers, shard_size_gb=args.shard_size_gb)
        check_output(
            args.output_dir, args.force, {"--input-dir": args.input_dir, "--origin-hf-dir": args.origin_hf_dir}
        )
        check_writable("--output-dir", args.output_dir)
        model_dir, carried = find_model_folder(args.input_dir, "--input-dir")
        check_output(
            args.output_dir, args.force, {"files of --input-dir": model_dir, "the model of --input-dir": carried}
        )
        origin = args.origin_hf_dir or carried
        if origin is None:
            raise ValueError(f"--origin-hf-dir is needed: {args.input_dir} does not say which model it is of")
        check_model_folder("--origin-hf-dir", str(origin))
        from slime_rl.trainer.convert import conversion_config, torch_dist_to_hf

        count = torch_dist_to_hf(
            conversion_config(origin, args.model_conversion_path, args.trust_remote_code, args.model_provider_path),
            model_dir,
            args.output_dir,
            num_workers=args.num_workers,
            dtype=args.dtype,
            shard_bytes=int(min(args.shard_size_gb * 1e9, sys.maxsize)),
        )
    except (ValueError, OSError) as error:
        message = told(error, "--output-dir", args.output_dir) if isinstance(error, OSError) else error
        print(f"convert_torch_dist_to_hf: {message}", file=sys.stderr)
        return 2
    print(f"{args.output_dir}: {count:,} parameters from {model_dir}")
    return 0


if __name__ == "__main__":
    run_command(main)
