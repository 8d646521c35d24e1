"""The schema of each kind of recipe: required fields have no default wherever the choice is the experiment's.

A recipe's *identity body* is everything except the blocks `measure` (what is observed) and `execution` (how this model
runs). Only the identity body and the fingerprints of what it names enter the fingerprint.

A field that is added after a release must hold a default that leaves old artifacts as they are, and be declared with
`added_later(neutral)`: it stays out of the canonical form while it holds that value, so old fingerprints do not move.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, TypeVar, Union

from pydantic import AfterValidator, Field, model_validator

from marin_build.errors import RequestError
from marin_build.recipe.fields import (
    DecayRate,
    Fraction,
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RawTarget,
    RelativeGlob,
    SetName,
    TokenizedTarget,
    TokenizerTarget,
    added_later,
)
from marin_build.recipe.mixture_schedule import schedule_of
from marin_build.recipe.sources import Chat, DocumentFormat, RawSource, TextFormat, TextSource, TokenizerFileSource

MAX_QUOTED = 8
MAX_PARTS = 99_999

# ---- measure: what is observed, outside the fingerprint --------------------------------------------------------------


class Measure(Model):
    """What is observed and said about an artifact. It may change at any time without changing the artifact."""

    description: str = ""
    tags: list[str] = Field(default=[])


class Validation(Model):
    every_steps: PositiveInt
    """Validate at step 0, after every this many steps, and at the end."""
    sets: dict[SetName, TokenizedTarget]


class CheckpointMeasure(Measure):
    validation: Validation | None = None
    keep_every_steps: PositiveInt | None = None
    """Checkpoints at multiples of this are kept in the finished artifact, beside the final one."""
    baselines: list[Literal["byte_bigram"]] = Field(default=[])
    """Simple models fitted on the training sets and scored on the validation sets, for comparison."""


# ---- raw, tokenizers, tokenized --------------------------------------------------------------------------------------


class RawRecipe(Model):
    """Text as it was found, stored unchanged."""

    kind: ClassVar[str] = "raw"
    source: RawSource
    measure: Measure = Measure()


class SpecialTokens(Model):
    """Special tokens by role; `null` where the tokenizer has none."""

    bos: str | None
    eos: str | None
    pad: str | None

    @property
    def given(self) -> list[str]:
        return [token for token in (self.bos, self.eos, self.pad) if token is not None]

    @model_validator(mode="after")
    def _distinct(self) -> SpecialTokens:
        if len(set(self.given)) != len(self.given) or "" in self.given:
            raise ValueError("special tokens must be distinct and not empty")
        return self


class TrainingText(Model):
    target: RawTarget
    files: Annotated[list[RelativeGlob], Field(min_length=1)]
    format: TextFormat


class TrainedTokenizer(Model):
    """Byte-level BPE trained on text: all 256 bytes, dense ids, special tokens last."""

    method: Literal["byte_level_bpe"]
    text: Annotated[list[TrainingText], Field(min_length=1)]
    vocabulary_size: PositiveInt
    """Ids in all, special tokens included."""
    split_regex: str
    """Pre-tokenization: matches are split off before byte pairs are merged."""
    special_tokens: SpecialTokens


class BytesTokenizer(Model):
    """256 ids, one a byte, then the special tokens."""

    method: Literal["bytes"]
    special_tokens: SpecialTokens

    @property
    def vocabulary_size(self) -> int:
        return 256 + len(self.special_tokens.given)


class AdoptedTokenizer(Model):
    """An existing `tokenizer.json`, with `tokenizer_config.json` where there is one."""

    method: Literal["adopt"]
    source: TokenizerFileSource
    vocabulary_size: PositiveInt
    special_tokens: SpecialTokens
    token_ids: dict[str, NonNegativeInt] = added_later({})
    """Special tokens that have to be there, with the id that each has to have."""
    chat_data: bool = added_later(False)
    """Whether it has to have a chat template that says what is trained on, as `format.type: chat` needs."""


class TokenizerRecipe(Model):
    kind: ClassVar[str] = "tokenizers"
    tokenizer: Annotated[Union[TrainedTokenizer, BytesTokenizer, AdoptedTokenizer], Field(discriminator="method")]
    measure: Measure = Measure()


class TokenBudget(Model):
    """Take source files in an order given by the seed until this many tokens are there."""

    tokens: PositiveInt
    seed: NonNegativeInt


class ValidationSplit(Model):
    """One side of a division of the documents that never changes: each document's side is a function of its text and
    the seed alone, whatever file it is in and whatever else there is."""

    part: Literal["train", "validation"]
    """Which side this set holds. Two recipes that differ in nothing else hold every document, and none twice."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    """Of the documents, on average."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]


