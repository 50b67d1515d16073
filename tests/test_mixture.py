"""Mixture: which source makes which outlier, separate kinds, separate streams, settings as JSON."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from firm.errors import FirmError
from firm.images.preprocess import Preprocessing
from firm.outliers.registry import LOCAL, CutPaste, Mixture
from firm.recipes.presets import PATCHES
from firm.recipes.recipe import Recipe, change, digest, from_json, parse_settings, to_json
from firm.training.batches import ImageTask
from firm.training.loop import Training
from firm.types import Outliers, Scene, Statistics
from firm.views.registry import Translation

STATISTICS = Statistics((0.5,) * 3, (0.5,) * 3)
DEFAULT = ("perlin-blend", "nsa", "cutpaste-union")


class Marking:
    """A source that adds its number to every pixel, in kinds by its draws, and remembers what it was given."""

    per_inlier = 2

    def __init__(self, number, kinds):
        self.number, self.kinds, self.calls = number, kinds, []

    def __call__(self, inliers, *, rng, copy=None, scene=None):
        self.calls.append((inliers, copy, scene))
        group = torch.randint(1, self.kinds + 1, (len(inliers),), generator=rng)
        return Outliers(inliers + self.number, group, torch.ones_like(inliers[:, 0], dtype=torch.bool))


@pytest.fixture
def marking(monkeypatch):
    """The three default sources replaced by such, of 3, 1 and 2 kinds."""
    sources = [Marking(number, kinds) for number, kinds in ((1, 3), (2, 1), (3, 2))]
    for name, source in zip(DEFAULT, sources, strict=True):
        monkeypatch.setitem(LOCAL, name, source)
    return sources


def some_scene(n, donors):
    """Objects and donors that differ from each other."""
    rng = contracts.generator(5)
    objects = torch.rand(n + donors, 16, 16, generator=rng) < 0.7
    return Scene(objects[:n], contracts.images_of(donors, seed=6), objects[n:])


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True))


# --- who makes what ---


@pytest.mark.parametrize("per_inlier", [3, 7])
def test_the_copy_names_the_source_and_results_stand_in_the_order_of_the_inliers(marking, per_inlier):
    inliers = contracts.images_of(40)
    copy = torch.randint(per_inlier, (40,), generator=contracts.generator(3))
    made = Mixture(per_inlier=per_inlier)(inliers, rng=contracts.generator(), copy=copy)
    first = {1: (1, 3), 2: (4, 4), 3: (5, 6)}  # kinds of each source: 3, then 1, then 2
    for inlier, number, result, group in zip(inliers, copy.tolist(), made.images, made.group.tolist(), strict=True):
        turn = 1 + number % 3
        assert torch.equal(result, inlier + turn)
        low, high = first[turn]
        assert low <= group <= high
    assert set(made.group.tolist()) == set(range(1, 7))
    assert made.where.all()
    assert Mixture().kinds == 6


@pytest.mark.parametrize(("per_inlier", "shares"), [(3, (1, 1, 1)), (4, (2, 1, 1))])
def test_without_a_copy_one_is_drawn_uniformly(marking, per_inlier, shares):
    inliers = torch.zeros(2000, 1, 1, 1, dtype=torch.uint8)
    made = Mixture(per_inlier=per_inlier)(inliers, rng=contracts.generator())
    found = np.bincount(made.images.flatten(), minlength=4)
    np.testing.assert_allclose(found / 2000, [0, *np.array(shares) / per_inlier], atol=0.035)


@pytest.mark.parametrize(("per_inlier", "copied"), [(1, True), (2, False), (2, True)])
def test_fewer_outliers_than_sources_are_drawn_from_all_of_them(marking, per_inlier, copied):
    """Half good images and half outliers, of however many sources."""
    inliers = torch.zeros(2000, 1, 1, 1, dtype=torch.uint8)
    copy = torch.arange(2000) % per_inlier if copied else None
    made = Mixture(per_inlier=per_inlier)(inliers, rng=contracts.generator(), copy=copy)
    found = np.bincount(made.images.flatten(), minlength=4)
    np.testing.assert_allclose(found / 2000, [0, 1 / 3, 1 / 3, 1 / 3], atol=0.035)


def test_a_drawn_copy_is_as_good_as_a_given_one(marking):
    inliers = contracts.images_of(12)
    drawn = Mixture()(inliers, rng=contracts.generator())
    copy = (drawn.images - inliers)[:, 0, 0, 0].long() - 1
    assert equal(drawn, Mixture()(inliers, rng=contracts.generator(), copy=copy))


def test_a_source_draws_among_its_own_variants(marking):
    """A source has as many copies as it likes; the numbers that reach it here are not those."""
    Mixture()(contracts.images_of(9), rng=contracts.generator(), copy=torch.arange(9) % 3)
    assert [call[1] for source in marking for call in source.calls] == [None] * 3


def test_a_source_is_not_asked_for_nothing(marking):
    Mixture()(contracts.images_of(2), rng=contracts.generator(), copy=torch.tensor([1, 1]))
    assert [len(source.calls) for source in marking] == [0, 1, 0]


@pytest.mark.parametrize("copies", [[2] * 40, [0, 1, 2, 2] * 10])
def test_both_pieces_of_cutpaste_appear(copies):
    images = contracts.images_of(40, 3, 64)
    made = Mixture()(images, rng=contracts.generator(), copy=torch.tensor(copies))
    _, pieces = made.group[torch.tensor(copies) == 2].unique(return_counts=True)
    assert len(pieces) == 2
    assert pieces.min() > pieces.sum() / 5
    assert set(made.group.tolist()) == {copies[0] + 1, copies[1] + 1, 3, 4}


def test_a_scene_is_cut_to_the_inliers_of_a_source_and_keeps_all_donors(marking):
    inliers, scene = contracts.images_of(7), some_scene(7, 5)
    copy = torch.tensor([2, 0, 0, 1, 2, 0, 2])
    Mixture()(inliers, rng=contracts.generator(), copy=copy, scene=scene)
    for turn, source in enumerate(marking):
        [(given, _, share)] = source.calls
        assert torch.equal(given, inliers[copy == turn])
        assert torch.equal(share.foreground, scene.foreground[copy == turn])
        assert torch.equal(share.donors, scene.donors)
        assert torch.equal(share.donor_foreground, scene.donor_foreground)


def test_without_a_scene_all_inliers_are_donors_and_objects_are_everywhere(marking):
    inliers = contracts.images_of(6)
    Mixture()(inliers, rng=contracts.generator(), copy=torch.arange(6))
    for source in marking:
        [(_, _, share)] = source.calls
        assert torch.equal(share.donors, inliers)
        assert share.foreground.shape == (2, 16, 16)
        assert share.foreground.all()
        assert share.donor_foreground.all()


# --- what is drawn ---


@settings(max_examples=10)
@given(
    sources=st.lists(st.sampled_from(sorted(LOCAL)), min_size=1, max_size=4, unique=True),
    more=st.integers(0, 2),
    channels=st.sampled_from([1, 3]),
)
def test_any_mixture_keeps_the_contract(sources, more, channels):
    source = Mixture(sources=tuple(sources), per_inlier=len(sources) + more)
    contracts.check_outlier_source(source, contracts.images_of(6, channels, 24, 20))


@pytest.mark.parametrize("scene", [None, some_scene(9, 4)])
def test_what_one_source_draws_shifts_no_other(scene):
    """Nor where it stands among them, nor how many outliers it is asked for."""
    inliers, turns = contracts.images_of(9), torch.arange(9) % 3

    def made_by(*sources, copy=turns):
        return Mixture(sources=sources)(inliers, rng=contracts.generator(), copy=copy, scene=scene)

    usual = made_by(*DEFAULT)
    other = made_by("perlin-blend", "nsa-uniform", "cutpaste-union")
    moved = made_by("cutpaste-union", "perlin-blend", "nsa", copy=(turns + 1) % 3)
    fewer = made_by(*DEFAULT, copy=torch.where(turns == 1, 2, turns))
    assert torch.equal(usual.images, moved.images)
    assert torch.equal(usual.images[turns != 1], other.images[turns != 1])
    assert torch.equal(usual.images[turns == 0], fewer.images[turns == 0])
    assert not torch.equal(usual.images[turns == 1], other.images[turns == 1])


def test_sources_and_calls_draw_differently():
    """Two calls on one generator differ, and so do two sources of the same settings under different names."""
    inliers = contracts.images_of(4)
    rng = contracts.generator()
    first, second = (Mixture()(inliers, rng=rng, copy=torch.zeros(4, dtype=torch.long)) for _ in range(2))
    assert not torch.equal(first.images, second.images)
    assert LOCAL["nsa-carpet"] == LOCAL["nsa-tile"]
    twins = Mixture(sources=("nsa-carpet", "nsa-tile"))
    carpet, tile = (twins(inliers, rng=contracts.generator(), copy=torch.full((4,), turn)) for turn in (0, 1))
    assert not torch.equal(carpet.images, tile.images)


def test_a_batch_takes_its_outliers_from_all_sources(marking):
    preprocessing, training = Preprocessing(size=16, statistics=STATISTICS), Training(batch=32, stratified=True)
    everywhere = torch.ones(8, 16, 16, dtype=torch.bool)
    batch = ImageTask(
        contracts.images_of(8), preprocessing, Mixture(), Translation(), training, seed=0, foreground=everywhere
    ).batch(0)
    assert [len(source.calls[0][0]) for source in marking] == [8, 8, 8]  # an epoch in a batch: every copy once
    assert set(batch.group.tolist()) <= set(range(7))
    assert int((batch.group == 4).sum()) == 2 * 8  # the one kind of the second source, in two views


# --- settings ---


def through_json(recipe):
    return from_json(json.loads(json.dumps(to_json(recipe))))


def test_a_recipe_names_it_changes_it_and_reads_it_back():
    recipe = change(PATCHES, {"outliers": "mixture"})
    assert recipe.outliers == Mixture()
    assert to_json(recipe)["outliers"] == {"kind": "mixture", "sources": list(DEFAULT), "per_inlier": 3}
    two = change(recipe, {"outliers.sources": ["perlin-blend", "nsa"]})
    assert two.outliers == Mixture(sources=("perlin-blend", "nsa"))
    typed = parse_settings(["outliers=mixture", 'outliers.sources=["nsa-screw"]', "outliers.per_inlier=1"])
    one = change(PATCHES, typed)
    assert one.outliers == Mixture(sources=("nsa-screw",), per_inlier=1)
    for each in (recipe, two, one):
        assert through_json(each) == each
        assert digest(through_json(each)) == digest(each)
    assert len({digest(each) for each in (PATCHES, recipe, two, one)}) == 4


def test_several_sources_are_several_kinds():
    assert Recipe(positives="rot-supcon", outliers=Mixture(sources=("perlin-blend", "nsa"))).outliers.kinds == 2
    with pytest.raises(FirmError, match="rot-supcon needs several kinds of outliers"):
        Recipe(positives="rot-supcon", outliers=Mixture(sources=("perlin-blend",)))
    assert Mixture(sources=("cutpaste-union",)).kinds == CutPaste().kinds == 2
