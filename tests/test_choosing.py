"""Settings chosen on good images: the light and the pose that the parts need, in sentences, without test images."""

import re
from functools import cache

import numpy as np
import pytest
import torch

import drawings
from firm import choosing as module
from firm.choosing import Choice, choose, describe
from firm.conditioning import Conditioning
from firm.foreground import Rule
from firm.images import resize
from firm.recipes.presets import FAST, INSPECT
from firm.recipes.recipe import change
from firm.types import FirmError, OneClass

RECIPE = change(INSPECT, {"size": 0, "tiling.stride": 16, "memory.reach": 1, "training.batch": 16})
DISC = tuple((20 * np.cos(angle), 20 * np.sin(angle)) for angle in np.arange(40) * np.pi / 20)


class Forbidden:
    """Whatever is asked of it is one question too many."""

    def __getattribute__(self, name):
        raise AssertionError(f"asked the test images for {name}")


def data_of(images, name="images", test=None):
    return OneClass(name, images, Forbidden() if test is None else test, Forbidden(), size=images.shape[-1])


def grain(n=12, side=64, seed=0):
    """A texture without an object."""
    rng = torch.Generator().manual_seed(seed)
    return (120 + 20 * torch.randn(n, 1, side, side, generator=rng)).clamp(0, 255).byte().expand(-1, 3, -1, -1)


@cache
def chosen(*, automatic=RECIPE.automatic, seed=0, changes=(), **drawn):
    """The recipe chosen for screws, and the sentences; made once for all tests that ask for it."""
    sentences = []
    recipe = change(RECIPE, {"automatic": automatic, **dict(changes)})
    images = drawings.screws(24, **drawn).images
    return choose(recipe, data_of(images), seed=seed, on_choice=sentences.append), sentences


def values(sentences):
    """What was tried -> AUROC in percent, in the order of the trials."""
    found = [re.fullmatch(r"tried (.*): ([\d.]+)", sentence) for sentence in sentences]
    return {one[1]: float(one[2]) for one in found if one}


@pytest.mark.parametrize("turned", [False, True])
def test_changing_light_is_evened_out(turned):
    recipe, sentences = chosen(light=0.3, turned=turned, automatic=("foreground", "light", "align")[: 2 + turned])
    assert recipe.conditioning.light in ("median", "local")
    tried = values(sentences)
    assert tried["light none, as it lies, compared within 1 cells"] < max(tried.values()) - 5


def test_a_long_part_that_lies_anyhow_is_aligned():
    recipe, sentences = chosen(turned=True)
    assert recipe.conditioning.align
    assert recipe.conditioning.foreground.method == "otsu"
    tried = values(sentences)
    lying = max(value for name, value in tried.items() if "as it lies" in name)
    assert max(tried.values()) > lying + 10


def test_every_candidate_is_tried_and_told():
    recipe, sentences = chosen(turned=True)
    assert sentences[0] == "foreground: the bright side of otsu on grey, so it is taken for a product on a background"
    tried = values(sentences)
    assert list(tried) == [
        f"light {light}, {pose}, compared {where}"
        for where in ("within 1 cells", "everywhere")
        for pose in ("as it lies", "aligned")
        for light in ("none", "median", "local")
    ]
    assert len(sentences) == 14
    assert recipe.automatic == ()
    own = Choice(recipe.conditioning, recipe.memory.reach, 0.0).sentence().removesuffix(": 0.0")
    assert sentences[-1] == f"chosen: {own}: {tried[own]}"


@pytest.mark.parametrize("turned", [False, True])
def test_the_simplest_of_those_hardly_worse_is_chosen(turned):
    _, sentences = chosen(turned=turned)
    tried = values(sentences)
    good = [name for name, value in tried.items() if value >= max(tried.values()) - 0.95]  # told with one decimal
    assert sentences[-1].startswith(f"chosen: {good[0]}: ")


def test_without_an_object_there_is_nothing_to_align():
    sentences = []
    recipe = choose(RECIPE, data_of(grain()), seed=0, on_choice=sentences.append)
    assert sentences[0] == "foreground: everything is object, so it is taken for a texture"
    assert recipe.conditioning.foreground.method == "ones"
    assert not recipe.conditioning.align
    assert len(values(sentences)) == 6
    assert not any("aligned" in sentence for sentence in sentences)


@pytest.mark.parametrize(("many", "keep"), [(108, 1.0), (107, 27 / 108)])
def test_of_many_patches_that_are_compared_everywhere_a_coreset_is_kept(many, keep, monkeypatch):
    """Twelve images of 3 x 3 patches; within reach none is left out, however many there are."""
    monkeypatch.setattr(module, "MANY", many)
    monkeypatch.setattr(module, "CORE", 27)
    everywhere = choose(change(RECIPE, {"automatic": ("reach", "foreground")}), data_of(grain()), seed=0)
    assert everywhere.memory.reach == -1
    assert (everywhere.memory.keep, everywhere.memory.choose) == (keep, "random" if keep == 1 else "coreset")
    near = change(RECIPE, {"automatic": ("light", "foreground")})
    assert choose(near, data_of(grain()), seed=0).memory == RECIPE.memory


