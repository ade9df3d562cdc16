"""Pages name what exists: flags of the migration tables, files, and the commands of slime-rl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_rl.cli import COMMANDS
from slime_rl.config import make_parser

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
PREFIXES = ("--sglang-", "--router-", "--megatron-")


def test_every_flag_in_the_last_column_of_the_migration_tables_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "migration.md").read_text().splitlines() if line.startswith("| `")]
    named = {flag for row in rows for flag in re.findall(r"--[a-z0-9-]+", row.split("|")[-2])}
    assert len(named) > 40
    known = make_parser().flags
    assert sorted(flag for flag in named if flag not in known and not flag.startswith(PREFIXES)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_scripts_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    commands = set(re.findall(r"slime-rl ([a-z]+)", text))
    assert commands <= {*COMMANDS, "completion"}
    files = set(re.findall(r"(?:python|bash) ((?:benchmarks|scripts|tools)/[\w./]+\.(?:py|sh))", text))
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
