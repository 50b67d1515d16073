"""The four positive sets and the loss against golden values, loops, finite differences and their own symmetries."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
import oracles
from cases import each
from firm.training.positives import (
    LAYOUTS,
    POSITIVES,
    collapsed_loss,
    contrastive_loss,
    firm,
    ntxent,
    rot_supcon,
    supcon,
)

TAU = 0.2
GROUP = torch.tensor([0, 0, 1, 2, 1, 3])
GOLDEN = {  # concat mean, concat sum, pairwise first -> second, pairwise second -> first
    "ntxent": (0.57338574, 6.88062891, 0.33945106, 0.33254740),
    "supcon": (3.61491792, 43.37901505, 2.99229041, 2.98538676),
    "rot-supcon": (1.44461592, 17.33539107, 1.00367508, 0.99677142),
    "firm": (0.69889711, 8.38676527, 0.43522501, 0.42832135),
}


def golden_views():
    i = torch.arange(6, dtype=torch.float64)
    first = torch.stack([(0.7 * i + 0.3).sin(), (1.1 * i - 0.2).cos(), (0.5 * i**2 + 1.0).sin()], 1)
    second = torch.stack([(0.7 * i + 0.45).sin(), (1.1 * i - 0.05).cos(), (0.5 * i**2 + 1.2).sin()], 1)
    return first, second


def masked(kind, group):
    """The mask of a two-view batch, first views before second views."""
    source = torch.arange(len(group)).repeat(2)
    return POSITIVES[kind](source, group.repeat(2))


def random_z(views, dim=4, seed=0, dtype=torch.float64):
    return torch.randn(views, dim, generator=contracts.generator(seed), dtype=dtype)


groups = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(torch.tensor)
kinds = st.sampled_from(sorted(POSITIVES))
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**32)


@pytest.mark.parametrize("kind", POSITIVES)
def test_golden_values(kind):
    first, second = golden_views()
    mean, total, there, back = GOLDEN[kind]
    mask = masked(kind, GROUP)
    concat = contrastive_loss(torch.cat([first, second]), mask, TAU).item()
    assert concat == pytest.approx(mean, abs=6e-9)
    assert concat * 12 == pytest.approx(total, abs=6e-9)
    assert contrastive_loss(torch.cat([first, second]), mask, TAU, "pairwise").item() == pytest.approx(there, abs=6e-9)
    assert contrastive_loss(torch.cat([second, first]), mask, TAU, "pairwise").item() == pytest.approx(back, abs=6e-9)


@settings(max_examples=60)
@given(group=groups, kind=kinds, order=st.randoms())
def test_positive_sets_are_the_words_of_the_paper(group, kind, order):
    places = list(range(2 * len(group)))
    order.shuffle(places)  # a positive set knows no first and second half
    source, both = torch.arange(len(group)).repeat(2)[places], group.repeat(2)[places]
    contracts.check_positive_set(POSITIVES[kind], source, both)
    mask = POSITIVES[kind](source, both)
    for i in places:
        expected = oracles.positives(kind, i, range(len(places)), source.tolist(), both.tolist())
        assert mask[i].nonzero().flatten().tolist() == expected


@given(group=groups)
def test_firm_is_supcon_with_a_label_of_its_own_for_every_outlier(group):
    own = torch.where(group == 0, 0, 1 + torch.arange(len(group)))
    assert torch.equal(masked("firm", group), masked("rot-supcon", own))


@given(inliers=st.integers(1, 6), outliers=st.integers(0, 6))
def test_firm_meets_its_siblings_at_the_ends(inliers, outliers):
    alone = torch.zeros(inliers, dtype=torch.long)
    assert torch.equal(masked("firm", alone), masked("supcon", alone))
    one_inlier = torch.cat([torch.tensor([0]), torch.ones(outliers, dtype=torch.long)])
    assert torch.equal(masked("firm", one_inlier), masked("ntxent", one_inlier))


def test_sizes_of_the_positive_sets():
    group = torch.tensor([0] * 8 + [1] * 8 + [2] * 8 + [3] * 8)
    sizes = {kind: masked(kind, group).sum(1)[[0, 31]].tolist() for kind in POSITIVES}
    assert sizes == {"ntxent": [1, 1], "supcon": [15, 47], "rot-supcon": [15, 15], "firm": [15, 1]}


@settings(max_examples=40)
@given(group=groups, kind=kinds, seed=seeds)
def test_concat_knows_no_order_of_views(group, kind, seed):
    z = random_z(2 * len(group), seed=seed)
    source, both = torch.arange(len(group)).repeat(2), group.repeat(2)
    places = torch.randperm(len(z), generator=contracts.generator(seed + 1))
    expected = contrastive_loss(z, POSITIVES[kind](source, both), TAU)
    shuffled = contrastive_loss(z[places], POSITIVES[kind](source[places], both[places]), TAU)
    torch.testing.assert_close(shuffled, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(group=groups, kind=kinds, layout=layouts, seed=seeds)
def test_order_of_images_does_not_matter_in_either_layout(group, kind, layout, seed):
    n = len(group)
    z = random_z(2 * n, seed=seed)
    places = torch.randperm(n, generator=contracts.generator(seed + 1))
    expected = contrastive_loss(z, masked(kind, group), TAU, layout)
    shuffled = contrastive_loss(z[torch.cat([places, n + places])], masked(kind, group[places]), TAU, layout)
    torch.testing.assert_close(shuffled, expected, rtol=1e-12, atol=1e-12)


@each("kind", POSITIVES)
def test_swapping_the_views_changes_pairwise_only(kind):
    first, second = golden_views()
    mask = masked(kind, GROUP)
    there, back = torch.cat([first, second]), torch.cat([second, first])
    torch.testing.assert_close(
        contrastive_loss(there, mask, TAU), contrastive_loss(back, mask, TAU), rtol=1e-12, atol=1e-12
    )
    gap = contrastive_loss(there, mask, TAU, "pairwise") - contrastive_loss(back, mask, TAU, "pairwise")
    assert gap.abs() > 1e-3


@each("kind, layout", [("firm", "concat"), ("rot-supcon", "pairwise")])
def test_gradient_is_that_of_finite_differences(kind, layout):
    z = random_z(10, dim=3).requires_grad_()
    mask = masked(kind, torch.tensor([0, 0, 1, 2, 1]))
    assert torch.autograd.gradcheck(lambda z: contrastive_loss(z, mask, TAU, layout), z)


@each("kind, layout, tau", [(kind, *rest) for kind in POSITIVES for rest in (("concat", 0.01), ("pairwise", 0.05))])
def test_float32_follows_float64_at_low_temperatures(kind, layout, tau):
    z = random_z(16, dim=8)
    mask = masked(kind, torch.tensor([0, 0, 0, 1, 2, 3, 1, 2]))
    narrow = z.float().requires_grad_()
    loss = contrastive_loss(narrow, mask, tau, layout)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), contrastive_loss(z, mask, tau, layout), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(narrow.grad).all()


@each("layout", LAYOUTS)
def test_zero_vectors_are_at_a_right_angle_to_everything(layout):
    z = random_z(12)
    z[3] = 0
    source, group = torch.arange(6).repeat(2), GROUP.repeat(2)
    expected = oracles.loss(z.tolist(), source.tolist(), group.tolist(), TAU, "firm", layout)
    z.requires_grad_()
    loss = contrastive_loss(z, firm(source, group), TAU, layout)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert torch.isfinite(z.grad).all()


def test_a_batch_with_one_view_of_each_image_is_finite():
    z = random_z(5).requires_grad_()
    lonely = torch.arange(5)
    loss = contrastive_loss(z, ntxent(lonely, lonely), TAU)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(z.grad, torch.zeros_like(z))
    # an anchor without positives adds nothing, but it still counts as an anchor
    mixed = contrastive_loss(z, firm(lonely, torch.tensor([0, 0, 1, 1, 1])), TAU).item()
    assert mixed == pytest.approx(oracles.loss(z.tolist(), [0, 1, 2, 3, 4], [0, 0, 1, 1, 1], TAU, "firm"))


@each("kind, layout", [("firm", "concat"), ("supcon", "pairwise")])
def test_a_constant_embedding_rests_at_the_log_of_its_keys(kind, layout):
    z = torch.ones(12, 4, dtype=torch.float64)
    found = contrastive_loss(z, masked(kind, GROUP), TAU, layout).item()
    assert found == pytest.approx(collapsed_loss(12, layout), abs=1e-12)
    assert found == pytest.approx(math.log(11 if layout == "concat" else 6), abs=1e-12)


def test_the_floor_is_the_log_of_the_positives():
    """All positives on one point and everything else opposite: log |P|, not zero."""
    inliers, views = 8, 16
    z = torch.tensor([[1.0, 0.0]] * inliers + [[-1.0, 0.0]], dtype=torch.float64).repeat(2, 1)
    mask = masked("firm", torch.tensor([0] * inliers + [1]))
    sharp = contrastive_loss(z, mask, 0.01).item() * len(z)  # the two outlier views are alone together: zero
    assert sharp == pytest.approx(views * math.log(views - 1), rel=1e-9)
    paired = contrastive_loss(z, mask, 0.01, "pairwise").item() * (inliers + 1)
    assert paired == pytest.approx(inliers * math.log(inliers), rel=1e-9)


def test_loss_falls_as_positives_close_in():
    mask = masked("firm", torch.tensor([0, 0, 1]))
    far = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    losses = []
    for part in (0.0, 0.5, 1.0):
        near = far.clone()
        near[1, 1] -= part
        losses.append(contrastive_loss(near.repeat(2, 1), mask, TAU).item())
    assert all(later < earlier for earlier, later in pairwise(losses))


def test_the_table_holds_the_four_sets():
    assert {"ntxent": ntxent, "supcon": supcon, "rot-supcon": rot_supcon, "firm": firm} == POSITIVES