class TokenizeExecution(Model):
    """How the work on one token set is spread. It changes speed, never the artifact's identity."""

    parts: Annotated[int, Field(ge=1, le=MAX_PARTS)] = 1
    """Jobs that share the work before one joins what they made; 1: that one does it all."""


class TokenizedRecipe(Model):
    """Documents as token ids in Arrow shards."""

    kind: ClassVar[str] = "tokenized"
    tokenizer: TokenizerTarget
    source: TextSource
    format: DocumentFormat
    add_bos: bool
    add_eos: bool
    shard_bytes: PositiveInt
    """Source bytes a shard: shard boundaries are byte ranges of each input file; a compressed file is one range."""
    token_budget: TokenBudget | None
    max_bad_documents: NonNegativeInt
    """Unusable documents to skip, counted and listed, before the build stops."""
    split: ValidationSplit | None = added_later(None)
    """Take one side of a division of the documents; null: all of them."""
    measure: Measure = Measure()
    execution: dict[str, TokenizeExecution] = Field(default={})
    """By platform (a setting that profiles give); `default` applies where a platform is not named."""

    @model_validator(mode="after")
    def _template_writes_specials(self) -> TokenizedRecipe:
        if isinstance(self.format, Chat) and (self.add_bos or self.add_eos):
            raise ValueError(
                "format.type chat needs add_bos: false and add_eos: false; the chat template writes all special tokens"
            )
        return self


class PartRecipe(Model):
    """A share of the work on a token set."""

    kind: ClassVar[str] = "parts"
    of: TokenizedTarget
    part: NonNegativeInt
    parts: PositiveInt
    set: TokenizedRecipe
    """What the set is made from, without what is only said of it."""


class EncoderCheckRecipe(Model):
    """A comparison of the fast encoder with the reference, for one tokenizer."""

    kind: ClassVar[str] = "checks"
    of: TokenizerTarget
    fast: str
    """The library and its version, as installed here: another one is compared anew."""
    reference: str


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class MixtureComponent(Model):
    target: TokenizedTarget
    weight: NonNegativeFloat
    """Share of the training sequences after normalisation over all components."""
    max_epochs: PositiveFloat | None = added_later(None)
    """How often the whole run may read the set at most; null: as often as it takes."""


Named = TypeVar("Named")


def _by_name(components: dict[str, Named]) -> dict[str, Named]:
    return dict(sorted(components.items()))


class MixtureStage(Model):
    """Other weights from a step on."""

    from_step: PositiveInt
    """The first step with these weights; the sequences before it must be whole blocks of the mixture."""
    weights: Annotated[dict[SetName, NonNegativeFloat], AfterValidator(_by_name)]
    """The weight of every component of `train` from that step on; 0 for one that is not drawn from."""


class TrainingData(Model):
    tokenizer: TokenizerTarget
    train: Annotated[dict[SetName, MixtureComponent], Field(min_length=1), AfterValidator(_by_name)]
    """Sorted by name once loaded, so that the order of a recipe's keys can count nowhere."""
    stages: list[MixtureStage] = added_later([])
    """Stages after the first, whose weights are those of `train`: for example a midtraining."""
    sequence_length: PositiveInt
    """Tokens a sequence that the model predicts."""
    mixture_block: PositiveInt
    """Sequences a block; each block holds every component in exact, equal counts."""
    attention_across_documents: bool
    """Whether a token may attend to earlier documents of its sequence."""

    @model_validator(mode="after")
    def _some_weight(self) -> TrainingData:
        if not any(component.weight > 0 for component in self.train.values()):
            raise ValueError("at least one component needs a weight above 0")
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> TrainingData:
        before = 0
        for number, stage in enumerate(self.stages):
            here = f"stages[{number}]"
            if stage.from_step <= before:
                raise ValueError(f"{here}.from_step {stage.from_step} is not after that of the stage before, {before}")
            if unknown := sorted(set(stage.weights) - set(self.train)):
                raise ValueError(f"{here}.weights names {_quoted(unknown)}; train has {_quoted(self.train)}")
            if missing := sorted(set(self.train) - set(stage.weights)):
                raise ValueError(
                    f"{here}.weights lacks {_quoted(missing)}; write 0 for what this stage does not draw from"
                )
            if not any(stage.weights.values()):
                raise ValueError(f"{here}.weights needs a weight above 0")
            before = stage.from_step
        return self


