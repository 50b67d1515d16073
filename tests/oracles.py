"""Each equation as naive loops over Python numbers, sharing no code with the package.

Slow and literal on purpose: what stands here is to be read beside the paper, and the fast code is compared with it.
"""

import colorsys
import math

import numpy as np
from PIL import Image, ImageEnhance


def positives(kind, i, keys, source, group):
    """P(i) among the keys, as section 4 of the paper describes it in words."""
    if kind == "ntxent":
        return [p for p in keys if p != i and source[p] == source[i]]
    if kind == "supcon":
        return [p for p in keys if p != i and (group[p] == 0) == (group[i] == 0)]
    if kind == "rot-supcon":
        return [p for p in keys if p != i and group[p] == group[i]]
    if group[i] == 0:
        return [p for p in keys if p != i and group[p] == 0]
    return [p for p in keys if p != i and source[p] == source[i]]


def loss(z, source, group, temperature, kind, layout="concat"):
    """Equation 5 anchor by anchor; `pairwise` has first views as anchors and second views as keys."""
    views = range(len(z))
    half = len(z) // 2
    total = []
    for i in views if layout == "concat" else range(half):
        keys = [a for a in views if a != i] if layout == "concat" else list(range(half, len(z)))
        similarity = {a: cosine(z[i], z[a]) / temperature for a in keys}
        denominator = math.log(math.fsum(math.exp(similarity[a]) for a in keys))
        chosen = positives(kind, i, keys, source, group)
        total.append(-math.fsum(similarity[p] - denominator for p in chosen) / max(1, len(chosen)))
    return math.fsum(total) / len(total)


def length(u):
    return math.sqrt(math.fsum(float(a) ** 2 for a in u))


def cosine(u, v):
    """The cosine of two vectors; a zero vector is at a right angle to everything."""
    product = length(u) * length(v)
    return math.fsum(float(a) * float(b) for a, b in zip(u, v, strict=True)) / product if product else 0.0


def s_con(query, bank, k, *, norm=False):
    """Equations 6 and 7 as anomaly scores: neighbours found by sorting all cosines."""
    nearest = sorted((cosine(query, other) for other in bank), reverse=True)[:k]
    similarity = math.fsum(nearest) / k
    return -similarity * length(query) if norm else 1 - similarity


def s_shift(turned_queries, turned_banks, k, *, norm=False):
    """Equation 8: the mean over the turns, references turned alike."""
    pairs = list(zip(turned_queries, turned_banks, strict=True))
    return math.fsum(s_con(query, bank, k, norm=norm) for query, bank in pairs) / len(pairs)


def s_ens(turned_crops, turned_banks, k, *, norm=False):
    """Equation 9: the mean over turns and crops; the references are turned, not cropped."""
    scores = [
        s_con(crop, bank, k, norm=norm)
        for crops, bank in zip(turned_crops, turned_banks, strict=True)
        for crop in crops
    ]
    return math.fsum(scores) / len(scores)


def s_proto(query, bank):
    """One less the cosine to the mean of the unit vectors of the bank."""
    units = [[a / length(row) for a in map(float, row)] for row in bank]
    return 1 - cosine(query, [math.fsum(column) / len(units) for column in zip(*units, strict=True)])


def kde(query, bank, scale=10.0):
    """-(1/gamma) log sum exp(-gamma |x - y|^2) on unit vectors, gamma = scale / (variance x dimensions)."""
    units = [[a / length(row) for a in map(float, row)] for row in bank]
    entries = [a for row in units for a in row]
    mean = math.fsum(entries) / len(entries)
    variance = math.fsum((a - mean) ** 2 for a in entries) / len(entries)
    gamma = scale / (variance * len(units[0]))
    x = [a / length(query) for a in map(float, query)]
    kernels = [math.exp(-gamma * math.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True))) for y in units]
    return -math.log(math.fsum(kernels)) / gamma


