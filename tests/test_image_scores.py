"""Neighbours against brute force, every score against its formula, and images scored whatever their company."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
import oracles
from firm.errors import SettingError
from firm.images.preprocess import Preprocessing
from firm.networks.heads import Encoder, build, embed
from firm.research.semantic import balanced_subset, evaluate_scorings
from firm.scoring import image_scores as scores
from firm.scoring import knn
from firm.scoring.image_scores import (
    SCORES,
    SCORINGS,
    Kde,
    Knn,
    Prototype,
    Scoring,
    crop_boxes,
    fit_scorings,
    reference_features,
    score_images,
    with_k,
)
from firm.scoring.knn import nearest, unit
from firm.types import Statistics

SIDE = 8
PREPROCESSING = Preprocessing(SIDE, 1.0, Statistics((0.5,) * 3, (0.25,) * 3))


def vectors(n, dim=5, seed=0):
    """Non-negative, as the encoder's features are."""
    return torch.rand(n, dim, generator=contracts.generator(seed))


# --- neighbours ---


@settings(max_examples=60)
@given(queries=st.integers(1, 12), bank=st.integers(1, 12), k=st.integers(1, 12), chunk=st.sampled_from([1, 20, 2**24]))
def test_neighbours_are_those_of_brute_force(queries, bank, k, chunk):
    asked, known = unit(vectors(queries)), unit(vectors(bank, seed=1))
    if k > bank:
        with pytest.raises(SettingError, match=f"k = {k} neighbours .* among {bank} "):
            nearest(asked, known, k)
        return
    expected = np.sort(asked.double().numpy() @ known.double().numpy().T, axis=1)[:, ::-1][:, :k]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knn, "CHUNK", chunk)  # however few similarities are held at once
        np.testing.assert_allclose(nearest(asked, known, k).numpy(), expected, atol=1e-6)


def test_no_query_has_no_neighbours_and_no_reference_is_refused():
    known = unit(vectors(4))
    assert nearest(known[:0], known, 2).shape == (0, 2)
    with pytest.raises(SettingError, match=r"k = 1 neighbours .* among 0 "):
        nearest(known, known[:0], 1)


def test_unit_vectors_and_the_zero_vector():
    found = unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


# --- scores of embeddings ---


ORACLES = {
    "knn": lambda query, bank: oracles.s_con(query, bank, 1),
    "prototype": oracles.s_proto,
    "kde": oracles.kde,
}


@pytest.mark.parametrize("name", SCORES)
def test_every_score_is_its_formula(name):
    bank, queries = vectors(20), vectors(9, seed=1) * 3
    found = SCORES[name].fit(bank)(queries)
    expected = [ORACLES[name](query, bank.tolist()) for query in queries.tolist()]
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("score", [*SCORES.values(), Knn(k=3), Knn(k=2, norm=True)])
def test_every_score_keeps_the_contract(score):
    rng = contracts.generator()
    normal = torch.tensor([5.0, 0.2, 0.2, 0.2]) + 0.1 * torch.rand(30, 4, generator=rng)
    strange = torch.tensor([0.1, 2.0, 2.0, 0.1]) + 0.1 * torch.rand(6, 4, generator=rng)
    contracts.check_score(score, normal, strange)


@settings(max_examples=25)
@given(k=st.integers(1, 6), norm=st.booleans(), seed=st.integers(0, 999))
def test_knn_is_its_formula(k, norm, seed):
    bank, queries = vectors(6, seed=seed), vectors(3, seed=seed + 1)
    found = Knn(k=k, norm=norm).fit(bank)(queries)
    expected = [oracles.s_con(query, bank.tolist(), k, norm=norm) for query in queries.tolist()]
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


def test_kde_splits_its_work_without_changing_it(monkeypatch):
    bank, queries = vectors(20), vectors(9, seed=1)
    whole = Kde().fit(bank)(queries)
    monkeypatch.setattr(scores, "CHUNK", 40)
    torch.testing.assert_close(Kde().fit(bank)(queries), whole)


def test_length_matters_to_the_starred_scores_only():
    bank, queries = vectors(10), vectors(4, seed=1)
    for score in (Knn(), Prototype(), Kde()):
        torch.testing.assert_close(score.fit(bank)(7 * queries), score.fit(bank)(queries), rtol=1e-4, atol=1e-6)
    starred = Knn(norm=True).fit(bank)
    torch.testing.assert_close(starred(7 * queries), 7 * starred(queries))


# --- scores of images ---


