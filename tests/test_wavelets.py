"""Wavelets: filters as defined, energies as plain loops have them, and a backbone like any other that needs no file."""

import math

import numpy as np
import pytest
import torch

import contracts
import drawings
from firm import Detector
from firm.detector.tune import SURROUNDINGS, choose
from firm.errors import ModelFileError
from firm.networks.backbone import architecture
from firm.networks.wavelets import CELL, FAINT, FIRST, LEVELS, LOW, SECOND, Wavelets
from firm.networks.weights import FACTS, WAVELETS, installed, load_backbone, rebuild
from firm.recipes.presets import recipe
from firm.scoring.patch_features import cell_features
from firm.scoring.patch_grid import Grid
from firm.types import OneClass

ENERGY, BRIGHT, DARK = slice(0, FIRST), slice(FIRST, 2 * FIRST), slice(2 * FIRST, 3 * FIRST)


def noise(count=1, side=64, seed=0):
    return torch.rand(count, 3, side, side, generator=contracts.generator(seed))


def stripes(angle, side=64, contrast=0.2):
    """Waves of the length the finest filters look for, across the given angle."""
    y, x = torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij")
    wave = torch.cos(2 * math.pi * (x * math.cos(angle) + y * math.sin(angle)) / 4)
    return (0.5 + contrast * wave).expand(1, 3, side, side)


def finished(image):
    """All stages as a detector of patches of one cell sees them."""
    trunk = Wavelets()
    return [trunk.finished(number, stage) for number, stage in enumerate(trunk.stages(image), 1)]


def middle(stage):
    """What is seen of the cells that know nothing of the border."""
    return stage[0, :, 3:5, 3:5].mean((1, 2))


def test_stages_have_the_channels_and_the_stride_of_the_facts():
    facts = FACTS[WAVELETS]
    found = load_backbone(WAVELETS).stages(noise(2, 96))
    assert [tuple(stage.shape) for stage in found] == [(2, channels, 12, 12) for channels in facts.channels]
    assert facts.strides == (CELL,) * LEVELS


def test_filters_answer_to_no_even_surface_and_have_one_length():
    trunk = Wavelets()
    for filters in (trunk.lines, trunk.coarse):
        assert torch.allclose(filters.sum((1, 2, 3)), torch.zeros(len(filters)), atol=1e-6)
        assert torch.allclose(filters.flatten(1).norm(dim=1), torch.ones(len(filters)))
    assert trunk.coarse.shape[0] == FIRST * 2 * SECOND


def test_energies_and_lines_are_those_of_plain_loops():
    image = noise(seed=3)
    found = finished(image)[0][0]
    grey = np.pad(image[0].mean(0).numpy().astype(np.float64), 3, mode="reflect")
    filters = Wavelets().lines[:, 0].numpy().astype(np.float64)
    row, column = 0, 5  # at the border, where the image is mirrored
    energy, bright, dark = (np.zeros(FIRST) for _ in range(3))
    for y in range(CELL * row, CELL * row + CELL):
        for x in range(CELL * column, CELL * column + CELL):
            window = grey[y : y + 7, x : x + 7]
            for number in range(FIRST):
                even, odd = (window * filters[number]).sum(), (window * filters[FIRST + number]).sum()
                energy[number] += math.hypot(even, odd) / CELL**2
                bright[number] += max(even, 0) / CELL**2
                dark[number] += max(-even, 0) / CELL**2
    for part, expected in ((ENERGY, energy), (BRIGHT, bright), (DARK, dark)):
        np.testing.assert_allclose(found[part, row, column].numpy(), np.log(expected + FAINT), atol=1e-4)


def test_stripes_are_found_by_the_filter_of_their_orientation():
    energies = [middle(finished(stripes(math.pi * number / FIRST))[0])[ENERGY] for number in range(FIRST)]
    assert [int(energy.argmax()) for energy in energies] == list(range(FIRST))


def test_twice_the_contrast_is_one_step_in_all_energies():
    weak, strong = (middle(finished(stripes(0.3, contrast=part))[0])[ENERGY] for part in (0.2, 0.4))
    clear = weak > math.log(20 * FAINT)
    assert int(clear.sum()) >= 4
    assert torch.allclose((strong - weak)[clear], torch.tensor(math.log(2)), atol=0.03)


def test_a_dark_line_is_not_a_bright_one():
    image = torch.full((1, 3, 64, 64), 0.5)
    image[..., 36:38] = 0.1
    stage = finished(image)[1][0, :, 4, 4]  # of the copy of half the size, in which it is a pixel wide
    assert float(stage[DARK][0]) > float(stage[BRIGHT][0]) + 0.2
    lit = finished(1 - image)[1][0, :, 4, 4]
    torch.testing.assert_close(lit[DARK], stage[BRIGHT], atol=1e-4, rtol=0)


