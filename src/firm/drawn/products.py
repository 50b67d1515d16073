"""How good drawn parts are made: a machined plate, a woven cloth and a printed bottle.

Each builder draws its part's pose and irregularity from the generator it is given, and returns a scene.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import cv2
import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFont

from firm.drawn.scene import Light, Plane, Pose, Scene, Spot, clouds, lay_down, length, mix, plane, srgb, step
from firm.runtime.random import numpy_stream

# --- plate: a brushed aluminium flange on a conveyor belt ---

PLATE = (0.77, 0.67, 0.15)  # half width, half height, corner radius
BORE, FACE = 0.19, 0.31  # the central bore and the turned face around it
Hole = tuple[float, float, float, float]  # u, v, radius, radius of the countersink
CORNERS = tuple((x, y, 0.07, 0.125) for x in (-0.56, 0.56) for y in (-0.46, 0.46))
HOLES: tuple[Hole, ...] = (*CORNERS, (-0.6, 0.0, 0.042, 0.056), (0.6, 0.0, 0.042, 0.056))


def build_plate(rng: Generator, side: int, light: Light) -> Scene:
    """A flange with a turned bore and six holes; undrilled it stays in `before`."""
    pose = lay_down(rng, turn=5, shift=0.05, stretch=0.03)
    blank = lay_plate(build_belt(rng, side), rng, pose, light)
    blank = drill(blank, pose, [(0.0, 0.0, BORE, BORE + 0.02)], light)
    drilled = drill(blank, pose, HOLES, light)
    spots = tuple(Spot(*pose.to_canvas(*hole[:2], side), *[hole[3] * side / 2] * 2) for hole in HOLES)
    return replace(drilled, spots=spots, before=blank)


def build_belt(rng: Generator, side: int) -> Scene:
    """A dark rubber belt with a moulded diamond grain, wherever it has run to."""
    lines = np.linspace(-1, 1, side, dtype=np.float32)
    x, y = lines[None, :] + rng.uniform(0, 1), lines[:, None] + rng.uniform(0, 1)
    grain = np.sin((x + y) * 75) * np.sin((x - y) * 75)
    worn = clouds(rng, side, 7) * 0.14 + clouds(rng, side, 70) * 0.12
    albedo = srgb(0x464B4E) * (1 + worn + grain * 0.12)
    return Scene(albedo, grain * (side * 0.0006), plane(0.016 * (1 + worn)), np.zeros((side, side), bool), plane(0))


def rounded_box(u: Plane, v: Plane) -> Plane:
    """Distance to the plate's outline, negative inside."""
    width, height, radius = PLATE
    du, dv = np.abs(u) - (width - radius), np.abs(v) - (height - radius)
    outside = length(np.maximum(du, 0), np.maximum(dv, 0))
    return outside + np.minimum(np.maximum(du, dv), 0) - radius


def lay_plate(belt: Scene, rng: Generator, pose: Pose, light: Light) -> Scene:
    """The undrilled plate on its belt: brushed, chamfered, with a turned face and a cast shadow."""
    side, unit = belt.side, belt.unit
    u, v = pose.to_part(side)
    outline = rounded_box(u, v)
    cover = np.clip(0.5 - outline * unit, 0, 1)
    shadow = 1 - 0.75 * (1 - step(rounded_box(u + light.x * 0.1, v + light.y * 0.1), -0.05, 0.06))
    r = length(u, v)
    turned = 1 - step(r, FACE - 0.008, FACE + 0.008)
    brushed = pose.turn(clouds(rng, side, 170, 5) + 0.7 * clouds(rng, side, 60, 3))
    grooves = brushed * (1 - turned) * 0.0011 + np.sin(r * 260) * turned * 0.0018
    chamfer = np.minimum(-outline, 0.035) * 0.75
    height = plane((chamfer - turned * 0.012 + grooves) * unit)
    tone = 1 + 0.05 * clouds(rng, side, 5) + brushed * (1 - turned) * 0.05
    return Scene(
        albedo=mix(belt.albedo * shadow, srgb(0x8E9296) * tone, cover),
        height=mix(belt.height, height, cover),
        gloss=mix(belt.gloss * shadow, plane(0.62 * tone), cover),
        site=(outline < -0.06) & (r > BORE + 0.05),
        surface=cover,
        roughness=0.27,
    )


