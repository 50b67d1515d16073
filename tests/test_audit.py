"""Images that do not belong among the good ones are found, left out, listed and drawn; clean folders are left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from commands import run, values
from firm.detector.audit import LIMIT, MIN_PARTS, Audit, audit_images
from firm.detector.detector import Detector
from firm.detector.fit import fit
from firm.detector.read import Options, as_data, read_good
from firm.drawn.render import draw_dataset, save_png
from firm.images.decode import decode
from firm.networks.weights import load_backbone
from firm.recipes.presets import recipe as preset
from listening import Heard

RECIPE = preset(
    "wavelets",
    **{"size": 64, "training.epochs": 0, "pretrained.margin": 0, "automatic": ["foreground", "align"]},
)
PLATES = draw_dataset("plate", size=64, train=40, good=1, bad=1).train
PAINTED = 3


def painted(images: torch.Tensor) -> torch.Tensor:
    """The same red stripe on every image: similar defects hide each other."""
    bad = images.clone()
    bad[:, :, 24:34, 20:44] = torch.tensor([200, 20, 30], dtype=torch.uint8)[:, None, None]
    return bad


DIRTY = torch.cat([PLATES[: 31 - PAINTED], painted(PLATES[31 - PAINTED : 31])])


def audited(images: torch.Tensor, parts: torch.Tensor | None = None, **options: object) -> Audit:
    parts = torch.arange(len(images)) if parts is None else parts
    return audit_images(RECIPE, as_data(images, **options), parts, load_backbone("wavelets"))


def numbers(found: Audit) -> list[int]:
    return found.suspect.nonzero().squeeze(1).tolist()


# --- who is suspected ---


def test_painted_parts_are_suspected_although_they_look_alike():
    found = audited(DIRTY)
    assert numbers(found) == [28, 29, 30]
    assert [each["file"] for each in found.suspects()] == [found.names[i] for i in found.ordered(suspect=True)]
    assert all(each["score"] > each["limit"] > LIMIT for each in found.suspects())
    assert found.scores.argmax() == found.ordered(suspect=True)[0]


def test_photographs_of_one_painted_part_do_not_vouch_for_each_other():
    parts = torch.cat([torch.arange(28), torch.full((3,), 28)])
    assert numbers(audited(DIRTY, parts)) == [28, 29, 30]


def test_a_clean_folder_is_left_alone():
    assert numbers(audited(PLATES)) == []


def test_few_parts_are_not_audited():
    assert not audited(DIRTY[-MIN_PARTS + 1 :]).suspect.any()
    assert not audited(DIRTY, torch.arange(len(DIRTY)) % (MIN_PARTS - 1)).suspect.any()


def test_copies_suspect_nobody():
    assert not audited(torch.cat([PLATES[:1].expand(12, -1, -1, -1), PLATES[1:9]])).suspect.any()


def test_no_more_than_a_fifth_is_ever_suspected():
    noise = torch.randint(0, 256, (8, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = audited(torch.cat([PLATES[:12], noise]))
    assert int(found.suspect.sum()) <= 4


def test_ignored_pixels_make_nobody_a_suspect():
    hidden = torch.zeros(64, 64, dtype=torch.bool)
    hidden[20:38, 16:48] = True
    assert not audited(DIRTY, ignored=hidden).suspect.any()


# --- what a fit makes of it ---


def test_suspects_are_neither_learnt_from_nor_set_thresholds_unless_kept():
    heard = Heard()
    left_out = fit(read_good(DIRTY, RECIPE), heard)
    clean = fit(read_good(DIRTY[:28], RECIPE), Heard())
    assert [each["file"] for each in left_out.origin["suspects"]]
    assert len(left_out.origin["suspects"]) == PAINTED
    (text,) = [text for text in heard.warnings if "firm audit" in text]
    assert f"{PAINTED} of 31" in text
    assert left_out.id == clean.id
    assert left_out.calibration == clean.calibration
    kept = fit(read_good(DIRTY, RECIPE, Options(keep_suspects=True)), Heard())
    assert kept.origin["suspects"] == left_out.origin["suspects"]
    assert kept.id != clean.id
    assert len(kept.thumbnails) > len(clean.thumbnails)
    assert kept.origin["asked"] != left_out.origin["asked"]


def test_a_detector_of_whole_images_is_not_audited():
    heard = Heard()
    small = preset("fast", **{"training.epochs": 1, "encoder.width": 4, "size": 32})
    detector = Detector.fit(DIRTY, recipe=small, listener=heard)
    assert detector.origin["suspects"] == []
    assert not any("audit" in stage for stage in heard.stages)


# --- the command ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "parts"
    home.mkdir()
    for number, image in enumerate(DIRTY):
        save_png(home / f"{number:03d}.png", image)
    return home


def test_the_command_lists_suspects_and_draws_them(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("firm.recipes.presets.installed", lambda _: False)
    found = values("audit", folder, "--out", tmp_path / "sheet.png", "--json")
    assert {each["file"] for each in found["suspects"]} == {"028.png", "029.png", "030.png"}
    assert found["images"] == len(DIRTY)
    assert decode(tmp_path / "sheet.png").shape[1] > 64
    done = run("audit", folder, "--out", tmp_path / "sheet.png")
    assert done.code == 0
    assert "029.png" in done.out
    assert run("audit", folder, "--out", tmp_path / "sheet.txt").code == 2
    for file in ("028.png", "029.png", "030.png"):
        (folder / file).unlink()
    assert values("audit", folder, "--out", tmp_path / "clean.png", "--json")["suspects"] == []
    assert (tmp_path / "clean.png").is_file()


def test_parts_are_named_by_files_here_too(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("firm.recipes.presets.installed", lambda _: False)
    done = run("audit", folder, "--out", tmp_path / "sheet.png", "--group-by", r"/(\d\d)\d\.png")
    assert f"{len(DIRTY)} images of 4 parts are too few" in done.out
    assert run("audit", folder, "--out", tmp_path / "sheet.png", "--group-by", "screw")[0] == 2


def test_fit_keeps_suspects_if_told(folder: Path, tmp_path: Path):
    small = ["--encoder=wavelets", "--set=size=64", "--set=training.epochs=0", "--set=pretrained.margin=0"]
    for option, learnt in ((), 28), (("--keep-suspects",), 31):
        found = values("fit", folder, "--out", tmp_path / "x.firm", *small, *option, "--json")
        assert found["origin"]["good_images"] == found["calibration"]["images"] == learnt
        assert len(found["origin"]["suspects"]) == PAINTED
        shutil.rmtree(tmp_path / "x.firm")


# --- what is stated of false calls still holds ---


def false_calls(images: int, draws: int, *, fresh: int = 60) -> tuple[float, float, float, float]:
    """Of clean folders: the share suspected, the rates stated and realised with the audit, and realised without it."""
    suspected, stated, realised = 0, 0.0, {True: 0.0, False: 0.0}
    for seed in range(draws):
        data = draw_dataset("plate", seed=100 + seed, size=64, train=images, good=fresh, bad=1)
        for keep in (True, False):
            options = Options(seed=seed, keep_suspects=keep)
            detector = Detector.of(fit(read_good(as_data(data.train), RECIPE, options), Heard()))
            wrong = detector.score(data.test[:fresh]) > detector.limit
            realised[keep] += float(wrong.float().mean()) / draws
        suspected += len(detector.origin["suspects"])
        stated += detector.decides.reviewed.kept / draws
    return suspected / (images * draws), stated, realised[False], realised[True]


def test_false_calls_stay_within_what_is_stated():
    suspected, stated, realised, _ = false_calls(40, draws=3)
    assert suspected <= 0.02
    assert realised <= stated + 0.05  # three calibrations on ten images each


@pytest.mark.slow
@pytest.mark.parametrize("images", [20, 40, 80])
def test_trimming_does_not_raise_false_calls(images: int):
    suspected, stated, realised, without = false_calls(images, draws=24, fresh=200)
    assert suspected <= 0.02
    assert realised <= stated + 0.03
    assert realised <= without + 0.02
