"""The vision transformer: against its definition, both naming schemes, any grid of tokens, files, detectors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import contracts
import drawings
from cases import each
from commands import run
from firm.data.registry import data_root
from firm.detector import embed_images
from firm.detector.detector import Detector
from firm.detector.read import as_data
from firm.drawn.render import draw_dataset
from firm.errors import ModelFileError, SettingError
from firm.metrics.image import auroc
from firm.networks import weights
from firm.networks.adaptor import Pretrained
from firm.networks.backbone import architecture
from firm.networks.vit import SHAPES, Shape, ViT, official_names
from firm.networks.weights import FACTS, file_digest, fill, installed, load_backbone, rebuild, weights_file
from firm.recipes.presets import recipe as preset
from firm.scoring.patch_features import cell_features
from firm.scoring.patch_grid import Grid
from listening import Heard
from random_networks import close, pictures

NAME = "dinov2-small"
TINY = Shape(patch=4, width=12, heads=3, blocks=4, grid=5, stages=(1, 3))
REAL = data_root() / "weights" / "dinov2_vits14.fp16.safetensors"
needs_weights = pytest.mark.skipif(
    not REAL.is_file(), reason="needs weights of DINOv2 in the folder named by FIRM_DATA"
)


def random_tensors(shape, blocks, seed=1):
    """As a published file has them: all blocks, the last norm, a mask token."""
    with torch.device("meta"):
        network = ViT(Shape(**vars(shape) | {"stages": (blocks,)}), deepest=1)
    rng = contracts.generator(seed)
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    shapes |= {"norm.weight": (shape.width,), "norm.bias": (shape.width,), "mask_token": (1, shape.width)}
    around = {name: float(name.endswith(("norm1.weight", "norm2.weight", "gamma"))) for name in shapes}
    spread = {name: 1 / math.sqrt(size[-1]) if name.endswith("weight") else 0.3 for name, size in shapes.items()}
    return {name: torch.randn(size, generator=rng) * spread[name] + around[name] for name, size in shapes.items()}


def hugging_face(tensors, prefix=""):
    """Official names -> those of Hugging Face."""
    stem = {"cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings"}
    stem |= {"mask_token": "embeddings.mask_token", "norm.weight": "layernorm.weight", "norm.bias": "layernorm.bias"}
    layers = {"patch_embed.proj": "embeddings.patch_embeddings.projection", "blocks": "encoder.layer"}
    layers |= {"attn.proj": "attention.output.dense", "ls1.gamma": "layer_scale1.lambda1"}
    layers |= {"ls2.gamma": "layer_scale2.lambda1"}
    renamed = {}
    for name, value in tensors.items():
        theirs = stem.get(name, name)
        for ours, other in layers.items():
            theirs = theirs.replace(ours, other)
        if "attn.qkv" in theirs:
            for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                renamed[prefix + theirs.replace("attn.qkv", f"attention.attention.{part}")] = third.clone()
        else:
            renamed[prefix + theirs] = value
    return renamed


def tiny(deepest=2):
    with torch.device("meta"):
        network = ViT(TINY, deepest=deepest)
    fill(network, random_tensors(TINY, 4))
    return network.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(SHAPES[NAME], 12)


@pytest.fixture(scope="module")
def path(tensors, tmp_path_factory):
    file = tmp_path_factory.mktemp("vit") / "dino.safetensors"
    save_file({name: value.half() for name, value in tensors.items()}, file)
    return str(file)


# --- the network ---


def by_hand(tensors, image, heads, blocks):
    """The tokens of one image after each block, loop by loop."""
    tensors = {name: value.double().numpy() for name, value in tensors.items()}
    image, patch = image.double().numpy(), tensors["patch_embed.proj.weight"].shape[-1]

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(x, name):
        mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-6) * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def gelu(x):
        return np.vectorize(lambda value: value * 0.5 * (1 + math.erf(value / math.sqrt(2))))(x)

    tokens = [tensors["cls_token"][0, 0]]
    for top in range(0, image.shape[1], patch):
        for left in range(0, image.shape[2], patch):
            window = image[:, top : top + patch, left : left + patch]
            filters = tensors["patch_embed.proj.weight"]
            tokens.append((filters * window).sum((1, 2, 3)) + tensors["patch_embed.proj.bias"])
    x = np.stack(tokens) + tensors["pos_embed"][0]
    outputs = []
    for number in range(blocks):
        block = f"blocks.{number}"
        queries, keys, values = np.split(linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv"), 3, axis=1)
        mixed, size = np.zeros_like(x), x.shape[1] // heads
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            for i, query in enumerate(queries[:, part]):
                weights = np.exp([query @ key / math.sqrt(size) for key in keys[:, part]])
                mixed[i, part] = sum(w * v for w, v in zip(weights / weights.sum(), values[:, part], strict=True))
        x = x + linear(mixed, f"{block}.attn.proj") * tensors[f"{block}.ls1.gamma"]
        middle = gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1"))
        x = x + linear(middle, f"{block}.mlp.fc2") * tensors[f"{block}.ls2.gamma"]
        outputs.append(x)
    return outputs


def test_the_transformer_against_its_definition():
    images = pictures(2, 20, 20) * 2 - 1
    found = tiny().stages(images)
    for number, image in enumerate(images):
        after = by_hand(random_tensors(TINY, 4), image, heads=3, blocks=3)
        for stage, block in zip(found, (1, 3), strict=True):
            expected = after[block - 1][1:].reshape(5, 5, 12).transpose(2, 0, 1)
            np.testing.assert_allclose(stage[number], expected, rtol=1e-4, atol=1e-4)


def test_stages_are_the_tokens_after_blocks_2_4_6_8_and_9():
    facts, shape = FACTS[NAME], SHAPES[NAME]
    assert (shape.stages, facts.stages, facts.strides) == ((2, 4, 6, 8, 9), (3, 4), (14,) * 5)
    for deepest in range(1, 6):
        with torch.device("meta"):
            network = ViT(shape, deepest=deepest)
        assert len(network.blocks) == shape.stages[deepest - 1]
        found = network.stages(torch.zeros(2, 3, 98, 126, device="meta"))
        assert [tuple(stage.shape) for stage in found] == [(2, 384, 7, 9)] * deepest
    published = 22_056_576 - 384  # of the whole network, without the mask token
    block = sum(value.numel() for value in network.blocks[0].parameters())
    assert sum(value.numel() for value in network.parameters()) + 3 * block + 2 * 384 == published


def test_deeper_blocks_change_nothing():
    images = pictures(1, 20, 24)
    assert torch.equal(tiny(1).stages(images)[0], tiny(2).stages(images)[0])


def test_positions_of_the_native_grid_are_the_learnt_ones():
    network = tiny()
    assert network.positions(5, 5) is network.pos_embed
    other = network.positions(7, 3)
    assert other.shape == (1, 1 + 7 * 3, 12)
    assert torch.equal(other[:, 0], network.pos_embed[:, 0])
    network.pos_embed[:, 1:] = 2.5  # a constant stays one
    torch.testing.assert_close(network.positions(9, 4)[:, 1:], torch.full((1, 36, 12), 2.5))


def test_positions_keep_their_order_and_direction():
    network = tiny()
    rows = torch.arange(5.0).repeat_interleave(5)
    network.pos_embed[0, 1:, 0], network.pos_embed[0, 1:, 1] = rows, torch.arange(5.0).repeat(5)
    found = network.positions(8, 3)[0, 1:].unflatten(0, (8, 3))
    assert bool((found[1:, :, 0] > found[:-1, :, 0]).all())
    assert bool((found[:, 1:, 1] > found[:, :-1, 1]).all())


@each("height, width", [(1, 3), (20, 20), (21, 30), (43, 17)])
def test_any_size_is_covered_by_whole_tokens(height, width):
    network, images = tiny(), pictures(1, height, width)
    found = network.stages(images)[1]
    assert found.shape[2:] == (math.ceil(height / 4), math.ceil(width / 4))
    assert bool(found.isfinite().all())


def test_the_cells_of_any_stride_lie_where_their_tokens_do(path):
    """320 px are 23 tokens and 40 cells of 8 px: a bright spot changes the features most where it is."""
    backbone, grid = load_backbone(path, deepest=1), Grid(size=8, stride=8)
    backbone.trunk.blocks = backbone.trunk.blocks[:1]
    backbone.trunk.ends = (1,)
    for side, margin in ((96, 32), (128, 0), (104, 32)):
        plain = torch.full((1, 3, side, side), 90, dtype=torch.uint8)
        spot = plain.clone()
        spot[:, :, side - 24 : side - 8, 40:56] = 250
        settings = Pretrained(name=NAME, stages=(1,), pool=1, margin=margin)
        features = [cell_features(backbone, settings, grid, images) for images in (plain, spot)]
        assert features[0].shape == (1, side // 8, side // 8, 384)
        change_ = (features[1] - features[0])[0].norm(dim=2)
        rows, columns = np.unravel_index(int(change_.argmax()), change_.shape)
        assert abs(rows + 0.5 - (side - 16) / 8) <= 1
        assert abs(columns + 0.5 - 6) <= 1


# --- files ---


def test_both_naming_schemes_give_the_same_backbone(tensors, path, tmp_path):
    images = pictures(1, 42, 56)
    halved = {name: value.half() for name, value in tensors.items()}
    expected = load_backbone(path).stages(images)
    save_file(hugging_face(halved), tmp_path / "a.safetensors")
    torch.save(hugging_face(halved, "dinov2.") | {"classifier.bias": torch.zeros(2)}, tmp_path / "b.pth")
    single = {name: value.float() for name, value in halved.items() if name != "mask_token"}
    save_file(single, tmp_path / "c.safetensors")
    for file in sorted(tmp_path.iterdir()):
        backbone = load_backbone(str(file))
        assert backbone.facts is FACTS[NAME]
        assert backbone.digest == file_digest(file)
        assert {value.dtype for value in backbone.state_dict().values()} == {torch.float32}
        assert all(torch.equal(*pair) for pair in zip(backbone.stages(images), expected, strict=True))


def test_other_tensors_keep_their_names():
    others = {"layer1.0.conv1.weight": torch.zeros(1), "blocks.10.0.bn1.weight": torch.zeros(1)}
    assert official_names(others) == others


def test_what_does_not_fit_is_refused_with_the_culprit(tensors, tmp_path):
    short = {name: value for name, value in tensors.items() if name != "blocks.3.ls1.gamma"}
    theirs = hugging_face(tensors)
    del theirs["encoder.layer.2.attention.attention.key.bias"]
    registers = tensors | {"register_tokens": torch.zeros(1, 4, 384)}
    smaller = tensors | {"pos_embed": torch.zeros(1, 257, 384)}
    longer = tensors | {"blocks.12.norm1.bias": torch.zeros(384)}
    for wrong, culprit in [
        (short, "blocks.3.ls1.gamma"),
        (theirs, "blocks.2.attn.qkv.bias"),
        (registers, "register_tokens"),
        (smaller, r"pos_embed is \(1, 257, 384\)"),
        (longer, "blocks.12.norm1.bias"),
    ]:
        save_file(wrong, tmp_path / "w.safetensors")
        with pytest.raises(ModelFileError, match=rf"w\.safetensors.*{NAME}, but .*{culprit}"):
            load_backbone(str(tmp_path / "w.safetensors"))


def test_weights_belong_to_a_name(path, resnet18_file, tmp_path, monkeypatch):
    monkeypatch.setenv("FIRM_DATA", str(tmp_path))
    assert weights_file(NAME, Path(path)) == path
    with pytest.raises(SettingError, match=f"resnet18, not of {NAME}"):
        weights_file(NAME, Path(resnet18_file))
    for name in ("", "wavelets", "timm:net"):
        with pytest.raises(SettingError, match=f"--encoder.*{name}"):
            weights_file(name, Path(path))
    with pytest.raises(SettingError, match=rf"{NAME} .*--weights FILE.*blocks\.0"):
        load_backbone(NAME)


def test_a_stored_backbone_comes_back_to_the_bit(path):
    backbone = load_backbone(path, deepest=3)
    again = rebuild(architecture(backbone), backbone.state_dict())
    images = pictures(2, 50, 61)
    assert all(torch.equal(*pair) for pair in zip(again.stages(images), backbone.stages(images), strict=True))
    assert architecture(again) == {"name": NAME, "deepest": 3, "digest": backbone.digest, "folded": True}
    close(backbone.stages(images.flip(0)), [stage.flip(0) for stage in backbone.stages(images)])
    with torch.autocast("cpu", torch.bfloat16):
        halved = backbone.stages(images)
    pairs = zip(halved, again.stages(images), strict=True)
    assert all(float((one - other).norm() / other.norm()) < 0.05 for one, other in pairs)


# --- detectors ---


SMALL = {"pretrained.stages": [1, 2], "pretrained.hidden": [8], "training.epochs": 1, "automatic": []}
PATCHES = {"outliers": "perlin-blend", "size": 72, "conditioning.foreground.method": "otsu", "training.batch": 64}
WHOLE = {"outliers": "rotations", "size": 42, "pretrained.views": 2, "training.batch": 16}


@each("base, changes", [("adapted", PATCHES), ("semantic", WHOLE)])
def test_a_detector_needs_no_file_after_the_fit(base, changes, path, tmp_path):
    recipe = preset(base, **SMALL | changes | {"pretrained.name": path})
    options = {"holdout": 0.2, "false_calls": 0.25, "keep_suspects": True, "listener": Heard()}
    good, bad = drawings.screws(10, light=0.1).images, drawings.screws(3, seed=2, defect=True).images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_images, "FEWEST_OUTLIERS", 12)
        detector = Detector.fit(as_data(good), recipe=recipe, **options)
    scores = detector.score(bad)
    detector.save(tmp_path / "screw.firm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "read_weights", None)
        again = Detector.load(tmp_path / "screw.firm")
    assert torch.equal(again.score(bad), scores)
    assert again.origin["backbone"]["name"] == NAME
    assert again.origin["licence"].startswith("Apache-2.0")


def test_the_command_takes_a_name_and_its_weights(path, resnet18_file, tmp_path):
    fit = ("fit", "drawn:plate", "-o", tmp_path / "x.firm", "--encoder", NAME)
    asked = {}

    def read(data, out, recipe, options, *, force):
        asked["name"] = recipe.pretrained.name
        raise SettingError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firm.cli.fit._read", read)
        assert run(*fit, "--weights", path).code
    assert asked["name"] == path
    wrong = run(*fit, "--weights", resnet18_file)
    assert wrong.code
    assert "resnet18" in wrong.err


@needs_weights
def test_published_weights_tell_defects_from_good_parts():
    """Plain neighbours of patches, nothing trained: defects of drawn weaves are far from every good patch."""
    backbone, data = load_backbone(str(REAL), deepest=4), draw_dataset("weave", size=112, train=12, good=12, bad=12)
    assert bool(all(value.isfinite().all() for value in backbone.state_dict().values()))
    settings, grid = Pretrained(name=NAME, pool=1, margin=0), Grid(size=16, stride=16)
    known, tested = (
        torch.nn.functional.normalize(cell_features(backbone, settings, grid, images), dim=3)
        for images in (data.train, data.test)
    )
    nearest = torch.cdist(tested.flatten(1, 2), known.flatten(0, 2)[None]).amin(2)
    found = auroc(nearest.amax(1), data.anomalous)
    assert found > 0.75


def test_weights_in_a_folder_of_data_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("FIRM_DATA", str(tmp_path))
    assert not installed(NAME)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "dinov2_vits14_any.safetensors").touch()
    assert installed(NAME)
    assert not installed("resnet18")
