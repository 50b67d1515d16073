"""A prototype of patches: its definition as plain loops, what it leaves out, and that it is saved whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from firm.errors import DataError, ModelFileError, SettingError
from firm.scoring.memory import Memory
from firm.scoring.models import PatchScorer
from firm.scoring.patch_bank import Prototype, fit_prototype, remember
from firm.scoring.patch_grid import Grid
from firm.scoring.place_statistics import statistics

PLAIN, STANDARD = Memory(), Memory(standardise=True)


def drawn(n=6, rows=3, columns=4, dim=5, seed=0, centre=0.6):
    rng = contracts.generator(seed)
    return torch.randn(n, rows, columns, dim, generator=rng) + centre


def naive_direction(features, *, without=(), visible=None):
    total = torch.zeros(features.shape[-1], dtype=torch.float64)
    for image in range(len(features)):
        for row in range(features.shape[1]):
            for column in range(features.shape[2]):
                if image not in without and (visible is None or visible[image, row, column]):
                    patch = features[image, row, column].double()
                    total += patch / patch.norm()
    return total / total.norm()


def naive_scores(features, directions):
    scores = torch.zeros(features.shape[:3])
    for image in range(len(features)):
        for row in range(features.shape[1]):
            for column in range(features.shape[2]):
                patch = features[image, row, column].double()
                scores[image, row, column] = 1 - patch @ directions[image] / patch.norm()
    return scores


@settings(max_examples=20)
@given(n=st.integers(1, 5), dim=st.integers(1, 8), seed=st.integers(0, 999))
def test_a_patch_scores_one_less_its_cosine_to_the_mean_direction(n, dim, seed):
    good, asked = drawn(n, dim=dim, seed=seed, centre=3.0), drawn(2, dim=dim, seed=seed + 1)  # they have a direction
    found = fit_prototype(good, PLAIN)
    expected = naive_scores(asked, [naive_direction(good)] * 2)
    torch.testing.assert_close(found.score(asked), expected, atol=1e-5, rtol=0)


def test_without_a_common_direction_every_patch_is_as_far_away():
    good = torch.cat([drawn(2), -drawn(2)])
    torch.testing.assert_close(
        fit_prototype(good, PLAIN).score(drawn(1, seed=1)), torch.ones(1, 3, 4), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("parts", [None, [0, 0, 1, 1, 2, 2]])
def test_scores_are_standardised_by_what_images_score_without_their_own_part(parts):
    good = drawn()
    owner = list(range(6)) if parts is None else parts
    found = fit_prototype(good, STANDARD, parts=None if parts is None else torch.tensor(parts))
    directions = [
        naive_direction(good, without=[other for other in range(6) if owner[other] == owner[image]])
        for image in range(6)
    ]
    mean, deviation = statistics(naive_scores(good, directions), torch.ones(good.shape[:3], dtype=torch.bool))
    asked = drawn(2, seed=7)
    expected = (naive_scores(asked, [naive_direction(good)] * 2) - mean) / deviation
    torch.testing.assert_close(found.score(asked), expected, atol=1e-4, rtol=1e-4)


def test_images_of_a_single_part_are_others_to_each_other():
    good = drawn()
    one, none = (fit_prototype(good, STANDARD, parts=parts) for parts in (torch.zeros(6, dtype=torch.long), None))
    assert torch.equal(one.mean, none.mean)


def test_what_is_not_seen_does_not_count():
    good = drawn(20)
    visible = torch.ones(20, 3, 4, dtype=torch.bool)
    visible[:3, 1:] = False
    wild = good.clone()
    wild[~visible] = -100.0
    known, blind = (fit_prototype(features, STANDARD, visible=visible) for features in (good, wild))
    for name, value in known.state_dict().items():
        assert torch.equal(value, blind.state_dict()[name]), name
    torch.testing.assert_close(known.direction.double(), naive_direction(good, visible=visible), atol=1e-6, rtol=0)


def test_the_order_and_the_company_of_images_do_not_matter():
    good, asked = drawn(40), drawn(5, seed=3)
    found = fit_prototype(good, STANDARD)
    other = fit_prototype(good.flip(0), STANDARD)
    torch.testing.assert_close(other.score(asked), found.score(asked), atol=1e-4, rtol=1e-4)
    alone = torch.cat([found.score(image[None]) for image in asked])
    torch.testing.assert_close(alone, found.score(asked), atol=1e-5, rtol=1e-5)


def test_it_is_its_tensors():
    found = fit_prototype(drawn(), STANDARD)
    again = Prototype(STANDARD, found.state_dict())
    assert torch.equal(again.score(drawn(2, seed=1)), found.score(drawn(2, seed=1)))
    with pytest.raises(ModelFileError, match="direction"):
        Prototype(STANDARD, {})


def test_what_cannot_be_is_refused():
    with pytest.raises(DataError, match="no good patches"):
        fit_prototype(drawn(0), PLAIN)
    with pytest.raises(DataError, match="no good patches"):
        fit_prototype(drawn(2), PLAIN, visible=torch.zeros(2, 3, 4, dtype=torch.bool))
    with pytest.raises(DataError, match="standardise"):
        fit_prototype(drawn(1), STANDARD)
    with pytest.raises(SettingError, match=r"\(3, 4, 6\)"):
        fit_prototype(drawn(), PLAIN).score(drawn(dim=6))


def test_no_patch_weighs_more_than_another():
    found = fit_prototype(drawn(), PLAIN)
    assert torch.equal(found.weights(drawn()[0, 0], torch.arange(4)), torch.ones(4))


def test_behind_the_head_patches_are_compared_with_the_mean_and_else_with_each_other():
    rng = contracts.generator(0)
    made = {kind: remember(kind, drawn(), PLAIN, rng=rng) for kind in ("encoder", "projection", "backbone")}
    assert {kind: isinstance(one, Prototype) for kind, one in made.items()} == {
        "encoder": False,
        "projection": True,
        "backbone": False,
    }


def test_a_saved_scorer_has_a_prototype_behind_the_head():
    grid = Grid(size=8, stride=8)
    prototype = fit_prototype(drawn(), STANDARD)
    tensors = PatchScorer(grid, {"projection": prototype}, torch.zeros(3, 4)).state_dict()
    again = PatchScorer.from_tensors(tensors, grid, STANDARD, ("projection",)).banks["projection"]
    assert torch.equal(again.score(drawn(2, seed=1)), prototype.score(drawn(2, seed=1)))
