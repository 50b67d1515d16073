"""Named streams: the same names give the same numbers, other names unrelated ones."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.runtime.random import numpy_stream, stream, stream_seed

names = st.lists(st.one_of(st.integers(0, 999), st.text("abc", min_size=1)), max_size=3)


@given(seed=st.integers(0, 2**40), one=names, other=names)
def test_names_decide(seed, one, other):
    assert stream_seed(seed, *one) == stream_seed(seed, *one)
    assert 0 <= stream_seed(seed, *one) < 2**63
    if list(map(str, one)) != list(map(str, other)):
        assert stream_seed(seed, *one) != stream_seed(seed, *other)
    assert stream_seed(seed, *one) != stream_seed(seed + 1, *one)


def test_streams_repeat_whatever_else_was_drawn():
    first = torch.rand(5, generator=stream(3, "views", 7))
    torch.manual_seed(0)
    torch.rand(100)
    stream(3, "views", 6)
    assert torch.equal(torch.rand(5, generator=stream(3, "views", 7)), first)
    assert not torch.equal(torch.rand(5, generator=stream(3, "views", 8)), first)
    np.testing.assert_array_equal(numpy_stream(3, "views").random(5), numpy_stream(3, "views").random(5))


def test_the_numbers_of_a_seed_never_change():
    """A run is repeated by its seed, so the derivation is part of every published result."""
    assert stream_seed(0) == 4761921975702974394
    assert stream_seed(0, "weights") == 4283426181684004966
    assert stream_seed(4, "views", 700) == 977497093975817023
