"""Recipes as values: changed by path, written and read as JSON, named by what decides a training."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import each
from firm.errors import SettingError
from firm.networks.heads import Encoder, Head
from firm.outliers.registry import OUTLIERS, CutPaste, Exposure, Rotations
from firm.recipes.presets import AUTHORS, FAST, INSPECT, PAPER, PATCHES, PRESETS, WHOLE
from firm.recipes.presets import recipe as preset
from firm.recipes.recipe import Recipe, change, digest, from_json, parse_settings, to_json
from firm.scoring.image_scores import SCORES, SCORINGS, Kde, Knn, Scoring
from firm.scoring.patch_grid import TILINGS, Grid, Whole
from firm.training.loop import Training
from firm.views.registry import VIEWS, PatchPairs, SimCLR, Translation

CHANGES = {
    "positives": st.sampled_from(["ntxent", "supcon", "firm"]),
    "outliers": st.sampled_from(sorted(OUTLIERS)),
    "views": st.sampled_from(sorted(VIEWS)),
    "views.sigma": st.tuples(st.floats(0.1, 1), st.floats(1, 2)).map(list),
    "views.jitter.hue": st.floats(0, 0.5),
    "encoder.width": st.integers(1, 128),
    "encoder.stem": st.sampled_from(["3x3", "3x3/2", "7x7"]),
    "encoder.head.hidden": st.lists(st.integers(1, 1024), max_size=9),
    "encoder.head.last_norm": st.booleans(),
    "training.epochs": st.integers(0, 5000),
    "training.temperature": st.floats(0.01, 1),
    "training.lr": st.one_of(st.integers(1, 3), st.floats(1e-4, 1)),
    "training.layout": st.sampled_from(["concat", "pairwise"]),
    "training.stratified": st.booleans(),
    "score": st.sampled_from(sorted(SCORINGS)),
    "score.by": st.sampled_from(sorted(SCORES)),
    "score.crops": st.integers(0, 20),
    "size": st.integers(0, 64),
    "zoom": st.floats(1, 2),
    "normalise": st.sampled_from(["published", "inliers", "half"]),
    "conditioning.illumination": st.sampled_from(["none", "median", "local"]),
    "conditioning.foreground.method": st.sampled_from(["ones", "otsu", "triangle"]),
    "tiling": st.sampled_from([*TILINGS, {"kind": "grid", "stride": 8, "min_foreground": 0.5}]),
    "memory.neighbourhood": st.integers(-1, 5),
    "memory.sampling_ratio": st.floats(0.01, 1),
    "features": st.sampled_from(["encoder", "pixels"]),
    "automatic": st.lists(st.sampled_from(["foreground", "illumination", "align", "neighbourhood"]), unique=True),
}


def _that_fit(changes):
    """Settings of an augmentation are only there if the views are one."""
    augmented = isinstance(VIEWS[changes.get("views", "simclr")], SimCLR)
    return {path: value for path, value in changes.items() if augmented or not path.startswith("views.")}


some_changes = st.fixed_dictionaries({}, optional=CHANGES).map(_that_fit)


def through_json(recipe):
    return from_json(json.loads(json.dumps(to_json(recipe))))


def flat(value, path=""):
    """A nested JSON value as {path: leaf}; a list is a leaf."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for name, inner in value.items() for k, v in flat(inner, f"{path}.{name}".lstrip(".")).items()}


# --- presets ---


