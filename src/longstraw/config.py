"""The run configuration of `longstraw train`: small, typed, checked as a whole before anything is loaded.

Apart from the rooms it configures, and free of torch, so that a wrong setting is refused in milliseconds. Names and
defaults that TRL also has are TRL's. Reading a file and overriding keys is in `config_file.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Stops = Annotated[tuple[int | str, ...], Field(strict=False)]
Betas = Annotated[tuple[float, float], Field(strict=False)]


class Section(BaseModel):
    """Base of every section: unknown keys, implicit conversions and non-finite numbers are refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class AdapterConfig(Section):
    """The LoRA adapter that is trained."""

    r: Count = 16
    """Rank of the adapter."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Numerator of the adapter's scale alpha / r; null is 2 * r."""
    target_modules: str | Names = "all-linear"
    """Linear layers that get an adapter: names, one regular expression, or `all-linear` (not the head nor indexers)."""
    target_parameters: Names = ()
    """Names of bare parameters that get an adapter, as in peft: the fused experts of mixture-of-experts models."""


class ModelConfig(Section):
    """The policy: what is loaded and which of its parameters are trained."""

    name: str
    """Hub id or folder of a transformers model; with `gguf_file`, the folder that holds that file."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of the weights. Adapters, their gradients and the optimizer are float32."""
    device: str = "auto"
    """Where the model runs: `cpu`, `cuda`, `cuda:1`; `auto` is a CUDA device if there is one, else the CPU."""
    gguf_file: str | None = None
    """Name of the GGUF file inside the folder; its weights are unpacked to `dtype`."""
    quantization: Literal["nf4"] | None = None
    """`nf4` keeps the frozen linear weights in 4 bits (bitsandbytes); null keeps `dtype`."""
    adapter: AdapterConfig | None = Field(default_factory=AdapterConfig)
    """The LoRA adapter; null trains every parameter of the model."""


class EngineConfig(Section):
    """How the update is computed: memory against time, exact against cheap."""

    chunk_tokens: Count = 4096
    """Tokens that are run at once. Live memory grows with it, speed too up to a point."""
    prompt_gradient: Literal["exact", "stopped"] = "exact"
    """`exact` pulls cotangents back through the prompt; `stopped` holds its state constant: cheaper and biased."""
    graph_scope: Literal["layer", "chunk"] = "layer"
    """Graph that is alive at once: one layer of a chunk, or the whole chunk (one forward fewer, more memory)."""
    residency: Literal["device", "host"] = "device"
    """Where a prompt's state lives; `host` takes host memory for it instead of the device's: longer prompts, slower."""
    staging_bytes: Count = 2**30
    """Bytes of device memory through which state is fetched with `residency: host`; not used otherwise."""


class DataConfig(Section):
    """The rows trained on: a `prompt` column (text or chat messages) or verl rows; other columns go to rewards."""

    rows: str
    """A .jsonl, .json or .parquet file, a folder of them, or a hub id for `datasets`."""
    split: str = "train"
    """Split to read, where the source has splits."""
    shuffle: bool = True
    """Draw the rows in a new order each epoch; false keeps the file's order."""
    shuffle_seed: int = 0
    """Seed of that order."""
    max_prompt_tokens: Count | None = None
    """Longest prompt in tokens; null is what the model's positions leave beside the completion."""
    long_prompts: Literal["refuse", "skip"] = "refuse"
    """What happens to a row whose prompt is longer: refuse the run and name the row, or leave the row out."""


class RewardConfig(Section):
    """One reward function and its share of the reward."""

    function: str
    """Dotted path (`package.module.function`), `path/to/file.py:function`, or the name of a built-in reward."""
    weight: float = 1.0
    """Factor of this function's number in the sum that is the reward (TRL's `reward_weights`)."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments passed on every call, for example the pattern of `regex_match`."""


class SamplingConfig(Section):
    """How responses are drawn. The checkpoint's own generation config is not read."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Responses sampled for each prompt (G)."""
    max_completion_length: Count = 512
    """Longest response in tokens; one that reaches it without a stop counts as truncated."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, for sampling and scoring alike."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k likeliest tokens only; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of likeliest tokens with this much probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens at least this times as likely as the likeliest; null keeps all."""
    stop: Stops | None = None
    """Token ids or texts of one token that end a response; null is the tokenizer's end-of-text and end-of-turn."""