@pytest.fixture(scope="module")
def encoder():
    """A random network whose running statistics are those of some images, so that its features differ."""
    network = build(Encoder(width=8, stem="3x3/2"), rng=contracts.generator()).encoder
    network.train()
    with torch.no_grad():
        for _ in range(20):
            network(PREPROCESSING.test_view(contracts.images_of(64, 3, SIDE, seed=5)))
    return network.eval()


@pytest.fixture(scope="module")
def references():
    return contracts.images_of(12, 3, SIDE, seed=1)


@pytest.fixture(scope="module")
def images():
    return contracts.images_of(5, 3, SIDE, seed=2)


def features_by_hand(encoder, images, turn, box=None):
    """Turned by NumPy, cropped by loops, embedded one by one."""
    rows = []
    for view in PREPROCESSING.test_view(images):
        look = np.rot90(view.double().numpy(), turn, axes=(1, 2))
        if box is not None:
            top, left, side = (float(part) * SIDE for part in box)
            look = oracles.window(look, top, left, side, side, SIDE)
        rows.append(embed(encoder, iter([torch.tensor(look.copy(), dtype=torch.float32)[None]]))[0].tolist())
    return rows


@pytest.fixture(scope="module")
def by_hand(encoder, references, images):
    """Reference features per turn, and image features per turn: whole, and per crop."""
    boxes = crop_boxes(10)
    banks = [features_by_hand(encoder, references, turn) for turn in range(4)]
    whole = [features_by_hand(encoder, images, turn) for turn in range(4)]
    crops = [[features_by_hand(encoder, images, turn, box) for box in boxes] for turn in range(4)]
    return banks, whole, crops


def expected_scores(name, k, by_hand):
    banks, whole, crops = by_hand
    starred = name.endswith("*")
    results = []
    for i in range(len(whole[0])):
        if name.startswith("s_con"):
            results.append(oracles.s_con(whole[0][i], banks[0], k, norm=starred))
        elif name.startswith("s_shift"):
            results.append(oracles.s_shift([whole[turn][i] for turn in range(4)], banks, k, norm=starred))
        elif name.startswith("s_ens"):
            looks = [[crop[i] for crop in crops[turn]] for turn in range(4)]
            results.append(oracles.s_ens(looks, banks, k, norm=starred))
        else:
            results.append({"s_proto": oracles.s_proto, "kde": oracles.kde}[name](whole[0][i], banks[0]))
    return results


@pytest.fixture(scope="module")
def in_one_pass(encoder, references, images):
    """All scorings with k = 1 and k = 3 from one call."""
    scorings = {f"{name} {k}": with_k(scoring, k) for name, scoring in SCORINGS.items() for k in (1, 3)}
    fitted = fit_scorings(scorings, reference_features(encoder, PREPROCESSING, references, 4))
    return fitted, score_images(encoder, PREPROCESSING, images, fitted)


@pytest.mark.parametrize("name", SCORINGS)
def test_every_scoring_is_its_equation(name, by_hand, in_one_pass):
    for k in (1, 3):
        found = in_one_pass[1][f"{name} {k}"]
        assert float(found.std()) > 1e-4  # the images differ, or there would be nothing to compare
        np.testing.assert_allclose(found.numpy(), expected_scores(name, k, by_hand), rtol=1e-3, atol=1e-5)


def test_one_pass_is_each_scoring_alone(encoder, images, in_one_pass):
    fitted, together = in_one_pass
    for name in ("s_con 1", "s_shift* 3", "s_ens 1", "kde 1"):
        alone = score_images(encoder, PREPROCESSING, images, {name: fitted[name]})
        assert torch.equal(alone[name], together[name])


