from __future__ import annotations

from typing import Any

import pytest

from slime_rl.data.rendering import render_prompt, token_texts


class FakeTokenizer:
    """One token per character; BOS 1 and EOS 2 around texts; the template writes `role:content;`."""

    eos_token_id = 2

    def __init__(self, chat_template: str | None = "template") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        body = [ord(c) for c in text]
        return [1, *body, 2] if add_special_tokens else body

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        if any(m["role"] == "odd" for m in messages):
            raise KeyError("odd role")
        text = "".join(f"{m['role']}:{m['content']};" for m in messages)
        if options["continue_final_message"]:
            text = text.removesuffix(";")
        text += "assistant:" if options["add_generation_prompt"] else ""
        text += f"[{options['tools'][0]['name']}]" if options["tools"] else ""
        assert options["return_dict"] is False
        return [ord(c) for c in text]


def rendered(prompt: Any, **options: Any) -> str:
    return "".join(map(chr, render_prompt(FakeTokenizer(), prompt, True, **options)))


def test_text_becomes_one_user_message() -> None:
    assert rendered("hi") == "user:hi;assistant:"
    assert (
        rendered([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}])
        == "system:s;user:hi;assistant:"
    )


def test_a_last_assistant_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]
    assert rendered(messages) == "user:hi;assistant:I"


def test_tools_reach_the_template() -> None:
    assert rendered("hi", tools=[{"name": "add"}]).endswith("[add]")


def test_text_as_it_is_keeps_the_leading_special_token_but_no_eos() -> None:
    assert render_prompt(FakeTokenizer(), "ab", False) == [1, ord("a"), ord("b")]


def test_what_does_not_go_together_is_refused() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="needs text prompts"):
        render_prompt(FakeTokenizer(), messages, False)
    with pytest.raises(ValueError, match="no chat template"):
        render_prompt(FakeTokenizer(chat_template=None), messages, True)
    with pytest.raises(ValueError, match="rejects this prompt: KeyError"):
        render_prompt(FakeTokenizer(), [{"role": "odd", "content": "x"}], True)


class ByteTokenizer:
    """One token per byte of UTF-8; a first token that is a space is left out, as SentencePiece does."""

    num_calls = 0

    def decode(self, tokens: list[int]) -> str:
        self.num_calls += 1
        return bytes(tokens).decode("utf-8", errors="replace").removeprefix(" ")


def test_texts_of_tokens_joined_are_the_text_and_a_character_is_its_last_tokens() -> None:
    texts = token_texts(ByteTokenizer(), list("a b é 🙂!".encode()))
    assert "".join(texts) == "a b é 🙂!"
    assert texts == ["a", " ", "b", " ", "", "é", " ", "", "", "", "🙂", "!"]


def test_bytes_that_are_no_character_have_texts_too() -> None:
    texts = token_texts(ByteTokenizer(), [0xF0] * 30)
    assert len(texts) == 30 and "".join(texts) == "\ufffd" * 30
    assert token_texts(ByteTokenizer(), list("né".encode()[:-1])) == ["n", "\ufffd"]


def test_text_of_whole_characters_takes_a_call_for_each_kind_of_token() -> None:
    tokenizer = ByteTokenizer()
    assert token_texts(tokenizer, list(b"abab" * 500)) == ["a", "b"] * 1000
    assert tokenizer.num_calls == 3
