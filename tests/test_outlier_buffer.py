"""Outliers used several times: a window that slides with the steps and is a function of seed and step alone."""

from collections import Counter

import pytest
import torch

import contracts
from firm.images.preprocess import Preprocessing
from firm.outliers.registry import PerlinBlend, Rotations
from firm.recipes.presets import INSPECT
from firm.recipes.recipe import change
from firm.training.batches import READY, ImageTask, OutlierBuffer
from firm.training.loop import Training
from firm.training.runs import Run
from firm.types import Outliers
from firm.views.registry import PatchPairs

SIDE = 4
IMAGES = contracts.images_of(6, 1, SIDE)
OBJECTS = torch.rand(6, SIDE, SIDE, generator=contracts.generator(3)) < 0.5


class Numbered:
    """Outliers of drawn pixels, so that each can be told from all others; notes what it is given."""

    per_inlier = 1
    kinds = 3

    def __init__(self, *, where=True):
        self.where = where
        self.given = []

    def __call__(self, inliers, *, rng, copy=None, scene=None):
        self.given.append((inliers, copy, scene))
        images = torch.randint(256, inliers.shape, generator=rng, dtype=torch.uint8)
        group = torch.randint(1, 4, (len(inliers),), generator=rng)
        return Outliers(images, group, images[:, 0] > 99 if self.where else None)


def replay(per_step=2.0, *, seed=0, source=None):
    return OutlierBuffer(source or Numbered(), IMAGES, OBJECTS, seed, per_step)


def names(taken):
    """What tells the outliers of a step apart."""
    return [image.numpy().tobytes() for image in taken.images]


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "group", "where"))


@pytest.mark.parametrize("per_step", [0.3, 1.5])
def test_a_step_does_not_know_which_steps_ran_before(per_step):
    ran = replay(per_step)
    for step in range(0, 700, 7):
        ran.take(step, 8)
    wanted = ran.take(700, 8)
    assert same(replay(per_step).take(700, 8), wanted)
    ran.take(30, 8)  # back, and forth again
    assert same(ran.take(700, 8), wanted)
    torch.manual_seed(5)
    assert same(replay(per_step).take(700, 8), wanted)
    assert not same(replay(per_step, seed=1).take(700, 8), wanted)
    assert not same(replay(per_step).take(701, 8), wanted)


def test_every_step_draws_anew_from_the_window():
    still = replay(0.0)  # the window stands
    first, second = still.take(0, 16), still.take(1, 16)
    assert names(first) != names(second)
    assert len(set(names(first))) == len(set(names(second))) == 16
    shown = {name for step in range(60) for name in names(still.take(step, 16))}
    assert len(shown) == READY  # all of it comes up, nothing else


@pytest.mark.parametrize("reuse", [1, 4, 16])
def test_an_outlier_is_used_as_often_as_asked(reuse):
    steps, count = 30 * reuse, 16
    source = Numbered()
    used = Counter()
    window = replay(count / reuse, source=source)
    for step in range(steps):
        used.update(names(window.take(step, count)))
        assert len(window.made) <= READY
    fresh = (steps - 1) * count // reuse
    assert len(source.given) == READY + fresh  # each is made once
    assert sum(used.values()) / len(source.given) == pytest.approx(reuse, rel=0.25)  # the ends are used less
    inner = replay(count / reuse)
    last = {name for number in range(150, 400) for name in names(inner._make(number))}
    assert sum(used[name] for name in last) / 250 == pytest.approx(reuse, rel=0.1)


def test_the_window_grows_with_a_large_batch():
    window = replay(300.0)
    for step in range(3):
        assert len(set(names(window.take(step, READY + 70)))) == READY + 70
        assert len(window.made) == READY + 70


def test_group_and_place_pass_through():
    source = Numbered()
    taken = replay(source=source).take(5, 40)
    assert taken.images.shape == (40, 1, SIDE, SIDE)
    assert torch.equal(taken.where, taken.images[:, 0] > 99)
    assert set(taken.group.tolist()) == {1, 2, 3}
    everywhere = replay(source=Numbered(where=False)).take(5, 40)
    assert torch.equal(everywhere.images, taken.images)
    assert torch.equal(everywhere.group, taken.group)
    assert everywhere.where.dtype == torch.bool
    assert everywhere.where.shape == (40, SIDE, SIDE)
    assert everywhere.where.all()


