"""The trial on good images: which play the inspected ones, which are remembered, and what becomes of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import contracts
import drawings
from firm.foreground import Rule
from firm.outliers import Donor, Mixed
from firm.trial import EXPOSURE, INSPECTED, KNOWN, apart, make_trial
from firm.types import FirmError


@given(images=st.integers(4, 500), of_each=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_no_part_is_both_inspected_and_remembered(images, of_each, seed):
    parts = torch.arange(images) // of_each
    inspected, known = apart(parts, rng=contracts.generator(seed))
    assert len(inspected) == min(INSPECTED, images // 3)
    assert 1 <= len(known) <= KNOWN
    assert len(set(known.tolist()) | set(inspected.tolist())) == len(known) + len(inspected)
    if images >= 100 * of_each:  # then the inspected leave enough parts to others
        assert not set(parts[known].tolist()) & set(parts[inspected].tolist())


def test_sisters_of_the_inspected_are_not_remembered():
    parts = torch.arange(600) // 6
    inspected, known = apart(parts, rng=contracts.generator())
    assert not set(parts[known].tolist()) & set(parts[inspected].tolist())
    assert len(known) == KNOWN


def test_one_part_alone_is_shared():
    inspected, known = apart(torch.zeros(30, dtype=torch.long), rng=contracts.generator())
    assert (len(inspected), len(known)) == (10, 20)


def test_the_trial_is_good_images_apart_and_the_same_with_defects_in_changing_light():
    images = drawings.screws(30).images
    trial = make_trial(images, torch.arange(len(images)), Rule(method="otsu"), Donor(), seed=0)
    assert trial.inspected.shape[0] == 20
    assert trial.defective.tolist() == [False] * 10 + [True] * 10
    names = {image.numpy().tobytes(): number for number, image in enumerate(images)}
    known = {names[image.numpy().tobytes()] for image in trial.known}
    shown = []
    for good in trial.inspected[:10].float():
        ratio = good.mean() / images.float().mean((1, 2, 3))
        difference = (images.float() * ratio[:, None, None, None] - good).abs().mean((1, 2, 3))
        number = int(difference.argmin())
        assert float(difference[number]) < 1
        assert abs(float(ratio[number]) - 1) < EXPOSURE + 0.01
        shown.append((number, float(ratio[number])))
    assert len({number for number, _ in shown}) == 10
    assert not known & {number for number, _ in shown}
    assert len(known) >= 10
    ratios = [ratio for _, ratio in shown]
    assert max(ratios) - min(ratios) > EXPOSURE
    for (number, _), bad in zip(shown, trial.inspected[10:].float(), strict=True):
        original = images[number].float()
        original *= bad.median() / original.median()
        assert float((bad - original).abs().max()) > 10


def trial_of(images, defects, seed=0):
    return make_trial(images, torch.arange(len(images)), Rule(), defects, seed=seed)


def test_every_kind_of_defect_gets_its_share():
    """Each source alters some image: of grey images a stroke alters little, a shade much."""
    images = torch.full((90, 1, 64, 64), 120, dtype=torch.uint8)
    trial = make_trial(
        images, torch.arange(len(images)), Rule(), Mixed(sources=("strokes", "shades"), per_inlier=2), seed=0
    )
    bad = trial.inspected[trial.defective].float()
    altered = (bad - bad.flatten(1).median(1).values[:, None, None, None]).abs().gt(5).flatten(1).float().mean(1)
    assert 10 <= int((altered < 0.05).sum()) <= 20


def test_a_trial_is_bounded_and_the_same_for_a_seed():
    images = contracts.images_of(300, 1, 16)
    trial = trial_of(images, Donor())
    assert (len(trial.known), len(trial.inspected)) == (KNOWN, 2 * INSPECTED)
    assert torch.equal(trial_of(images, Donor()).inspected, trial.inspected)
    assert not torch.equal(trial_of(images, Donor(), seed=1).inspected, trial.inspected)


def test_too_few_images_say_what_would_do():
    with pytest.raises(FirmError, match=r"3 good images are too few to choose settings on; give 4 .* automatic=\[\]"):
        make_trial(contracts.images_of(3, 1, 16), torch.arange(3), Rule(), Donor(), seed=0)
