"""Light and pose: what is no defect goes away, each image by itself, and a map finds its way back to the image."""

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

import contracts
from cases import each
from firm.errors import SettingError
from firm.images.alignment import FAINT, GAIN, MIDDLE, NEIGHBOURHOOD, SIDE, Conditioning, elongation, even_illumination
from firm.images.foreground import Rule

BRIGHT = Rule(method="otsu", close=0, open=0)
ALIGNED = Conditioning(align=True, foreground=BRIGHT)
HEIGHT, WIDTH = 152, 176
# a screw lying level in pixels around the middle: a wide head and a long shank
SCREW = np.array([[-56, -25], [-32, -25], [-32, -14], [56, -14], [56, 14], [-32, 14], [-32, 25], [-56, 25]], float)


def picture(*, angle=0.0, shift=(0.0, 0.0), outline=SCREW, dot=None, channels=3):
    """A bright part on dark ground, turned and shifted; a dot of the screw's own frame is red and green."""
    radians = np.deg2rad(angle)
    turn = np.array([[np.cos(radians), -np.sin(radians)], [np.sin(radians), np.cos(radians)]])
    middle = np.array([(WIDTH - 1) / 2, (HEIGHT - 1) / 2]) + shift
    image = np.full((HEIGHT, WIDTH, 3), 30, np.uint8)
    corners = np.round((outline @ turn.T + middle) * 16).astype(np.int32)
    cv2.fillPoly(image, [corners], (150, 150, 150), lineType=cv2.LINE_AA, shift=4)
    place = None
    if dot is not None:
        place = turn @ np.array(dot) + middle
        cv2.circle(image, [int(v) for v in np.round(place * 16)], 24, (255, 255, 150), -1, cv2.LINE_AA, shift=4)
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None, :channels].contiguous()
    return tensor if dot is None else (tensor, place)


def overlap(one, other):
    return float((one & other).sum() / (one | other).sum())


def textured(n=3, channels=3, height=40, width=56, seed=0):
    """Smooth random pictures in 60..120, so that neither half nor double the light leaves a byte."""
    rng = np.random.default_rng(seed)
    values = ndimage.gaussian_filter(rng.normal(size=(n, channels, height, width)), (0, 0, 2, 2))
    values = (values - values.min()) / (values.max() - values.min())
    return torch.from_numpy((60 + 60 * values).astype(np.float32))


def as_bytes(values):
    return values.round().clamp(0, 255).to(torch.uint8)


def levels(one, other):
    return (one.float() - other.float()).abs()


# --- light ---


@each("channels", [1, 3])
def test_the_median_goes_to_the_middle(channels):
    images = as_bytes(textured(5, channels))
    images[:, :, :12] = 250  # a bright part: the mean would not do
    found = Conditioning(illumination="median")(images).images
    for image in found:
        assert abs(float(np.median(image.numpy())) - MIDDLE) <= 1


@settings(max_examples=25)
@given(exposure=st.floats(0.6, 1.9), seed=st.integers(0, 99))
def test_median_light_does_not_know_the_exposure(exposure, seed):
    values = textured(2, seed=seed)
    condition = Conditioning(illumination="median")
    difference = levels(condition(as_bytes(values * exposure)).images, condition(as_bytes(values)).images)
    assert float(difference.max()) <= 4  # half a level of a picture at 0.6 is a bit more than one at the middle
    assert float(difference.mean()) < 2


@settings(max_examples=25)
@given(gain=st.floats(0.6, 1.6), offset=st.floats(-30, 50), seed=st.integers(0, 99))
def test_local_light_knows_neither_gain_nor_offset(gain, offset, seed):
    values = textured(2, seed=seed)
    values = (values - 90) * 2 + 90  # contrasts well above what counts as faint
    condition = Conditioning(illumination="local")
    found, expected = (condition(as_bytes(some)).images for some in ((values - 90) * gain + 90 + offset, values))
    assert float(levels(found, expected).mean()) < 6
    assert np.corrcoef(found.flatten().numpy(), expected.flatten().numpy())[0, 1] > 0.98  # rounded at a low gain
    shifted = condition(as_bytes(values.round() + 7)).images
    assert float(levels(shifted, condition(as_bytes(values.round())).images).max()) <= 1


