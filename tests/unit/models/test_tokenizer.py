"""Tokenizers from both formats: cuts, special tokens, streams, chats, refusals."""

import json
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from parallel_runtime.errors import CheckpointError, RequestError
from parallel_runtime.models import ChatTemplate, Tokenizer, load_tokenizer, open_checkpoint
from parallel_runtime.models.gguf import GgufFile
from parallel_runtime.models.gguf_tokenizer import gguf_backend
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_gguf_checkpoint, write_safetensors_checkpoint

CONFIG = tiny_llama_config(vocab_size=260)
SAMPLES = ["", "plain", "žluťoučký kůň", "日本語 😀", "a\n\n  b\t", "1234 5", "<|1|>x<|2|>", "\x00\x7f"]


def byte_tokenizer() -> Tokenizer:
    """One token for every byte."""
    backend = Backend(models.BPE({token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def write_vocabulary(path: Path, tokens: list[str], merges: list[str], *, pre: str | None = "smollm", **options: object) -> Path:
    """A GGUF file with a vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(str(options.get("model", "gpt2")))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_types([{"<s>": 3, "<tool>": 4}.get(token, 1) for token in tokens])
    writer.add_token_merges(merges)
    if options.get("bos"):
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TOKENS = ["<s>", "<tool>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12", "123", "he"]
MERGES = ["Ġ Ġ", "1 2", "12 3", "h e"]


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_text_survives_the_way_there_and_back(kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        model = write_gguf_checkpoint(tmp_path / "m.gguf", CONFIG)
    else:
        model = write_safetensors_checkpoint(tmp_path / "model", CONFIG)
    with open_checkpoint(model) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (260, 1, (2,))
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode("<|1|>")[0] == 1
    assert tokenizer.decode([1, *tokenizer.encode("x"), 2]) == "x"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["ĠĠ", "1", "2", "3", "Ġ", "he"]),  # digits alone, so the blanks before them stay together
        ("gpt-2", ["Ġ", "Ġ", "123", "Ġ", "he"]),  # one blank goes with the number
        ("llama-bpe", ["Ġ", "Ġ", "123", "Ġ", "he"]),
        ("qwen2", ["Ġ", "Ġ", "1", "2", "3", "Ġ", "he"]),
    ],
)
def test_text_is_cut_as_the_model_was_taught(pre: str, expected: list[str], tmp_path: Path) -> None:
    backend = gguf_backend(GgufFile(write_vocabulary(tmp_path / "v.gguf", TOKENS, MERGES, pre=pre)))
    assert backend.encode("  123 he").tokens == expected


def test_numbers_of_llama3_are_cut_by_three(tmp_path: Path) -> None:
    backend = gguf_backend(GgufFile(write_vocabulary(tmp_path / "v.gguf", TOKENS, MERGES, pre="llama-bpe")))
    assert backend.encode("1231234").tokens == ["123", "123", "4"]


def test_qwen_joins_an_accent_with_its_letter(tmp_path: Path) -> None:
    backend = gguf_backend(GgufFile(write_vocabulary(tmp_path / "v.gguf", TOKENS, MERGES, pre="qwen2")))
    assert backend.normalizer.normalize_str("e\u0301") == "\u00e9"


def test_special_tokens_are_found_in_text_and_bos_is_added(tmp_path: Path) -> None:
    tokenizer = Tokenizer(gguf_backend(GgufFile(write_vocabulary(tmp_path / "v.gguf", TOKENS, MERGES, bos=True))))
    assert tokenizer.encode("<tool>he<s>") == [0, 1, TOKENS.index("he"), 0]
    assert tokenizer.encode("he", add_special_tokens=False) == [TOKENS.index("he")]
    assert tokenizer.decode([0, 1]) == "<tool>", "a control token is left out, one that users wrote stays"


@given(st.lists(st.integers(0, 255), max_size=40))
def test_a_stream_gives_what_decode_gives_for_any_bytes(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids)


@given(st.text(max_size=20))
def test_a_stream_never_gives_half_a_character(text: str) -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(parts) + stream.flush() == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


def test_a_character_that_never_ends_comes_with_the_flush() -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in tokenizer.encode("a😀")[:-1]]
    assert (parts, stream.flush(), stream.flush()) == (["a", "", "", ""], "\ufffd", "")


def test_a_stream_keeps_blanks_between_words_of_other_decoders() -> None:
    backend = Backend(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    stream = tokenizer.stream()
    assert [stream.push(token) for token in (0, 1, 2, 1)] == ["a", " b", "c", " b"]


def test_bytes_that_a_decoder_writes_down_one_by_one_wait_for_their_character() -> None:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = Tokenizer(backend).stream()
    assert [stream.push(byte) for byte in "a€😀b".encode()] == ["a", "", "", "€", "", "", "", "😀", "b"]


def test_endless_bytes_that_are_no_text_do_not_pile_up() -> None:
    tokenizer = byte_tokenizer()
    junk = next(index for index in range(256) if tokenizer.decode([index, index, 0]).startswith("\ufffd\ufffd"))
    stream = tokenizer.stream()
    ids = [junk] * 300 + tokenizer.encode("é")
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert len(stream._window) < 80


def test_a_chat_is_written_down_by_the_models_template(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path / "model", CONFIG)
    turns = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    template = "{{ bos_token }}" + turns + "{% if add_generation_prompt %}>{% endif %}"
    config = {"bos_token": "<|1|>", "eos_token": {"content": "<|2|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    with open_checkpoint(folder) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.eos_ids == (2, 3)
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|1|>user:hi<|2|>>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": "named"}]}))
    with open_checkpoint(folder) as checkpoint:
        assert load_tokenizer(checkpoint).chat_template == ChatTemplate(source="named")
    (folder / "chat_template.jinja").write_text("own file")
    with open_checkpoint(folder) as checkpoint:
        assert load_tokenizer(checkpoint).chat_template == ChatTemplate(source="own file")


def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(RequestError, match="this model has no chat template"):
        byte_tokenizer().chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages: .*unsafe"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
    ],
)
def test_a_template_may_refuse_and_can_reach_nothing(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(source=source).render([{"role": "user", "content": "hi"}])


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(CheckpointError, match="the model's chat template is broken"):
        ChatTemplate(source="{% for %}").render([])


@pytest.mark.parametrize(
    ("tokens", "merges", "options", "message"),
    [
        (TOKENS, MERGES, {"model": "llama"}, r"tokenizer\.ggml\.model is 'llama', which is not implemented \(known: gpt2\)"),
        (TOKENS, MERGES, {"pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken', which is not implemented \(known: gpt-2, "),
        (TOKENS, ["he"], {}, "merge 'he' is not two tokens"),
        (TOKENS, ["q q"], {}, "its vocabulary and merges do not fit"),
        ([], MERGES, {}, r"tokenizer\.ggml\.tokens is missing or no array"),
    ],
)
def test_vocabularies_that_are_broken_or_unknown_are_refused(
    tokens: list[str], merges: list[str], options: dict[str, str], message: str, tmp_path: Path
) -> None:
    file = GgufFile(write_vocabulary(tmp_path / "v.gguf", tokens, merges, **options))
    with pytest.raises(CheckpointError, match=message):
        gguf_backend(file)


def test_a_directory_without_a_good_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path, tiny_llama_config())
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
            load_tokenizer(checkpoint)
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
            load_tokenizer(checkpoint)
