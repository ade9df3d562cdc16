"""Pages name what exists: flags, files, functions, modules, and the commands of slime-rl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_rl.cli import COMMANDS, CONVERSIONS
from slime_rl.config import make_parser
from slime_rl.config.flags import NEEDLESS, nearest_flag

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted((ROOT / "docs").glob("**/*.md")), ROOT / "README.md", ROOT / "plugins" / "README.md"]
PREFIXES = ("--sglang-", "--router-", "--megatron-")
# Of other programs, and words that stand for several flags.
FOREIGN = {
    *("--address", "--head", "--nodes", "--pid", "--gpus-per-node"),  # ray, sbatch, py-spy
    *("--custom-weight-loader", "--weight-version", "--is-embedding", "--enable-deterministic-inference"),  # SGLang
    *("--disable-circuit-breaker", "--sglang", "--router", "--megatron", "--name", "--no-name", "--eval", "--overlong"),
}


def about_us(page: Path) -> str:
    """A page without the columns of the migration tables that are of other projects."""
    lines = page.read_text().splitlines()
    if page.name == "migration.md":
        lines = [line.split("|")[-2] if line.startswith("|") else line for line in lines]
    return "\n".join(lines)


def test_every_flag_in_the_last_column_of_the_migration_tables_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "migration.md").read_text().splitlines() if line.startswith("| `")]
    named = {flag for row in rows for flag in re.findall(r"--[a-z0-9-]+", row.split("|")[-2])}
    assert len(named) > 40
    known = make_parser().flags
    assert sorted(flag for flag in named if flag not in known and not flag.startswith(PREFIXES)) == []


def test_every_flag_of_slime_in_the_tables_is_taken_or_answered() -> None:
    rows = [line for line in (ROOT / "docs" / "migration.md").read_text().splitlines() if line.startswith("| `--")]
    parser = make_parser()
    for row in rows:
        theirs, ours = row.split("|")[1], row.split("|")[-2]
        for flag in re.findall(r"--[a-z0-9-]+", theirs):
            if flag in parser.flags or flag.startswith(PREFIXES):
                continue
            assert "the same" not in ours, row
            if flag in NEEDLESS:
                continue
            assert nearest_flag(flag, parser.flags) in re.findall(r"--[a-z0-9-]+", ours), f"{flag}: {row}"


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Those of runs, of the commands of slime-rl, and of the programs in benchmarks/ and tools/."""
    commands = [*COMMANDS.values(), *CONVERSIONS.values()]
    programs = [path.read_text() for folder in ("benchmarks", "tools") for path in (ROOT / folder).glob("*.py")]
    own = {flag for text in programs for flag in re.findall(r'"(--[a-z][a-z0-9-]+)"', text)}
    return FOREIGN | own | {*make_parser().flags} | {flag for command in commands for flag in command.flags.split()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_are_named_exist(page: Path, known_flags: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", about_us(page)))
    positive = {flag.replace("--no-", "--", 1): flag for flag in named if not flag.startswith(PREFIXES)}
    assert sorted(flag for yes, flag in positive.items() if not {yes, flag} & known_flags) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_a_page_is_python(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        assert compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_that_is_named_exists(page: Path) -> None:
    text = about_us(page)
    for name, what in re.findall(r"`([\w./-]+\.py)(?::(\w+))?`", text):
        places = [ROOT / name, page.parent / name, *(ROOT / "slime_rl").glob(f"**/{name}")]
        found = [place.read_text() for place in places if place.is_file()]
        assert found or name.startswith("my_"), name
        pattern = rf"^\s*(?:async )?(?:def|class) {what}\b|^{what}\b"
        assert not what or any(re.search(pattern, code, re.MULTILINE) for code in found), f"{name}:{what}"
    for module in re.findall(r"python -m (slime_rl[\w.]*)", text):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w/]+\.md)", (ROOT / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_scripts_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    commands = set(re.findall(r"slime-rl ([a-z]+)", text))
    assert commands <= {*COMMANDS, "completion"}
    files = set(re.findall(r"(?:python|bash) ((?:benchmarks|scripts|tools)/[\w./]+\.(?:py|sh))", text))
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