@each("channels", [1, 3])
def test_local_light_is_the_difference_to_the_neighbourhood_in_its_deviations(channels):
    pixels = contracts.images_of(1, channels, 40, 56)[0].permute(1, 2, 0).numpy()
    sigma = NEIGHBOURHOOD * 40 / SIDE

    def around(plane):
        return ndimage.gaussian_filter(plane, sigma, mode="reflect", truncate=4)

    values = pixels.astype(np.float64)
    centred = values - np.stack([around(values[..., c]) for c in range(channels)], axis=2)
    spread = np.sqrt(around((centred**2).mean(axis=2)))
    expected = np.clip(centred / (spread[..., None] + FAINT) * GAIN + MIDDLE, 0, 255)
    assert np.abs(even_illumination(pixels, "local") - expected).max() < 1


def test_faint_noise_is_not_blown_up():
    noise = (100 + torch.randn(1, 3, 48, 48, generator=contracts.generator())).round()
    found = Conditioning(illumination="local")(as_bytes(noise)).images.float()
    assert 1 < float(found.std()) < 2 * GAIN / FAINT


@each("level", [0, 1, 77, 255])
@each("channels", [1, 3])
def test_a_constant_image_stays_constant(level, channels):
    plain = torch.full((2, channels, 20, 24), level, dtype=torch.uint8)
    for light, expected in (("none", level), ("median", 128 if level else 0), ("local", 128)):
        assert (Conditioning(illumination=light)(plain).images == expected).all()


# --- pose ---


@settings(max_examples=40)
@given(angle=st.floats(0, 360), right=st.floats(-9, 9), down=st.floats(-7, 7))
def test_however_a_part_lies_it_comes_out_in_one_frame(angle, right, down):
    expected, found = ALIGNED(picture()), ALIGNED(picture(angle=angle, shift=(right, down)))
    assert overlap(found.foreground, expected.foreground) > 0.8  # half a pixel moves an edge by one
    assert float(levels(found.images, expected.images).mean()) < 4


@settings(max_examples=25)
@given(angle=st.floats(0, 360))
def test_the_heavier_end_is_on_one_side_and_the_part_in_the_middle(angle):
    mask = ALIGNED(picture(angle=angle)).foreground[0]
    columns, rows = mask.any(0).nonzero(), mask.any(1).nonzero()
    assert abs(float(columns.min() + columns.max()) - (WIDTH - 1)) <= 2
    assert abs(float(rows.min() + rows.max()) - (HEIGHT - 1)) <= 2
    assert float(columns.max() - columns.min()) > 2 * float(rows.max() - rows.min())
    middle = (WIDTH - 1) / 2
    assert float(mask.nonzero()[:, 1].float().mean()) < middle - 2  # the head


@settings(max_examples=40)
@given(
    angle=st.floats(0, 360), right=st.floats(-9, 9), down=st.floats(-7, 7), along=st.floats(-50, 50),
    aside=st.sampled_from([-9.0, 0.0, 9.0]),
)  # fmt: skip
def test_a_point_of_the_aligned_frame_finds_its_way_back(angle, right, down, along, aside):
    image, (x, y) = picture(angle=angle, shift=(right, down), dot=(along, aside))
    ready = Conditioning(align=True, foreground=Rule(method="otsu", channel="blue", close=0, open=0))(image)
    spot = (ready.images[:, 0].float() - 150).clamp(min=0)  # red shows nothing else as bright
    maps = ready.back(spot)
    assert maps.shape == (1, HEIGHT, WIDTH)
    assert maps.dtype == torch.float32
    weight = maps[0].double() / maps[0].double().sum()
    found = float((weight.sum(0) * torch.arange(WIDTH)).sum()), float((weight.sum(1) * torch.arange(HEIGHT)).sum())
    assert np.hypot(found[0] - x, found[1] - y) < 1.5


def test_a_map_without_alignment_stays_where_it_is():
    for light in ("none", "local"):
        maps = torch.rand(2, 24, 32, generator=contracts.generator())
        ready = Conditioning(illumination=light)(contracts.images_of(2, 3, 24, 32))
        assert ready.frames is None
        assert torch.equal(ready.back(maps), maps)


def test_beyond_the_frame_a_map_has_no_heat():
    """Heat at the rim of the aligned image ends there and is not drawn out to the corners of the image as it came."""
    ready = ALIGNED(picture(angle=90))
    heat = ready.back(torch.full((1, HEIGHT, WIDTH), 3.0))[0]
    frame = ready.frames[0].numpy()
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    right, down = frame[:, :2] @ np.stack([x.ravel(), y.ravel()]) + frame[:, 2:]
    past = np.maximum(np.abs(right - (WIDTH - 1) / 2) - WIDTH / 2, np.abs(down - (HEIGHT - 1) / 2) - HEIGHT / 2)
    past = torch.from_numpy(past.reshape(HEIGHT, WIDTH))
    assert (past > 0.1).any()
    assert (heat[past > 0.1] == 0).all()
    assert (heat[past < -0.1] == 3).all()


