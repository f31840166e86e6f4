"""MXFP8, emulated: against plain products of numbers that were rounded by torchao and turned back."""

import pytest
import torch
from torch.nn import functional as F

from tests.converters.test_float8 import TENSOR, error, high_precision, settings, train
from titanlike.config import Config
from titanlike.errors import ConfigError
from titanlike.models.linear import Linear
from titanlike.parallel.fully_shard import check_device

pytest.importorskip("torchao")


def emulated(**sections):
    made = settings(**sections)
    made["model"]["converters"] = ["quantize.linear.mx"]
    return {**made, "quantize": {"linear": {"mx": {"recipe_name": "mxfp8_emulated"}}}}


def rounded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x [rows, columns] with blocks of 32 along a dimension rounded to MXFP8."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    lying = x if dim == 1 else x.t()
    back = MXTensor.to_mx(lying.contiguous(), torch.float8_e4m3fn, 32).dequantize(x.dtype)
    return back if dim == 1 else back.t()


def test_a_layer_multiplies_rounded_numbers():
    from titanlike.converters.mx import MX

    torch.manual_seed(0)
    layer = Linear(64, 96)
    MX(Config.model_validate(emulated())).convert(layer)
    x, upstream = torch.randn(2, 32, 64, requires_grad=True), torch.randn(2, 32, 96)
    out = layer(x)
    out.backward(upstream)
    rows, grads, weight = x.detach().flatten(0, 1), upstream.flatten(0, 1), layer.weight.detach()
    want = {
        "out": F.linear(rounded(rows, 1), rounded(weight, 1), layer.bias.detach()).view(2, 32, 96),
        "x": (rounded(grads, 1) @ rounded(weight, 0)).view(2, 32, 64),
        "weight": rounded(grads, 0).t() @ rounded(rows, 0),
        "bias": grads.sum(0),
    }
    got = {"out": out.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    assert error(got, want) < 1e-6
    exact = F.linear(rows, weight, layer.bias.detach()).view(2, 32, 96)
    assert 1e-3 < error({"out": out.detach()}, {"out": exact}) < 0.06


@pytest.mark.slow
def test_over_data_and_tensor_ranks(pool):
    """Blocks lie along rows, of which a tensor rank of this model has whole ones: two layouts, one result."""
    want = high_precision()
    (alone,) = train(pool, 1, emulated())
    assert alone["losses"] == pytest.approx(want["losses"], rel=1e-3)
    assert 1e-3 < error(alone["gradients"], want["gradients"]) < 0.15
    data, tensor = train(pool, 2, emulated(), emulated(**TENSOR))
    assert data["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert tensor["losses"] == pytest.approx(alone["losses"], rel=1e-3)


def test_kernels_of_blackwell_are_refused_elsewhere():
    made = emulated()
    check_device(Config.model_validate(made), torch.device("cpu"))
    made["quantize"]["linear"]["mx"]["recipe_name"] = "mxfp8_cublas"
    with pytest.raises(ConfigError, match=r"mxfp8_cublas.*compute capability 10.0.*mxfp8_emulated"):
        check_device(Config.model_validate(made), torch.device("cpu"))


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    gpu = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"compute capability 8.9.*this one has 8.0.*emulate"):
        check_device(Config.model_validate(settings({"emulate": False})), gpu)
    check_device(Config.model_validate(settings({"emulate": True})), gpu)
    with pytest.raises(ConfigError, match=r"10.0"):
        made = emulated()
        made["quantize"]["linear"]["mx"]["recipe_name"] = "mxfp8_cublas"
        check_device(Config.model_validate(made), gpu)