def test_paper_is_the_paper():
    settings = flat(to_json(PAPER))
    paper = {
        "positives": "firm",
        "outliers.kind": "rotations",
        "views.kind": "simclr",
        "views.crop": [0.25, 1.0],
        "views.crop_by": "area",
        "views.aspect": [1.0, 1.0],
        "views.crop_first": True,
        "views.flip": 0.0,
        "views.jitter.brightness": 0.4,
        "views.jitter.contrast": 0.4,
        "views.jitter.saturation": 0.4,
        "views.jitter.hue": 0.4,
        "views.jitter.probability": 1.0,
        "views.jitter.additive_brightness": False,
        "views.grey": 0.0,
        "views.blur": 0.75,
        "views.sigma": [0.1, 2.0],
        "encoder.width": 64,
        "encoder.stem": "3x3",
        "encoder.norm_momentum": 0.1,
        "encoder.weights": "",
        "encoder.head.hidden": [512] * 8,
        "encoder.head.out": 128,
        "encoder.head.last_norm": False,
        "pretrained.name": "",
        "pretrained.stages": [],
        "pretrained.pool": 3,
        "pretrained.margin": 32,
        "pretrained.hidden": [256],
        "pretrained.out": 64,
        "pretrained.noise": 0.0,
        "pretrained.residual": False,
        "pretrained.head": True,
        "pretrained.views": 4,
        "training.epochs": 2000,
        "training.batch": 32,
        "training.temperature": 0.2,
        "training.layout": "concat",
        "training.lr": 0.01,
        "training.momentum": 0.9,
        "training.weight_decay": 3e-4,
        "training.warmup": 20 / 2000,
        "training.schedule": "cosine",
        "training.stratified": False,
        "training.reuse": 1,
        "training.precision": "float32",
        "score.by.kind": "knn",
        "score.by.k": 1,
        "score.by.norm": False,
        "score.turns": 1,
        "score.crops": 0,
        "score.crop_scale": [0.5, 1.0],
        "size": 0,
        "shape": [],
        "crop.x": 0.0,
        "crop.y": 0.0,
        "crop.width": 1.0,
        "crop.height": 1.0,
        "crop.follow.method": "ones",
        "crop.follow.polarity": "bright",
        "crop.follow.channel": "grey",
        "crop.follow.close": 6,
        "crop.follow.open": 6,
        "zoom": 1.125,
        "normalise": "published",
        "conditioning.illumination": "none",
        "conditioning.align": False,
        "conditioning.foreground.method": "ones",
        "conditioning.foreground.polarity": "bright",
        "conditioning.foreground.channel": "grey",
        "conditioning.foreground.close": 6,
        "conditioning.foreground.open": 6,
        "tiling.kind": "whole",
        "memory.sampling_ratio": 1.0,
        "memory.sampling": "random",
        "memory.neighbourhood": -1,
        "memory.standardise": False,
        "memory.k": 1,
        "memory.metric": "cosine",
        "memory.reweight": 0,
        "features": "encoder",
        "automatic": [],
    }
    assert settings == paper
    assert change(Recipe(), {"training.precision": "float32"}) == PAPER


def test_authors_differ_in_what_is_documented_and_in_nothing_else():
    paper, authors = flat(to_json(PAPER)), flat(to_json(AUTHORS))
    assert {path: value for path, value in authors.items() if paper[path] != value} == {
        "encoder.head.hidden": [1024] * 7,
        "encoder.head.last_norm": True,
        "encoder.norm_momentum": 0.9,
        "training.layout": "pairwise",
        "training.schedule": "one-cycle",
    }
    assert paper.keys() == authors.keys()


@each("recipe", PRESETS.values())
def test_presets_come_back_from_json(recipe):
    assert through_json(recipe) == recipe
    assert digest(through_json(recipe)) == digest(recipe)


def test_presets_have_names_of_their_own():
    assert {"paper", "authors", "fast"} <= set(PRESETS)
    assert len({digest(recipe) for recipe in PRESETS.values()}) == len(PRESETS)


def differences(recipe, base):
    """{path: value} of what differs; None for what the base has and the recipe has not."""
    ours, theirs = flat(to_json(recipe)), flat(to_json(base))
    return {path: ours.get(path) for path in [*ours, *theirs] if ours.get(path) != theirs.get(path)}


def test_patches_are_what_section_5_says():
    found = differences(PATCHES, PAPER)
    assert found["outliers.kind"] == "perlinblend"
    assert {
        path: value for path, value in found.items() if path.split(".")[0] not in ("outliers", "views", "tiling")
    } == {
        "training.stratified": True,
        "size": 256,
        "zoom": 1.0,
        "automatic": ["foreground"],
    }
    assert PATCHES.training.batch == 32
    assert PATCHES.views == PatchPairs(
        sizes=(32,), min_foreground=0.9, min_overlap=0.15, min_altered=0.0, both_altered=False
    )
    assert PATCHES.tiling == Grid(size=32, stride=16, kernel=15, sigma=4.0, top_patches=1, min_foreground=0.0)
    assert (PATCHES.memory.sampling_ratio, PATCHES.memory.neighbourhood, PATCHES.memory.k, PATCHES.features) == (
        1.0,
        -1,
        1,
        "encoder",
    )
    assert not PATCHES.memory.standardise


