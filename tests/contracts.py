"""What any member of a family must satisfy, whoever it is."""

import torch


def images_of(n, channels=3, height=16, width=None, seed=0):
    """Random uint8 images."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, height, width or height), dtype=torch.uint8, generator=rng)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def check_positive_set(positive_set, source, group):
    """P(i) as a mask: square, symmetric, i itself never in it, the other view of i always."""
    mask = positive_set(source, group)
    assert mask.dtype == torch.bool
    assert mask.shape == (len(source), len(source))
    assert not mask.diagonal().any()
    assert torch.equal(mask, mask.T)
    other_view = (source[:, None] == source[None, :]).fill_diagonal_(False)
    assert (mask | ~other_view).all()


def check_outlier_source(source, inliers):
    """As many outliers as inliers, of a kind each, decided by the rng alone; the inliers stay as they are."""
    before = inliers.clone()
    made = source(inliers, rng=generator(1))
    assert torch.equal(inliers, before)
    assert made.images.dtype == torch.uint8
    assert made.images.shape[0] == len(inliers)
    assert made.images.shape[1] in (inliers.shape[1], 3)
    assert made.images.shape[2:] == inliers.shape[2:]
    assert made.group.dtype == torch.long
    assert made.group.shape == (len(inliers),)
    assert int(made.group.min()) >= 1
    assert int(made.group.max()) <= source.kinds
    assert source.per_inlier >= 1

    again = source(inliers, rng=generator(1))
    other = source(inliers, rng=generator(2))
    assert torch.equal(made.images, again.images)
    assert torch.equal(made.group, again.group)
    assert not torch.equal(made.images, other.images)

    if made.where is not None:
        assert made.where.shape == (len(inliers), *inliers.shape[2:])
        assert torch.equal(made.where, (made.images != inliers).any(1))
        assert made.where.flatten(1).any(1).all()
    return made


def check_views(views, images, size):
    """Two different views of each image in 0..1, of the size asked for, decided by the rng alone."""
    before = images.clone()
    first, second = views(images, size, rng=generator(1))
    assert torch.equal(images, before)
    for view in (first, second):
        assert view.dtype == torch.float32
        assert view.shape == (len(images), images.shape[1], size, size)
        assert float(view.min()) >= -1e-6
        assert float(view.max()) <= 1 + 1e-6
    assert (first - second).abs().flatten(1).amax(1).gt(1e-3).all()

    again, _ = views(images, size, rng=generator(1))
    other, _ = views(images, size, rng=generator(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def check_score(score, normal, strange):
    """Fitted to normal embeddings it gives one finite number per embedding, higher for strange ones."""
    scorer = score.fit(normal)
    common, odd = scorer(normal[:5]), scorer(strange)
    assert common.shape == (5,)
    assert odd.shape == (len(strange),)
    assert torch.isfinite(torch.cat([common, odd])).all()
    assert common.max() < odd.min()
    assert scorer(normal[:0]).shape == (0,)
    alone = torch.cat([scorer(row[None]) for row in strange])
    torch.testing.assert_close(alone, odd, rtol=1e-5, atol=1e-6)
