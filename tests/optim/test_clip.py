import pytest
import torch

from titanlike.optim.clip import clip_gradients, counted_square


def _parameters():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5, 2)]
    parameters[0].grad = torch.tensor([3.0, 0.0, 0.0])
    parameters[1].grad = torch.tensor([0.0, 4.0, 0.0, 0.0, 0.0])
    return parameters  # the third has no gradient


@pytest.mark.parametrize("form", [list, iter, lambda ps: (p for p in ps), tuple])
@pytest.mark.parametrize("max_norm", [1.0, 1e-3])
def test_clips_whatever_the_iterable(form, max_norm):
    parameters = _parameters()
    assert clip_gradients(form(parameters), max_norm).item() == 5.0, "the norm before clipping"
    after = torch.cat([p.grad for p in parameters if p.grad is not None]).norm().item()
    assert 0.999 * max_norm <= after <= max_norm * (1 + 1e-4)


def test_zero_switches_it_off_and_small_norms_stay():
    for max_norm in (0.0, 6.0):
        parameters = _parameters()
        assert clip_gradients(parameters, max_norm).item() == 5.0
        assert parameters[1].grad[1].item() == 4.0


def test_the_norm_of_a_large_gradient_of_few_large_elements_is_exact():
    """Summed in float32 one after the other it is off by more than a part in a hundred thousand."""
    grad = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)) * 1e-4
    grad[::512] += 1.0
    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    norm = clip_gradients([parameter], 0.0)
    assert norm.item() == pytest.approx(grad.double().norm().item(), rel=1e-7)
    assert counted_square(grad).sqrt().item() == pytest.approx(grad.double().norm().item(), rel=1e-7)
