"""FIRM on pretrained features: cells of a backbone, batches of them, and a detector that needs nothing installed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import drawings
from firm.adaptor import Adapted, Adaptor, CellLooker, Pretrained, cell_features, check_cells, mirrored
from firm.backbones import FACTS, load_backbone
from firm.backbones.resnet import ResNet
from firm.bank import Memory
from firm.cells import Cells, CellTask, Choosable, overlapping, spread
from firm.choosing import AROUND, COARSE, choose
from firm.detector import Detector
from firm.embedding import EXTRA, cell_task, embedder_of
from firm.encoder import Head
from firm.fitting import as_data
from firm.foreground import Rule
from firm.foretelling import foretell
from firm.localiser import is_grey, kinds_of, object_part
from firm.metrics import auroc
from firm.model_folder import read_model, write_model
from firm.plain import plain_cells
from firm.recipes.presets import ADAPTED
from firm.recipes.recipe import change, from_json, to_json
from firm.runs import Run
from firm.tiling import Grid
from firm.types import FirmError

SIDE = 96
GRID = Grid(size=8, stride=8)
GOOD = drawings.screws(16, light=0.1).images
FRESH, BAD = drawings.screws(8, light=0.1, seed=1), drawings.screws(8, light=0.1, seed=2, defect=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A ResNet-18 of drawn weights, as somebody's checkpoint: random features tell much already."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file({name: value.contiguous() for name, value in ResNet("resnet18").state_dict().items()}, path)
    return str(path)


@pytest.fixture(scope="module")
def recipe(weights):
    changes = {
        "pretrained.name": weights,
        "pretrained.stages": [2, 3],
        "pretrained.hidden": [32],
        "pretrained.out": 16,
        "outliers": "donor",
        "encoder.head.hidden": [16],
        "encoder.head.out": 8,
        "training.epochs": 2,
        "training.batch": 64,
        "size": SIDE,
        "conditioning.foreground.method": "otsu",
        "automatic": [],
    }
    return change(ADAPTED, changes)


@pytest.fixture(scope="module")
def backbone(weights):
    return load_backbone(weights, deepest=4)


@pytest.fixture(scope="module")
def detector(recipe):
    return Detector.fit(GOOD, recipe=recipe, seed=0, holdout=0.2, false_calls=0.25)


# --- cells of a backbone ---


def test_a_cell_sees_its_own_surroundings_and_not_the_far_side(backbone):
    settings = Pretrained(name="x", stages=(2,), pool=3)
    plain = torch.full((1, 3, SIDE, SIDE), 90, dtype=torch.uint8)
    spot = plain.clone()
    spot[:, :, 40:48, 64:72] = 250  # cell 5, 8
    change_ = (cell_features(backbone, settings, GRID, spot) - cell_features(backbone, settings, GRID, plain)).norm(
        dim=3
    )[0]
    assert divmod(int(change_.argmax()), 12) == (5, 8)
    assert float(change_[:, :2].max()) == 0


def test_the_border_is_no_edge(backbone):
    """An even image has even features; zeros beyond the border would make an edge of it."""
    even = torch.full((1, 1, SIDE, SIDE), 120, dtype=torch.uint8)
    features = cell_features(backbone, Pretrained(name="x", stages=(2, 3)), GRID, even)
    assert features.shape == (1, 12, 12, 64 + 128)
    off = (features - features[:, 6:7, 6:7]).norm(dim=3)
    assert float(off.max()) < 0.01 * float(features[0, 6, 6].norm())
    bare = backbone.stages(backbone.normalise(even / 255))[2][0]
    assert float((bare[:, 0] - bare[:, 6]).norm()) > 0.1 * float(bare[:, 6].norm())  # what the margin is for


@pytest.mark.parametrize(("height", "width"), [(96, 96), (104, 72), (96, 200)])
def test_images_are_mirrored_to_whole_steps(height, width):
    image = torch.rand(1, 3, height, width)
    found = mirrored(image, 32)
    assert found.shape[-2] % 32 == 0
    assert found.shape[-1] % 32 == 0
    assert torch.equal(found[..., 32 : 32 + height, 32 : 32 + width], image)
    assert torch.equal(found[..., 31, 32 : 32 + width], image[..., 1, :])


def test_without_a_margin_zeros_lie_beyond_the_border(backbone):
    """As PatchCore has it: its own outputs, pooled with zeros around them."""
    settings = Pretrained(name="x", stages=(3,), pool=3, margin=0)
    found = cell_features(backbone, settings, GRID, GOOD[:1])
    stage = backbone.stages(backbone.normalise(GOOD[:1] / 255))[2]
    around = torch.nn.functional.pad(stage, (1, 1, 1, 1))
    for row, column in [(0, 0), (0, 7), (11, 11), (5, 6)]:
        expected = around[0, :, row : row + 3, column : column + 3].sum(dim=(1, 2)) / 9
        torch.testing.assert_close(found[0, row, column], expected, rtol=1e-4, atol=1e-5)


def test_context_stands_behind_the_patch_and_is_for_the_adaptor_alone(backbone):
    alone, wider = (Pretrained(name="x", stages=(2, 3), context=context) for context in (0, 5))
    patch, seen = (cell_features(backbone, settings, GRID, GOOD[:2]) for settings in (alone, wider))
    assert seen.shape[-1] == 2 * patch.shape[-1] == 2 * (64 + 128)
    assert torch.equal(seen[..., :192], patch)
    around = cell_features(backbone, replace(alone, pool=5), GRID, GOOD[:2])
    assert torch.equal(seen[..., 192:], around)
    network = Adapted(backbone, Adaptor(2 * 192, wider, Head(hidden=(8,), out=4)))
    look = CellLooker(network, wider, GRID, ("encoder", "backbone"))
    kinds = look(GOOD[:2])
    assert torch.equal(kinds["backbone"], patch)
    assert torch.equal(kinds["encoder"], network.adapt(seen))


@pytest.mark.parametrize("grey", [False, True])
def test_plain_pixels_stand_beside_the_features_of_the_same_patches(backbone, grey):
    settings = Pretrained(name="x", stages=(2, 3))
    network = Adapted(backbone, Adaptor(192, settings, Head(hidden=(8,), out=4)))
    look = CellLooker(network, settings, GRID, ("backbone", "pixels"), grey)
    kinds = look(GOOD[:2])
    assert torch.equal(kinds["backbone"], cell_features(backbone, settings, GRID, GOOD[:2]))
    expected = torch.stack([plain_cells(GRID, settings.pool, one[None], grey=grey) for one in GOOD[:2]])
    assert torch.equal(kinds["pixels"], expected)
    assert set(look.kinds_from(kinds["backbone"])) == {"backbone"}
    told = foretell(change(ADAPTED, {"automatic": [], "size": SIDE, "features": "backbone+pixels"}), as_data(GOOD))
    numbers = {line.split()[0]: int(line.split(" x ")[1].split()[0]) for line in told if " bank: " in line}
    assert numbers["pixels"] == plain_cells(GRID, 3, GOOD[:1], grey=is_grey(GOOD)).shape[-1] + 1  # l2 takes one more


@pytest.mark.parametrize("context", [-1, 2, 3])
def test_a_context_is_wider_than_its_patch(context):
    with pytest.raises(FirmError, match=r"pretrained\.context is .*; use 0 for none, or an odd number of cells above"):
        Pretrained(pool=3, context=context)


@pytest.mark.parametrize("stride", [4, 8, 16])
def test_every_stage_comes_to_the_cells_asked_for(backbone, stride):
    grid = Grid(size=stride, stride=stride)
    features = cell_features(backbone, Pretrained(name="x", stages=(1, 2, 3, 4)), grid, GOOD[:2])
    assert features.shape == (2, SIDE // stride, SIDE // stride, 64 + 64 + 128 + 256)


def test_each_image_is_described_alone(backbone):
    settings = Pretrained(name="x", stages=(2, 3))
    together = cell_features(backbone, settings, GRID, GOOD[:3])
    alone = cell_features(backbone, settings, GRID, GOOD[1:2])
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("grid", "side", "says"),
    [
        (Grid(size=32, stride=16), 96, "side by side"),
        (Grid(size=12, stride=12), 96, "side by side"),
        (GRID, 100, "multiple"),
        (GRID, 64, "above"),
    ],
)
def test_cells_that_cannot_be_are_refused(grid, side, says):
    with pytest.raises(FirmError, match=says):
        check_cells(Pretrained(name="x"), grid, side)


@pytest.mark.parametrize(
    "wrong", [{"pool": 2}, {"pool": 0}, {"margin": 16}, {"margin": -32}, {"out": 0}, {"hidden": (0,)}, {"versions": 0}]
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(FirmError, match="pretrained"):
        Pretrained(**wrong)


def test_stages_a_backbone_lacks_are_refused():
    with pytest.raises(FirmError, match=r"has 1\.\.5"):
        Pretrained(stages=(6,)).stages_of(FACTS["resnet18"])


# --- drawing ---


def test_patches_overlap_as_much_as_asked():
    for pool, over in [(3, 0.15), (3, 0.5), (5, 0.3), (1, 0.15)]:
        found = {tuple(pair) for pair in overlapping(pool, over).tolist()}
        wanted = set()
        for y in range(-9, 10):
            for x in range(-9, 10):
                rows = set(range(pool)) & set(range(y, y + pool))
                columns = set(range(pool)) & set(range(x, x + pool))
                if (y, x) != (0, 0) and len(rows) * len(columns) / pool**2 >= over:
                    wanted.add((y, x))
        assert found == (wanted or {(0, 0)})


@given(st.integers(0, 2**31), st.floats(0.05, 0.95))
def test_drawn_cells_and_partners_are_allowed_and_near(seed, least):
    rng = torch.Generator().manual_seed(seed)
    part = torch.rand(5, 6, 7, generator=rng) * torch.tensor([1, 1, 0.04, 0, 1.0])[:, None, None]
    choosable = Choosable.at_least(part, least)
    images = torch.randint(5, (200,), generator=rng)
    first = choosable.draw(images, rng=rng)
    offsets = overlapping(3, 0.15)
    second = choosable.partners(images, first, offsets, rng=rng)
    flat = part.flatten(1)
    best = flat.amax(1)[images]
    assert bool((flat[images, first] >= torch.minimum(best, torch.tensor(least))).all())
    assert bool(choosable.allowed.flatten(1)[images, second].all())
    moved = torch.stack([second // 7 - first // 7, second % 7 - first % 7], dim=1)
    permitted = {tuple(pair) for pair in offsets.tolist()} | {(0, 0)}
    assert all(tuple(pair) in permitted for pair in moved.tolist())


def test_every_allowed_cell_is_drawn_equally_often():
    allowed = torch.zeros(2, 3, 3, dtype=torch.bool)
    allowed[0, 0, :2] = True
    allowed[1] = True
    rng = torch.Generator().manual_seed(0)
    images = torch.tensor([0, 1]).repeat(9000)
    drawn = Choosable(allowed).draw(images, rng=rng)
    small = drawn[images == 0].bincount(minlength=9)
    assert small[2:].sum() == 0
    assert abs(int(small[0]) - 4500) < 250
    assert abs(drawn[images == 1].bincount(minlength=9) - 1000).max() < 150


def test_a_cell_stays_alone_only_without_an_allowed_neighbour():
    allowed = torch.zeros(1, 5, 5, dtype=torch.bool)
    allowed[0, 2, 2] = True
    images, cells = torch.zeros(50, dtype=torch.long), torch.full((50,), 12)
    offsets, rng = overlapping(3, 0.15), torch.Generator().manual_seed(0)
    assert bool((Choosable(allowed).partners(images, cells, offsets, rng=rng) == 12).all())
    allowed[0, 2, 3] = True
    assert bool((Choosable(allowed).partners(images, cells, offsets, rng=rng) == 13).all())


def test_the_spread_is_that_of_all_cells():
    features = torch.randn(70, 3, 2, 4) * torch.tensor([1, 5, 0.1, 0]) + torch.tensor([0, 10, -1, 3.0])
    mean, std = spread(features)
    flat = features.flatten(0, 2)
    torch.testing.assert_close(mean, flat.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(std[:3], flat.std(0, unbiased=False)[:3], rtol=1e-4, atol=1e-5)
    assert float(std[3]) == 1


# --- the task ---


def test_what_is_embedded_is_what_is_learnt_from(recipe):
    embedder = embedder_of(change(recipe, {"pretrained.versions": 2}), as_data(GOOD), seed=0)
    task = cell_task(embedder, folder=None)
    assert task.good.features.shape == (32, 12, 12, 64 + 128)
    expected = cell_features(embedder.backbone, embedder.settings, GRID, embedder.ready.images[:8])
    torch.testing.assert_close(task.good.features[:8].float(), expected, rtol=2e-3, atol=1e-3)
    assert not torch.equal(task.good.features[:16], task.good.features[16:])
    assert len(task.outliers.features) == 16 * recipe.outliers.per_inlier
    assert bool((task.outliers.group > 0).all())
    shown = object_part(GRID, embedder.ready.foreground)
    assert bool((shown[task.good.choosable.allowed[:16]] >= 0.3).all())


def test_a_batch_is_a_function_of_seed_and_step(recipe):
    task = cell_task(embedder_of(recipe, as_data(GOOD), seed=0), folder=None)
    one, again, other = task.batch(3), task.batch(3), task.batch(4)
    assert torch.equal(one.images, again.images)
    assert not torch.equal(one.images, other.images)
    assert one.images.shape == (128, 64 + 128)
    assert one.group[:32].eq(0).all()
    assert one.group[32:64].gt(0).all()
    assert torch.equal(one.source[:64], one.source[64:])


def test_altered_cells_are_where_the_defect_was_painted(recipe):
    embedder = embedder_of(recipe, as_data(GOOD), seed=0)
    rows = embedder.outliers(0, 8)
    clean = embedder.features(embedder.ready.images[:8])
    altered, moved = rows[..., -EXTRA], (rows[..., :-EXTRA] - clean).norm(dim=3)
    assert float(moved[altered > 0.5].mean()) > 3 * float(moved[altered == 0].mean())


def test_features_are_named_by_all_that_decides_them(recipe):
    def key(changes, images=GOOD):
        return embedder_of(change(recipe, changes), as_data(images), seed=0).key()

    same = key({})
    assert key({"pretrained.hidden": [64], "training.epochs": 9, "positives": "supcon"}) == same
    for changes in ({"pretrained.pool": 5}, {"pretrained.stages": [3]}, {"conditioning.light": "median"}):
        assert key(changes) != same
    assert key({}, GOOD[1:]) != same


def test_whole_image_outliers_are_refused(recipe):
    with pytest.raises(FirmError, match="local"):
        cell_task(embedder_of(change(recipe, {"outliers": "rotations"}), as_data(GOOD), seed=0), folder=None)


# --- a detector ---


def test_it_tells_bad_from_good_and_where(detector):
    both = torch.cat([FRESH.images, BAD.images])
    found = detector.locate(both)
    assert auroc(found.scores, torch.arange(16) >= 8) > 0.9
    inside = [float(found.maps[8 + i][BAD.masks[i]].mean()) for i in range(8)]
    outside = [float(found.maps[8 + i][~BAD.masks[i]].mean()) for i in range(8)]
    assert sum(a > b for a, b in zip(inside, outside, strict=True)) >= 7


def test_a_fit_chooses_its_features_and_keeps_them(recipe, tmp_path, monkeypatch):
    """Whatever they win by, so that those behind the head are taken, which are not the default."""
    monkeypatch.setattr("firm.preferring.WORTH", -1.0)
    monkeypatch.setattr("firm.embedding.FEWEST", 10)
    told = []
    asked = change(recipe, {"automatic": ["features"], "memory.reach": -1})
    fitted = Detector.fit(GOOD, recipe=asked, holdout=0.2, false_calls=0.25, on_choice=told.append)
    assert fitted.recipe == change(asked, {"features": "projection+backbone", "automatic": []})
    assert sum(line.startswith("tried features") for line in told) == 2
    fitted.save(tmp_path / "x.firm")
    assert torch.equal(Detector.load(tmp_path / "x.firm").score(BAD.images), fitted.score(BAD.images))


def test_a_saved_one_decides_the_same_without_the_weights_file(detector, tmp_path):
    path = tmp_path / "part.firm"
    detector.save(path)
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from firm.detector import Detector\nfrom safetensors.torch import load_file, save_file\n"
        "d = Detector.load(sys.argv[1]); save_file({'s': d.score(load_file(sys.argv[2])['i'])}, sys.argv[3])"
    )
    save_file({"i": BAD.images}, tmp_path / "i.st")
    card = detector.card()
    assert "licence" in card["origin"]
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "i.st", tmp_path / "s.st"], check=True)
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "s.st")["s"], detector.score(BAD.images))


def test_two_fits_are_equal_and_a_resumed_one_too(recipe, detector, tmp_path):
    again = Detector.fit(GOOD, recipe=recipe, seed=0, holdout=0.2, false_calls=0.25, folder=tmp_path / "whole")
    assert torch.equal(again.score(BAD.images), detector.score(BAD.images))
    steps = iter(range(10**6))

    def die(progress, run):
        run.save()
        if next(steps) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Detector.fit(
            GOOD, recipe=recipe, seed=0, holdout=0.2, false_calls=0.25, folder=tmp_path / "cut", on_progress=die
        )
    resumed = Detector.fit(GOOD, recipe=recipe, seed=0, holdout=0.2, false_calls=0.25, folder=tmp_path / "cut")
    assert torch.equal(resumed.score(BAD.images), detector.score(BAD.images))


def test_the_plain_baseline_trains_nothing_and_makes_no_defects(recipe, tmp_path):
    plain = change(recipe, {"features": "backbone", "training.epochs": 0, "memory.standardise": False})
    told: list[str] = []
    found = Detector.fit(
        GOOD,
        recipe=plain,
        seed=0,
        holdout=0.2,
        false_calls=0.25,
        folder=tmp_path,
        on_images=lambda done, rows, what: told.append(what),
    )
    assert set(found.localiser.banks) == {"backbone"}
    assert set(told) == {"good"}
    assert found.localiser.banks["backbone"].memory.metric == "l2"


def test_reweighed_image_scores_are_those_of_the_file_and_maps_stay(recipe, tmp_path):
    """Fitted, saved and loaded, with the threshold set on weighed scores; a file from before knows of no weights."""
    plain = change(
        recipe, {"features": "backbone", "training.epochs": 0, "pretrained.margin": 0, "memory": Memory(keep=0.3)}
    )
    light, heavy = (
        Detector.fit(GOOD[:8], recipe=given, seed=0, holdout=0.2, false_calls=0.25)
        for given in (plain, change(plain, {"memory.reweight": 9}))
    )
    bad = BAD.images[:4]
    here, there = light.locate(bad), heavy.locate(bad)
    assert torch.equal(here.maps, there.maps)
    assert torch.equal(heavy.score(bad), there.scores)
    weight = there.scores / here.scores
    assert float(weight.min()) >= 1 - 1 / 9 - 1e-6
    assert float(weight.max()) < 1
    assert len(weight.unique()) == 4
    bound = torch.tensor(heavy.limit)
    assert torch.isclose(heavy.score(GOOD[:8]), bound).any()
    assert not torch.isclose(light.score(GOOD[:8]), bound).any()
    heavy.save(tmp_path / "part.firm")
    assert torch.equal(Detector.load(tmp_path / "part.firm").score(bad), there.scores)

    light.save(tmp_path / "old.firm")
    tensors, card = read_model(tmp_path / "old.firm")
    for owner, name in (("memory", "reweight"), ("pretrained", "hard"), ("pretrained", "evenly")):
        del card["recipe"][owner][name]
    write_model(tmp_path / "old.firm", tensors, card)
    old = Detector.load(tmp_path / "old.firm")
    assert old.recipe == light.recipe
    assert torch.equal(old.score(bad), here.scores)


def test_only_the_adaptor_is_trained(recipe):
    task = cell_task(embedder_of(recipe, as_data(GOOD), seed=0), folder=None)
    before = {name: value.clone() for name, value in task.backbone.state_dict().items()}
    run = Run(recipe, task)
    fresh = {name: value.clone() for name, value in run.state.network.state_dict().items()}
    for _ in run:
        pass
    assert all(torch.equal(value, before[name]) for name, value in task.backbone.state_dict().items())
    assert not torch.equal(run.state.network.adapt[0].weight, fresh["adapt.0.weight"])
    assert torch.equal(run.state.network.mean, fresh["mean"])
    assert isinstance(run.state.network, Adaptor)
    assert isinstance(task, CellTask)


def test_a_texture_is_compared_everywhere_from_a_coreset(recipe, monkeypatch):
    monkeypatch.setattr("firm.choosing.WORTH", 1.0)  # nothing wins by so much: the simplest is taken
    asked = change(recipe, {"automatic": ["foreground", "light", "align", "reach"]})
    weave = torch.randint(0, 255, (12, 1, SIDE, SIDE), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    settled = choose(asked, as_data(weave), seed=0)
    assert settled.conditioning.foreground == Rule(method="ones", close=settled.conditioning.foreground.close,
                                                   open=settled.conditioning.foreground.open)  # fmt: skip
    assert settled.memory.reach == -1
    assert (settled.memory.keep, settled.memory.choose) == (COARSE, "coreset")
    assert settled.tiling.around == AROUND
    assert settled.conditioning.light == "none"


def test_what_it_will_take_is_foretold():
    asked = change(ADAPTED, {"automatic": [], "size": SIDE, "memory.reach": 2})
    told = " ".join(foretell(asked, as_data(GOOD)))
    assert "backbone bank" in told
    assert "encoder bank" in told


def test_features_that_do_not_go_together_are_refused():
    assert kinds_of("encoder+backbone") == ("encoder", "backbone")
    for wrong in ("encoder+", "backbone+backbone", "both+pixels"):
        with pytest.raises(FirmError, match="joined by"):
            kinds_of(wrong)
    with pytest.raises(FirmError, match="standardise"):
        change(ADAPTED, {"memory.standardise": False})
    with pytest.raises(FirmError, match="pretrained"):
        change(ADAPTED, {"pretrained.name": ""})


def test_the_recipe_survives_json():
    assert from_json(to_json(ADAPTED)) == ADAPTED


def test_an_adaptor_knows_the_scale_of_the_features():
    torch.manual_seed(0)
    adaptor = Adaptor(4, Pretrained(hidden=(8,), out=3), Head(hidden=(5,), out=2)).eval()
    plain = torch.randn(6, 4)
    expected = adaptor.adapted(plain)
    adaptor.mean, adaptor.std = torch.full((4,), 7.0), torch.full((4,), 3.0)
    torch.testing.assert_close(adaptor.adapted(3 * plain + 7), expected, rtol=1e-4, atol=1e-5)
    assert adaptor(plain).shape == (6, 2)


def test_cells_hold_pairs_of_one_image():
    features = torch.arange(3).view(3, 1, 1, 1).expand(3, 4, 4, 2).half()
    cells = Cells(features, Choosable(torch.ones(3, 4, 4, dtype=torch.bool)), torch.tensor([0, 5, 9]))
    first, second, group = cells.pairs(40, overlapping(3, 0.15), rng=torch.Generator().manual_seed(0))
    assert torch.equal(first, second)
    assert torch.equal(group, torch.tensor([0, 5, 9])[first[:, 0].long()])
