"""The final answer in a response, which rewards compare with the label. Linear in time: safe in the main process."""

from __future__ import annotations

import re

from slime_rl.types import Sample

THINK_START = "<think>"
_THINK_END = re.compile(r"""(?<!["'`])</think>|</think>(?!["'`])""")  # between quotes it is text, as in a program
_BRACES = re.compile(r"\\(?:boxed|fbox) *\{|\\(?:boxed|fbox) +(?P<bare>[^\s{}]+)|[{}]")
# "Answer: 5", "**Answer:** 34", "the final answer is (B)", "#### 72"; the answer is the rest of that line.
_MARKER = re.compile(r"(?:\banswer\b[*_ \t]*(?:is\b|[:=])[*_:= \t]*|^[ \t]*####[ \t]*)", re.IGNORECASE | re.MULTILINE)
_WRAPPERS = {  # by their first character
    "$": (("$$", "$$"), ("$", "$")),
    "\\": (("\\(", "\\)"), ("\\[", "\\]")),
    "*": (("**", "**"),),
    "`": (("`", "`"),),
    '"': (('"', '"'),),
}


def without_thinking(response: str) -> str:
    """What follows the thoughts: the first closing think tag (a template may have opened it), and each one that was
    opened later. The whole response when there is none; a tag in quotes is none."""
    start = 0
    opened = 0
    while opened >= 0 and (closed := _THINK_END.search(response, opened)):
        start = closed.end()
        opened = response.find(THINK_START, start)
    return response[start:]


def has_unclosed_thinking(response: str) -> bool:
    """A think tag was opened after the last one was closed: the response may have been cut off in its thoughts."""
    return THINK_START in without_thinking(response)


def final_answer(response: str) -> str | None:
    """The answer that a response marks as its final one, cleaned; None when it marks none.

    In order of precedence: the last box (`\\boxed{5}`), `<answer>5</answer>`, then the last `Answer: 5`, `answer is 5`
    or `#### 5`. An empty mark is passed over.
    """
    text = without_thinking(response)
    for candidate in (last_boxed(text), _tagged(text), _marked(text)):
        if candidate is not None and (answer := clean(candidate)):
            return answer
    return None


def last_boxed(text: str) -> str | None:
    """Contents of the last whole `\\boxed{...}` (braces balance), or of a last `\\boxed 5`. One pass over the text."""
    opened: list[int] = []  # where the contents of every open brace begin; negative for braces that are no box
    last, last_start = None, -1
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else -1
            if start > last_start:
                last, last_start = text[start : match.start()], start
        elif token.endswith("{"):
            opened.append(match.end() if token != "{" else -1)
        elif match.end() > last_start:  # bare: `\\boxed 5`
            last, last_start = match.group("bare").rstrip("$."), match.end()
    return last


def clean(answer: str) -> str:
    """Without surrounding space, Markdown and maths marks, and without full stops at the end.

    The ends move over the text, which is cut once: a copy for each mark would take the square of a text of marks.
    """
    start, end = 0, len(answer)
    while True:
        while start < end and answer[start].isspace():
            start += 1
        while start < end and (answer[end - 1] == "." or answer[end - 1].isspace()):
            end -= 1
        for left, right in _WRAPPERS.get(answer[start], ()) if start < end else ():
            whole = end - start > len(left) + len(right)
            if whole and answer.startswith(left, start, end) and answer.endswith(right, start, end):
                start, end = start + len(left), end - len(right)
                break
        else:
            return answer[start:end]


def _tagged(text: str) -> str | None:
    _, opened, after = text.rpartition("<answer>")
    return after.partition("</answer>")[0] if opened else None


def _marked(text: str) -> str | None:
    last = None
    for last in _MARKER.finditer(text):  # noqa: B007 - only the last match counts
        pass
    if last is None:
        return None
    line = text[last.end() :].partition("\n")[0].strip()
    return line if line.startswith("**") and line.endswith("**") else line.removesuffix("**")


def labels_of(sample: Sample, reward: str) -> list[str]:
    """The accepted answers of a sample as text: its label, or each entry when the label is a list.

    Raises:
        ValueError: the sample has no label.
    """
    label = sample.label
    entries = list(label) if isinstance(label, (list, tuple)) else [label]
    if not entries or any(entry is None for entry in entries):
        raise ValueError(
            f"--rm-type {reward} needs a label for every prompt, got {label!r} for sample {sample.index}; "
            "--label-key names the field that holds it"
        )
    return [str(entry).strip() for entry in entries]
