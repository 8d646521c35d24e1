"""Model sizes and training settings to start a recipe from; `marin-build new --model NAME` writes them out as literals.

Presets are used once, when a page is written: a recipe never names one, so changing this table changes no artifact.
Sizes and the settings marked so are those of the Marin project (experiments/llama.py, 2026); the rest says its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from marin_build.errors import RequestError

DEFAULT = "quickstart"
TOKENS_PER_PARAMETER = 20
"""Where no number of steps is known: about the compute-optimal ratio (Hoffmann et al. 2022)."""


@dataclass(frozen=True)
class Size:
    """A Llama in the names of its config, and the sequence length it is trained on."""

    sequence_length: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    llama3_rope: bool = False
    """Base 500,000 and the frequency scaling of Llama 3.1, instead of Llama 2's base of 10,000 without scaling."""
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def parameters(self, vocab_size: int) -> int:
        """All parameters, embeddings included."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + self.hidden_size


@dataclass(frozen=True)
class Training:
    """Settings of a run, and where they come from."""

    global_batch_size: int
    steps: int | None
    """None: as many as TOKENS_PER_PARAMETER asks for."""
    learning_rate: str
    weight_decay: str
    origin: str
    z_loss: str = "0"
    warmup_fraction: float = 0.01
    compute: str = "bfloat16"


@dataclass(frozen=True)
class Preset:
    name: str
    size: Size
    training: Training

    def steps(self, vocab_size: int) -> int:
        """Optimizer steps; rounded down to hundreds where they follow from the number of parameters."""
        if self.training.steps is not None:
            return self.training.steps
        tokens_per_step = self.training.global_batch_size * self.size.sequence_length
        return max(100, TOKENS_PER_PARAMETER * self.size.parameters(vocab_size) // tokens_per_step // 100 * 100)


SIZES = {
    # name: sequence, hidden, MLP, heads, key-value heads, layers
    "quickstart": Size(256, 192, 512, 6, 6, 4),
    "nano": Size(512, 32, 128, 2, 2, 2),
    "30m": Size(1024, 128, 448, 2, 2, 4),
    "50m": Size(1024, 192, 448, 2, 2, 4),
    "75m": Size(1024, 256, 896, 4, 4, 8),
    "150m": Size(1024, 512, 1792, 8, 8, 6),
    "300m": Size(1024, 768, 2688, 12, 12, 12),
    "600m": Size(1024, 1024, 3584, 16, 8, 24),
    "1.4b": Size(4096, 2048, 7168, 16, 8, 16),
    "1.9b": Size(4096, 2048, 7168, 16, 8, 24),
    "llama3.2-1B": Size(4096, 2048, 8192, 32, 8, 16, llama3_rope=True, tie_word_embeddings=True),
    "3.5b": Size(4096, 2560, 8960, 20, 10, 32),
    "8b": Size(4096, 4096, 14336, 32, 8, 32, llama3_rope=True),
    "llama3.1-8B": Size(4096, 4096, 14336, 32, 8, 32, llama3_rope=True),
    "13b": Size(4096, 5120, 13824, 40, 8, 40, llama3_rope=True),
    "24b": Size(4096, 6144, 16384, 48, 16, 56, llama3_rope=True),
    "32b": Size(4096, 5120, 27648, 40, 8, 64, llama3_rope=True),
    "56b": Size(4096, 8192, 28672, 64, 8, 64, llama3_rope=True),
    "70b": Size(4096, 8192, 28672, 64, 8, 80, llama3_rope=True),
}

_8B = Training(1024, 40_000, "2e-3", "0.05", "Marin's for 8b")
TRAININGS = {
    "quickstart": Training(
        8, 500, "3e-3", "0.1", "the quickstart's", z_loss="1e-4", warmup_fraction=0.1, compute="float32"
    ),
    "nano": Training(4, 100, "6e-4", "0.1", "those of Marin's first-experiment tutorial", compute="float32"),
    "30m": Training(128, 10_000, "6e-4", "0.1", "the middle of Marin's sweep tutorial"),
    "150m": Training(512, 20_000, "3e-3", "0.1", "Marin's for 150m"),
    "300m": Training(1024, 18_000, "3e-3", "0.1", "Marin's for 300m"),
    "1.4b": Training(1024, 10_000, "3e-4", "0.1", "Marin's for 1.4b"),
    "8b": _8B,
    "llama3.1-8B": _8B,
}


def preset(name: str | None) -> Preset:
    """The preset of that name, or the default one.

    Raises:
        RequestError: no such preset, with the nearest name and all names.
    """
    name = DEFAULT if name is None else name
    by_lower = {known.lower(): known for known in SIZES}
    known = by_lower.get(name.lower())
    if known is None:
        near = get_close_matches(name.lower(), by_lower, n=1)
        hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
        raise RequestError(f"--model {name!r}: no such preset{hint}\n  presets are: {', '.join(SIZES)}")
    return Preset(known, SIZES[known], TRAININGS.get(known) or _usual(SIZES[known]))


def _usual(size: Size) -> Training:
    """Settings where the source names none: those of the nearest size that has some."""
    if size.hidden_size <= 1024:
        return Training(512, None, "3e-3", "0.1", "Marin's for 150m; it has none for this size")
    if size.hidden_size <= 2560:
        return Training(1024, None, "3e-4", "0.1", "Marin's for 1.4b; it has none for this size")
    return Training(1024, None, "3e-4", "0.1", "a careful start; Marin has none for this size")
