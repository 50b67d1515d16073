"""A batch is a function of seed, step and rank; an epoch is one pass over every inlier and its outliers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from cases import each
from firm.errors import DataError, SettingError
from firm.images.colour import Jitter
from firm.images.preprocess import Preprocessing
from firm.outliers.registry import CutPaste, Exposure, Rotations
from firm.outliers.whole_images import turned
from firm.training.batches import ImageTask, steps_per_epoch
from firm.training.loop import Training
from firm.types import Outliers, Statistics
from firm.views.registry import VIEWS, SimCLR

SIDE = 6
CLEAN = SimCLR(crop=(1.0, 1.0), jitter=Jitter(probability=0), blur=0.0)  # a view is the image itself
PIXELS = Preprocessing(SIDE)


def composed(
    images,
    step,
    *,
    batch=8,
    seed=0,
    stratified=False,
    outliers=None,
    views=CLEAN,
    preprocessing=PIXELS,
    foreground=None,
    rank=0,
    world=1,
):
    training = Training(batch=batch, stratified=stratified)
    task = ImageTask(images, preprocessing, outliers or Rotations(), views, training, seed, foreground)
    return task.batch(step, rank=rank, world=world)


def items_of(images, batch):
    """Which (inlier, quarter turns) each first view shows."""
    table = {
        turned(images[i : i + 1], quarter).numpy().tobytes(): (i, quarter)
        for i in range(len(images))
        for quarter in range(4)
    }
    half = batch.images[: len(batch.images) // 2]
    return [table[(image * 255).round().to(torch.uint8).numpy().tobytes()] for image in half]


@settings(max_examples=20)
@given(
    inliers=st.sampled_from([2, 6, 8]),
    batch=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 3),
)
def test_an_epoch_shows_every_inlier_at_every_angle_once(inliers, batch, seed, epoch):
    images = contracts.images_of(inliers, 3, SIDE)
    steps = steps_per_epoch(inliers, 3, batch)
    assert steps * batch == 4 * inliers
    shown = []
    for step in range(epoch * steps, (epoch + 1) * steps):
        made = composed(images, step, batch=batch, seed=seed)
        items = items_of(images, made)
        assert [quarter for _, quarter in items] == made.group[:batch].tolist()
        shown += items
    assert sorted(shown) == [(i, quarter) for i in range(inliers) for quarter in range(4)]


def test_the_incomplete_batch_is_dropped():
    assert steps_per_epoch(5000, 3, 32) == 625
    assert steps_per_epoch(2500, 3, 32) == 312
    images = contracts.images_of(5, 3, SIDE)
    shown = [item for step in range(2) for item in items_of(images, composed(images, step))]
    assert len(shown) == len(set(shown)) == 16


def test_epochs_are_shuffled_anew():
    images = contracts.images_of(8, 3, SIDE)
    first, second = (items_of(images, composed(images, step)) for step in (0, 4))
    assert first != second


def test_two_views_of_one_image_share_source_and_group():
    images = contracts.images_of(8, 3, SIDE)
    made = composed(images, 3)
    assert made.images.shape == (16, 3, SIDE, SIDE)
    assert made.source.tolist() == list(range(8)) * 2
    assert torch.equal(made.group[:8], made.group[8:])
    torch.testing.assert_close(made.images[:8], made.images[8:])  # the clean view shows the same image twice


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "source", "group"))


@pytest.mark.parametrize("world", [2, 3])
def test_the_parts_of_all_ranks_are_the_whole_batch(world):
    """Disjoint, complete and the same pixels, views and outliers included: the number of processes decides nothing."""
    images = contracts.images_of(8, 3, SIDE)

    def make(rank=0, world=1):
        return composed(images, 5, outliers=CutPaste(), views=VIEWS["simclr"], rank=rank, world=world)

    whole, parts = make(), [make(rank, world) for rank in range(world)]
    halves = [len(part.source) // 2 for part in parts]
    firsts = torch.cat([part.source[:half] for part, half in zip(parts, halves, strict=True)])
    assert sorted(firsts.tolist()) == list(range(8))
    assert max(halves) - min(halves) <= 1
    for part, half in zip(parts, halves, strict=True):
        assert torch.equal(part.source[:half], part.source[half:])  # both views of an image are on one rank
        at = torch.cat([part.source[:half], 8 + part.source[half:]])
        assert torch.equal(part.images, whole.images[at])
        assert torch.equal(part.group, whole.group[at])
    assert same(parts[1], make(1, world))


@each("rank, world", [(2, 2), (-1, 2), (0, 0), (8, 9)])
def test_impossible_ranks_are_refused(rank, world):
    with pytest.raises(SettingError, match=r"rank|processes"):
        composed(contracts.images_of(8, 3, SIDE), 0, rank=rank, world=world)


@pytest.mark.parametrize("outliers", [Rotations(), CutPaste()])
def test_a_batch_is_a_function_of_seed_and_step(outliers):
    images = contracts.images_of(8, 3, SIDE)
    before = images.clone()

    def make(step, seed=0):
        return composed(images, step, seed=seed, outliers=outliers, views=VIEWS["simclr"])

    wanted = make(5)
    make(0), make(9), make(2, seed=3)  # nothing is remembered
    torch.manual_seed(4)
    assert same(wanted, make(5))
    assert not same(wanted, make(6))
    assert not same(wanted, make(5, seed=1))
    assert torch.equal(images, before)


def test_every_step_draws_outliers_and_views_of_its_own():
    drawn = []

    class Watched(CutPaste):
        def __call__(self, inliers, *, rng, copy=None, scene=None):
            drawn.append(torch.rand(1, generator=rng).item())
            return super().__call__(inliers, rng=rng, copy=copy, scene=scene)

    def watched(images, size, *, rng, focus=None):
        drawn.append(torch.rand(1, generator=rng).item())
        return CLEAN(images, size, rng=rng, focus=focus)

    images = contracts.images_of(8, 3, SIDE)
    for step in range(6):
        composed(images, step, outliers=Watched(), views=watched)
    assert len(drawn) == len(set(drawn)) == 12


def test_a_quarter_of_the_items_are_inliers_in_expectation():
    images = contracts.images_of(64, 3, SIDE)
    counts = [int((composed(images, step, batch=32).group[:32] == 0).sum()) for step in range(8 * 12)]
    assert np.mean(counts) == 8  # whole epochs: exactly a quarter
    assert min(counts) < 8 < max(counts)


@each("batch, normal", [(8, 2), (32, 8), (10, 2), (3, 1)])
def test_stratified_batches_have_the_same_number_of_inliers(batch, normal):
    images = contracts.images_of(40, 3, SIDE)
    shown = []
    for step in range(steps_per_epoch(40, 3, batch)):
        made = composed(images, step, batch=batch, stratified=True)
        assert int((made.group[:batch] == 0).sum()) == normal
        shown += items_of(images, made)
    if 4 * normal == batch:
        assert sorted(shown) == [(i, quarter) for i in range(40) for quarter in range(4)]


def test_too_few_images_say_what_would_do():
    with pytest.raises(DataError, match=r"3 good images .* training\.batch=12"):
        steps_per_epoch(3, 3, 32)
    assert steps_per_epoch(3, 3, 12) == 1


def test_images_are_normalised_as_the_preprocessing_says():
    images = contracts.images_of(8, 3, SIDE)
    statistics = Statistics((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    raw = composed(images, 0).images
    found = composed(images, 0, preprocessing=Preprocessing(SIDE, 1.0, statistics)).images
    expected = (raw - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    torch.testing.assert_close(found, expected)


def test_colour_outliers_stand_beside_grey_inliers(tmp_path):
    pool = np.random.default_rng(0).integers(0, 256, (20, SIDE, SIDE, 3), dtype=np.uint8)
    np.save(tmp_path / "pool.npy", pool)
    images = contracts.images_of(16, 1, SIDE)
    source = Exposure(path=str(tmp_path / "pool.npy"))
    for step in range(4):
        made = composed(images, step, batch=16, outliers=source)
        assert made.images.shape == (32, 3, SIDE, SIDE)
        shown = (made.images * 255).round().to(torch.uint8)
        is_grey = (shown == shown[:, :1]).flatten(1).all(1)
        assert torch.equal(is_grey, made.group == 0)
        outside = {image.tobytes() for image in pool.transpose(0, 3, 1, 2)}
        assert all(image.numpy().tobytes() in outside for image in shown[made.group != 0])
        inside = {image.expand(3, -1, -1).numpy().tobytes() for image in images}
        assert all(image.numpy().tobytes() in inside for image in shown[made.group == 0])
    made = composed(images, 0, batch=2, outliers=source, stratified=True)
    assert made.group.tolist() == [0, 1] * 2


# --- where the object is, and where it was altered ---


class Noting(CutPaste):
    """Notes the inliers and the scene it is given."""

    def __init__(self, *, local=True):
        super().__init__()
        object.__setattr__(self, "local", local)
        object.__setattr__(self, "given", [])

    def __call__(self, inliers, *, rng, copy=None, scene=None):
        made = super().__call__(inliers, rng=rng, copy=copy, scene=scene)
        made = made if self.local else Outliers(made.images, made.group)
        self.given.append((inliers, scene, made))
        return made


def noting_views():
    given = []

    def views(images, size, *, rng, focus=None):
        given.append((images.clone(), focus))
        return CLEAN(images, size, rng=rng, focus=focus)

    return views, given


def with_objects(n=8):
    """Images, and an object in each that tells which it is."""
    images = contracts.images_of(n, 3, SIDE)
    return images, images[:, 0] > 100


@pytest.mark.parametrize("stratified", [False, True])
def test_a_source_is_told_where_the_objects_of_its_inliers_are(stratified):
    images, objects = with_objects()
    source = Noting()
    for step in range(3):
        composed(images, step, outliers=source, foreground=objects, stratified=stratified)
    assert len(source.given) == 3
    for inliers, scene, _ in source.given:
        assert torch.equal(scene.foreground, inliers[:, 0] > 100)
        assert torch.equal(scene.donors, images)
        assert torch.equal(scene.donor_foreground, objects)


@pytest.mark.parametrize("local", [True, False])
def test_views_are_told_of_the_object_and_of_what_was_altered(local):
    images, objects = with_objects()
    source, (views, given) = Noting(local=local), noting_views()
    for step in range(3):
        made = composed(images, step, outliers=source, views=views, foreground=objects)
        shown, focus = given[step]
        inliers, _, outliers = source.given[step]
        is_outlier = made.group[:8] != 0
        assert not focus.altered[~is_outlier].any()
        assert torch.equal(focus.foreground[~is_outlier], shown[~is_outlier][:, 0] > 100)
        assert torch.equal(focus.foreground[is_outlier], inliers[:, 0] > 100)  # that of the image it was made from
        assert torch.equal(shown[is_outlier], outliers.images)
        if local:
            assert torch.equal(focus.altered[is_outlier], (outliers.images != inliers).any(1))
        else:
            assert focus.altered[is_outlier].all()  # a source that does not say where altered the whole image
        assert 0 < int(is_outlier.sum()) < 8


def test_without_objects_nobody_is_told_of_any_and_nothing_else_changes():
    images, objects = with_objects()
    source, (views, given) = Noting(), noting_views()
    plain = composed(images, 2, outliers=source, views=views)
    assert source.given[0][1] is None
    assert given[0][1] is None
    assert same(plain, composed(images, 2, outliers=CutPaste()))
    # a source and views that have no use for a scene make the very same batch with one
    assert same(plain, composed(images, 2, outliers=CutPaste(), foreground=objects))
