"""The decoder against transformers' Llama, and packed documents against the same documents alone."""

import dataclasses

import pytest
import torch

from titanlike.data.batch import document_offsets
from titanlike.models.decoder import Decoder
from titanlike.models.families.llama3 import llama3
from titanlike.models.initial import initial_values, materialise
from titanlike.models.spec import DecoderSpec, Part, RopeScaling

TINY = DecoderSpec(
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=128,
    vocab_size=320,
    max_seq_len=64,
    rope_theta=1e4,
)


def build(spec: DecoderSpec, seed: int = 0, **options) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec, **options)
    materialise(model, "cpu", initial_values(model, seed))
    return model


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection from neighbouring pairs to the Hub's halves."""
    head_dim = weight.shape[0] // heads
    return weight.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape_as(weight)


def transformers_llama(model: Decoder):
    """transformers' Llama with the same weights: an implementation that we did not write."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s = model.spec
    rope = {"rope_type": "default", "rope_theta": s.rope_theta}
    if s.rope_scaling:
        rope = {
            "rope_type": "llama3",
            "rope_theta": s.rope_theta,
            "factor": s.rope_scaling.factor,
            "low_freq_factor": s.rope_scaling.low_freq_factor,
            "high_freq_factor": s.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": s.rope_scaling.original_max_seq_len,
        }
    config = LlamaConfig(
        vocab_size=s.vocab_size,
        hidden_size=s.dim,
        intermediate_size=s.ffn_dim,
        num_hidden_layers=s.n_layers,
        num_attention_heads=s.n_heads,
        num_key_value_heads=s.n_kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=s.max_seq_len,
        rms_norm_eps=s.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=s.tied_head,
        attn_implementation="eager",
    )
    reference = LlamaForCausalLM(config)
    names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    parts = {
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    state = {}
    for name, value in model.state_dict().items():
        base = name.removesuffix(".weight")
        if base.startswith("layers."):
            _, layer, part = base.split(".", 2)
            if part == "attention.wq":
                value = _half_split(value, s.n_heads)
            if part == "attention.wk":
                value = _half_split(value, s.n_kv_heads)
            state[f"model.layers.{layer}.{parts[part]}.weight"] = value
        else:
            state[f"{names[base]}.weight"] = value
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if s.tied_head else set())
    if s.tied_head:
        reference.tie_weights()
    return reference.eval()


SPECS = {
    "plain": TINY,
    "tied": dataclasses.replace(TINY, tied_head=True),
    "scaled rope": dataclasses.replace(
        TINY, rope_theta=5e5, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=32), head_dim=24
    ),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_logits_are_those_of_transformers(spec, kernel):
    model = build(spec, kernel=kernel)
    tokens = torch.randint(0, spec.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model.logits(model(tokens))
        theirs = transformers_llama(model)(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_gradients_are_those_of_transformers():
    model = build(TINY)
    reference = transformers_llama(model)
    tokens = torch.randint(0, TINY.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))
    (-model(tokens[:, :-1], labels=tokens[:, 1:], reduction="sum") / 64).backward()
    reference(tokens, labels=tokens).loss.backward()
    theirs = dict(reference.named_parameters())
    pairs = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "layers.1.attention.wv.weight": "model.layers.1.self_attn.v_proj.weight",
        "layers.0.feed_forward.w2.weight": "model.layers.0.mlp.down_proj.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    for ours, name in pairs.items():
        want = theirs[name].grad
        assert (model.get_parameter(ours).grad - want).norm() <= 1e-5 * want.norm(), ours


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    # As published in the model cards (in units that the cards print: 1.24, 3.21, 8.03, 70.6, 405.9 billion).
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_published_sizes(flavor, parameters):
    spec = llama3.flavors[flavor]
    with torch.device("meta"):
        model = Decoder(spec, seq_len=8)
    assert spec.parameters() == parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_packed_documents_see_only_themselves(kernel):
    """A pack of 10 + 14 tokens: the second document's logits are its own, whatever the first holds."""
    model = build(TINY, kernel=kernel)
    a, b = torch.randint(0, 320, (10,)), torch.randint(0, 320, (14,))
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    offsets = document_offsets(torch.tensor([[0] * 10 + [1] * 14], dtype=torch.int32))

    def logits(first, second, *layout):
        return model.logits(model(torch.cat([first, second])[None], *layout))[0, len(first) :]

    with torch.no_grad():
        packed = logits(a, b, positions, offsets)
        alone = logits(a[:0], b)
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
        other = logits((a + 7) % 320, b, positions, offsets)
        assert torch.equal(packed, other)
        assert not torch.equal(logits(a, b), packed), "without offsets the documents must see each other"


def test_no_gradient_crosses_a_document():
    model = build(TINY)
    tokens = torch.arange(24)[None]
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    offsets = torch.tensor([0, 10, 24], dtype=torch.int32)
    labels = torch.full((1, 24), -100)
    labels[0, 10:] = 5
    model(tokens, positions, offsets, labels=labels, reduction="sum").backward()
    grad = model.tok_embeddings.weight.grad
    assert grad[:10].abs().max() == 0 < grad[10:24].abs().min(dim=1).values.max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dim", [64, 256])
def test_first_loss_is_a_uniform_guess(tied, dim):
    spec = dataclasses.replace(TINY, dim=dim, head_dim=dim // 4, tied_head=tied)
    model = build(spec)
    tokens = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = -model(tokens, labels=labels).mean().item()
    assert abs(loss - torch.tensor(320.0).log().item()) < 0.05 * 5.768


def test_buffers_are_computed_not_left_over():
    """Memory full of NaN must not shine through after meta initialisation."""
    garbage = [torch.full((1 << 16,), float("nan")) for _ in range(64)]
    del garbage
    built = build(TINY)
    assert torch.equal(built.rope_table, Decoder(TINY).rope_table)
    assert not any(t.is_meta for t in [*built.parameters(), *built.buffers()])


@pytest.mark.parametrize("tied", [False, True])
def test_parts_make_the_whole(tied):
    """Same names, same initial values, and one after the other the same log-probabilities, bit by bit."""
    spec = dataclasses.replace(TINY, tied_head=tied)
    whole = build(spec)
    first, middle, last = (
        build(spec, part=Part(layers=layers, first=not i, last=i == 2)) for i, layers in enumerate([(0, 1), (2,), ()])
    )
    values = dict(whole.named_parameters())
    names = [name for part in (first, middle, last) for name, _ in part.named_parameters()]
    assert sorted(names) == sorted([*values, *(["tok_embeddings.weight"] if tied else [])])
    for part in (first, middle, last):
        assert all(torch.equal(p, values[n]) for n, p in part.named_parameters())
        assert torch.equal(part.rope_table, whole.rope_table)
    tokens = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(1))
    assert torch.equal(last(middle(first(tokens)), labels=labels), whole(tokens, labels=labels))