class GRPOConfig(Section):
    """The objective, with TRL's names, meanings and defaults."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = "dapo"
    """How token losses are formed and averaged."""
    epsilon: NotNegative = 0.2
    """Clip range of the importance ratio below 1 (and above, unless `epsilon_high` is given)."""
    epsilon_high: NotNegative | None = None
    """Clip range above 1; for `cispo` the largest ratio itself. Null is `epsilon`."""
    delta: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of the ratio where the advantage is negative (two-sided clipping); null has none."""
    beta: NotNegative = 0.0
    """Weight of the KL term to the reference policy (the model with adapters off); 0 needs no reference."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the importance ratio, which makes its gradient unbiased; matters with `beta` only."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or one per response (GSPO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the group's, or the step's, rewards, or nothing."""
    mask_truncated_completions: bool = False
    """Leave responses without a stop out of the loss."""
    sapo_temperature_neg: Annotated[float, Field(gt=0)] = 1.05
    """Temperature of `sapo`'s soft gate where the advantage is not positive."""
    sapo_temperature_pos: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of `sapo`'s soft gate where the advantage is positive."""

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _accept_trl_booleans(cls, value: object) -> object:
        if isinstance(value, bool):
            return "group" if value else "none"
        return value


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    learning_rate: NotNegative = 1e-6
    """Peak learning rate. 1e-6 suits full-parameter training; LoRA usually wants 1e-5 to 3e-4."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: held, or lowered to 0 at the last step. TRL's own default is `linear`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0 to its peak."""
    weight_decay: NotNegative = 0.0
    """AdamW's decay, applied to parameters with two or more axes."""
    betas: Betas = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's term added to the denominator."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global L2 norm the gradient is clipped to; null does not clip."""


class RunSettings(Section):
    """Length of the run, its folder, and what it keeps."""

    output_dir: str
    """The run folder. A new run refuses one that is not empty."""
    max_steps: Count | None = None
    """Optimizer steps. Give this or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the rows. Give this or `max_steps`."""
    prompts_per_step: Count = 1
    """Prompts, each with its group of responses, in one optimizer step."""
    num_iterations: Count = 1
    """Optimizer steps made from the same responses."""
    seed: int = 42
    """Seed of the adapter's first weights and of sampling."""
    save_steps: Count | None = 10
    """A checkpoint is saved every so many optimizer steps, and at the end; null saves at the end only."""
    keep_checkpoints: Count | None = 2
    """Newest checkpoints that are kept; null keeps all."""
    log_completions: bool = True
    """Write every response, its reward and its advantage to completions.jsonl."""
    track_memory_steps: Count | None = 10
    """Count live tensor bytes by stage, sampling apart, in the first step and every so many after it; null never."""
    threads: Count | None = None
    """CPU threads torch uses; null is torch's own choice."""


class EvaluationConfig(Section):
    """Held-out rows whose sampled responses are scored, never trained on."""

    rows: str
    """As `data.rows`."""
    split: str = "test"
    """As `data.split`."""
    num_generations: Count = 8
    """Responses sampled for each held-out prompt."""
    max_rows: Count | None = None
    """Score only the first so many rows; null scores all."""
    metrics: Annotated[tuple[RewardConfig, ...], Field(strict=False)] | None = None
    """Functions whose means are reported, each under its own name; null is the run's rewards."""
    every: Count | None = None
    """Evaluate every so many optimizer steps; null only before and after."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""


class ParallelConfig(Section):
    """How a job of several processes (torchrun) divides the work; `context` times `data` is their number."""

    context: Count = 1
    """Ranks that share out the tokens of every chunk, and so a prompt's state: longer prompts."""
    data: Count = 1
    """Ranks, or context axes, that take different prompts of a step: more prompts in the same time."""
    expert: Count = 1
    """Ranks of a context axis that share out the routed experts' weights; a divisor of `context`."""
    token_order: Literal["zigzag", "block_cyclic"] = "zigzag"
    """Which tokens of a chunk a rank takes; `zigzag` gives all ranks equal work in causal attention."""
    compare_parameters: bool = True
    """After each step compare a digest of the trained parameters over the ranks and stop if they differ."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 7200.0
    """How long a rank waits for others before the job ends; ranks of `data` wait for the longest prompt of a step."""

    @property
    def num_processes(self) -> int:
        return self.context * self.data


class RunConfig(Section):
    """Everything `longstraw train` needs to know."""

    model: ModelConfig
    engine: EngineConfig = Field(default_factory=EngineConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    data: DataConfig
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False, min_length=1)]
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    run: RunSettings
    evaluation: EvaluationConfig | None = None
