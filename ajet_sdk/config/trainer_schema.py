"""The section `trainer_common`: how weights are trained, validated, saved and logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import model_validator

from ajet_sdk.config.schema import ONE_OR_MORE, Section, key, section, wrong
from ajet_sdk.types import Json

RewardEstimator = Literal["grpo", "rloo", "opo", "reinforce_plus_plus"]
Estimator = Literal[RewardEstimator, "sft", "dpo", "opd"]

RatioLevel = Literal["token", "turn", "sequence"]
ClipType = Literal["two_sided", "one_sided", "soft", "none"]
ImportanceWeights = Literal["none", "truncated", "masked"]
Aggregation = Literal["token", "sample", "turn", "agent", "constant"]
LossType = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "rloo",
    "opo",
    "reinforce++",
    "tis",
    "icepop",
]

_GRPO = {"algorithm": {"adv_estimator": "grpo"}}
_NO_KL = {"use_kl_loss": False}
_PPO_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
_CORRECTED = {"ratio_base": "trainer", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
_DR_GRPO = {
    "algorithm": {"adv_estimator": "grpo", "normalize_std": False},
    "loss_aggregation": "constant",
}
_SEQUENCE = {"ratio_level": "sequence", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
LOSS_TYPES: dict[str, Json] = {
    "grpo": {**_GRPO, **_PPO_CLIP, "loss_aggregation": "sample"},
    "dapo": {**_GRPO, **_NO_KL, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
    "dr_grpo": {**_DR_GRPO, **_NO_KL, **_PPO_CLIP},
    "gspo": {**_GRPO, **_NO_KL, **_SEQUENCE, "loss_aggregation": "sample"},
    "cispo": {
        **_GRPO,
        **_NO_KL,
        "clip_type": "one_sided",
        "clip_ratio_low": 1.0,
        "clip_ratio_high": 4.0,
    },
    "sapo": {**_GRPO, **_NO_KL, "clip_type": "soft", "loss_aggregation": "sample"},
    "rloo": {"algorithm": {"adv_estimator": "rloo"}, **_PPO_CLIP},
    "opo": {"algorithm": {"adv_estimator": "opo"}, **_NO_KL, **_PPO_CLIP},
    "reinforce++": {"algorithm": {"adv_estimator": "reinforce_plus_plus"}, **_PPO_CLIP},
    "tis": {**_CORRECTED, "importance_weights": "truncated", "importance_bounds": [0.0, 2.0]},
    "icepop": {**_CORRECTED, "importance_weights": "masked", "importance_bounds": [0.5, 5.0]},
}
"""The defaults that a named loss sets in `trainer_common`. The guide's table has the sources."""
OBJECTIVE = (
    "loss_type",
    "ratio_level",
    "ratio_base",
    "clip_type",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_max",
    "soft_clip_temperatures",
    "importance_weights",
    "importance_level",
    "importance_bounds",
    "loss_aggregation",
    "loss_length",
)
"""Keys of the policy objective."""

_OF_REWARDS = get_args(RewardEstimator)
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coef"), _OF_REWARDS),
    **dict.fromkeys(OBJECTIVE, (*_OF_REWARDS, "opd")),
    "algorithm.normalize_std": ("grpo",),
    **dict.fromkeys(("algorithm.data", "algorithm.per_task"), ("sft", "dpo", "replay")),
    "algorithm.min_reward": ("sft", "replay"),
    "algorithm.val_loss_freq": ("sft",),
    "algorithm.replay": _OF_REWARDS,
    "algorithm.replay_coef": ("replay",),
    "algorithm.beta": ("dpo",),
    **dict.fromkeys(
        ("algorithm.teacher", "algorithm.teacher_model", "algorithm.teacher_key_env"), ("opd",)
    ),
}
"""Keys of `trainer_common` that only some estimators read, with these estimators; `replay`: any
that replays."""


