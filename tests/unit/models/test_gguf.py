"""The GGUF reader agrees with gguf-py, reads parts, and names what is wrong with a damaged file."""

import struct
from collections.abc import Sequence
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
import torch

from parallel_runtime.errors import CheckpointError, ContextStateError
from parallel_runtime.models.gguf import GgufArray, GgufFile

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def write(path: Path, *, keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", version: int = 3) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """One matrix of every kind, as gguf-py writes it, and some metadata."""
    writer = gguf.GGUFWriter(tmp_path / "sample.gguf", "llama")
    writer.add_string("a.text", "héllo")
    writer.add_bool("a.flag", True)
    writer.add_float64("a.real", 0.1)
    writer.add_int64("a.negative", -5)
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.flags", [True, False])
    writer.add_array("a.texts", ["x", "", "žluť"])
    values = np.random.default_rng(0).standard_normal((6, 96), dtype=np.float32)
    for kind in KINDS:
        of = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(values, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "sample.gguf"


def test_metadata_of_every_type_is_read(sample: Path) -> None:
    metadata = GgufFile(sample).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["a.text"] == "héllo"
    assert metadata["a.flag"] is True
    assert metadata["a.real"] == 0.1
    assert metadata["a.negative"] == -5
    numbers, flags, texts = metadata["a.numbers"], metadata["a.flags"], metadata["a.texts"]
    assert isinstance(numbers, GgufArray)
    assert isinstance(flags, GgufArray)
    assert isinstance(texts, GgufArray)
    assert (len(numbers), len(texts)) == (3, 3)
    assert numbers.numbers() == [1, -2, 3]
    assert flags.numbers() == [True, False]
    assert texts.strings() == texts.strings() == ["x", "", "žluť"]
    with pytest.raises(CheckpointError, match="expected an array of strings, found one of type 5"):
        numbers.strings()
    with pytest.raises(CheckpointError, match="expected an array of numbers, found one of type 8"):
        texts.numbers()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_equal_gguf_py_whole_and_in_parts(kind: str, sample: Path) -> None:
    stored = next(entry for entry in gguf.GGUFReader(sample).tensors if entry.name == kind)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(stored.data, stored.tensor_type)))
    file = GgufFile(sample)
    assert file.tensors[kind].shape == (6, 96)
    whole = file.read(kind, range(6), range(96))
    assert whole.dtype == file.tensors[kind].dtype
    assert torch.equal(whole.float(), expected)
    for rows, columns in (
        (range(1, 4), range(96)),
        (range(6), range(32, 64)),
        (range(2, 3), range(5, 71)),
        (range(3, 3), range(4, 9)),
    ):
        part = file.read(kind, rows, columns)
        assert torch.equal(part.float(), expected[rows.start : rows.stop, columns.start : columns.stop])
        assert part.is_contiguous()


def test_what_was_read_outlives_the_file(sample: Path) -> None:
    file = GgufFile(sample)
    read = [file.read(kind, range(6), range(96)) for kind in KINDS]
    file.close()
    file.close()
    assert all(bool(values.isfinite().all()) for values in read)
    with pytest.raises(ContextStateError, match=r"sample\.gguf is closed; read it while it is open"):
        file.read("F32", range(6), range(96))
    texts = file.metadata["a.texts"]
    assert isinstance(texts, GgufArray)
    with pytest.raises(ContextStateError, match=r"sample\.gguf is closed"):
        texts.strings()


def test_a_file_cut_anywhere_is_refused(sample: Path, tmp_path: Path) -> None:
    whole = sample.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 20, 60, 150, 300, 500, len(whole) - 100):
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut short|cannot be opened"):
            GgufFile(cut)


def test_a_cut_tensor_is_named(sample: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(sample.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"cut\.gguf: tensor 'Q5_1' ends at byte \d+, but the file has \d+; it was cut short"
    ):
        GgufFile(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\3\4" + b"\0" * 60, r"starts with b'PK\\x03\\x04'; a GGUF file starts with b'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648"),
    ],
)
def test_other_files_and_versions_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ([key("k", 77, b"")], [], "metadata 'k' has unknown type 77"),
        ([key("k", 9, struct.pack("<IQ", 9, 1))], [], "metadata 'k' is an array of type 9"),
        ([key("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")], [], "is not UTF-8"),
        ([key("k", 9, struct.pack("<IQ", 8, 2**60))], [], "cut short or is damaged"),
        ([key("general.alignment", 8, text("x"))], [], "general.alignment is 'x'; expected a positive integer"),
        ([], [tensor("t", (1,) * 5)], "tensor 't' has 5 dims; 1 to 4"),
        ([], [tensor("t", (33, 2), kind=8)], "tensor 't' has rows of 33; its type 8 needs a multiple of 32"),
        ([], [tensor("t", (32,), kind=250)], "tensor 't' has GGML type 250, which this version of gguf does not know"),
    ],
)
def test_damage_is_named(keys: Sequence[bytes], tensors: Sequence[bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        GgufFile(write(tmp_path / "bad.gguf", keys=keys, tensors=tensors))


def test_a_type_that_cannot_be_dequantised_is_named_when_read(tmp_path: Path) -> None:
    file = GgufFile(
        write(tmp_path / "int.gguf", tensors=[tensor("t", (4,), kind=int(gguf.GGMLQuantizationType.I32))], data=b"\0" * 16)
    )
    with pytest.raises(CheckpointError, match="tensor 't' has GGML type 26, which cannot be dequantised"):
        file.read("t", range(1), range(4))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.gguf: cannot be opened as a GGUF file"):
        GgufFile(tmp_path / "nothing.gguf")
