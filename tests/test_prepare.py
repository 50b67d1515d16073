"""Features embedded once: their names, further versions of good images, hard cells, and what they will cost."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import save_file

import drawings
from firm.adaptor import Pretrained, cell_features
from firm.backbones.resnet import ResNet
from firm.cells import Choosable, hard_first, spread
from firm.colour import Jitter, jittered
from firm.detector import Detector
from firm.embedding import CHUNK, EXTRA, cell_task, embedder_of
from firm.fitting import as_data
from firm.foretelling import foretell
from firm.images import fingerprint
from firm.localiser import object_part
from firm.recipes.industrial import PRETRAINED, patch_experiment
from firm.recipes.presets import ADAPTED
from firm.recipes.recipe import change, digest, from_json, parse_settings, to_json
from firm.runs import Run
from firm.streams import stream
from firm.tiling import Grid
from firm.types import FirmError

SIDE, GOOD = 96, drawings.screws(6, light=0.1).images
GRID = Grid(size=8, stride=8)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """One stage of a ResNet-18 of drawn weights, two defects on each of six screws."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file({name: value.contiguous() for name, value in ResNet("resnet18").state_dict().items()}, path)
    changes = {
        "pretrained": Pretrained(name=str(path), stages=(2,), margin=0, hidden=(16,), out=8),
        "outliers": "donor",
        "outliers.per_inlier": 2,
        "encoder.head.hidden": [8],
        "encoder.head.out": 8,
        "training.epochs": 1,
        "training.batch": 32,
        "size": SIDE,
        "conditioning.foreground.method": "otsu",
        "automatic": [],
    }
    return change(ADAPTED, changes)


def embedder(recipe, changes=None, *, seed=0, images=GOOD):
    return embedder_of(change(recipe, changes or {}), as_data(images), seed=seed)


VARIED = {"pretrained.versions": 3, "views.light": 0.3}
MIRRORED = {"pretrained.versions": 4, "pretrained.flip": True, "views.light": 0.0}


# --- spare images ---


def test_of_spare_images_neither_versions_nor_defects_are_learnt_from(recipe):
    spare = torch.tensor([1, 4])
    task = cell_task(replace(embedder(recipe, {"pretrained.versions": 2}), spare=spare), folder=None)
    for cells, copies in ((task.good, 2), (task.outliers, 2)):
        assert cells.choosable.drawn.tolist() == [True, False, True, True, False, True] * copies
    assert torch.equal(task.spare.images, spare)
    plain = cell_task(embedder(recipe), folder=None)
    assert plain.spare is None
    assert plain.good.choosable.drawn is None
    plain, rows = embedder(recipe), torch.arange(len(plain.outliers.features)).split(CHUNK)
    stored = torch.cat([plain.outliers(int(part[0]), int(part[-1]) + 1)[..., -EXTRA] for part in rows])
    torch.testing.assert_close(task.spare.altered, stored.half().float())


def test_a_training_that_spares_is_not_resumed_as_one_that_does_not(recipe):
    names = {
        cell_task(replace(embedder(recipe), spare=spare), folder=None).fingerprint
        for spare in (None, torch.tensor([1]), torch.tensor([2]))
    }
    assert len(names) == 3


# --- further versions of good images ---


def in_another_light(image, row, light, seed=0):
    """A version by hand: brightness and contrast by the numbers of its own stream."""
    rng = stream(seed, "version", row)
    ranges = Jitter(brightness=light, contrast=light, saturation=0.0, hue=0.0)
    return (jittered(image[None].float() / 255, ranges, rng=rng)[0] * 255).round().clamp(0, 255).to(torch.uint8)


