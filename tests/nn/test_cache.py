"""Keys and values of past tokens."""

import torch

from leadline.nn.cache import LayerCache


def test_a_cache_grows_as_it_fills():
    """What may be written is no reason to allocate it."""
    cache, parts = LayerCache(10**12), [torch.randn(2, 3, count, 4) for count in (5, 300, 1, 700)]
    for part in parts:
        keys, values = cache.append(part, part + 1)
    assert torch.equal(keys, torch.cat(parts, 2))
    assert torch.equal(values, torch.cat(parts, 2) + 1)
    assert cache.keys.shape[2] < 3000
    small = LayerCache(7)
    small.append(parts[0], parts[0])
    small.append(parts[0][:, :, :2], parts[0][:, :, :2])
    assert small.keys.shape[2] == 7
