"""A detector's folder: whole or not there, refused when touched; what earlier versions wrote still decides alike."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from firm.detector import Detector
from firm.model_folder import CARD, read_model, write_model
from firm.types import FirmError

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
    assert (card["kind"], card["schema"], card["origin"], card["share"]) == ("detector", 2, {"seed": 3}, 0.1)


def test_writing_again_replaces_and_leaves_no_rest(folder):
    before = weights(folder).name
    (folder / "calibration.json").write_text("kept by whoever wrote it")
    write_model(folder, TENSORS | {"a": torch.zeros(1)}, {})
    assert weights(folder).name != before
    assert read_model(folder)[0]["a"].shape == (1,)
    assert sorted(file.name for file in folder.iterdir()) == sorted([CARD, "calibration.json", weights(folder).name])


def test_an_interruption_leaves_the_old_one(folder, monkeypatch):
    """Whichever of the two files could not be written."""
    import firm.model_folder as module

    real, old = module.write_atomically, read_model(folder)
    for lost in ("weights", CARD):

        def full(path, content, lost=lost):
            if path.name.startswith(lost):
                raise FirmError(f"cannot write {path}: No space left on device")
            real(path, content)

        monkeypatch.setattr(module, "write_atomically", full)
        with pytest.raises(FirmError, match="No space left"):
            write_model(folder, {"a": torch.ones(4)}, {})
        found = read_model(folder)
        assert found[1] == old[1]
        assert torch.equal(found[0]["a"], TENSORS["a"])
    monkeypatch.setattr(module, "write_atomically", real)
    write_model(folder, {"a": torch.ones(4)}, {})
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"share": 0.2}, "damaged or edited"),
        ({"digest": "0" * 64}, "damaged or edited"),
        ({"further": 1}, "damaged or edited"),
        ({"schema": 3}, "schema 3, this firm reads up to 2; upgrade firm"),
        ({"kind": "checkpoint"}, "is a firm checkpoint, not a detector"),
        ({"weights": "../other/weights-0123456789abcdef.safetensors"}, "names no weights"),
        ({"weights": None}, "names no weights"),
        ({"weights": "weights-0123456789abcdef.safetensors"}, "cannot be read"),
    ],
)
def test_an_edited_card_is_refused(folder, changes, why):
    rewritten(folder, **changes)
    with pytest.raises(FirmError, match=why) as error:
        read_model(folder)
    assert "\n" not in str(error.value)


def test_every_changed_byte_and_every_cut_of_the_weights_is_refused(folder):
    file = weights(folder)
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FirmError, match="copy it again"):
            read_model(folder)
        file.write_bytes(whole[:place])
        with pytest.raises(FirmError, match="copy it again"):
            read_model(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"kind": "detector", "schema": "x"}'])
def test_a_card_that_is_none_is_refused(folder, content):
    (folder / CARD).write_bytes(content)
    with pytest.raises(FirmError, match=r"was not written by firm"):
        read_model(folder)


class Hostile:
    """What a pickle can do when it is read."""

    def __reduce__(self):
        return (Path.touch, (Path("ran.txt"),))


def test_nothing_in_it_runs(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in (weights(folder), folder / CARD):
        before = file.read_bytes()
        file.write_bytes(pickle.dumps(Hostile()))
        with pytest.raises(FirmError):
            Detector.load(folder)
        file.write_bytes(before)
    file = tmp_path / "single.firm"
    file.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(FirmError):
        Detector.load(file)
    assert not (tmp_path / "ran.txt").exists()


def test_other_things_are_not_mixed_with_it(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"x")
    with pytest.raises(FirmError, match="is a folder of other things; name a new one"):
        write_model(tmp_path / "photos", TENSORS, {})
    with pytest.raises(FirmError, match="is a file; name another place"):
        write_model(tmp_path / "photos" / "a.png", TENSORS, {})
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "empty", TENSORS, {})
    assert read_model(tmp_path / "empty")[1]["schema"] == 2


def striped(count, *, blot=False):
    """What the fixture was fitted to, drawn without anything of the package."""
    across, images = torch.arange(48), []
    for number in range(count):
        image = (120 + 60 * torch.sin((across + number) / 3)).round()[None].expand(48, 48).clone()
        if blot:
            image[10 + number : 18 + number, 20:28] = 20
        images.append(image)
    return torch.stack(images)[:, None].expand(-1, 3, -1, -1).to(torch.uint8).contiguous()


def test_a_detector_of_the_first_schema_still_decides_as_it_did(tmp_path):
    """Written by the code that wrote single files; its scores were written down then."""
    written = json.loads((FIXTURES / "schema-1.json").read_text())
    shutil.copy(FIXTURES / "schema-1.firm", tmp_path)
    old = Detector.load(tmp_path / "schema-1.firm")
    images = torch.cat([striped(3), striped(3, blot=True)])
    torch.testing.assert_close(old.score(images), torch.tensor(written["scores"]), rtol=1e-3, atol=1e-3)
    assert old.limit == old.decides.fail == written["threshold"]
    assert old.predict(images).tolist() == [1, 1, 1, -1, -1, -1]
    old.save(tmp_path / "new.firm")
    new = Detector.load(tmp_path / "new.firm")
    assert torch.equal(new.score(images), old.score(images))
    assert (new.id, new.decides) == (old.id, old.decides)
