"""Perlin blend: changed only on the object, visibly, by another good image or one of a folder."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import contracts
from firm.errors import DataError
from firm.outliers import perlin_blend as module
from firm.outliers.perlin_blend import LOOKS, VISIBLE, Look
from firm.outliers.registry import OUTLIERS, PerlinBlend
from firm.types import Scene

SEEDS = st.integers(0, 2**32)


def photographs(n, channels=3, height=64, width=None, seed=0):
    """Smooth random images with some grain, as cameras give them."""
    rng = contracts.generator(seed)
    width = width or height
    coarse = 40 + 170 * torch.rand(n, channels, 5, 5, generator=rng)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return (smooth + 2 * torch.randn(n, channels, height, width, generator=rng)).clamp(0, 255).to(torch.uint8)


def scene_of(inliers, donors, foreground=None):
    if foreground is None:
        foreground = torch.ones(len(inliers), *inliers.shape[2:], dtype=torch.bool)
    return Scene(foreground, donors, torch.ones(len(donors), *donors.shape[2:], dtype=torch.bool))


def flat(level, n=1, channels=3, side=64):
    return torch.full((n, channels, side, side), level, dtype=torch.uint8)


@pytest.fixture
def only(monkeypatch):
    """Let donors have one look only; without a name, that of the donor as it is."""

    def choose(name=""):
        look = LOOKS[name] if name else Look(contrast=(1, 1), shift=(0, 0))
        monkeypatch.setattr(module, "LOOKS", {name: look})

    return choose


def save(folder, name, pixels):
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / name)


# --- what every image must be ---


def test_every_look_keeps_the_contract(only):
    for look in LOOKS:
        only(look)
        for channels in (1, 3):
            contracts.check_outlier_source(PerlinBlend(), photographs(6, channels))


@settings(max_examples=15)
@given(seed=SEEDS, strength=st.sampled_from([0.0, 0.3, 1.0, 3.0]), least=st.sampled_from([1, 16, 90]))
def test_what_changes_lies_on_the_object_is_large_enough_and_visible(seed, strength, least):
    inliers = photographs(6, seed=seed)
    foreground = photographs(6, 1, seed=seed + 1)[:, 0] > 120
    made = PerlinBlend(strength=strength, least=least)(
        inliers, rng=contracts.generator(seed), scene=scene_of(inliers, inliers, foreground)
    )
    assert torch.equal(made.where, (made.images != inliers).any(1))
    change = (made.images.float() - inliers.float()).abs().mean(1)
    for where, inside, levels in zip(made.where, foreground, change, strict=True):
        assert int(where.sum()) >= least
        assert not (where & ~inside).any()
        assert float(levels[where].mean()) >= VISIBLE * 0.9  # cells of two blobs are smoothed together


@settings(max_examples=15)
@given(level=st.integers(0, 255), seed=SEEDS, strength=st.sampled_from([0.0, 1.0]))
def test_blank_images_do_not_come_back_unchanged(level, seed, strength):
    made = PerlinBlend(strength=strength)(flat(level, 3, side=24), rng=contracts.generator(seed))
    assert (made.where.flatten(1).sum(1) >= 16).all()
    changed = (made.images[made.where[:, None].expand_as(made.images)].float() - level).abs()
    assert float(changed.mean()) >= VISIBLE


def test_what_nobody_would_see_is_drawn_again_stronger(only):
    """Blank donors that are only moved show nothing; a little distorted they do, before the light has to change."""
    only("stained")
    made = PerlinBlend(strength=0.0)(flat(100, 10, 1), rng=contracts.generator())
    change = (made.images.amax((1, 2, 3)) - 100).float() + (100 - made.images.amin((1, 2, 3))).float()
    assert len(change.unique()) > 5


def test_aligned_products_and_even_textures_still_change_visibly():
    """Smoothed over 8 px, in which grain vanishes, the altered pixels differ by more than the others ever do."""
    rng = contracts.generator(3)
    textures = (128 + 25 * torch.randn(12, 3, 96, 96, generator=rng)).clamp(0, 255).to(torch.uint8)
    made = PerlinBlend()(textures, rng=contracts.generator(4))
    change = made.images.float() - textures.float()
    for where, levels in zip(made.where, change, strict=True):
        kept = torch.nn.functional.avg_pool2d(where.float()[None], 8)[0]
        smooth = torch.nn.functional.avg_pool2d(levels[None], 8)[0] / kept.clamp(min=1 / 64)
        weighted = (smooth.abs().mean(0) * kept).sum() / kept.sum()
        assert float(weighted) > 0.7 * VISIBLE


# --- whose pixels they are ---


def test_donors_of_the_scene_are_used_and_never_altered(only):
    only()
    inliers, donors = flat(0, 8), torch.cat([flat(150), flat(200)])
    before = donors.clone()
    made = PerlinBlend(opacity=(1.0, 1.0))(inliers, rng=contracts.generator(), scene=scene_of(inliers, donors))
    assert torch.equal(donors, before)
    assert set(made.images.unique().tolist()) == {0, 150, 200}
    assert all(len(image.unique()) == 2 for image in made.images)  # one donor to an outlier


def test_an_image_is_not_its_own_donor():
    images = photographs(4, 3, 16).numpy()
    rng, pool = np.random.default_rng(0), module._Pool(images)
    for number, image in enumerate(images):
        assert {pool.other_than(image, rng) for _ in range(60)} == {0, 1, 2, 3} - {number}
    assert {pool.other_than(255 - images[0], rng) for _ in range(60)} == {0, 1, 2, 3}
    assert module._Pool(images[:1]).other_than(images[0], rng) == 0  # a lone one has no other


def test_the_object_of_the_donor_is_shown(only):
    """A donor with a small bright object on black: everywhere else it would hardly ever show."""
    only()
    inliers, donors = flat(100, 40), flat(0)
    donors[..., 20:26, 40:46] = 220
    inside = donors[:, 0] > 0
    scene = Scene(torch.ones(40, 64, 64, dtype=torch.bool), donors, inside)
    made = PerlinBlend(opacity=(1.0, 1.0), strength=0.0)(inliers, rng=contracts.generator(), scene=scene)
    bright = made.images.flatten(1).amax(1) > 150
    assert float(bright.float().mean()) > 0.9


def shown_place(strength, seed):
    """The linear map from pixels to places in the donor, and how far the places are from it: ramps tell both."""
    line = np.arange(0, 256, 4, dtype=np.uint8)
    ramps = np.stack([np.tile(line, (64, 1)).T, np.tile(line, (64, 1)), np.zeros((64, 64), np.uint8)], 2)
    rows, columns = (axis.ravel() for axis in np.mgrid[28:36, 28:36])  # small, so that no edge is mirrored
    placed = module._placed(ramps, rows * 64 + columns, (32, 32), strength, np.random.default_rng(seed))
    fit = np.stack([rows, columns, np.ones_like(rows)], 1)
    found, *_ = np.linalg.lstsq(fit, placed[:2].T / 4, rcond=None)
    return found[:2].T, np.abs(placed[:2].T / 4 - fit @ found).max(0)


def test_donors_are_turned_by_any_angle_and_flipped():
    maps, errors = zip(*(shown_place(0.0, seed) for seed in range(60)), strict=True)
    assert np.max(errors) < 0.2  # 8 bits of the ramp, and OpenCV's steps between pixels
    for one in maps:
        np.testing.assert_allclose(one @ one.T, np.eye(2), atol=0.06)
    turns = [np.arctan2(one[1, 0], one[0, 0]) for one in maps]
    assert np.histogram(turns, bins=8, range=(-np.pi, np.pi))[0].min() > 0
    assert 15 < sum(np.linalg.det(one) < 0 for one in maps) < 45


def test_donors_are_bent_by_their_strength():
    weak, strong = (np.mean([shown_place(strength, seed)[1] for seed in range(20)], axis=0) for strength in (0.0, 3.0))
    assert (strong > 3 * weak).all()  # along both axes


def test_more_pixels_than_a_line_holds_are_sampled_in_order():
    values = np.arange(256, dtype=np.uint8)[None, :].repeat(200, 0)
    x, y = (axis.ravel().astype(np.float32) for axis in np.meshgrid(np.arange(255), np.arange(199)))
    assert len(x) > 3 * module.LINE
    np.testing.assert_array_equal(module._sampled(values, x, y), x[None])


def test_a_smeared_donor_has_lost_its_detail(only):
    """Of stripes 4 px wide, a blur of 256 / 20 px leaves next to nothing."""
    stripes = (torch.arange(256) % 8 < 4).to(torch.uint8).mul(200).expand(1, 1, 256, 256).contiguous()
    contrast = {}
    for name in ("smeared", "misplaced"):
        only(name)
        made = PerlinBlend(opacity=(1.0, 1.0))(
            flat(100, 4, 1, 256), rng=contracts.generator(), scene=scene_of(flat(100, 4, 1, 256), stripes)
        )
        contrast[name] = max(
            float(image[0][where].float().std()) for image, where in zip(made.images, made.where, strict=True)
        )
    assert contrast["smeared"] < 0.3 * contrast["misplaced"]


def test_one_pixel_of_the_mask_shows_the_source():
    donors = np.zeros((64, 64), np.uint8)
    donors[50, 9] = 255
    for seed in range(10):
        at = np.flatnonzero(np.random.default_rng(seed).random((64, 64)) < 0.05)
        placed = module._placed(donors, at, (50, 9), 0.0, np.random.default_rng(seed))
        assert placed.max() == 255


def test_no_outlier_depends_on_those_beside_it():
    """Not even on how often they had to be drawn again."""
    inliers, donors = photographs(6), photographs(4, seed=7)
    narrow = torch.ones(6, 64, 64, dtype=torch.bool)
    narrow[0] = False
    narrow[0, 5, 5:25] = True  # hard to hit
    wide, tight = (
        PerlinBlend()(inliers, rng=contracts.generator(5), scene=scene_of(inliers, donors, foreground))
        for foreground in (None, narrow)
    )
    assert not torch.equal(wide.images[0], tight.images[0])
    assert torch.equal(wide.images[1:], tight.images[1:])


def test_a_scene_without_donors_falls_back_on_the_inliers():
    inliers = photographs(4)
    scene = scene_of(inliers, inliers[:0])
    assert torch.equal(
        PerlinBlend()(inliers, rng=contracts.generator(2), scene=scene).images,
        PerlinBlend()(inliers, rng=contracts.generator(2)).images,
    )


# --- how they are blended ---


def test_opacity_stays_within_its_bounds_and_fills_them(only):
    only()
    inliers = flat(0, 200, 1, 32)
    made = PerlinBlend(opacity=(0.5, 0.8))(
        inliers, rng=contracts.generator(), scene=scene_of(inliers, flat(250, 1, 1, 32))
    )
    shown = torch.tensor(
        [image[where].unique().item() for image, where in zip(made.images[:, 0], made.where, strict=True)]
    )
    opacity = shown / 250
    assert 0.5 <= float(opacity.min()) + 0.002 < 0.52
    assert 0.78 < float(opacity.max()) - 0.002 <= 0.8
    assert float(opacity.mean()) == pytest.approx(0.65, abs=0.02)


def test_the_default_opacity_is_that_of_the_method():
    assert PerlinBlend().opacity == (0.5, 1.0)
    assert OUTLIERS["perlin-blend"] == PerlinBlend()
    assert (PerlinBlend().kinds, PerlinBlend().per_inlier, PerlinBlend(per_inlier=3).per_inlier) == (1, 1, 3)


@pytest.mark.parametrize("name", LOOKS)
def test_looks_change_tone_and_contrast_within_their_bounds(name):
    look = LOOKS[name]
    rng = np.random.default_rng(0)
    placed = rng.uniform(100, 150, (1, 400)).astype(np.float32)
    shifts, gains = [], []
    for _ in range(200):
        toned = module._toned(placed, look, 1.0, rng)
        if toned.min() > 0 and toned.max() < 255:  # else the ends are clipped
            shifts.append(abs(toned.mean() - placed.mean()))
            gains.append(float(((toned - toned.mean()) * (placed - placed.mean())).sum() / placed.var() / placed.size))
    assert look.shift[0] - 0.5 <= min(shifts)
    assert max(shifts) <= look.shift[1] + 0.5
    assert look.contrast[0] - 0.01 <= min(gains) < look.contrast[0] + 0.1
    assert look.contrast[1] - 0.15 < max(gains) <= look.contrast[1] + 0.01


@pytest.mark.parametrize(("level", "signs"), [(2, {1}), (128, {-1, 1}), (253, {-1})])
def test_tones_shift_to_where_there_is_room(level, signs):
    rng, placed = np.random.default_rng(0), np.full((1, 20), level, np.float32)
    toned = [module._toned(placed, LOOKS["plain"], 1.0, rng).mean() - level for _ in range(40)]
    assert {int(np.sign(shift)) for shift in toned} == signs
    assert min(np.abs(toned)) >= 29.5


def test_strength_scales_the_change_of_tone():
    placed = np.full((1, 20), 120, np.float32)
    shifts = [
        abs(module._toned(placed, LOOKS["stained"], s, np.random.default_rng(1)) - 120).mean() for s in (0, 0.5, 1)
    ]
    assert shifts[0] == 0
    assert shifts[1] == pytest.approx(shifts[2] / 2)


def test_a_camera_without_colour_sees_none():
    grey = photographs(30, 1).expand(-1, 3, -1, -1).contiguous()
    made = PerlinBlend()(grey, rng=contracts.generator()).images
    assert torch.equal(made[:, 0], made[:, 1])
    assert torch.equal(made[:, 0], made[:, 2])


def test_a_stain_has_a_colour_of_its_own(only):
    only("stained")
    inliers = torch.cat([flat(level, 30, 1) for level in (150, 120, 90)], dim=1)
    made = PerlinBlend()(inliers, rng=contracts.generator())
    change = (made.images.float() - inliers.float()).permute(0, 2, 3, 1)[made.where]
    assert float((change.amax(1) - change.amin(1)).mean()) > 10


def test_blobs_nobody_would_see_are_left_as_they_were():
    """Of two blobs, one changed by 20 grey levels and one by noise alone, only the first counts."""
    mask = np.zeros((64, 64), bool)
    mask[5:20, 5:20] = mask[40:60, 40:60] = True
    at = np.flatnonzero(mask)
    noise = np.random.default_rng(0).normal(0, 12, (3, len(at))).astype(np.float32)
    first = at < 64 * 30
    assert np.array_equal(module._visible(noise + 20 * first, at, mask), first)
    assert np.abs(noise).mean() > VISIBLE  # though the noise alone would pass unsmoothed


@pytest.mark.parametrize(("level", "seen"), [(VISIBLE - 0.1, False), (VISIBLE + 0.1, True)])
def test_the_bound_of_the_visible_is_a_mean_over_channels(level, seen):
    mask = np.zeros((50, 70), bool)
    mask[10:30, 12:50] = True
    at = np.flatnonzero(mask)
    for channels in (1, 3):
        change = np.full((channels, len(at)), level, np.float32) * np.float32([[1], [-1], [1]])[:channels]
        assert module._visible(change, at, mask).all() == seen


# --- folders ---


def test_images_of_a_folder_are_shown_as_they_are(tmp_path):
    pixels = np.random.default_rng(0).integers(100, 256, (3, 48, 48, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        save(tmp_path / "sdas" / "screw", f"{number}.png", image)
    made = PerlinBlend(folder=str(tmp_path / "sdas" / "screw"), opacity=(1.0, 1.0))(
        flat(0, 30, side=48), rng=contracts.generator()
    )
    used = set()
    for image, where in zip(made.images.permute(0, 2, 3, 1).numpy(), made.where.numpy(), strict=True):
        (number,) = [n for n in range(3) if np.array_equal(image[where], pixels[n][where])]
        used.add(number)
    assert used == {0, 1, 2}


def test_images_of_a_folder_come_in_the_size_and_colours_of_the_inliers(tmp_path):
    for name in ("a.jpg", "b.bmp"):
        save(tmp_path, name, np.full((20, 90, 3), (255, 0, 0), np.uint8))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".hidden.png").write_bytes(b"no image")
    colour = PerlinBlend(folder=str(tmp_path), opacity=(1.0, 1.0))(photographs(4, 3, 30, 40), rng=contracts.generator())
    red = colour.images.permute(0, 2, 3, 1)[colour.where].float()
    assert red[:, 0].min() > 250
    assert red[:, 1:].max() < 5
    grey = PerlinBlend(folder=str(tmp_path), opacity=(1.0, 1.0))(flat(0, 4, 1, 30), rng=contracts.generator())
    assert set(grey.images[:, 0][grey.where].tolist()) <= {75, 76, 77}  # the luminance of red


def test_opacity_blends_images_of_a_folder(tmp_path):
    save(tmp_path, "white.png", np.full((32, 32, 3), 255, np.uint8))
    made = PerlinBlend(folder=str(tmp_path))(flat(0, 60, side=32), rng=contracts.generator())
    shown = torch.tensor([int(image.max()) for image in made.images])
    assert 127 <= int(shown.min()) < 140
    assert 245 < int(shown.max()) <= 255


def test_where_nothing_differs_the_light_changes(tmp_path):
    save(tmp_path, "same.png", np.full((32, 32, 3), 77, np.uint8))
    made = PerlinBlend(folder=str(tmp_path))(flat(77, 5, side=32), rng=contracts.generator())
    assert (made.where.flatten(1).sum(1) >= 16).all()
    assert set(made.images.unique().tolist()) == {77, 77 + 48}
    assert torch.equal(made.where, (made.images != 77).any(1))


def test_too_few_changed_pixels_are_drawn_again(tmp_path):
    """The donor is the inlier but for a square that masks hardly ever cover by chance."""
    pixels = np.full((64, 64, 3), 60, np.uint8)
    pixels[30:38, 30:38] = 250
    save(tmp_path, "square.png", pixels)
    made = PerlinBlend(folder=str(tmp_path), opacity=(1.0, 1.0))(flat(60, 60), rng=contracts.generator())
    assert int(made.where.flatten(1).sum(1).min()) >= 16
    hits = made.images.flatten(1).eq(250).any(1)
    assert 0 < int(hits.sum()) < 60  # the light changed on the others


def test_a_damaged_file_is_named_and_left_out(tmp_path):
    save(tmp_path, "good.png", np.full((16, 16, 3), 200, np.uint8))
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match=r"left out: .*bad\.png cannot be decoded"):
        made = PerlinBlend(folder=str(tmp_path))(flat(0, 3, side=16), rng=contracts.generator())
    assert made.where.flatten(1).any(1).all()


def test_a_folder_is_read_once(tmp_path):
    save(tmp_path, "one.png", np.full((16, 16, 3), 200, np.uint8))
    first = PerlinBlend(folder=str(tmp_path))(flat(0, 3, side=16), rng=contracts.generator())
    (tmp_path / "one.png").unlink()
    again = PerlinBlend(folder=str(tmp_path))(flat(0, 3, side=16), rng=contracts.generator())
    assert torch.equal(first.images, again.images)


def test_folders_without_images_are_named(tmp_path):
    def refused(folder, message):
        with pytest.raises(DataError, match=message):
            PerlinBlend(folder=str(folder))(flat(0), rng=contracts.generator())

    refused(tmp_path / "nowhere", "nowhere is not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"outliers\.folder .*empty")
    save(tmp_path / "sdas" / "bottle", "1.jpg", np.zeros((16, 16, 3), np.uint8))
    refused(tmp_path / "sdas", r"outliers\.folder .*sdas.bottle")  # the fix
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "1.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="left out"):
        refused(tmp_path / "broken", r"outliers\.folder .*broken")