def drill(scene: Scene, pose: Pose, holes: Iterable[Hole], light: Light) -> Scene:
    """The scene with more countersunk holes in its part, their walls lit on the side away from the lamp."""
    side, unit = scene.side, scene.unit * pose.scale
    albedo, height, gloss = scene.albedo.copy(), scene.height.copy(), scene.gloss.copy()
    surface, site = scene.surface.copy(), scene.site.copy()
    for u, v, inner, outer in holes:
        x, y = pose.to_canvas(u, v, side)
        reach = math.ceil(outer * unit + 3)
        rows, columns = (slice(max(0, int(middle) - reach), int(middle) + reach) for middle in (y, x))
        px = np.arange(side, dtype=np.float32)[None, columns] + 0.5 - x
        py = np.arange(side, dtype=np.float32)[rows, None] + 0.5 - y
        r = length(px, py)
        through = np.clip(inner * unit - r + 0.5, 0, 1)
        face = albedo[:, rows, columns]
        face[:] = mix(face, hole_wall(px, py, r, inner * unit, (u, v), light), through)
        height[rows, columns] -= np.clip(outer * unit - r, 0, (outer - inner) * unit) * 0.8
        gloss[rows, columns] *= 1 - through
        surface[rows, columns] *= 1 - through
        site[rows, columns] &= r > outer * unit + 0.02 * unit
    return replace(scene, albedo=albedo, height=height, gloss=gloss, site=site, surface=surface)


def hole_wall(px: Plane, py: Plane, r: Plane, radius: float, at: tuple[float, float], light: Light) -> Plane:
    """Inside a hole: a dark floor, and the wall the camera sees by looking slightly from the middle."""
    lean = 0.16 + 0.2 * math.hypot(*at)
    away = math.atan2(at[1], at[0]) if at != (0.0, 0.0) else math.atan2(-light.y, -light.x)
    floor = length(px + lean * radius * math.cos(away) * 0.6, py + lean * radius * math.sin(away) * 0.6)
    wall = step(floor, radius * 0.74, radius * 0.84)
    lit = np.maximum(px * -light.x - py * light.y, 0) / np.maximum(r, 1)
    return plane(0.008 + wall * (0.03 + 0.5 * lit)) * srgb(0xF4F6FF)


# --- weave: a twill with thread-level irregularity ---

THREADS = 27