def test_an_even_surface_has_brightness_and_colour_alone():
    colour = torch.tensor([0.6, 0.3, 0.2])
    stages = finished(colour.view(1, 3, 1, 1).expand(1, 3, 64, 64))
    for stage in stages[:-1]:
        torch.testing.assert_close(stage, torch.full_like(stage, math.log(FAINT)), atol=1e-2, rtol=0)
    lows = stages[-1][0, -9:].unflatten(0, (3, 3))
    expected = LOW * torch.tensor([colour.mean(), 0.3, 0.25])
    torch.testing.assert_close(lows, expected.view(1, 3, 1, 1).expand_as(lows))


def test_what_moves_by_a_cell_is_seen_a_cell_further():
    image = noise(side=128, seed=5)
    here, there = (finished(part)[0] for part in (image[..., :96], image[..., 8:104]))
    torch.testing.assert_close(here[..., 5:-3], there[..., 4:-4], atol=1e-5, rtol=0)


def test_energies_are_averaged_over_a_patch_before_their_logarithm_is_taken():
    image = (noise(side=64, seed=2) * 255).byte()
    settings = recipe("wavelets", **{"pretrained.margin": 0}).pretrained
    found = cell_features(load_backbone(WAVELETS), settings, Grid(size=CELL, stride=CELL), image)[0, 4, 4]
    stages = Wavelets().stages(image.float() / 255)
    means = [stage[0, :, 3:6, 3:6].mean((1, 2)) for stage in stages]
    expected = torch.cat([(torch.cat(means)[:-9] + FAINT).log(), means[-1][-9:]])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_fewer_stages_are_the_first_ones_of_all():
    image = noise()
    some, every = load_backbone(WAVELETS, deepest=2), load_backbone(WAVELETS)
    assert some.deepest == 2
    assert every.deepest == LEVELS
    for few, all_of_them in zip(some.stages(image), every.stages(image), strict=False):
        assert torch.equal(few, all_of_them)
    kept = some.stages(image)[1]
    assert torch.equal(some.finished(2, kept), every.finished(2, kept))


def test_it_needs_no_file_and_comes_back_from_what_was_stored():
    assert installed(WAVELETS)
    backbone = load_backbone(WAVELETS, deepest=3)
    tensors = {name: value + 1e-3 for name, value in backbone.state_dict().items()}  # filters of another version
    again = rebuild(architecture(backbone), tensors)
    assert (again.digest, again.deepest) == (backbone.digest, 3)
    for name, value in again.state_dict().items():
        assert torch.equal(value, tensors[name])


def test_detectors_of_wavelets_whose_logarithms_came_first_are_refused():
    backbone = load_backbone(WAVELETS)
    tensors = {name: value for name, value in backbone.state_dict().items() if "faint" not in name}
    with pytest.raises(ModelFileError, match="faint"):
        rebuild(architecture(backbone), tensors)


def small(changes=None):
    """The preset, cut down to what small screws need."""
    cheap = {"size": 96, "training.epochs": 3, "pretrained.hidden": [32], "pretrained.out": 16, "automatic": []}
    cheap |= {"conditioning.foreground.method": "otsu", "encoder.head.hidden": [32], "training.batch": 64}
    return recipe("wavelets", **cheap | (changes or {}))


def test_a_detector_tells_bad_from_good_and_decides_the_same_when_loaded(tmp_path):
    good, bad = drawings.screws(30).images, drawings.screws(6, defect=True, level=110, seed=9).images
    detector = Detector.fit(good[:24], recipe=small(), seed=0)
    assert float(detector.score(bad).min()) > float(detector.score(good[24:]).max())
    assert detector.card()["origin"]["licence"] == FACTS[WAVELETS].licence
    detector.save(tmp_path / "a.firm")
    assert torch.equal(Detector.load(tmp_path / "a.firm").score(bad), detector.score(bad))


def test_a_trial_scores_as_the_detector_will(monkeypatch):
    """The surroundings count in a trial where the fit would count them: compared anywhere, and chosen automatically."""
    grids = []
    monkeypatch.setattr(
        "firm.scoring.models.Grid.surrounding",
        lambda grid, scores: grids.append(grid.surroundings) or torch.zeros_like(scores),
    )
    images = (noise(12, 64) * 255).byte()
    data = OneClass("images", images, images[:0], torch.zeros(0, dtype=torch.bool), 64)
    changes = {
        "conditioning.foreground.method": "ones",
        "size": 64,
        "pretrained.margin": 0,
        "automatic": ["neighbourhood"],
    }
    asked = small(changes)
    chosen = choose(asked, data, torch.arange(12), seed=0, backbone=load_backbone(WAVELETS)).recipe
    assert grids == [SURROUNDINGS]  # one of the two neighbourhoods that were tried is the whole image
    assert chosen.tiling.surroundings == (SURROUNDINGS if chosen.memory.neighbourhood < 0 else 0.0)