def test_whole_is_the_ablation_without_patches():
    assert WHOLE.tiling == Whole()
    assert WHOLE.views == Translation()
    assert WHOLE.outliers == OUTLIERS["nsa"]
    assert WHOLE.encoder.stem == "7x7"
    assert WHOLE.score == Scoring(by=Knn(k=1))
    kept = ("training", "conditioning", "memory", "size", "zoom", "normalise", "positives", "automatic")
    assert all(getattr(WHOLE, name) == getattr(PATCHES, name) for name in kept)


def test_inspect_is_patches_made_cheap():
    assert INSPECT.tiling.patchwise
    assert INSPECT.encoder.width < PATCHES.encoder.width
    assert INSPECT.training.epochs < PATCHES.training.epochs
    assert INSPECT.training.stratified
    assert {"foreground", "illumination", "align", "neighbourhood"} == set(INSPECT.automatic)
    assert preset("inspect", **{"training.epochs": 3}) == change(INSPECT, {"training.epochs": 3})
    with pytest.raises(SettingError, match="no preset 'patch'"):
        preset("patch")


# --- change ---


@settings(max_examples=60)
@given(changes=some_changes)
def test_any_change_comes_back_from_json(changes):
    changed = change(PAPER, changes)
    assert through_json(changed) == changed
    assert digest(through_json(changed)) == digest(changed)
    assert change(changed, {}) == changed


@settings(max_examples=60)
@given(changes=some_changes)
def test_a_command_line_says_the_same(changes):
    typed = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in changes.items()]
    assert change(PAPER, parse_settings(typed)) == change(PAPER, changes)


def test_change_leaves_everything_else_and_the_original():
    before = to_json(FAST)
    changed = change(FAST, {"training.batch": 16, "encoder.head.hidden": [64, 64]})
    assert to_json(FAST) == before
    difference = {path: v for path, v in flat(to_json(changed)).items() if flat(before)[path] != v}
    assert difference == {"training.batch": 16, "encoder.head.hidden": [64, 64]}
    assert changed.encoder.head.hidden == (64, 64)


@each(
    "path, value, expected",
    [
        ("outliers", "cutpaste", CutPaste(variant="plain")),
        ("outliers", "cutpaste-union", CutPaste(variant="union")),
        ("outliers", "exposure-rotated", Exposure(rotate=True)),
        ("outliers", {"kind": "cutpaste", "variant": "scar", "per_inlier": 1}, CutPaste(variant="scar", per_inlier=1)),
        ("outliers", {"kind": "exposure", "path": "oe.npy"}, Exposure(path="oe.npy")),
        ("outliers", CutPaste(), CutPaste()),
        ("views", "droc", VIEWS["droc"]),
        ("views", {"kind": "simclr", "flip": 0.5}, SimCLR(flip=0.5)),
        ("score", "s_ens*", SCORINGS["s_ens*"]),
        ("score", {"by": {"kind": "knn", "k": 5}, "turns": 4}, Scoring(by=Knn(k=5), turns=4)),
        ("score.by", "kde", Kde()),
        ("score.by.k", 5, 5),
        ("encoder.head", Head(hidden=(8,)), Head(hidden=(8,))),
        ("encoder", {"width": 16}, Encoder(width=16)),
        ("training", {"epochs": 3}, Training(epochs=3)),
        ("training.lr", 1, 1.0),
        ("views.crop", [1, 1], (1.0, 1.0)),
    ],
)
def test_values_by_name_by_kind_and_as_they_are(path, value, expected):
    found = change(PAPER, {path: value})
    for name in path.split("."):
        found = getattr(found, name)
    assert found == expected
    assert type(found) is type(expected)