class Algorithm(Section):
    adv_estimator: Estimator = key(
        "grpo",
        "Learning algorithm. From rewards: grpo (arXiv:2402.03300), rloo (arXiv:2402.14740), opo"
        " (arXiv:2505.23585), reinforce_plus_plus (arXiv:2501.03262). Backbones local and tinker"
        " also: sft (supervised, on given replies), dpo (on pairs of a better and a worse attempt,"
        " arXiv:2305.18290), opd (on-policy distillation from a teacher's log-probabilities,"
        " arXiv:2306.13649). `algorithm: sft` is short for `algorithm: {adv_estimator: sft}`.",
    )
    normalize_std: bool = key(True, "grpo: divide advantages by the group's standard deviation.")
    use_kl_in_reward: bool = key(
        False,
        "grpo, rloo, opo with backbone local or tinker: subtract kl_loss_coef times the divergence"
        " from the initial model from each attempt's reward, instead of adding a penalty to the"
        " loss: the sum of log policy - log initial over its sampled tokens.",
    )
    data: str | None = key(
        None,
        "sft, dpo: training data. A trace (a file or an experiment's directory): sft uses the best"
        " episodes of each task, dpo its best and worst. Or a JSON-lines file with `messages` (sft)"
        " or `prompt`, `chosen` and `rejected` (dpo). null: sft uses the `messages` of the training"
        " tasks, dpo the attempts of each step. With `replay`: what the steps of the other"
        " algorithms imitate, chosen as for sft.",
    )
    replay: int = key(
        0,
        "Algorithms that learn from rewards, backbone local: number of conversations of `data` that"
        " each step imitates besides, so that what they teach is not forgotten.",
        ge=0,
    )
    replay_coef: float = key(
        1.0,
        "Weight of the replayed conversations' loss, their mean negative log-likelihood per token.",
        gt=0,
    )
    val_loss_freq: int = key(
        0,
        "sft: steps between measurements of val/loss, the mean negative log-likelihood per token of"
        " the conversations in `data` that belong to validation tasks, which are not trained on. 0"
        " or less: at each validation.",
    )
    per_task: int = key(
        1,
        "sft, dpo from a trace: maximum number of episodes (sft) or pairs (dpo) per task, best"
        " first.",
        ge=1,
    )
    min_reward: float | None = key(
        None,
        "sft from a trace: minimum reward of an episode; null: above the trace's lowest reward,"
        " unless all are equal.",
    )
    beta: float = key(
        0.1,
        "dpo: strength of the constraint that keeps the policy close to the initial model.",
        gt=0,
    )
    teacher: str | None = key(
        None,
        "opd: teacher with the same tokenizer: a directory, EXPERIMENT@STEP or EXPERIMENT@latest, a"
        " Hugging Face name, or the URL of an endpoint that returns `prompt_logprobs`, such as vLLM"
        " (`http://HOST:PORT/v1`). An endpoint scores tokens at temperature 1 without limits, bias,"
        " penalties or grammar: rollout.temperature must be 1.0, and calls that were sampled"
        " otherwise are not trained (outcome `unmaskable`).",
    )
    teacher_model: str | None = key(
        None, "opd: model name at the teacher's endpoint; null: the first one it lists."
    )
    teacher_key_env: str = key(
        "OPENAI_API_KEY",
        "opd: environment variable that holds the API key of the teacher's endpoint.",
    )

    @property
    def remote_teacher(self) -> bool:
        """Whether the teacher is an endpoint."""
        return self.adv_estimator == "opd" and (self.teacher or "").startswith(
            ("http://", "https://")
        )

    @property
    def stored(self) -> bool:
        """Whether a step learns from recorded conversations instead of new attempts."""
        return self.adv_estimator == "sft" or (
            self.adv_estimator == "dpo" and self.data is not None
        )

    @property
    def grouped(self) -> bool:
        """Whether attempts at the same task are compared."""
        return self.adv_estimator in ("grpo", "rloo", "opo") or (
            self.adv_estimator == "dpo" and not self.stored
        )

    @property
    def divides(self) -> bool:
        """Advantages are divided by the standard deviation of their group."""
        return self.adv_estimator == "grpo" and self.normalize_std

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the divergence from the initial model is part of the reward."""
        return self.use_kl_in_reward and self.adv_estimator in ("grpo", "rloo", "opo")

    @property
    def by_reward(self) -> bool:
        """Whether the estimator learns from rewards."""
        return self.adv_estimator in get_args(RewardEstimator)

    @property
    def replays(self) -> bool:
        """Whether each step also imitates recorded conversations."""
        return self.by_reward and self.replay > 0

    @property
    def needs_reward(self) -> bool:
        """Whether an attempt without a reward is not used."""
        return self.by_reward or self.adv_estimator == "dpo"

    @model_validator(mode="after")
    def _needs(self) -> Algorithm:
        if self.adv_estimator == "opd" and not self.teacher:
            raise wrong(
                "teacher",
                "is required for opd {got}: a directory, a Hugging Face name, or an endpoint's URL",
            )
        if self.replays and self.data is None:
            raise wrong("replay", "needs algorithm.data {got}: a file of conversations, or a trace")
        return self


class FsdpConfig(Section):
    param_offload: bool = key(False, "Offload parameters to CPU memory (clusters).")
    optimizer_offload: bool = key(False, "Offload optimizer states to CPU memory (clusters).")


class Optim(Section):
    lr: float | None = key(None, "Learning rate; null: chosen by model size and logged.", gt=0)
    weight_decay: float = key(0.0, "Weight decay of AdamW.", ge=0)
    betas: tuple[float, float] = key((0.9, 0.95), "Betas of AdamW.")
    warmup_steps: int = key(
        5,
        "Optimizer updates during which the learning rate rises to `lr`. A longer warm-up than the"
        " run is reported.",
        ge=0,
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "Learning rate schedule after warm-up: constant, or linear or cosine decay to 0 at the end"
        " of the run.",
    )
    grad_clip: float = key(1.0, "Maximum norm of the gradient.", gt=0)

    @model_validator(mode="after")
    def _betas(self) -> Optim:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise wrong("betas", "must both be at least 0 and less than 1 {got}")
        return self


class TrainerCommon(Section):
    seed: int = key(0, "Random seed; all other seeds are derived from it.", ge=0)
    total_epochs: int = key(50, "Number of passes over the training tasks.", ge=1)
    total_steps: int | None = key(
        None, "Number of training steps; null: given by total_epochs.", ge=1
    )
    total_training_steps: int | None = key(
        None,
        "Maximum number of training steps, even if `total_epochs` or `total_steps` asks for more.",
        ge=1,
    )
    val_before_train: bool = key(False, "Validate before the first training step.")
    val_pass_n: int = key(
        4,
        "Sampled attempts per validation task, for pass@k. 0: one greedy attempt only, whose reward"
        " is val/reward then (backbone local).",
        ge=0,
    )
    val_tasks: int | None = key(None, "Number of tasks to validate on; null: all.", ge=1)
    val_by: list[str] = key(
        [],
        "Metadata keys of validation tasks, e.g. [family]: the tasks of each value are a set whose"
        " rewards are reported apart, and watched for a drop. Files that are named apart"
        " (validation.file_path) are sets too.",
    )
    stop_when: list[Literal["drop", "unstable", "solved", "rise"]] = key(
        [],
        "backbone local: end the run early, with the checkpoint of the best validation. drop: the"
        " validation reward of a set of tasks, or of all, fell below that of the first validation"
        " by more than chance explains. unstable: entropy, gradient or the gap between sampler and"
        " trainer left its range. solved: every attempt of three steps in a row solved its task;"
        " the run validates once more. rise: sft's val/loss was above its lowest twice in a row;"
        " the best checkpoint is then that of the lowest.",
    )
    save_freq: int = key(20, "Steps between checkpoints; 0 or less: only at the end.")
    test_freq: int = key(20, "Steps between validations; 0 or less: only at the end.")
    keep_checkpoints: int = key(
        2,
        "Number of checkpoints to keep besides the final model and the one with the best"
        " validation.",
        ge=1,
    )
    nnodes: int = key(1, "Machines (clusters).", ge=1)
    n_gpus_per_node: int = key(8, "GPUs per machine (clusters).", ge=0)
    logger: Annotated[list[Literal["console", "tensorboard", "wandb", "swanlab"]], ONE_OR_MORE] = (
        key(
            ["console", "tensorboard"],
            "Logger or list of loggers for metrics, in addition to the trace.",
        )
    )
    algorithm: Algorithm = section(Algorithm, "Learning algorithm and its data.")
    mini_batch_num: int = key(1, "Optimizer steps per batch.", ge=1)
    ppo_epochs: int = key(1, "Passes over each batch.", ge=1)
    micro_batch_tokens: int | None = key(
        None,
        "Tokens per forward pass; gradients are accumulated over several passes. null: `local` 512"
        " to 8192, by model and memory; clusters 8192.",
        ge=1,
    )
    loss_type: LossType | None = key(
        None,
        "Named loss: sets each of the keys below, and the advantage estimator, that the config does"
        " not set.",
    )
    ratio_level: RatioLevel = key(
        "token",
        "Level of the policy ratio: a token, or the geometric mean over a turn (a call) or a"
        " sequence (a sample).",
    )
    ratio_base: Literal["sampler", "trainer"] = key(
        "sampler",
        "Denominator of the policy ratio: the log-probabilities that the sampler recorded, or the"
        " trainer's own before the step's first update (one more forward pass where a step has"
        " several updates).",
    )
    clip_type: ClipType = key(
        "two_sided",
        "Surrogate: two_sided (PPO), one_sided (CISPO: the clipped ratio weighs the"
        " log-probability), soft (SAPO: a sigmoid instead of bounds) or none.",
    )
    clip_ratio_low: float = key(
        0.2, "Lower clipping of the policy ratio: 1 - this value.", ge=0, le=1
    )
    clip_ratio_high: float = key(0.28, "Upper clipping of the policy ratio: 1 + this value.", ge=0)
    clip_ratio_max: float | None = key(
        None,
        "two_sided: bound of the ratio for negative advantages too (dual clip); null: none.",
        gt=1,
    )
    soft_clip_temperatures: tuple[float, float] = key(
        (1.0, 1.05), "soft: temperatures of the sigmoid for positive and for other advantages."
    )
    importance_weights: ImportanceWeights = key(
        "none",
        "With ratio_base trainer: weights that correct for the difference of sampler and trainer,"
        " truncated to importance_bounds, or masked (0 outside of them).",
    )
    importance_level: Literal["token", "sequence"] = key(
        "token", "Level of the importance weights."
    )
    importance_bounds: tuple[float, float] = key(
        (0.0, 2.0), "Lowest and highest importance weight."
    )
    loss_aggregation: Aggregation = key(
        "token",
        "What has equal weight in the loss: each token of the update, each sample, each turn, or"
        " each agent of an episode; constant: a sample's sum divided by loss_length.",
    )
    loss_length: int | None = key(
        None,
        "constant: tokens that a sample's sum is divided by; null: rollout.max_model_len.",
        ge=1,
    )
    entropy_coef: float = key(0.0, "Weight of the entropy bonus.", ge=0)
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training (clusters).")
    optim: Optim = section(Optim, "The optimiser.")
    use_kl_loss: bool = key(
        True,
        "Add a KL penalty towards the initial model to the loss, for algorithms that learn from"
        " rewards.",
    )
    kl_loss_coef: float = key(0.002, "Weight of the KL penalty.", ge=0)
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = key(
        "low_var_kl", "Estimator of the KL divergence (joschu.net/blog/kl-approx.html)."
    )
    ulysses_sequence_parallel_size: int = key(
        1, "Sequence parallel size: GPUs that share one sequence (clusters).", ge=1
    )
    checkpoint_base_dir: str | None = key(
        None, "Directory of checkpoints; null: `checkpoint/` in the experiment's directory."
    )
    save_trajectory_as_json_file: bool = key(
        False, "Also write each episode as JSON to trajectory/ beside the trace."
    )

    @model_validator(mode="before")
    @classmethod
    def _named_loss(cls, data: Any) -> object:
        if isinstance(data, Mapping):
            named = LOSS_TYPES.get(str(data.get("loss_type")))
        else:
            named = None
        if named is None:
            return data
        algorithm = data.get("algorithm") or {}
        if isinstance(algorithm, Mapping):
            algorithm = {**named.get("algorithm", {}), **algorithm}
        return {**named, **data, **({"algorithm": algorithm} if algorithm else {})}

    @model_validator(mode="after")
    def _loss(self) -> TrainerCommon:
        low, high = self.importance_bounds
        if not 0 <= low < high:
            raise wrong(
                "importance_bounds", "must be a lower and a higher number, both at least 0 {got}"
            )
        if min(self.soft_clip_temperatures) <= 0:
            raise wrong("soft_clip_temperatures", "must both be greater than 0 {got}")
        if self.importance_weights != "none" and self.ratio_base == "sampler":
            raise wrong(
                "importance_weights",
                "needs ratio_base: trainer {got}; with ratio_base: sampler the policy ratio itself"
                " is that correction",
            )
        return self