def _quoted(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    more = f" and {len(listed) - MAX_QUOTED} more" if len(listed) > MAX_QUOTED else ""
    return ", ".join(listed[:MAX_QUOTED]) + more


class Llama3RopeScaling(Model):
    """Frequency scaling of Llama 3.1, with the names of its config.json."""

    type: Literal["llama3"]
    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class LlamaModel(Model):
    """The Llama family, with the field names of a Hugging Face LlamaConfig."""

    architecture: Literal["llama"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    rope_theta: PositiveFloat
    rope_scaling: Llama3RopeScaling | None
    rms_norm_eps: PositiveFloat
    initializer_range: PositiveFloat
    tie_word_embeddings: bool

    @model_validator(mode="after")
    def _shapes(self) -> LlamaModel:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        return self


class CosineSchedule(Model):
    """Linear warmup from 0, then cosine over all remaining steps down to min_lr_ratio × the peak."""

    type: Literal["cosine"]
    warmup_steps: NonNegativeInt
    min_lr_ratio: Fraction


DecayGroup = Literal["norms", "embeddings", "lm_head"]


def _as_set(groups: list[DecayGroup]) -> list[DecayGroup]:
    if len(set(groups)) != len(groups):
        raise ValueError("names a group twice")
    return sorted(groups)


class AdamW(Model):
    """AdamW with decoupled weight decay multiplied by the learning rate."""

    type: Literal["adamw"]
    learning_rate: PositiveFloat
    beta1: DecayRate
    beta2: DecayRate
    epsilon: PositiveFloat
    weight_decay: NonNegativeFloat
    no_weight_decay: Annotated[list[DecayGroup], AfterValidator(_as_set)]
    """Groups of parameters that are not decayed; a set, so its order counts nowhere."""
    max_grad_norm: PositiveFloat | None
    schedule: CosineSchedule


class Precision(Model):
    parameters: Literal["float32"]
    compute: Literal["float32", "bfloat16"]


class Mesh(Model):
    """Devices along each axis; -1 on at most one axis means all that are left."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1

    @model_validator(mode="after")
    def _one_rest(self) -> Mesh:
        sizes = (self.data, self.fsdp, self.tensor)
        if any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
            raise ValueError("axis sizes are at least 1, or -1 on at most one axis")
        return self


class Execution(Model):
    """How one model runs on one platform. It changes speed and memory, never the artifact's identity."""

    mesh: Mesh = Mesh()
    micro_batch_size: PositiveInt | None = None
    """Sequences of the global batch that are computed at once; null: all."""
    rematerialization: Literal["none", "dots", "full"] = "none"
    scan_layers: bool = True
    validation_batch_size: PositiveInt | None = None
    """Sequences a validation batch; null: the global batch size."""


class CheckpointRecipe(Model):
    """A trained language model."""

    kind: ClassVar[str] = "checkpoints"
    data: TrainingData
    model: LlamaModel
    optimizer: AdamW
    steps: PositiveInt
    global_batch_size: PositiveInt
    """Sequences a step."""
    z_loss: NonNegativeFloat
    """Weight of mean(logsumexp²) in the loss; 0 switches it off."""
    precision: Precision
    seed: NonNegativeInt
    measure: CheckpointMeasure = CheckpointMeasure()
    execution: dict[str, Execution] = Field(default={})
    """By platform (a setting that profiles give); `default` applies where a platform is not named."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> CheckpointRecipe:
        if self.optimizer.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"optimizer.schedule.warmup_steps {self.optimizer.schedule.warmup_steps} exceeds steps {self.steps}"
            )
        return self

    @model_validator(mode="after")
    def _mixture_fits(self) -> CheckpointRecipe:
        for number, stage in enumerate(self.data.stages):
            if stage.from_step >= self.steps:
                raise ValueError(f"data.stages[{number}].from_step {stage.from_step} is not before steps {self.steps}")
        try:
            schedule_of(self).check_served(self.steps)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return self


Recipe = Union[RawRecipe, TokenizerRecipe, TokenizedRecipe, CheckpointRecipe, PartRecipe, EncoderCheckRecipe]

SCHEMAS: dict[str, type[Model]] = {
    schema.kind: schema for schema in (RawRecipe, TokenizerRecipe, TokenizedRecipe, CheckpointRecipe)
}
OUTSIDE_IDENTITY = ("measure", "execution")