def test_only_the_largest_object_gives_the_pose():
    """A crumb, far from the part and at another angle, moves nothing."""
    alone = picture(angle=25)
    crumbed = alone.clone()
    crumbed[:, :, 3:9, 3:9] = 150
    torch.testing.assert_close(ALIGNED(crumbed).frames, ALIGNED(alone).frames)


def test_the_object_moves_with_its_image():
    image = picture(angle=140)
    ready = ALIGNED(image)
    again = (ready.images[0].float().mean(0) > 90)[None]
    assert overlap(ready.foreground, again) > 0.9


# --- elongation ---


def rectangle(width, height, canvas=(80, 100)):
    mask = torch.zeros(1, *canvas, dtype=torch.bool)
    mask[:, 10 : 10 + height, 20 : 20 + width] = True
    return mask


def test_elongation_is_the_ratio_of_the_axes():
    assert elongation(rectangle(60, 20)) == pytest.approx(3, rel=0.01)
    assert elongation(rectangle(12, 60)) == pytest.approx(5, rel=0.01)
    assert elongation(rectangle(30, 30)) == pytest.approx(1)
    turned = ALIGNED(picture(angle=33)).foreground
    assert elongation(turned) == pytest.approx(elongation(ALIGNED(picture()).foreground), rel=0.05)


def test_elongation_is_that_of_the_largest_object_and_of_the_middle_image():
    crumbed = rectangle(60, 20)
    crumbed[:, 70:78, 90:98] = True
    assert elongation(crumbed) == pytest.approx(3, rel=0.01)
    several = torch.cat([rectangle(60, 20), rectangle(40, 20), rectangle(20, 20)])
    assert elongation(several) == pytest.approx(2, rel=0.01)
    assert elongation(several[:0]) == 1.0
    assert elongation(torch.zeros(1, 40, 80, dtype=torch.bool)) == pytest.approx(2, rel=0.01)  # no object: all of it
    single = torch.zeros(1, 9, 9, dtype=torch.bool)
    single[0, 4, 4] = True
    assert elongation(single) == 1.0


# --- each by itself ---


@each("condition", [Conditioning(illumination="median"), Conditioning(illumination="local"), ALIGNED])
def test_an_image_is_conditioned_by_itself_alone(condition):
    images = torch.cat([picture(angle=angle) for angle in (0, 70, 200)])
    before = images.clone()
    together = condition(images)
    assert torch.equal(images, before)
    assert together.images.is_contiguous()
    for i in range(len(images)):
        alone = condition(images[i : i + 1])
        assert torch.equal(alone.images[0], together.images[i])
        assert torch.equal(alone.foreground[0], together.foreground[i])
        if condition.align:
            assert torch.equal(alone.frames[0], together.frames[i])


@each("light", ["none", "median", "local"])
@each("align", [False, True])
def test_grey_is_conditioned_as_its_three_copies(light, align):
    condition = Conditioning(illumination=light, align=align, foreground=BRIGHT)
    images = torch.cat([picture(angle=angle) for angle in (20, 150)])
    one, three = condition(images[:, :1].contiguous()), condition(images)
    assert one.images.shape == (2, 1, HEIGHT, WIDTH)
    assert torch.equal(one.images.expand(-1, 3, -1, -1), three.images)
    assert torch.equal(one.foreground, three.foreground)


def test_nothing_to_do_hands_the_images_through():
    images = contracts.images_of(2, 3, 10, 14)
    ready = Conditioning()(images)
    assert torch.equal(ready.images, images)
    assert ready.foreground.all()
    assert ready.frames is None


@each("condition", [Conditioning(), Conditioning(illumination="local"), ALIGNED])
def test_no_images_are_no_trouble(condition):
    ready = condition(torch.empty(0, 3, 12, 16, dtype=torch.uint8))
    assert ready.images.shape == (0, 3, 12, 16)
    assert ready.back(torch.empty(0, 12, 16)).shape == (0, 12, 16)


def test_impossible_settings_are_named():
    with pytest.raises(SettingError, match=r"conditioning\.illumination is 'dim'.*none, median, local"):
        Conditioning(illumination="dim")
    with pytest.raises(SettingError, match=r"conditioning\.align .*conditioning\.foreground\.method"):
        Conditioning(align=True)