def test_a_source_is_told_of_the_object_and_of_all_good_images():
    source = Numbered()
    replay(source=source).take(0, 8)
    from_where = {image.numpy().tobytes(): number for number, image in enumerate(IMAGES)}
    drawn = Counter()
    for inliers, copy, scene in source.given:
        assert copy is None
        number = from_where[inliers[0].numpy().tobytes()]
        drawn[number] += 1
        assert torch.equal(scene.foreground, OBJECTS[number : number + 1])
        assert torch.equal(scene.donors, IMAGES)
        assert torch.equal(scene.donor_foreground, OBJECTS)
    assert set(drawn) == set(range(6))
    assert max(drawn.values()) < 3 * min(drawn.values())


def test_real_outliers_replay_too():
    images = contracts.images_of(4, 3, 24)
    everywhere = torch.ones(4, 24, 24, dtype=torch.bool)
    one, other = (OutlierBuffer(PerlinBlend(), images, everywhere, 0, 1.0) for _ in range(2))
    one.take(0, 3)
    assert same(one.take(4, 3), other.take(4, 3))


def test_a_training_resumed_in_its_middle_ends_as_an_uninterrupted_one(tmp_path):
    """Steps beyond the checkpoint are lost, and the window that is filled anew is the one that was lost with them."""
    recipe = change(
        INSPECT,
        {"encoder.width": 8, "encoder.head.hidden": (8,), "encoder.head.out": 4, "training.epochs": 6}
        | {"training.batch": 4, "training.reuse": 3, "views.sizes": (8,), "automatic": ()},
    )

    def fresh(folder):
        made = ImageTask(
            contracts.images_of(6, 1, 12), Preprocessing(12), Numbered(), recipe.views, recipe.training, 0,
            torch.ones(6, 12, 12, dtype=torch.bool),
        )  # fmt: skip
        network = made.network(recipe.encoder)
        return Run(made, recipe.method, network, digest="x", folder=folder, checkpoint_seconds=1e9)

    list(whole := fresh(tmp_path / "whole"))
    first = fresh(tmp_path / "parts")
    for progress in first:
        if progress.step == 7:
            first.save()
        if progress.step == 10:
            break
    list(second := fresh(tmp_path / "parts"))
    assert (second.resumed_at, second.state.step, whole.state.step) == (7, 18, 18)
    for name, value in whole.state.network.state_dict().items():
        assert torch.equal(second.state.network.state_dict()[name], value), name


# --- the task's own ---


def task(reuse, *, foreground=OBJECTS, outliers=None, **training):
    return ImageTask(
        images=IMAGES,
        preprocessing=Preprocessing(SIDE),
        outliers=outliers or Numbered(),
        views=PatchPairs(sizes=(2,)),
        training=Training(epochs=1, reuse=reuse, **({"batch": 8} | training)),
        seed=0,
        foreground=foreground,
    )


def test_a_task_replays_only_where_it_is_to():
    assert task(1).buffer is None
    assert task(4, foreground=None).buffer is None
    made = task(4).buffer
    assert made is not None
    assert made.per_step == 1.0  # four outliers to a batch, each used four times
    assert task(4, outliers=Rotations()).buffer.per_step == 1.5  # six of eight items


@pytest.mark.parametrize("stratified", [False, True])
def test_the_batches_of_a_task_hold_replayed_outliers(stratified):
    ours, window, shown = task(4, stratified=stratified), task(4).buffer, set()
    for step in range(30):
        batch = ours.batch(step)
        taken = window.take(step, int((batch.group[:8] > 0).sum()))
        assert batch.group[batch.group > 0].tolist() == taken.group.repeat(2).tolist()
        shown.update(names(taken))
    assert len(shown) < 30 * 4


def test_a_batch_without_outliers_is_only_good_images():
    """Two items drawn from all: now and then both are good."""
    ours = task(2, batch=2)
    groups = [ours.batch(step).group.tolist() for step in range(40)]
    assert [0] * 4 in groups
    assert any(sum(group) for group in groups)