WRONG = [
    ("epochs", 3, "no setting 'epochs'; Recipe has positives"),
    ("training.epoch", 3, r"no setting 'training\.epoch'; Training has epochs"),
    ("encoder.head.depth", 3, r"no setting 'encoder\.head\.depth'; Head has hidden"),
    ("size.width", 3, r"no setting 'size\.width'"),
    ("", 3, "no setting ''; Recipe has"),
    ("training.epochs", "many", r"training\.epochs is 'many'.* int"),
    ("training.epochs", 2.5, r"training\.epochs is 2\.5.* int"),
    ("training.epochs", True, r"training\.epochs is True.* int"),
    ("training.epochs", None, r"training\.epochs is None.* int"),
    ("training.lr", "0.1x", r"training\.lr is '0\.1x'.* float"),
    ("training.lr", False, r"training\.lr is False.* float"),
    ("training.stratified", 1, r"training\.stratified is 1.* bool"),
    ("positives", 3, "positives is 3.* str"),
    ("views.crop", [0.5], r"views\.crop is \[0\.5\].* 2 values"),
    ("views.crop", "half", r"views\.crop is 'half'.* tuple"),
    ("encoder.head.hidden", 512, r"encoder\.head\.hidden is 512.* tuple"),
    ("encoder.head.hidden", [512, "x"], r"encoder\.head\.hidden is 'x'.* int"),
    ("outliers", "rotation", "outliers is 'rotation'.* rotations, exposure"),
    ("outliers", 5, "outliers is 5.* rotations, exposure"),
    ("outliers", {"kind": "noise"}, r"outliers\.kind is 'noise'.* rotations, exposure"),
    ("outliers", {"kind": "cutpaste", "size": 3}, "outliers has an unknown setting 'size'.* variant"),
    ("outliers", {}, "outliers is {}.* rotations, exposure"),
    ("score", "s_best", r"score is 's_best'.* s_con, s_con\*"),
    ("training", {"epochs": "x"}, r"training\.epochs is 'x'.* int"),
    ("training", 7, "training is 7.* Training"),
    ("training.epochs", -1, "epochs"),
    ("positives", "triplet", "'triplet'.* ntxent, supcon, rot-supcon, firm"),
    ("normalise", "imagenet", "normalise is 'imagenet'.* published, inliers, half"),
    ("features", "colour", "features is 'colour'"),
    ("automatic", ["epochs"], "'epochs'.* foreground"),
    ("automatic", "illumination", "automatic is 'illumination'.* tuple"),
    ("tiling", "tiles", "tiling is 'tiles'.* whole, grid"),
    ("tiling", {"kind": "grid", "size": 8}, "stride"),
    ("conditioning.align", True, r"conditioning\.align"),
    ("memory.neighbourhood", -2, r"memory\.neighbourhood is -2"),
]


@each("path, value, culprit", WRONG)
def test_a_wrong_setting_is_named(path, value, culprit):
    with pytest.raises(SettingError, match=culprit):
        change(PAPER, {path: value})


def test_unknown_entries_of_a_card_are_named():
    for data, message in (
        ({"loss": "firm"}, "recipe has an unknown setting 'loss'"),
        ({"training": {"epoch": 1}}, r"recipe\.training has an unknown setting 'epoch'"),
        ({"encoder": {"width": "64"}}, r"recipe\.encoder\.width is '64'"),
    ):
        with pytest.raises(SettingError, match=message):
            from_json(data)
    assert from_json({}) == Recipe()


@each("source", OUTLIERS.values())
def test_rot_supcon_needs_several_kinds_of_outliers(source):
    if source.kinds > 1:
        assert Recipe(positives="rot-supcon", outliers=source).outliers == source
    else:
        with pytest.raises(SettingError, match="rot-supcon"):
            Recipe(positives="rot-supcon", outliers=source)


def test_settings_are_parsed_as_json_where_they_are_json():
    typed = ["training.epochs=20", "views.crop=[0.5, 1]", "outliers=cutpaste", "training.stratified=true", "a=b=c"]
    assert parse_settings(typed) == {
        "training.epochs": 20,
        "views.crop": [0.5, 1],
        "outliers": "cutpaste",
        "training.stratified": True,
        "a": "b=c",
    }
    assert parse_settings([]) == {}
    for wrong in ("training.epochs", "=3", ""):
        with pytest.raises(SettingError, match="path=value"):
            parse_settings([wrong])


