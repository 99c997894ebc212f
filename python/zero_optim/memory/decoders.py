"""Decoder transformers as integers: elements of every parameter of well-known ones, and of one of any size."""

from __future__ import annotations

from dataclasses import dataclass

GPT_VOCABULARY = 50257
ASPECT = 128
"""Width over depth of an invented decoder: GPT-3 has 96 layers of width 12288."""


@dataclass(frozen=True)
class Width:
    """The sizes that activations are computed from. ``vocabulary``: rows of the head."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int


@dataclass(frozen=True)
class Decoder:
    """``layers`` equal blocks, and the rest.

    Attributes:
        block: elements of each parameter of a block, in the order of its modules.
        before, after: of what is outside of the blocks: embeddings; the last norm, and the head unless it is tied.
    """

    name: str
    width: Width
    block: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def layers(self) -> int:
        return self.width.layers

    @property
    def root(self) -> tuple[int, ...]:
        """Sizes of the parameters outside of the blocks."""
        return self.before + self.after

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding, which is then the first parameter."""
        return max(self.after) < self.width.vocabulary * self.width.hidden

    @property
    def numels(self) -> tuple[int, ...]:
        """Sizes of all parameters, in the order in which they are used."""
        return self.before + self.block * self.layers + self.after

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(self.root) + self.layers * sum(self.block)


def llama(name: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, vocabulary: int) -> Decoder:
    """Grouped-query attention, a gated MLP, no biases, a head of its own. ``kv``: the width of keys, and of values."""
    attention = [hidden * wide for wide in (hidden, kv, kv, hidden)]
    block = (*attention, *[hidden * ffn] * 3, hidden, hidden)
    width = Width(layers, hidden, heads, vocabulary)
    return Decoder(name, width, block, (vocabulary * hidden,), (hidden, vocabulary * hidden))


def gpt(name: str, layers: int, hidden: int, heads: int, positions: int, vocabulary: int = GPT_VOCABULARY) -> Decoder:
    """GPT-2's blocks, with biases; learned positions; the head is the embedding."""
    width = Width(layers, hidden, heads, vocabulary)
    before = (vocabulary * hidden, *((positions * hidden,) if positions else ()))
    return Decoder(name, width, _gpt_block(hidden), before, (hidden, hidden))


def _gpt_block(hidden: int) -> tuple[int, ...]:
    norm, square = (hidden, hidden), hidden * hidden
    attention = (3 * square, 3 * hidden, square, hidden)
    mlp = (4 * square, 4 * hidden, 4 * square, hidden)
    return (*norm, *attention, *norm, *mlp)


def gpt_of(parameters: int) -> Decoder:
    """A GPT of exactly so many parameters.

    It has L = (parameters / (12 * 128^2))^(1/3) layers, rounded: about 128 times as wide as it is deep. Its width is
    the largest multiple of 8 that leaves room for an embedding of 50 257 rows; that takes what is left over as well.
    Raises ValueError for fewer than a million.
    """
    if parameters < 10**6:
        raise ValueError(f"{parameters:,} parameters are too few for a GPT: at least 1,000,000")
    layers = max(1, round((parameters / (12 * ASPECT**2)) ** (1 / 3)))
    hidden = 8
    step = 1 << 20
    while step >= 8:
        if _least(layers, hidden + step) <= parameters:
            hidden += step
        else:
            step //= 2
    after = (hidden, hidden)
    embedding = parameters - layers * sum(_gpt_block(hidden)) - sum(after)
    width = Width(layers, hidden, max(1, hidden // 128), GPT_VOCABULARY)
    return Decoder("a GPT", width, _gpt_block(hidden), (embedding,), after)


def fewest_parameters(layers: int) -> int:
    """Count parameters with which ``gpt_of`` has so many layers."""
    return 12 * ASPECT**2 * layers**3


def _least(layers: int, hidden: int) -> int:
    return layers * sum(_gpt_block(hidden)) + (GPT_VOCABULARY + 2) * hidden


LLAMA_2_70B = llama("llama-2-70b", 80, 8192, 28672, 64, 1024, 32000)

KNOWN = {
    decoder.name: decoder
    for decoder in (
        gpt("gpt2", 12, 768, 12, 1024),
        gpt("gpt2-medium", 24, 1024, 16, 1024),
        gpt("gpt2-large", 36, 1280, 20, 1024),
        gpt("gpt2-xl", 48, 1600, 25, 1024),
        gpt("gpt3-175b", 96, 12288, 96, 2048),
        llama("llama-2-7b", 32, 4096, 11008, 32, 4096, 32000),
        llama("llama-2-13b", 40, 5120, 13824, 40, 5120, 32000),
        LLAMA_2_70B,
        llama("llama-3-8b", 32, 4096, 14336, 32, 1024, 128256),
        llama("llama-3-70b", 80, 8192, 28672, 64, 1024, 128256),
        llama("llama-3-405b", 126, 16384, 53248, 128, 1024, 128256),
        llama("mistral-7b", 32, 4096, 14336, 32, 1024, 32000),
    )
}
"""By name, from their published configurations."""
