"""Initial values: a function of (seed, name, global index), whatever shard asks."""

import torch

from titanlike.models.initial import Shard, normal


def _whole(shape, name="layers.0.attention.wq.weight", seed=0):
    shape = torch.Size(shape)
    return normal(Shard(name, shape, (0,) * len(shape), torch.empty(shape)), 1.0, seed)


def test_any_box_of_a_parameter_is_cut_from_the_same_whole():
    whole = _whole((37, 53))
    for start, size in [
        ((0, 0), (37, 1)),
        ((5, 0), (13, 53)),
        ((36, 0), (1, 53)),
        ((0, 17), (37, 19)),
        ((9, 50), (7, 3)),
    ]:
        box = normal(Shard("layers.0.attention.wq.weight", whole.shape, start, torch.empty(size)), 1.0, 0)
        assert torch.equal(box, whole[start[0] : start[0] + size[0], start[1] : start[1] + size[1]])


def test_chunks_do_not_show(monkeypatch):
    whole = _whole((64, 33))
    monkeypatch.setattr("titanlike.models.initial._CHUNK", 100)
    assert torch.equal(_whole((64, 33)), whole)


def test_seed_and_name_change_every_value():
    base = _whole((50, 50))
    for other in (_whole((50, 50), seed=1), _whole((50, 50), name="layers.1.attention.wq.weight")):
        assert (base == other).float().mean() < 1e-3
        assert abs(torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1]) < 0.06


def test_distribution_is_the_cut_normal():
    """Moments of a standard normal cut at 3: variance 0.9733, fourth moment 2.6800 (closed form); quantiles by it."""
    x = _whole((1000, 1000)).flatten().double()
    assert abs(x.mean()) < 4e-3
    assert abs(x.var() - 0.97334) < 5e-3
    assert abs((x**4).mean() - 2.6800) < 4e-2
    assert x.abs().max() <= 3
    for bound, share in [(-2.0, 0.02146), (-1.0, 0.15773), (0.5, 0.69198)]:
        assert abs((x < bound).double().mean() - share) < 1.5e-3
    neighbours = torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]
    assert abs(neighbours) < 4e-3
