"""Blocks of code in Markdown, as models write them. One pass over the lines: linear in time."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"[\w+#-]+")
_BEFORE_OPENING = " \t>*-.0123456789"  # of lists and quotations


@dataclass(frozen=True)
class Block:
    """`language` is the first word behind the opening, in small letters; "" when there is none."""

    language: str
    text: str


def last_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The last block in one of `languages`, else the last one that names none; None when there is neither."""
    blocks = code_blocks(text, languages)
    fitting = [block for block in blocks if block.language in languages] or [b for b in blocks if not b.language]
    return fitting[-1].text if fitting else None


def code_blocks(text: str, languages: tuple[str, ...]) -> list[Block]:
    """The blocks of a text in order: of ``` or ~~~, indented or not, with any words behind the language. One that is
    not closed goes to the end of the text.

    Behind other words on a line only a block of one of `languages` opens.
    """
    blocks: list[Block] = []
    lines: list[str] = []
    opened: tuple[str, str, int] | None = None  # fence, language, indent
    for line in text.replace("\r\n", "\n").split("\n"):
        if opened is None:
            opened, lines = _opening(line, languages), []
            continue
        fence, language, indent = opened
        line = line[min(indent, len(line) - len(line.lstrip(" "))) :]
        end = line.rstrip()
        if not end.endswith(fence):
            lines.append(line)
            continue
        if rest := end.rstrip(fence[0]).rstrip():  # closed behind the last line of code
            lines.append(rest)
        blocks.append(_block(language, lines))
        opened = None
    if opened is not None:
        blocks.append(_block(opened[1], lines))
    return [block for block in blocks if block.text.strip()]


def _opening(line: str, languages: tuple[str, ...]) -> tuple[str, str, int] | None:
    end = max(line.rfind("`"), line.rfind("~")) + 1
    marks = line[:end]
    before = marks.rstrip(marks[-1:])
    fence, word = marks[len(before) :], _WORD.search(line, end)
    language = word.group().lower() if word is not None else ""
    if len(fence) < 3 or (before.strip(_BEFORE_OPENING) and language not in languages):
        return None
    return fence, language, len(before)


def _block(language: str, lines: list[str]) -> Block:
    return Block(language, "".join(f"{line}\n" for line in lines))
