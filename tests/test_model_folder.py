"""A detector's folder: whole or not there, and refused when it was touched."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch

from firm.decision.calibration import read_calibration
from firm.detector.detector import Detector
from firm.detector.model_folder import CARD, KIND, SCHEMA, check_target, read_model, write_model
from firm.errors import MachineError, ModelFileError, SettingError

FIXTURES = Path(__file__).parent / "fixtures"
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.uint8)}


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "part.firm", TENSORS, {"origin": {"seed": 3}, "share": 0.1})
    return tmp_path / "part.firm"


def weights(folder):
    (file,) = folder.glob("weights-*.safetensors")
    return file


def rewritten(folder, **changes):
    card = json.loads((folder / CARD).read_text()) | changes
    (folder / CARD).write_text(json.dumps(card))


def test_it_comes_back(folder):
    tensors, card = read_model(folder)
    assert set(tensors) == {"a", "b"}
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    assert (card["kind"], card["schema"], card["origin"], card["share"]) == (KIND, SCHEMA, {"seed": 3}, 0.1)


def test_writing_again_replaces_and_leaves_no_rest(folder):
    before = weights(folder).name
    (folder / "calibration.json").write_text("kept by whoever wrote it")
    write_model(folder, TENSORS | {"a": torch.zeros(1)}, {})
    assert weights(folder).name != before
    assert read_model(folder)[0]["a"].shape == (1,)
    assert sorted(file.name for file in folder.iterdir()) == sorted([CARD, "calibration.json", weights(folder).name])


def test_an_interruption_leaves_the_old_one(folder, monkeypatch):
    """Whichever of the two files could not be written."""
    import firm.detector.model_folder as module

    real, old = module.write_atomically, read_model(folder)
    for lost in ("weights", CARD):

        def full(path, content, lost=lost):
            if path.name.startswith(lost):
                raise MachineError(f"cannot write {path}: No space left on device")
            real(path, content)

        monkeypatch.setattr(module, "write_atomically", full)
        with pytest.raises(MachineError, match="No space left"):
            write_model(folder, {"a": torch.ones(4)}, {})
        found = read_model(folder)
        assert found[1] == old[1]
        assert torch.equal(found[0]["a"], TENSORS["a"])
    monkeypatch.setattr(module, "write_atomically", real)
    write_model(folder, {"a": torch.ones(4)}, {})
    assert len(list(folder.iterdir())) == 2


def test_an_edited_card_is_refused(folder):
    card = (folder / CARD).read_text()
    for changes, culprit in (
        ({"share": 0.2}, "part.firm"),
        ({"digest": "0" * 64}, "part.firm"),
        ({"further": 1}, "part.firm"),
        ({"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}.*upgrade"),
        ({"kind": "checkpoint"}, "checkpoint"),
        ({"weights": "../other/weights-0123456789abcdef.safetensors"}, "weights"),
        ({"weights": None}, "weights"),
        ({"weights": "weights-0123456789abcdef.safetensors"}, "weights-0123456789abcdef"),
    ):
        rewritten(folder, **changes)
        with pytest.raises(ModelFileError, match=culprit) as error:
            read_model(folder)
        assert "\n" not in str(error.value)
        (folder / CARD).write_text(card)


def test_every_changed_byte_and_every_cut_of_the_weights_is_refused(folder):
    file = weights(folder)
    whole = file.read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], whole[:place]):
            file.write_bytes(damaged)
            with pytest.raises(ModelFileError, match=r"part\.firm"):
                read_model(folder)


def test_a_card_that_is_none_is_refused(folder):
    for content in (
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"kind": "detector", "schema": "x"}'),
        *(b'{"kind": "detector", "schema": Infinity}', b'{"kind": ' + b"[" * 100_000),
    ):
        (folder / CARD).write_bytes(content)
        with pytest.raises(ModelFileError, match=CARD):
            read_model(folder)
        check_target(folder, "another product")  # a fit may replace it: nobody knows what it was


@pytest.mark.parametrize("kind", ["F6_E2M3", "F8_E8M0", "XX"])
def test_numbers_of_an_unknown_type_are_refused(folder, kind):
    size = 3 if kind == "F6_E2M3" else 4
    header = json.dumps({"a": {"dtype": kind, "shape": [4], "data_offsets": [0, size]}}).encode()
    weights(folder).write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    with pytest.raises(ModelFileError, match=weights(folder).name) as error:
        read_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_or_a_device_is_not_waited_for(folder):
    for file in (weights(folder), folder / CARD, folder / "calibration.json"):
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            before = file.read_bytes() if file.exists() else b""
            file.unlink(missing_ok=True)
            make(file)
            with pytest.raises(ModelFileError, match=r"part\.firm"):
                read_calibration(file, model="m") if file.name == "calibration.json" else read_model(folder)
            file.unlink()
            file.write_bytes(before)


class Hostile:
    """What a pickle can do when it is read."""

    def __reduce__(self):
        return (Path.touch, (Path("ran.txt"),))


def test_nothing_in_it_runs(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in (weights(folder), folder / CARD):
        before = file.read_bytes()
        file.write_bytes(pickle.dumps(Hostile()))
        with pytest.raises(ModelFileError):
            Detector.load(folder)
        file.write_bytes(before)
    file = tmp_path / "single.firm"
    file.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ModelFileError):
        Detector.load(file)
    assert not (tmp_path / "ran.txt").exists()


def test_other_things_are_not_mixed_with_it(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"x")
    for taken in (tmp_path / "photos", tmp_path / "photos" / "a.png"):
        with pytest.raises(SettingError, match=str(taken)):
            write_model(taken, TENSORS, {})
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "empty", TENSORS, {})
    assert read_model(tmp_path / "empty")[1]["schema"] == SCHEMA
