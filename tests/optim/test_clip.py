import pytest
import torch

from titanlike.optim.clip import clip_gradients


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
