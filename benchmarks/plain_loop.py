"""The yardstick: a plain hand-written training loop. Fused attention, F.cross_entropy, fused AdamW, no framework."""

from __future__ import annotations

import contextlib

import common as c

settings = c.arguments()

import torch  # noqa: E402 (after the number of threads is set)
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c.DIM))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), c.NORM_EPS)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = c.DIM // c.HEADS
        self.norm1, self.norm2 = Norm(), Norm()
        self.qkv = nn.Linear(c.DIM, (c.HEADS + 2 * c.KV_HEADS) * self.head_dim, bias=False)
        self.out = nn.Linear(c.DIM, c.DIM, bias=False)
        self.gate_up = nn.Linear(c.DIM, 2 * c.FFN, bias=False)
        self.down = nn.Linear(c.FFN, c.DIM, bias=False)

    def forward(self, x, cos, sin):
        rows, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([c.HEADS, c.KV_HEADS, c.KV_HEADS], 1)
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.VOCAB, c.DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(c.LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(c.DIM, c.VOCAB, bias=False)
        head_dim = c.DIM // c.HEADS
        frequencies = c.ROPE_THETA ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(c.SEQ).float(), frequencies)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if settings.dtype == "bf16":
            x = x.bfloat16()
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def main() -> None:
    torch.set_num_threads(settings.threads)
    torch.manual_seed(c.SEED)
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    net = torch.compile(model) if settings.compile else model
    tokens = torch.tensor(c.words(settings.steps * c.ROWS * (c.SEQ + 1))).view(settings.steps, c.ROWS, c.SEQ + 1)
    meter = c.Meter("plain", settings)
    meter.start()
    for batch in tokens:
        mixed = torch.autocast("cpu", torch.bfloat16) if settings.dtype == "bf16" else contextlib.nullcontext()
        with mixed:
            loss = F.cross_entropy(net(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.step(c.ROWS * c.SEQ, loss.item())
    meter.report()


if __name__ == "__main__":  # loader and tokenizer workers import this module
    main()