def build_weave(rng: Generator, side: int, light: Light) -> Scene:
    """A two-up-two-down twill: every thread has its own tone, thickness and waver."""
    pose = lay_down(rng, turn=3, shift=0.5, stretch=0.04)
    u, v = pose.to_part(side)
    a = (u + 2 + 0.006 * clouds(rng, side, 9) + 0.004 * clouds(rng, side, 4, 30)) * (THREADS / 2)
    b = (v + 2 + 0.006 * clouds(rng, side, 9) + 0.004 * clouds(rng, side, 30, 4)) * (THREADS / 2)
    warp, warp_tone = yarn(a, b, 1.0, rng, pose.turn(clouds(rng, side, 14, 60)))
    weft, weft_tone = yarn(b, a, -1.0, rng, pose.turn(clouds(rng, side, 60, 14)))
    front = np.clip((warp - weft) * 8 + 0.5, 0, 1)
    relief = np.maximum(warp, weft)
    tone = mix(weft_tone, warp_tone, front) * (0.3 + 0.7 * step(relief, -0.35, 0.9)) * (1 + 0.03 * clouds(rng, side, 5))
    colour = mix(srgb(0xC9C2B2), srgb(0x4C6E8F), front)
    return Scene(
        albedo=colour * tone,
        height=relief * np.float32(side / THREADS * 0.3),
        gloss=0.03 * tone,
        site=np.pad(np.ones((side - 2 * (side // 12),) * 2, bool), side // 12),
        surface=np.ones((side, side), np.float32),
        roughness=0.35,
    )


def yarn(across: Plane, along: Plane, lifted: float, rng: Generator, slubs: Plane) -> tuple[Plane, Plane]:
    """Height and tone of parallel threads, counted by `across`; systems with `lifted` 1 and -1 interlace."""
    number = np.floor(across)
    which = number.astype(np.intp) % (4 * THREADS)
    width = plane(rng.uniform(0.9, 1.08, 4 * THREADS))[which] * (1 + 0.07 * slubs)
    own = plane(rng.normal(1, 0.07, 4 * THREADS))[which]
    offset = (across - number - 0.5) * 2 / width
    crimp = np.cos((number + along - 0.5) * np.float32(math.pi / 2) + np.float32(0.4)) * np.float32(lifted * 0.6)
    twist = np.sin((along * 2.2 + offset * 0.8) * np.float32(2 * math.pi))
    round_ = np.sqrt(np.maximum(1 - offset * offset, 0))
    return round_ * 0.8 + crimp + 0.04 * twist, own * (1 + 0.1 * twist + 0.07 * slubs)


# --- label: a printed paper label around a white bottle ---

BOTTLE = 0.84  # its radius
LABEL = (0.98, 0.68)  # half width along the arc, half height
PAPER = 0xEFEBE1
typeface = lru_cache(maxsize=64)(ImageFont.load_default)  # Pillow's own: no machine needs one installed
LEGIBLE = 160  # half the width below which type falls apart: smaller artwork is drawn at this size and shrunk


def build_label(rng: Generator, side: int, light: Light) -> Scene:
    """A bottle with its label stuck on, a little turned about its axis; unprinted it stays in `before`."""
    pose = lay_down(rng, turn=2, shift=0.03, stretch=0.025)
    u, v = pose.to_part(side)
    turned, raised = rng.uniform(-0.05, 0.05), rng.uniform(-0.02, 0.02)
    rim = np.clip(1 - (u / BOTTLE) ** 2, 0, 1)
    arc = np.arcsin(np.clip(u / BOTTLE, -1, 1)) * BOTTLE - turned
    fall = v - 0.07 * np.sqrt(rim) + 0.05 - raised
    art = artwork(round(side * 0.62), f"LOT {rng.integers(10000, 99999)}   EXP {rng.integers(1, 13):02d}/27")
    ink = wrap(art, arc, fall)
    blank = wrap_bottle(u, arc, fall, rim, rng, side)
    printed = replace(blank, albedo=blank.albedo * ink, gloss=blank.gloss * (0.7 + 0.3 * ink[1]))
    spots = tuple(label_spot(pose, box, turned, raised, side) for box in PRINTED.values())
    return replace(printed, spots=spots, before=blank)


def wrap_bottle(u: Plane, arc: Plane, fall: Plane, rim: Plane, rng: Generator, side: int) -> Scene:
    """The bottle in front of an unsharp hall, with blank paper around it."""
    body = plane(np.clip((BOTTLE - np.abs(u)) * (side / 2) + 0.5, 0, 1))
    edge = np.maximum(np.abs(arc) - LABEL[0], np.abs(fall) - LABEL[1])
    paper = plane(np.clip(0.5 - edge * (side / 2), 0, 1) * body)
    hall = srgb(0x59626B) * (1 + 0.21 * clouds(rng, side, 4))
    fibres = 1 + 0.018 * clouds(rng, side, 90) + 0.012 * clouds(rng, side, 30)
    shadow = 1 - 0.3 * (1 - step(edge, 0, 0.035)) * (1 - paper)
    plastic = srgb(0xD3D8DC) * shadow
    surface = mix(plastic, srgb(PAPER) * fibres, paper)
    bulge = np.sqrt(rim + 0.02) * BOTTLE * 0.75
    turning_away = plane(0.55 + 0.45 * np.sqrt(rim))
    return Scene(
        albedo=mix(hall, surface * turning_away, body),
        height=(bulge * body + paper * 0.006) * np.float32(side / 2),
        gloss=(0.28 - 0.2 * paper) * body,
        site=(edge < -0.06) & (np.abs(u) < BOTTLE * 0.86),
        surface=paper,
        roughness=0.22,
    )


def wrap(art: Plane, arc: Plane, fall: Plane) -> Plane:
    """The flat artwork as it lies around the bottle; beyond it nothing is printed."""
    height, width = art.shape[:2]
    x = (arc / LABEL[0] + 1) * np.float32(width / 2) - 0.5
    y = (fall / LABEL[1] + 1) * np.float32(height / 2) - 0.5
    return plane(cv2.split(cv2.remap(art, x, y, cv2.INTER_LINEAR, borderValue=(1, 1, 1))))


Box = tuple[float, float, float, float]  # left, top, right and bottom in units of the label, from -1 to 1
PRINTED: dict[str, Box] = {
    "name": (-0.62, -0.28, 0.62, 0.0),
    "lot": (-0.62, 0.27, 0.62, 0.43),
    "barcode": (-0.62, 0.50, 0.12, 0.84),
    "logo": (0.26, 0.48, 0.62, 0.86),
    "band": (-1.02, -0.92, 1.02, -0.31),
}


def label_spot(pose: Pose, box: Box, turned: float, raised: float, side: int) -> Spot:
    """Where a printed box ends up on the canvas."""
    left, right = (BOTTLE * math.sin((edge * LABEL[0] + turned) / BOTTLE) for edge in (box[0], box[2]))
    top, bottom = (edge * LABEL[1] + raised + 0.01 for edge in (box[1], box[3]))
    x, y = pose.to_canvas((left + right) / 2, (top + bottom) / 2, side)
    return Spot(x, y, (right - left) * side / 4, (bottom - top) * side / 4)


def artwork(half: int, lot: str) -> Plane:
    """The label's ink as a transmission 0..1 over white paper, with this bottle's lot line."""
    art = fixed_artwork(max(half, LEGIBLE)).copy()
    write(art, PRINTED["lot"], lot, 0x1C1C1E, 0)
    size = (2 * half, round(2 * half * LABEL[1] / LABEL[0]))
    pixels = np.asarray(art if art.size == size else art.resize(size, Image.Resampling.BOX))
    return plane((np.arange(256) / 255) ** 2.2)[pixels]  # linear light of the 256 display values


@lru_cache(maxsize=8)
def fixed_artwork(half: int) -> Image.Image:
    """What is the same on every label: band, name, rules, barcode, logo, border."""
    art = Image.new("RGB", (2 * half, round(2 * half * LABEL[1] / LABEL[0])), "white")
    pen = ImageDraw.Draw(art)
    pen.rectangle(box_pixels(art, (-1.1, -0.9, 1.1, -0.38)), fill="#1d6f78")
    pen.rectangle(box_pixels(art, (-1.1, -0.35, 1.1, -0.32)), fill="#e0952f")
    write(art, (-0.62, -0.80, 0.62, -0.48), "solvane", 0xF6F4EC, 1)
    write(art, (-0.62, -0.26, 0.62, -0.02), "CONTACT CLEANER", 0x1C2A33, 1)
    write(art, (-0.62, 0.02, 0.62, 0.16), "fast drying · 250 ml", 0x3A4A52, 0)
    pen.rectangle(box_pixels(art, (-0.62, 0.2, 0.62, 0.215)), fill="#1c2a33")
    draw_barcode(art, PRINTED["barcode"])
    draw_logo(art, PRINTED["logo"])
    return art


def box_pixels(art: Image.Image, box: Box) -> tuple[int, int, int, int]:
    """A box in label units as pixels of the artwork."""
    width, height = art.size
    left, right = (round((edge + 1) * width / 2) for edge in (box[0], box[2]))
    top, bottom = (round((edge + 1) * height / 2) for edge in (box[1], box[3]))
    return left, top, right, bottom


def write(art: Image.Image, box: Box, text: str, ink: int, bold: int) -> None:
    """Set a line of text as large as its box allows, from the left edge."""
    left, top, right, bottom = box_pixels(art, box)
    pen = ImageDraw.Draw(art)
    wide = pen.textlength(text, font=typeface(100))
    size = round(min((bottom - top) * 0.95, 100 * (right - left) / wide))
    stroke = round(size / 28) * bold
    pen.text((left, (top + bottom) / 2), text, f"#{ink:06x}", typeface(size), anchor="lm", stroke_width=stroke)


def draw_barcode(art: Image.Image, box: Box) -> None:
    """Bars of one to three modules between guard bars; always the same number."""
    left, top, right, bottom = box_pixels(art, box)
    widths = [1, 1, 1, *numpy_stream(0, "barcode").integers(1, 4, 33), 1, 1, 1]
    edges = left + np.cumsum([0, *widths]) * (right - left) / sum(widths)
    pen = ImageDraw.Draw(art)
    for start, end in zip(edges[::2], edges[1::2], strict=False):
        pen.rectangle((round(start), top, round(end) - 1, bottom), fill="#17181a")


def draw_logo(art: Image.Image, box: Box) -> None:
    """A drop on an orange disc."""
    left, top, right, bottom = box_pixels(art, box)
    x, y, r = (left + right) / 2, (top + bottom) / 2, min(right - left, bottom - top) / 2
    pen = ImageDraw.Draw(art)
    pen.ellipse((x - r, y - r, x + r, y + r), fill="#e0952f")
    t = np.linspace(0, 2 * math.pi, 40)
    drop = np.stack([x + 0.5 * r * np.sin(t) * np.sin(t / 2) ** 1.5, y + 0.1 * r - 0.62 * r * np.cos(t)], 1)
    pen.polygon([(float(px), float(py)) for px, py in drop], fill="#fbf8ee")
