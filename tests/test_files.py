"""A stored file is whole, known and as it was written, or it is refused by name; a failed write changes nothing."""

import errno
import json
import os
import re
import resource
import stat
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

import firm
from cases import each
from firm.errors import FirmError, MachineError, ModelFileError
from firm.runtime.files import folder_lock, load_tensors, save_tensors, write_atomically

TENSORS = {
    "weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "half": torch.tensor([0.5, -1.5], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "pixels": torch.arange(8, dtype=torch.uint8).view(2, 4).T,  # not contiguous
    "empty": torch.empty(0, 3),
}
CARD = {"name": "bracket", "steps": 12, "nested": {"values": [1, 2.5, None]}}


def stored(folder):
    path = Path(folder) / "part.safetensors"
    save_tensors(path, TENSORS, CARD, kind="part", schema=2)
    return path


def read(path):
    return load_tensors(path, kind="part", schema=2)


def same(tensors):
    return tensors.keys() == TENSORS.keys() and all(
        torch.equal(value, TENSORS[name]) and value.dtype == TENSORS[name].dtype for name, value in tensors.items()
    )


def refused(path, message):
    with pytest.raises(ModelFileError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_what_is_stored_comes_back(tmp_path):
    tensors, card = read(stored(tmp_path))
    assert same(tensors)
    assert card == CARD | {"kind": "part", "schema": 2}


def test_parameters_are_stored_without_their_graph(tmp_path):
    path = tmp_path / "deep" / "folder" / "p.safetensors"
    weight = torch.nn.Parameter(torch.ones(3))
    save_tensors(path, {"w": weight}, {}, kind="part", schema=1)
    assert torch.equal(read(path)[0]["w"], torch.ones(3))


@each("part", [0, 4, 0.3, 0.9, -1])
def test_a_truncated_file_is_refused(tmp_path, part):
    path = stored(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content)) if isinstance(part, float) else part])
    refused(path, "is not a readable firm file")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a good file, and a place for a damaged copy."""
    folder = tmp_path_factory.mktemp("files")
    return stored(folder).read_bytes(), folder / "damaged.safetensors"


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_no_flipped_byte_goes_unnoticed(whole, place, change):
    content, path = whole
    damaged = bytearray(content)
    damaged[int(place * len(content))] ^= change
    path.write_bytes(damaged)
    try:
        tensors, card = read(path)
    except FirmError:
        return
    # white space of the header may change without a meaning
    assert same(tensors)
    assert card == CARD | {"kind": "part", "schema": 2}


def test_a_flipped_number_is_called_damage(tmp_path):
    path = stored(tmp_path)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # among the tensors
    path.write_bytes(content)
    refused(path, "was damaged or edited after it was written")


def rewritten(path, **changes):
    """The file with another card, everything else kept."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in TENSORS}
    card = json.loads(metadata["card"]) | changes
    save_file(tensors, path, metadata | {"card": json.dumps(card, sort_keys=True)})
    return path


def test_an_edited_card_is_refused(tmp_path):
    read(rewritten(stored(tmp_path)))  # rewritten as it was: still good
    refused(rewritten(stored(tmp_path), steps=13), "was damaged or edited")


