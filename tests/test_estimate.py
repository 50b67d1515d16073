"""What a fit will take, told from a few images; no clock of this machine decides a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

import firm.timing as module
from cheap import CHEAP
from firm.bank import Memory
from firm.data.drawn import drawn
from firm.foretelling import MEMORY, memory_of, most_images, numbers_of, steps_of
from firm.recipes.presets import ADAPTED, FAST, INSPECT
from firm.recipes.recipe import change
from firm.timing import Duration, duration
from firm.types import FirmError

KINDS = ("encoder", "backbone")  # searched for neighbours; behind the head nothing is


@pytest.fixture(scope="module")
def plates():
    return drawn("plate", size=48, train=40, good=0, bad=0)[0]


@pytest.fixture
def ticking(monkeypatch):
    """A clock that moves on by a second whenever it is read."""
    now = iter(range(10_000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(module, "_speed", lambda: 1e6)


def test_the_parts_of_a_fit_add_up(plates, ticking):
    took = duration(CHEAP, plates, held_out=10, seed=0)
    assert took.epoch == steps_of(CHEAP, 40)  # a second to a step
    assert took.epochs == 4
    assert took.choosing == took.features == 0
    look = 1 / module.IMAGES  # eight images between two readings of the clock
    compared = 40 * 9 * 40 * 9 * 192 / (module.SHARE * 1e6)  # every patch with all: 1 cell away is everywhere of 3 x 3
    assert took.memory == pytest.approx(compared + 40 * look)
    assert took.thresholds == pytest.approx(10 * (look + compared / 40))
    assert took.seconds == pytest.approx(took.memory + took.thresholds + 4 * took.epoch)


def test_choosing_takes_a_look_at_the_trial_in_every_light(plates, ticking):
    took = duration(replace(CHEAP, automatic=("light",)), plates, held_out=10, seed=0)
    assert took.choosing == pytest.approx(3 * 120 / module.IMAGES)


def test_a_coreset_is_chosen_and_compared_with(plates, ticking):
    kept = replace(CHEAP, memory=Memory(keep=0.1, choose="coreset"))
    compared = 2 * 360 * 36 * 192 / (module.SHARE * 1e6)
    assert duration(kept, plates, held_out=0, seed=0).memory == pytest.approx(compared + 40 / module.IMAGES)


def test_the_choice_of_features_compares_what_was_spared_both_ways(plates):
    cells = 36  # patches of 8 px in 48
    everywhere = change(ADAPTED, {"memory.reach": -1})
    encoder, backbone = (numbers_of(ADAPTED, ADAPTED.tiling, grey=False)[kind] for kind in KINDS)
    kept = 40 * cells * module.THIN
    among_known, spared = 40 * cells * kept * (encoder + backbone), 4 * 7 * cells * kept * (encoder + 2 * backbone)
    assert module._tried(everywhere, plates) == pytest.approx(among_known + spared)
    assert module._tried(ADAPTED, plates) == 0  # places count, so nothing is to be chosen
    few = replace(plates, train=plates.train[:39])
    settled = (
        (replace(everywhere, automatic=()), plates),
        (change(everywhere, {"training.epochs": 0}), plates),
        (CHEAP, plates),
    )
    for asked, images in ((everywhere, few), *settled):  # nothing is spared, so nothing is tried
        assert module._tried(asked, images) == 0


def test_whole_images_take_their_training_alone(plates, ticking):
    asked = change(FAST, {"encoder.width": 8, "training.batch": 8, "size": 32, "encoder.head.hidden": (8,)})
    took = duration(asked, plates, held_out=10, seed=0)
    assert took.seconds == took.epochs * took.epoch > 0


def test_the_sentence_leaves_out_what_takes_nothing():
    took = Duration(choosing=6.0, features=0.0, epoch=3.0, epochs=20, memory=30.0, thresholds=0.0)
    assert took.sentence() == "time: about 1.6 minutes on this machine (training 1.0, memory 0.5)"


@pytest.mark.parametrize(
    ("epoch", "said"),
    [
        (2.0, "time: about 52 seconds on this machine (training 40, choice of features 12)"),
        (0.0, "time: about 12 seconds on this machine (choice of features 12)"),
        (6.0, "time: about 2.2 minutes on this machine (training 2.0, choice of features 0.2)"),
    ],
)
def test_less_than_a_minute_is_said_in_seconds(epoch, said):
    took = Duration(choosing=0.0, features=0.2, epoch=epoch, epochs=20, preferring=12.0, memory=0.0, thresholds=0.0)
    assert took.sentence() == said


def test_nothing_is_said_to_take_no_time():
    took = Duration(choosing=0.0, features=0.2, epoch=0.0, epochs=1, memory=0.1, thresholds=0.0)
    assert took.sentence() == "time: about 2 seconds on this machine"


@pytest.mark.parametrize("recipe", [INSPECT, ADAPTED, FAST])
def test_as_many_images_as_the_memory_holds(recipe):
    for gigabytes in (1.0, MEMORY, 50.0):
        most = most_images(recipe, 256, gigabytes)
        assert memory_of(recipe, 256, most) <= gigabytes < memory_of(recipe, 256, most + 1)
    with pytest.raises(FirmError, match=r"0\.7 GB of memory are too few to learn anything in; give 0\.[789] or more"):
        most_images(recipe, 256, 0.7)
