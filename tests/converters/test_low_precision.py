"""Which layers are converted, and what is said of the others."""

import pytest
import torch

from titanlike.converters.low_precision import choose, low_precision
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.models.linear import Linear
from titanlike.models.spec import DecoderSpec

SIZES = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128, "vocab_size": 321}
LAYERS = ["attention.wk", "attention.wo", "attention.wq", "attention.wv"] + [f"feed_forward.w{i}" for i in (1, 2, 3)]


class Multiples:
    """A method that takes multiples of 16 and finds products of fewer than 5000 numbers small."""

    key, words, multiple = "quantize.linear.float8", "float8", 16

    def __init__(self):
        self.converted = []

    def convert(self, linear):
        self.converted.append(linear)

    def is_small(self, features):
        return features[0] * features[1] < 5000


def whole(**sizes):
    with torch.device("meta"):
        return Decoder(DecoderSpec(**{**SIZES, **sizes}))


def names(*tails):
    return {f"layers.{n}.{tail}" for n in range(3) for tail in tails}


def test_all_linear_layers_are_converted_and_nothing_else():
    model, method = whole(), Multiples()
    chosen = choose(method, [], model, 1)
    assert chosen.chosen == names(*LAYERS) and chosen.left == {}
    chosen.apply(model)
    assert len(method.converted) == 21 and all(isinstance(m, Linear) for m in method.converted)
    assert chosen.lines() == ["float8: 21 linear layers: " + ", ".join(f"layers.0-2.{tail}" for tail in LAYERS)]


def test_filters_leave_layers_out_by_part_of_the_name():
    chosen = choose(Multiples(), ["w1", "layers.1.", "output"], whole(), 1)
    left = {name for name in names(*LAYERS) if "w1" in name or "layers.1." in name}
    assert chosen.chosen == names(*LAYERS) - left
    assert set(chosen.left["by quantize.linear.float8.filter_fqns"]) == left
    lines = chosen.lines()
    assert "layers.0,2.attention.wk" in lines[0] and "layers.0-2.feed_forward.w1" in lines[1]


def test_a_filter_that_matches_nothing_is_named():
    with pytest.raises(ConfigError) as caught:
        choose(Multiples(), ["wq", "wx", "layers.3."], whole(), 1)
    wx, layer = caught.value.problems
    assert wx.startswith("quantize.linear.float8.filter_fqns: 'wx' matches no linear layer")
    assert "layers.N.attention.wq" in wx and "'layers.3.'" in layer


def test_sizes_that_are_no_multiples_stay_in_high_precision():
    """head_dim x key/value heads = 24, and a vocabulary of 321, which is the head's and none of ours."""
    chosen = choose(Multiples(), [], whole(head_dim=12), 1)
    assert chosen.chosen == names("attention.wo", "attention.wq", *LAYERS[4:])
    (why, left), *others = chosen.left.items()
    assert not others and why == "a size that is no multiple of 16"
    assert "layers.0-2.attention.wk (64 → 24)" in chosen.lines()[1] and len(left) == 6


@pytest.mark.parametrize(
    ("tensor", "sizes", "left"),
    [
        (2, {}, set()),
        (4, {"ffn_dim": 96}, {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}),  # 24 a rank
        (4, {"head_dim": 8}, {"attention.wk", "attention.wv", "attention.wq", "attention.wo"}),  # 8 a rank
        (4, {}, set()),  # two key/value heads of 16 are shared by four ranks
        (2, {"ffn_dim": 80}, {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}),  # 40
        (2, {"ffn_dim": 94}, {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}),  # 47
    ],
)
def test_what_a_tensor_rank_multiplies_with_counts(tensor, sizes, left):
    chosen = choose(Multiples(), [], whole(**sizes), tensor)
    assert chosen.chosen == names(*(set(LAYERS) - left))


def test_small_layers_are_left_where_asked():
    chosen = choose(Multiples(), ["auto_filter_small_kn"], whole(), 1)
    assert set(chosen.left["too small to gain"]) == {
        f"{name} ({a} → {b})"
        for tail, (a, b) in {"wk": (64, 32), "wv": (64, 32), "wq": (64, 64), "wo": (64, 64)}.items()
        for name in names(f"attention.{tail}")
    }


def test_nothing_left_to_convert_is_refused():
    with pytest.raises(ConfigError, match=r"quantize.linear.float8 converts no layer \(by quantize.*filter_fqns"):
        choose(Multiples(), ["layers"], whole(), 1)


def test_without_converters_nothing_is_converted(make_config):
    assert low_precision(make_config(), 1) is None