def largest_products(keys, cells, queries, shape, radius, k, owners=None):
    """The k largest products of each query (cell by cell, then image by image) with the keys around its cell.

    A window grows from the radius until it has k keys, with owners (of images, of keys) whichever owner is left out.
    """
    columns, known = shape[1], range(len(keys))
    image_owner, key_owner = owners or ([None] * len(queries[0]), list(known))

    def apart(a, b):
        return max(abs(a // columns - b // columns), abs(a % columns - b % columns))

    def enough(found):
        left_out = [[i for i in found if key_owner[i] != one] for one in set(key_owner)] if owners else [found]
        return min(map(len, left_out)) >= k

    result = []
    for cell, images in enumerate(queries):
        reach = radius if radius >= 0 else max(shape)
        while not enough(found := [i for i in known if apart(cell, cells[i]) <= reach]):
            reach += 1
        result.append([])
        for query, owner in zip(images, image_owner, strict=True):
            others = [keys[i] for i in found if key_owner[i] != owner]
            products = [math.fsum(a * b for a, b in zip(key, query, strict=True)) for key in others]
            result[-1].append(sorted(products, reverse=True)[:k])
    return result


def auroc(scores, anomalous):
    """Pairs in which the anomaly scores above the normal image, ties half, over all pairs."""
    bad = [s for s, a in zip(scores, anomalous, strict=True) if a]
    good = [s for s, a in zip(scores, anomalous, strict=True) if not a]
    return sum((b > g) + 0.5 * (b == g) for b in bad for g in good) / (len(bad) * len(good))


def diagnostics(z, source, group):
    """Compactness, margin and outlier spread from all ordered pairs of views of different images."""
    pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if source[i] != source[j]]

    def mean(wanted):
        values = [cosine(z[i], z[j]) for i, j in pairs if (group[i] == 0) + (group[j] == 0) == wanted]
        return math.fsum(values) / len(values)

    return {"compactness": mean(2), "margin": mean(2) - mean(1), "outlier_spread": 1 - mean(0)}


# --- colour, one image at a time: (h, w, 3) uint8 in, floats in 0..255 out ---

ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


def enhanced(image, what, factor):
    """Brightness, contrast or saturation by Pillow."""
    return np.asarray(ENHANCERS[what](Image.fromarray(image)).enhance(factor)).astype(float)


def hue_turned(image, turn):
    """Every pixel's hue turned by a part of the circle, by the standard library."""
    result = np.empty(image.shape)
    for y, x in np.ndindex(image.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[y, x] / 255))
        result[y, x] = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
    return result * 255


# --- geometry, one image at a time: (c, h, w) floats ---


def window(image, top, left, tall, wide, size):
    """A window resampled to size x size: pixel centres map to pixel centres, bilinear, edges repeated."""
    _, height, width = image.shape
    result = np.empty((len(image), size, size))
    for i, j in np.ndindex(size, size):
        y = min(max(top + (i + 0.5) * tall / size - 0.5, 0), height - 1)
        x = min(max(left + (j + 0.5) * wide / size - 0.5, 0), width - 1)
        y0, x0 = int(y), int(x)
        y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
        above = image[:, y0, x0] * (1 - x + x0) + image[:, y0, x1] * (x - x0)
        below = image[:, y1, x0] * (1 - x + x0) + image[:, y1, x1] * (x - x0)
        result[:, i, j] = above * (1 - y + y0) + below * (y - y0)
    return result


def blurred(image, sigma):
    """A 3 x 3 Gaussian, reflecting at the border without repeating the edge."""
    taps = {offset: math.exp(-(offset**2) / (2 * sigma**2)) for offset in (-1, 0, 1)}
    total = sum(taps.values()) ** 2
    _, height, width = image.shape

    def mirrored(place, size):
        return abs(place) if place < size else 2 * (size - 1) - place

    result = np.zeros(image.shape)
    for y, x in np.ndindex(height, width):
        for dy in taps:
            for dx in taps:
                weight = taps[dy] * taps[dx] / total
                result[:, y, x] += weight * image[:, mirrored(y + dy, height), mirrored(x + dx, width)]
    return result