def test_an_exchanged_or_missing_tensor_is_refused(tmp_path):
    path = stored(tmp_path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    for changed in ({"weight": TENSORS["weight"].view(3, 2)}, {"weight": TENSORS["weight"] + 1}, {"half": None}):
        tensors = {name: value.contiguous() for name, value in (TENSORS | changed).items() if value is not None}
        save_file(tensors, path, metadata)
        refused(path, "was damaged or edited")


def test_a_file_of_the_future_is_refused(tmp_path):
    refused(rewritten(stored(tmp_path), schema=3), "has schema 3, this firm reads up to 2; upgrade firm")


def test_an_older_schema_is_read(tmp_path):
    path = stored(tmp_path)
    assert load_tensors(path, kind="part", schema=5)[1]["schema"] == 2


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = stored(tmp_path)
    with pytest.raises(ModelFileError, match=r"part\.safetensors is a firm part, not a detector"):
        load_tensors(path, kind="detector", schema=2)


def test_a_foreign_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "foreign.safetensors"
    for metadata in (
        None,
        {"format": "pt"},
        {"card": "[1, 2]"},
        {"card": '{"kind": "part"}'},
        {"card": "{"},
        {"card": '{"kind": "part", "schema": Infinity}'},
        {"card": "[" * 100_000},
    ):
        path.write_bytes(save({"weight": torch.ones(2)}, metadata))
        refused(path, "has no firm card; it was not written by firm")


@each("content", [b"", b"PK\x03\x04 a zip, such as torch writes", os.urandom(300)])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    refused(path, "is not a readable firm file")


def test_a_header_that_lies_about_its_length_is_refused(tmp_path):
    path = tmp_path / "liar.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    refused(path, "is not a readable firm file")


@each("kind, size", [("F6_E2M3", 3), ("F4", 2), ("XX", 4)])
def test_numbers_of_an_unknown_type_are_refused(tmp_path, kind, size):
    card = {"card": json.dumps({"kind": "part", "schema": 2})}
    header = {"__metadata__": card, "a": {"dtype": kind, "shape": [4], "data_offsets": [0, size]}}
    text, path = json.dumps(header).encode(), tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    refused(path, r"odd\.safetensors")


def test_a_missing_file_is_named(tmp_path):
    refused(tmp_path / "nowhere.safetensors", "there is no file")
    refused(tmp_path, "there is no file")


# --- writing ---


def only(path):
    """Nothing stands beside the file, no temporary either."""
    return [child.name for child in path.parent.iterdir()] == [path.name]


def test_writing_replaces_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "new" / "file"
    for content in (b"first", b"second"):
        write_atomically(path, content)
        assert path.read_bytes() == content
        assert only(path)


@pytest.mark.skipif(os.name == "nt", reason="needs rights of files")
@each("mask, rights", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_rights_that_the_umask_leaves(tmp_path, mask, rights):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file", b"")
        with folder_lock(tmp_path, f"lock-{mask}"):
            pass
    finally:
        os.umask(before)
    for name in ("file", f"lock-{mask}"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == rights


@each("name", ["n" * 255, "ö" * 127, os.fsdecode(b"\xff" * 255)])
def test_the_longest_name_is_written(tmp_path, name):
    write_atomically(tmp_path / name, b"content")
    assert (tmp_path / name).read_bytes() == b"content"


def test_a_full_disk_leaves_the_old_file_whole(tmp_path):
    """No file may grow beyond 64 KB here: the write fails half way, as on a full disk."""
    path = stored(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(MachineError, match=r"cannot write .*part\.safetensors: File too large; .* is unchanged"):
            save_tensors(path, {"large": torch.zeros(2**16)}, {}, kind="part", schema=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(read(path)[0])
    assert only(path)


@each("call", ["fsync", "replace"])
@each("failure", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_failure_at_any_moment_leaves_the_old_file_whole(tmp_path, monkeypatch, call, failure):
    path = stored(tmp_path)

    def fail(*_):
        raise failure

    monkeypatch.setattr(os, call, fail)
    with pytest.raises((FirmError, KeyboardInterrupt)) as caught:
        write_atomically(path, b"new")
    monkeypatch.undo()
    if isinstance(failure, OSError):
        assert f"{path}: No space left on device; free some space" in str(caught.value)
    assert same(read(path)[0])
    assert only(path)


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(MachineError, match=r"cannot write .*model\.safetensors"):
        write_atomically(tmp_path / "file" / "model.safetensors", b"")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(MachineError, match=r"cannot write .*folder: Is a directory"):
        write_atomically(tmp_path / "folder", b"")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["file", "folder"]


# --- no file can run code when it is read ---


def test_nothing_is_pickled_anywhere():
    """Somebody's published .pth is read by torch's reader of bare weights, which refuses all else."""
    forbidden = re.compile(
        r"^\s*(import|from)\s+(pickle|dill|joblib|shelve|marshal)\b|allow_pickle=True|torch\.save\("
        r"|torch\.load\((?!path, weights_only=True)",
        re.M,
    )
    found = {
        str(path): match.group()
        for path in Path(firm.__file__).parent.rglob("*.py")
        if (match := forbidden.search(path.read_text()))
    }
    assert found == {}