def test_versions_after_the_first_differ_in_light_alone(recipe):
    made = embedder(recipe, VARIED)
    ready = made.ready.images
    rows = made.versions(0, 18)
    torch.testing.assert_close(rows[:6], made.features(ready))
    brightness = []
    for row in range(6, 18):
        lit = in_another_light(ready[row % 6], row, 0.3)
        brightness.append(float(lit.float().mean() / ready[row % 6].float().mean()))
        torch.testing.assert_close(rows[row], made.features(lit[None])[0], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(rows[row], rows[row % 6], rtol=1e-3, atol=1e-3)
    assert min(brightness) < 0.9
    assert max(brightness) > 1.1
    assert len({round(one, 4) for one in brightness}) == 12  # every version has a light of its own
    assert torch.equal(ready, made.ready.images)


def test_versions_are_decided_by_the_seed(recipe):
    one, again, other = (embedder(recipe, VARIED | {"pretrained.flip": True}, seed=seed) for seed in (0, 0, 1))
    rows = one.versions(0, 18)
    assert torch.equal(again.versions(0, 18), rows)
    assert torch.equal(other.versions(0, 6), rows[:6])
    for row in range(6, 18):
        assert not torch.allclose(other.versions(row, row + 1)[0], rows[row], rtol=1e-3, atol=1e-3)
    assert [one.mirrors(row) for row in range(18)] == [again.mirrors(row) for row in range(18)]
    assert [one.mirrors(row) for row in range(18)] != [other.mirrors(row) for row in range(18)]


def test_a_row_is_the_same_in_any_chunk(recipe):
    made = embedder(recipe, VARIED | {"pretrained.flip": True})
    rows = made.versions(0, 18)
    for begin, end in ((0, 1), (4, 9), (17, 18)):
        torch.testing.assert_close(made.versions(begin, end), rows[begin:end], rtol=1e-4, atol=1e-4)


def test_a_mirrored_version_is_the_mirrored_image(recipe):
    """Without a change of light the pixels are the same, and mirrored by hand they give the same features."""
    made = embedder(recipe, MIRRORED)
    rows, ready = made.versions(0, 24), made.ready.images
    by_hand = {
        (): ready,
        (-2,): ready[:, :, range(SIDE - 1, -1, -1)],
        (-1,): ready[:, :, :, range(SIDE - 1, -1, -1)],
        (-2, -1): torch.rot90(ready, 2, (2, 3)),
    }
    seen = {axes: made.features(images) for axes, images in by_hand.items()}
    for row in range(24):
        axes = tuple(made.mirrors(row))
        assert axes == () or row >= 6
        torch.testing.assert_close(rows[row], seen[axes][row % 6], rtol=1e-4, atol=1e-4)
        near = [other for other in seen if torch.allclose(rows[row], seen[other][row % 6], rtol=1e-3, atol=1e-3)]
        assert near == [axes]
    assert {tuple(made.mirrors(row)) for row in range(6, 24)} == set(by_hand)


def test_all_ways_of_mirroring_are_as_frequent_and_none_unless_asked(recipe):
    made = embedder(recipe, MIRRORED)
    axes = [tuple(made.mirrors(row)) for row in range(6, 4006)]
    for one in ((), (-2,), (-1,), (-2, -1)):
        assert abs(axes.count(one) - 1000) < 150
    plain = embedder(recipe, VARIED)
    assert not any(plain.mirrors(row) for row in range(200))


def test_the_object_is_mirrored_with_its_image(recipe):
    """Cells to be drawn of a mirrored version are those where its own object is."""
    made = embedder(recipe, MIRRORED)
    task = cell_task(made, folder=None)
    allowed = task.good.choosable.allowed
    assert allowed.shape == (24, 12, 12)
    for row in range(24):
        mask = made.ready.foreground[row % 6].flip(made.mirrors(row))
        expected = Choosable.at_least(object_part(GRID, mask[None]), made.views.fore).allowed[0]
        assert torch.equal(allowed[row], expected)
    assert any(not torch.equal(allowed[row], allowed[row % 6]) for row in range(6, 24))


def test_a_bank_remembers_first_versions_only(recipe):
    plain = {"features": "backbone", "training.epochs": 0, "memory.standardise": False}
    banks = []
    for changes in ({}, VARIED | {"pretrained.flip": True}):
        asked = change(recipe, plain | changes)
        made = embedder(asked)
        run = Run(asked, cell_task(made, folder=None))
        assert len(run.task.good.features) == 6 * asked.pretrained.versions
        banks.append(Detector.remember(asked, run, as_data(GOOD), {}, seed=0).localiser.banks["backbone"])
    here, there = banks
    assert sorted(there.image.tolist()) == [image for image in range(6) for _ in range(144)]
    assert all(torch.equal(*pair) for pair in zip(here.tensors().values(), there.tensors().values(), strict=True))
    features = made.features(made.ready.images).flatten(1, 2)[there.image, there.cell]
    torch.testing.assert_close(there.memory.remembered(there.vectors), features, rtol=2e-3, atol=1e-3)  # by float16


# --- names of features ---


def test_a_setting_that_decides_no_feature_is_not_in_its_name(recipe):
    """The name by hand, as it was before cells were drawn by chances: features of earlier fits are found again."""
    made = embedder(recipe, {"pretrained.hard": 2.0, "pretrained.evenly": "cells", "pretrained.noise": 0.5})
    settings = {
        "name": "",
        "stages": (2,),
        "pool": 3,
        "margin": 0,
        "hidden": (),
        "out": 0,
        "versions": 1,
        "flip": False,
    }
    text = json.dumps([fingerprint(made.ready.images), made.backbone.digest, settings, 8, 5], sort_keys=True)
    assert made.key(5) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert made.key() == embedder(recipe).key()


def test_hard_draws_are_another_training_on_the_same_features(recipe, tmp_path):
    tasks, written = {}, set()
    for changes in ({}, {"pretrained.hard": 1.0}, {"pretrained.evenly": "cells"}, {"pretrained.noise": 0.3}):
        task = cell_task(embedder(recipe, changes), folder=tmp_path)
        tasks[Run(change(recipe, changes), task).digest] = task.fingerprint
        written |= {(file.name, file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    assert len(tasks) == 4
    assert len(set(tasks.values())) == 1
    assert len(written) == 4  # two stores and their cards, never written again
    assert digest(recipe) == digest(change(recipe, {"pretrained.hard": 0.0, "pretrained.evenly": "images"}))


# --- hard cells ---


@pytest.mark.parametrize("versions", [1, 2])
def test_chances_come_from_the_good_image_each_defect_was_painted_on(recipe, versions):
    made = embedder(recipe, {"pretrained.hard": 2.0, "pretrained.versions": versions})
    task = cell_task(made, folder=None)
    bad, allowed, deviation = task.outliers.features, task.outliers.choosable.allowed, spread(task.good.features)[1]
    assert len(bad) == 12
    originals = cell_features(made.backbone, made.settings, GRID, made.ready.images).half()
    change_ = torch.zeros(allowed.shape)
    for outlier, row, column in product(range(12), range(12), range(12)):
        moved = (bad[outlier, row, column].float() - originals[outlier % 6, row, column].float()) / deviation
        change_[outlier, row, column] = math.sqrt(float(moved.square().sum()))
    expected = hard_first(change_, allowed, 2.0)
    torch.testing.assert_close(task.outliers.choosable.chance[allowed], expected[allowed], rtol=2e-2, atol=1e-6)
    assert task.good.choosable.chance is None
    unaltered = (change_[~allowed] == 0).float().mean()
    assert float(unaltered) > 0.2  # most of an image is as it was; those cells are of no account
    assert float(change_[allowed].median()) > 3 * float(change_[~allowed].median())


def test_hard_cells_are_drawn_more_and_large_defects_if_asked(recipe):
    easy, hard, cells = (
        cell_task(embedder(recipe, changes), folder=None).outliers
        for changes in ({}, {"pretrained.hard": 8.0}, {"pretrained.evenly": "cells"})
    )
    chance = hard.choosable.chance

    def drawn(some, seed=0):
        rng = torch.Generator().manual_seed(seed)
        images = some.choosable.draw_images(4000, rng=rng)
        return images, some.choosable.draw(images, rng=rng)

    mean = [float(chance.flatten(1)[drawn(some)].log().mean()) for some in (easy, hard)]
    share = chance.where(hard.choosable.allowed, 0).flatten(1)
    expected = (share / share.sum(1, keepdim=True) * chance.flatten(1).log()).sum(1)
    assert mean[1] == pytest.approx(float(expected[drawn(hard)[0]].mean()), abs=0.1)
    assert mean[1] > mean[0] + 0.2
    counts = easy.choosable.counts.double()
    assert counts.max() > 1.5 * counts.min()
    for some, expected in ((easy, torch.ones(12) / 12), (cells, counts / counts.sum())):
        found = drawn(some)[0].bincount(minlength=12) / 4000
        assert float((found - expected).abs().max()) < 0.02


def test_batches_stay_a_function_of_the_step(recipe, tmp_path):
    """In memory or from a folder, in whatever order; nothing asked for draws as before."""
    asked = {"pretrained.hard": 1.5, "pretrained.evenly": "cells"}
    task = cell_task(embedder(recipe, asked), folder=None)
    again = cell_task(embedder(recipe, asked), folder=tmp_path)
    resumed = cell_task(embedder(recipe, asked), folder=tmp_path)
    plain = cell_task(embedder(recipe), folder=tmp_path)
    for step in (5, 0, 3):
        assert torch.equal(again.batch(step).images, task.batch(step).images)
        assert torch.equal(resumed.batch(step).images, task.batch(step).images)
        assert not torch.equal(plain.batch(step).images, task.batch(step).images)
        same = replace(plain.outliers, choosable=Choosable(plain.outliers.choosable.allowed))
        assert torch.equal(replace(plain, outliers=same).batch(step).images, plain.batch(step).images)
    good = task.training.batch // 2
    assert torch.equal(plain.batch(4).images[:good], task.batch(4).images[:good])  # good cells are drawn as ever


# --- noise ---


def test_noise_is_of_the_asked_size_drawn_anew_in_each_step_and_changes_no_draw(recipe):
    plain = cell_task(embedder(recipe), folder=None)
    noisy = cell_task(embedder(recipe, {"pretrained.noise": 0.5}), folder=None)
    deviation = spread(plain.good.features)[1]
    steps = range(40)
    added = [(noisy.batch(step).images - plain.batch(step).images) / deviation for step in steps]
    every = torch.stack(added)
    assert float(every.mean().abs()) < 0.01
    assert float(every.std()) == pytest.approx(0.5, abs=0.01)
    assert float((every.flatten(0, 1).std(0) - 0.5).abs().max()) < 0.05  # every number of a feature by its own spread
    assert not torch.equal(added[0], added[1])
    assert torch.equal(noisy.batch(3).images, noisy.batch(3).images)
    assert torch.equal(noisy.batch(3).group, plain.batch(3).group)


# --- settings ---


def test_new_settings_are_typed_saved_and_read():
    typed = parse_settings(["pretrained.hard=1", "pretrained.evenly=cells", "memory.reweight=9", "features=backbone",
                            "memory.standardise=false"])  # fmt: skip
    asked = change(ADAPTED, typed)
    assert (asked.pretrained.hard, asked.pretrained.evenly, asked.memory.reweight) == (1.0, "cells", 9)
    assert from_json(json.loads(json.dumps(to_json(asked)))) == asked
    old = to_json(ADAPTED)
    for owner, name in (("pretrained", "hard"), ("pretrained", "evenly"), ("memory", "reweight")):
        del old[owner][name]
    assert from_json(old) == ADAPTED


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"hard": -1.0}, r"pretrained\.hard is -1\.0; use 0 for cells drawn alike, and at most 10"),
        ({"hard": 11.0}, r"pretrained\.hard is 11\.0"),
        ({"hard": math.nan}, r"pretrained\.hard is nan"),
        ({"noise": -0.1}, r"pretrained\.noise is -0\.1; use 0 for none, and at most 10"),
        ({"noise": float("nan")}, r"pretrained\.noise is nan; use 0 for none"),
        ({"evenly": "defects"}, r"pretrained\.evenly is 'defects'; use one of images, cells"),
    ],
)
def test_wrong_settings_are_refused(wrong, sentence):
    with pytest.raises(FirmError, match=sentence):
        Pretrained(**wrong)


