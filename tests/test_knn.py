"""The search for neighbours near a query's own cell, against loops over cells, images and keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import contracts
import oracles
from banks import features, fitted
from firm.scoring import knn
from firm.scoring.knn import largest_products, search_plan

SHAPE = (3, 4)


@settings(max_examples=80)
@given(
    counts=st.lists(st.integers(0, 5), min_size=12, max_size=12).filter(lambda counts: sum(counts) >= 3),
    radius=st.integers(-1, 3),
    k=st.integers(1, 3),
    images=st.integers(1, 3),
    owned=st.booleans(),
    block=st.sampled_from([1, 4, 1024]),
    keys_at_once=st.sampled_from([2, 512]),
)
def test_products_are_those_of_loops(counts, radius, k, images, owned, block, keys_at_once):
    """However many keys the cells have: equally many, different numbers, none."""
    rng = contracts.generator(sum(counts))
    cell = torch.arange(12).repeat_interleave(torch.tensor(counts))
    keys, queries = torch.randn(len(cell), 5, generator=rng), torch.randn(12, images, 5, generator=rng)
    owner = torch.randint(0, 4, cell.shape, generator=rng)
    owned = owned and len(cell) - int(owner.bincount().max()) >= k  # else nothing is left to compare with
    owners = (torch.arange(images), owner) if owned else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knn, "BLOCK", block)
        patch.setattr(knn, "KEYS", keys_at_once)
        plan = search_plan(cell, SHAPE, radius, k, owner if owned else None)
        found = largest_products(keys, plan, queries, k, owners)
    plain = None if owners is None else tuple(one.tolist() for one in owners)
    expected = oracles.largest_products(keys.tolist(), cell.tolist(), queries.tolist(), SHAPE, radius, k, plain)
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ratio", "most"), [(1.0, 1), (0.5, 12)])
def test_cells_with_equally_many_keys_share_a_product(ratio, most):
    """One product per number of keys, not one per cell: a hundred small ones cost more than their arithmetic."""
    bank = fitted(features(12, 10, 10), neighbourhood=2, sampling_ratio=ratio)
    with Products() as products:
        bank.score(features(1, 10, 10, seed=1))
    assert 1 <= products.count <= most


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_cells_that_are_needed_are_searched_for_as_if_all_were(ratio):
    bank, suspects = fitted(features(12, 6, 6), neighbourhood=1, sampling_ratio=ratio), features(3, 6, 6, seed=1)
    needed = torch.rand(3, 6, 6, generator=contracts.generator()) < 0.2
    every, some = bank.score(suspects), bank.score(suspects, needed)
    torch.testing.assert_close(some[needed], every[needed], rtol=1e-6, atol=1e-6)
    assert (some >= every - 1e-6).all()
    assert bank.score(suspects, torch.zeros_like(needed)).isinf().all()