# --- digest ---


@given(name=st.sampled_from(sorted(SCORINGS)), k=st.integers(1, 9))
def test_the_score_costs_no_training_and_no_name(name, k):
    assert digest(change(PAPER, {"score": name})) == digest(PAPER)
    assert digest(change(PAPER, {"score.by.k": k})) == digest(PAPER)


@each(
    "changes",
    [
        {"positives": "supcon"},
        {"outliers": "cutpaste"},
        {"views": "csi"},
        {"views.blur": 0.5},
        {"encoder.width": 32},
        {"encoder.head.last_norm": True},
        {"training.lr": 0.02},
        {"size": 16},
        {"zoom": 1.0},
    ],
)
def test_everything_else_renames_the_training(changes):
    assert digest(change(PAPER, changes)) != digest(PAPER)


def test_spelling_out_defaults_does_not_rename():
    spelled = Recipe(
        positives="firm",
        outliers=Rotations(),
        views=SimCLR(crop=(0.25, 1.0), flip=0.0),
        encoder=Encoder(width=64, head=Head(hidden=(512,) * 8, out=128)),
        training=Training(epochs=2000, batch=32, lr=0.01, precision="float32"),
        zoom=1.125,
    )
    assert digest(spelled) == digest(PAPER)
    assert digest(from_json({})) == digest(Recipe())
    assert digest(change(PAPER, {"training.lr": 0.02, "training.momentum": 0.9})) == digest(
        change(PAPER, {"training.lr": 0.02})
    )


@each(
    "changes",
    [
        {"tiling.stride": 8},
        {"tiling": Grid(size=16, stride=4, top_patches=5, min_foreground=0.3)},
        {"tiling": "whole"},
        {"memory.neighbourhood": 3},
        {"memory": {"sampling_ratio": 0.1, "sampling": "coreset", "standardise": True, "k": 3, "metric": "l2"}},
        {"features": "pixels"},
        {"features": "both", "memory.standardise": True},
        {"automatic": []},
    ],
)
@each("base", [PATCHES, INSPECT])
def test_ways_of_looking_share_a_training(changes, base):
    changed = change(base, changes)
    assert digest(changed) == digest(base)
    assert through_json(changed) == changed


@each(
    "changes",
    [
        {"conditioning.illumination": "local"},
        {"conditioning.foreground.method": "otsu"},
        {"conditioning.align": True, "conditioning.foreground.method": "otsu"},
        {"training.reuse": 3},
        {"training.stratified": False},
        {"views.min_foreground": 0.5},
        {"outliers.strength": 0.5},
        {"size": 128},
    ],
)
def test_light_pose_and_outliers_of_patches_rename_it(changes):
    assert digest(change(PATCHES, changes)) != digest(PATCHES)


def test_features_of_two_kinds_need_one_scale():
    with pytest.raises(SettingError, match=r"features=both.* memory\.standardise"):
        change(PATCHES, {"features": "both"})
    assert change(PATCHES, {"features": "both", "memory.standardise": True}).features == "both"


def test_the_name_of_a_training_never_changes():
    """Results on disk are found by it: a new setting must have a default that leaves these as they are."""
    assert digest(PAPER) == "d9938cb41d975f1e"
    assert digest(AUTHORS, seed=3) == "fd1d683d70c4c960"


def test_what_else_decides_a_training_is_part_of_its_name():
    names = {digest(PAPER), digest(PAPER, seed=0), digest(PAPER, seed=1), digest(PAPER, seed=0, images="x")}
    assert len(names) == 4


def test_changes_are_judged_together_in_no_order():
    start = change(PAPER, {"outliers": "exposure"})
    both = {"positives": "rot-supcon", "outliers": "rotations"}
    assert (
        change(start, both) == change(start, dict(reversed(both.items()))) == change(PAPER, {"positives": "rot-supcon"})
    )
    assert change(PAPER, {"outliers.variant": "scar", "outliers": "cutpaste"}).outliers.variant == "scar"


def test_a_member_of_another_family_is_refused():
    with pytest.raises(SettingError, match="outliers is Knn"):
        change(PAPER, {"outliers": Knn()})