def test_the_row_of_patchcore_weighs_as_patchcore_does():
    memory = patch_experiment(PRETRAINED, "drawn:plate", "patchcore", "short", 0).recipe.memory
    assert (memory.reweight, memory.standardise, memory.reach, memory.choose) == (9, False, -1, "coreset")


# --- what it will take ---


def test_the_disk_a_fit_will_take_is_foretold():
    asked = change(ADAPTED, {"automatic": [], "size": SIDE, "pretrained.versions": 2, "outliers": "mixed"})
    told = foretell(asked, as_data(drawings.screws(20).images), holdout=0.1)
    assert told[2:5] == [
        "patches of 8 px every 8 px of 96 px; synthetic defects: donor, nsa, cutpaste-union",
        "good features: 36 images x 12 x 12 x 152 = 2 MB on disk",
        f"outlier features: 54 images x 12 x 12 x {152 + EXTRA} = 3 MB on disk",
    ]
    wider = foretell(change(asked, {"pretrained.context": 7}), as_data(drawings.screws(20).images))
    assert "good features: 36 images x 12 x 12 x 304 = 4 MB on disk" in wider
    behind = foretell(change(asked, {"features": "projection+backbone"}), as_data(GOOD))
    assert "projection: the mean of the good patches, 64 numbers" in behind  # and no bank of them
    plain = foretell(change(asked, {"training.epochs": 0}), as_data(GOOD))
    assert plain[2].endswith("; synthetic defects: none, nothing is trained")
    assert [line for line in plain if "on disk" in line] == ["good features: 10 images x 12 x 12 x 152 = 1 MB on disk"]
    learnt = change(asked, {"pretrained.name": "", "features": "encoder", "tiling": Grid(), "training.batch": 4})
    assert not any("on disk" in line for line in foretell(learnt, as_data(GOOD)))


@pytest.mark.parametrize("size", [96, 100])  # 100: cells lie side by side, so four pixels are left out
def test_what_is_foretold_is_what_a_weights_file_takes(recipe, size, tmp_path):
    images = drawings.screws(6, side=104, light=0.1).images
    asked = change(recipe, {"size": size, "pretrained.stages": [2, 3]})
    told = " ".join(foretell(asked, as_data(images), holdout=0.2))
    assert f"backbone bank: 720 patches x {64 + 128 + 1}" in told
    cell_task(embedder_of(asked, as_data(images[:5]), seed=0), folder=tmp_path)
    for name, rows, numbers in (("good", 5, 64 + 128), ("outlier", 10, 64 + 128 + EXTRA)):
        (file,) = tmp_path.glob(f"{name}*.f16")
        assert file.stat().st_size == 2 * rows * 12 * 12 * numbers
        assert f"{name} features: {rows} images x 12 x 12 x {numbers} = 1 MB on disk" in told
