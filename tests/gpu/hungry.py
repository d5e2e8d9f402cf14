"""A model that no GPU can hold, which nothing but trying can tell."""

import torch
from torch import nn


class Hungry(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens):
        torch.empty(2**40, dtype=torch.uint8, device=tokens.device)
        return self.embed(tokens)


def build(vocab_size, **_):
    return Hungry(vocab_size)
