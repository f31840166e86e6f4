import pytest
import torch

from titanlike.models.decoder import Decoder
from titanlike.models.initial import initial_values, materialise
from titanlike.models.spec import DecoderSpec
from titanlike.rollout.sampling import Sampling, choose, generate

SPEC = DecoderSpec(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=50, max_seq_len=64, rope_theta=1e4
)


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        model = Decoder(SPEC)
    materialise(model, "cpu", initial_values(model, 3))
    with torch.no_grad():
        model.output.weight *= 8  # far from flat, so that orders of logits are clear
    return model


def _without_cache(model, prompt, n):
    tokens = list(prompt)
    for _ in range(n):
        with torch.no_grad():
            tokens.append(int(model.logits(model(torch.tensor([tokens])))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_cache_changes_nothing(model):
    """Greedy text equals that of running the whole row anew for each token; prompts of different lengths at once."""
    prompts = [[1, 2, 3], [7], [4, 9, 2, 30, 11, 8]]
    answers = generate(model, prompts, Sampling(max_new_tokens=12, temperature=0))
    assert answers == [_without_cache(model, p, 12) for p in prompts]


def test_rows_do_not_depend_on_their_neighbours(model):
    sampling = Sampling(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=5)
    together = generate(model, [[1, 2, 3], [7, 8], [9]], sampling)
    assert generate(model, [[1, 2, 3]], sampling) == together[:1]
    assert generate(model, [[1, 2, 3], [40, 41, 42, 43]], sampling)[0] == together[0]
    assert generate(model, [[1, 2, 3]], Sampling(max_new_tokens=20, seed=6)) != together[:1]


def test_stops(model):
    free = generate(model, [[1, 2]], Sampling(max_new_tokens=10, temperature=0))[0]
    stopped = generate(model, [[1, 2]], Sampling(max_new_tokens=10, temperature=0), stop=frozenset([free[3]]))[0]
    assert stopped == free[: free.index(free[3]) + 1]
    assert len(generate(model, [[1] * 60], Sampling(max_new_tokens=100, temperature=0))[0]) == 4, "fits seq_len"
    with pytest.raises(ValueError, match="64 tokens"):
        generate(model, [[1] * 64], Sampling())


def test_choose_follows_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    draws = torch.arange(1000).double() / 1000

    def shares(**options):
        chosen = choose(logits.expand(1000, -1), draws, Sampling(**options))
        return (torch.bincount(chosen, minlength=4) / 1000).tolist()

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=2e-3)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=2e-3)
    assert shares(top_p=0.8) == pytest.approx([0.625, 0.375, 0, 0], abs=2e-3)
    assert shares(top_p=0.81) == pytest.approx([0.526, 0.316, 0.158, 0], abs=2e-3)
    assert shares(temperature=0.5) == pytest.approx([0.685, 0.247, 0.0616, 0.0068], abs=2e-3)
    assert shares(temperature=0) == [1, 0, 0, 0]