def test_a_round_part_has_no_direction():
    _, sentences = chosen(outline=DISC)
    assert sentences[0] == "foreground: the bright side of otsu on grey, so it is taken for a product on a background"
    assert not any("aligned" in sentence for sentence in sentences)


def test_what_is_not_left_open_stays():
    recipe, sentences = chosen(automatic=("foreground", "reach"), changes=(("conditioning.light", "median"),))
    assert list(values(sentences)) == [
        "light median, as it lies, compared within 1 cells",
        "light median, as it lies, compared everywhere",
    ]
    assert recipe.conditioning.light == "median"
    assert not recipe.conditioning.align
    rule = Rule(method="triangle")
    recipe, sentences = chosen(automatic=("light",), changes=(("conditioning.foreground", rule), ("memory.reach", 5)))
    assert recipe.conditioning.foreground == rule
    assert recipe.memory.reach == 5
    assert all("within 5 cells" in name for name in values(sentences))
    assert len(values(sentences)) == 3


@pytest.mark.parametrize(
    ("automatic", "reach", "noise"),
    [(("features",), 2, 0.0), (("features",), -1, 0.3), ((), 2, 0.3), (("foreground",), 2, 0.3)],
)
def test_where_places_count_features_are_learnt_without_noise(automatic, reach, noise):
    """Unless the features are not left open: then the noise is what was asked for."""
    recipe = change(RECIPE, {"automatic": automatic, "memory.reach": reach, "pretrained.noise": 0.3})
    assert choose(recipe, data_of(drawings.screws(4).images), seed=0).pretrained.noise == noise


def test_nothing_left_open_costs_nothing():
    nothing = OneClass("images", Forbidden(), Forbidden(), Forbidden(), size=32)
    assert choose(FAST, nothing, seed=0, on_choice=pytest.fail) is FAST


def test_a_foreground_alone_needs_no_trial():
    recipe = change(RECIPE, {"automatic": ("foreground",), "training.batch": 4})
    told = []
    found = choose(recipe, data_of(drawings.screws(2).images), seed=0, on_choice=told.append)
    assert told == ["foreground: the bright side of otsu on grey, so it is taken for a product on a background"]
    assert found == change(recipe, {"automatic": (), "conditioning.foreground.method": "otsu"})
    large = change(recipe, {"training.batch": 64})
    few = choose(large, data_of(drawings.screws(3).images), seed=0, on_choice=told.append)
    assert told[-1] == "only 3 good images: batches of 6 instead of 64"
    assert few.training.batch == 6
    named = choose(recipe, data_of(drawings.screws(2).images, "mvtec:screw"), seed=0)
    assert named.conditioning.foreground == Rule(method="otsu", polarity="dark")
    assert choose(recipe, data_of(drawings.screws(2).images), seed=0) == found  # nobody needs to listen


def test_too_few_images_say_what_would_do():
    with pytest.raises(
        FirmError, match=r"3 good images are too few to choose settings on; give 4 .* set automatic=\[\]"
    ):
        choose(RECIPE, data_of(drawings.screws(3).images), seed=0)
    four = change(RECIPE, {"automatic": ("foreground", "reach")})
    assert choose(four, data_of(drawings.screws(4).images), seed=0).automatic == ()


def test_one_seed_gives_one_choice():
    recipe, sentences = chosen(turned=True)
    torch.manual_seed(9)
    again = chosen.__wrapped__(turned=True)
    assert again == (recipe, sentences)
    other = chosen(turned=True, automatic=("foreground", "light"), seed=1)[1]
    assert values(other) != {name: values(sentences)[name] for name in values(other)}


def test_large_images_are_tried_at_the_size_of_the_recipe():
    recipe = change(RECIPE, {"automatic": ("foreground", "reach"), "size": 48, "tiling.size": 16})
    large, told = drawings.screws(8).images, ([], [])
    found = [
        choose(recipe, data_of(images), seed=0, on_choice=sentences.append)
        for images, sentences in zip((large, resize(large, 48)), told, strict=True)
    ]
    assert found[0] == found[1]
    assert told[0] == told[1]


def test_rules_in_words():
    assert describe(Rule()) == "everything is object"
    assert describe(Rule(method="triangle", polarity="dark", channel="blue")) == "the dark side of triangle on blue"
    sentence = Choice(Conditioning(light="local"), -1, 0.9132).sentence()
    assert sentence == "light local, as it lies, compared everywhere: 91.3"


@pytest.mark.parametrize(("texture", "near", "reach"), [(False, 0.73, 2), (True, 0.74, -1), (True, 0.76, 2)])
def test_places_of_a_texture_must_win_by_more(texture, near, reach):
    """A product is compared near each place unless everywhere is clearly better; a texture the other way round."""
    values = {-1: 0.70, 2: near}
    order = [-1, 2] if texture else [2, -1]
    choices = [Choice(Conditioning(), where, values[where]) for where in order]
    assert module._best(choices, texture=texture).reach == reach