def test_a_score_does_not_depend_on_company(encoder, images, in_one_pass, monkeypatch):
    wanted = {name: in_one_pass[0][name] for name in ("s_con 1", "s_con* 3", "s_ens* 1", "kde 1")}
    alone = [score_images(encoder, PREPROCESSING, image[None], wanted) for image in images]
    monkeypatch.setattr(scores, "BATCH", 2)
    in_pairs = score_images(encoder, PREPROCESSING, images.flip(0), wanted)
    for name in wanted:
        together = in_one_pass[1][name]
        torch.testing.assert_close(torch.cat([one[name] for one in alone]), together, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(in_pairs[name].flip(0), together, rtol=1e-4, atol=1e-5)


def test_a_reference_image_is_the_least_anomalous(encoder, references, in_one_pass):
    found = score_images(encoder, PREPROCESSING, references, in_one_pass[0])
    for name in ("s_con", "s_shift"):
        torch.testing.assert_close(found[f"{name} 1"], torch.zeros(len(references)), rtol=0, atol=1e-5)
        assert float(in_one_pass[1][f"{name} 1"].min()) > 1e-4


def test_progress_and_nothing_to_score(encoder, images, in_one_pass, monkeypatch):
    wanted = {"plain": in_one_pass[0]["s_con 1"]}
    monkeypatch.setattr(scores, "BATCH", 2)
    told = []
    score_images(encoder, PREPROCESSING, images, wanted, told.append)
    assert told == [2, 2, 1]
    assert score_images(encoder, PREPROCESSING, images[:0], wanted)["plain"].shape == (0,)


def test_crops_lie_inside_the_image_and_never_change():
    boxes = crop_boxes(200)
    top, left, side = boxes.unbind(1)
    assert float(boxes.min()) >= 0
    assert float((top + side).max()) <= 1 + 1e-6
    assert float((left + side).max()) <= 1 + 1e-6
    area = side.square().sort().values
    assert float((area - torch.linspace(0.5, 1, 200)).abs().max()) < 0.06
    torch.manual_seed(7)
    assert torch.equal(boxes, crop_boxes(200))
    assert torch.equal(boxes[:10], crop_boxes(10))  # a scoring with more crops shares the first ones
    assert crop_boxes(0).shape == (0, 3)


def test_scorings_are_those_of_the_paper():
    described = {name: (scoring.by, scoring.turns, scoring.crops) for name, scoring in SCORINGS.items()}
    assert described == {
        "s_con": (Knn(), 1, 0),
        "s_con*": (Knn(norm=True), 1, 0),
        "s_shift": (Knn(), 4, 0),
        "s_shift*": (Knn(norm=True), 4, 0),
        "s_ens": (Knn(), 4, 10),
        "s_ens*": (Knn(norm=True), 4, 10),
        "s_proto": (Prototype(), 1, 0),
        "kde": (Kde(), 1, 0),
    }
    assert with_k(SCORINGS["s_ens*"], 5) == Scoring(by=Knn(k=5, norm=True), turns=4, crops=10)
    assert with_k(SCORINGS["kde"], 5) == SCORINGS["kde"]


def test_impossible_settings_are_named():
    with pytest.raises(SettingError, match="k is 0"):
        Knn(k=0)
    with pytest.raises(SettingError, match=r"score\.by\.scale is -1"):
        Kde(scale=-1.0)
    for name, value in (("turns", 2), ("crops", -1), ("crop_scale", (0.0, 1.0)), ("crop_scale", (0.9, 0.5))):
        with pytest.raises(SettingError, match=rf"score\.{name} (is )?{re.escape(str(value))}"):
            Scoring(**{name: value})


# --- evaluation ---


def test_evaluation_is_the_auroc_of_the_scores(encoder, references, images, in_one_pass):
    anomalous = torch.tensor([False, True, True, False, True])
    scorings = {name: SCORINGS[name] for name in ("s_con", "s_shift*", "kde")}
    found = evaluate_scorings(encoder, PREPROCESSING, references, images, anomalous, scorings)
    assert set(found) == set(scorings)
    for name, interval in found.items():
        expected = oracles.auroc(in_one_pass[1][f"{name} 1"].tolist(), anomalous.tolist())
        assert interval.value == pytest.approx(expected)
        assert 0 <= interval.low <= interval.high <= 1


@given(normal=st.integers(0, 20), wrong=st.integers(0, 20), wanted=st.integers(0, 50), seed=st.integers(0, 9))
def test_a_reduced_test_set_is_half_and_half_where_it_can_be(normal, wrong, wanted, seed):
    anomalous = torch.tensor([False] * normal + [True] * wrong, dtype=torch.bool)
    chosen = balanced_subset(anomalous, wanted, seed=seed)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert torch.equal(chosen, balanced_subset(anomalous, wanted, seed=seed))
    if wanted == 0 or wanted >= normal + wrong:
        assert len(chosen) == normal + wrong
        return
    assert len(chosen) <= wanted
    if min(normal, wrong) >= (wanted + 1) // 2:
        assert len(chosen) == wanted
        assert int((~anomalous[chosen]).sum()) == wanted // 2


def test_scorings_with_crops_of_other_scales_share_a_pass(encoder, references, images):
    """Each is scored by its own crops, whoever else is in the pass."""
    features = reference_features(encoder, PREPROCESSING, references, 1)
    scorings = {f"{low}": Scoring(crops=2, crop_scale=(low, 1.0)) for low in (0.3, 0.55)}
    together = score_images(encoder, PREPROCESSING, images, fit_scorings(scorings, features))
    for name, scoring in scorings.items():
        alone = score_images(encoder, PREPROCESSING, images, fit_scorings({name: scoring}, features))
        torch.testing.assert_close(alone[name], together[name])
    assert not torch.allclose(together["0.3"], together["0.55"])
