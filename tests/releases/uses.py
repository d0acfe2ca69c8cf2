"""What ajet uses of Trinity-RFT and verl, and with which parameters.

The releases are those that `ajet install trinity` installs. `breaks` compares a release with the
table, by its source alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.releases.packages import Package

Kind = Literal["uses", "calls", "overrides"]


@dataclass(frozen=True)
class Use:
    """A name that a file of ajet needs.

    kind: `uses` it, whatever its parameters; `calls` it with these parameters and no others; or
        `overrides` it, and is called by the package with these parameters.
    """

    ours: str
    module: str
    name: str
    kind: Kind = "uses"
    parameters: tuple[str, ...] = ()


def _of(ours: str, module: str, *rows: str) -> list[Use]:
    """Rows `name`, `name(parameters)` for a call, `name[parameters]` for what we override."""
    uses = []
    for row in rows:
        kind: Kind = "uses"
        name, parameters = row, ""
        if "(" in row:
            kind, (name, _, parameters) = "calls", row.rstrip(")").partition("(")
        elif "[" in row:
            kind, (name, _, parameters) = "overrides", row.rstrip("]").partition("[")
        named = tuple(part.strip() for part in parameters.split(",") if part.strip())
        uses.append(Use(ours, module, name, kind, named))
    return uses


_TRINITY = "ajet_sdk/backbones/trinity"
_VERL = "ajet_sdk/backbones/verl"

USES: dict[str, list[Use]] = {
    "trinity": [
        *_of(f"{_TRINITY}/launch.py", "trinity.common.config",
             "Config.check_and_update()"),
        *_of(f"{_TRINITY}/launch.py", "trinity.common.constants",
             "SyncStyle.FULLY_ASYNC", "SyncStyle.TRAINER_DRIVEN", "SyncMethod.NCCL", "SyncMethod.CHECKPOINT"),
        *_of(f"{_TRINITY}/launch.py", "trinity.manager.synchronizer",
             "Synchronizer.get_actor(namespace)", "Synchronizer.coordinate_weight_sync_setup()"),
        *_of(f"{_TRINITY}/launch.py", "trinity.explorer.explorer",
             "Explorer.get_actor(config)", "Explorer.explore()"),
        *_of(f"{_TRINITY}/launch.py", "trinity.trainer.trainer", "Trainer.get_actor(config)", "Trainer.sync_weight()"),
        *_of(f"{_TRINITY}/actors.py", "trinity.explorer.explorer",
             "RolloutCoordinator", "Explorer.__init__[config]", "Explorer.explore_step[]", "Explorer.need_eval[]",
             "Explorer.finish_current_steps[]", "Explorer.eval[]", "Explorer._pull_latest_weights[]",
             "Explorer._checkpoint_weights_update[step_num]", "Explorer.prepare[]", "Explorer.benchmark[]",
             "Explorer.shutdown[]", "Explorer._finish_explore_step(step)", "Explorer._finish_eval_step(step)",
             "Explorer._finish_eval_step(prefix)", "Explorer.sync_style", "Explorer.explore_step_num",
             "Explorer.model_version", "Explorer.last_monitored_step", "Explorer._inflight_train_steps",
             "Explorer.synchronizer", "Explorer.monitor", "Explorer.models", "Explorer.enable_lora"),
        *_of(f"{_TRINITY}/actors.py", "trinity.manager.synchronizer",
             "Synchronizer.get_latest_model_version()", "Synchronizer.wait_new_model_state_dict(current_version)"),
        *_of(f"{_TRINITY}/actors.py", "trinity.explorer.rollout_coordinator",
             "RolloutCoordinator._init_scheduler[]", "RolloutCoordinator.get_actor[config]",
             "RolloutCoordinator.scheduler", "RolloutCoordinator.__init__(config)",
             "RolloutCoordinator.submit_batch[batch_id, tasks, batch_type, min_wait_num]",
             "RolloutCoordinator._finalize_train_batch[batch_state, timeout]",
             "RolloutCoordinator.process_experiences(payloads)", "RolloutCoordinator.pending_batches",
             "RolloutCoordinator._build_batch_result(batch_state, pipeline_metrics)",
             "BatchLifecycleState.FINALIZED", "BatchState.batch_id", "BatchState.statuses", "BatchState.state",
             "BatchType"),
        *_of(f"{_TRINITY}/actors.py", "trinity.explorer.scheduler",
             "Scheduler.__init__(config)", "Scheduler.start()", "Scheduler._create_runner[runner_id]",
             "Scheduler.runners", "Scheduler.idle_runners", "Scheduler.pending_tasks",
             "Scheduler.completed_tasks", "Scheduler.default_timeout",
             "RunnerWrapper.__init__(runner_id, rollout_model_id, auxiliary_model_ids, config)",
             "RunnerWrapper.prepare()", "RunnerWrapper.restart_runner()", "RunnerWrapper.runner",
             "RunnerWrapper.run_with_retry"),
        *_of(f"{_TRINITY}/actors.py", "trinity.trainer.trainer",
             "Trainer.__init__[config]", "Trainer.prepare[]", "Trainer.train[]", "Trainer.train_step[exps]",
             "Trainer.engine", "Trainer.monitor"),
        *_of(f"{_TRINITY}/adapters.py", "trinity.common.models.model",
             "ModelWrapper.api_address", "ModelWrapper.api_key"),
        *_of(f"{_TRINITY}/adapter_trainer.py", "trinity.trainer.verl.workers",
             "TrinityActorRolloutRefWorker._maybe_patch_lora_fsdp2[]",
             "TrinityActorRolloutRefWorker._cache_state_dict_meta[]",
             "TrinityActorRolloutRefWorker.save_state_dict[local_path, global_step]",
             "TrinityActorRolloutRefWorker._save_lora[local_path]"),
        *_of(f"{_TRINITY}/adapter_trainer.py", "trinity.trainer.verl.trainer",
             "TrinityActorRolloutRefWorker", "VERLTrainer.upload_state_dict[]", "VERLTrainer.global_steps",
             "VERLTrainer.global_config", "VERLTrainer.actor_rollout_wg"),
        *_of(f"{_TRINITY}/adapter_trainer.py", "trinity.manager.synchronizer",
             "Synchronizer.get_actor(namespace)", "Synchronizer.set_model_state_dict(model_state_dict, trainer_step)"),
        *_of(f"{_TRINITY}/batches.py", "trinity.algorithm",
             "AdvantageFn.__call__[exps, kwargs]", "AdvantageFn.compute_in_trainer[]",
             "AdvantageFn.default_args[]"),
        *_of(f"{_TRINITY}/batches.py", "trinity.algorithm.algorithm",
             "MultiStepGRPOAlgorithm.use_reference"),
        *_of(f"{_TRINITY}/batches.py", "trinity.algorithm.sample_strategy.sample_strategy",
             "DefaultSampleStrategy.__init__(buffer_config)", "DefaultSampleStrategy.sample[step, kwargs]",
             "DefaultSampleStrategy.default_args[]", "DefaultSampleStrategy.exp_buffer",
             "DefaultSampleStrategy.set_model_version_metric(exp_list, metrics)"),
        *_of(f"{_TRINITY}/batches.py", "trinity.buffer.operators", "ExperienceOperator.process[exps]"),
        *_of(f"{_TRINITY}/batches.py", "trinity.buffer.selector.selector",
             "BaseSelector.__init__[data_source, config]", "BaseSelector.get_indices[batch_size, return_extra_info]",
             "BaseSelector.feedback", "BaseSelector.state_dict[]", "BaseSelector.load_state_dict[state_dict]"),
        *_of(f"{_TRINITY}/batches.py", "trinity.common.config", "DataSelectorConfig.seed"),
        *_of(f"{_TRINITY}/batches.py", "trinity.buffer.reader.file_reader", "_HFBatchReader.dataset_size"),
        *_of(f"{_TRINITY}/pictures.py", "trinity.trainer.tinker.tinker_trainer", "to_tinker_input"),
        *_of(f"{_TRINITY}/pictures.py", "trinity.trainer.tinker.utils", "to_tinker_input(experiences, logger)"),
        *_of(f"{_TRINITY}/pictures.py", "trinity.common.experience", "Experience.tokens", "Experience.info"),
        *_of(f"{_TRINITY}/plugins.py", "trinity.algorithm.policy_loss_fn.policy_loss_fn",
             "PolicyLossFn.__init__(backend)", "PolicyLossFn.__call__[logprob, kwargs]",
             "PolicyLossFn.default_args[]"),
        *_of(f"{_TRINITY}/plugins.py", "trinity.algorithm.entropy_loss_fn.entropy_loss_fn",
             "EntropyLossFn.__call__[entropy, action_mask, kwargs]"),
        *_of(f"{_TRINITY}/plugins.py", "trinity.utils.monitor",
             "Monitor.__init__", "WandbMonitor.__init__[project, group, name, role, config]",
             "Monitor.log[data, step, commit]",
             "Monitor.close[]"),
        *_of(f"{_TRINITY}/sampler.py", "trinity.common.models.model",
             "ModelWrapper.api_address", "ModelWrapper.api_key", "ModelWrapper.model_version_async",
             "ModelWrapper.model_path", "ModelWrapper.model_name", "ModelWrapper.model", "ModelWrapper.enable_lora"),
        *_of(f"{_TRINITY}/sampler.py", "trinity.common.models.tinker_model", "TinkerModel.get_model_path()"),
        *_of(f"{_TRINITY}/swarm.py", "trinity.common.models.allocator",
             "Allocator.__init__(config)", "Allocator.get_model(config, role, engine_id)"),
        *_of(f"{_TRINITY}/swarm.py", "trinity.common.models.model", "ModelWrapper.prepare()"),
        *_of(f"{_TRINITY}/workflow.py", "trinity.common.workflows",
             "Workflow.__init__(task, model, auxiliary_models)", "Workflow.reset[task]",
             "Workflow.set_repeat_times[repeat_times, run_id_base]", "Workflow.run_async[]",
             "Workflow.is_async", "Workflow.can_repeat", "Workflow.can_reset", "Task.workflow_args",
             "Task.batch_id", "Task.task_id", "Task.raw_task", "Task.is_eval"),
        *_of(f"{_TRINITY}/workflow.py", "trinity.common.experience",
             "EID.task", "EID.run", "EID.step", "EID.suffix", "EID.batch",
             "Experience.__init__(eid, tokens, prompt_length, logprobs, action_mask, advantages, returns, reward,"
             " info, metrics)"),
        *_of(f"{_TRINITY}/without_vllm.py", "trinity.common.models.mm_utils",
             "should_use_processor", "vLLMMultiModalRender", "combine_output_token_ids", "build_mm_message",
             "processor_or_tokenizer_cls"),
    ],
    "verl": [
        *_of("ajet_sdk/backbones/shared/padding.py", "verl.utils.attention_utils", "_get_attention_functions()"),
        *_of("ajet_sdk/backbones/shared/padding.py", "verl.utils.npu_flash_attn_utils",
             "index_first_axis", "pad_input", "rearrange", "unpad_input"),
        *_of(f"{_TRINITY}/adapter_trainer.py", "verl.single_controller.base.decorator",
             "register(dispatch_mode)"),
        *_of(f"{_TRINITY}/adapter_trainer.py", "verl.utils.device", "get_device_id()"),
        *_of(f"{_VERL}/backbone.py", "verl.experimental.reward_loop", "migrate_legacy_reward_impl(config)"),
        *_of(f"{_VERL}/backbone.py", "verl.trainer.ppo.utils", "need_critic(config)", "need_reference_policy(config)"),
        *_of(f"{_VERL}/backbone.py", "verl.utils.config",
             "validate_config(config, use_reference_policy, use_critic)"),
        *_of(f"{_VERL}/backbone.py", "verl.trainer.constants_ppo", "get_ppo_ray_runtime_env()"),
        *_of(f"{_VERL}/backbone.py", "verl.trainer.main_ppo", "TaskRunner.run(config)"),
        *_of(f"{_VERL}/manager.py", "verl.trainer.ppo.core_algos", "register_adv_est(name_or_enum)"),
        *_of(f"{_VERL}/manager.py", "verl.experimental.agent_loop.agent_loop",
             "AgentLoopManager.create", "AgentLoopManager.generate_sequences[prompts]"),
        *_of(f"{_VERL}/batches.py", "verl.protocol", "DataProto.__init__(batch, non_tensor_batch, meta_info)"),
        *_of(f"{_VERL}/runner.py", "verl.workers.rollout.llm_server",
             "LLMServerClient.generate(request_id, prompt_ids, sampling_params, image_data)"),
        *_of(f"{_VERL}/runner.py", "verl.workers.rollout.replica",
             "TokenOutput.token_ids", "TokenOutput.log_probs", "TokenOutput.stop_reason", "TokenOutput.extra_fields"),
    ],
}  # fmt: skip
"""By package."""


def breaks(package: Package) -> Iterator[tuple[Use, str]]:
    """The rows that a release of the package doesn't keep, each with what differs."""
    for use in USES[package.name]:
        found = package.find(use.module, use.name)
        if found is None and use.name.endswith(".__init__"):
            owner = package.find(use.module, use.name.removesuffix(".__init__"))
            if owner is not None and isinstance(owner.node, ast.ClassDef):
                continue  # made by a dataclass
        if found is None:
            yield use, _missing(package, use)
            continue
        if use.kind != "uses" and found.parameters is not None:
            difference = _difference(found.parameters, use)
            if difference:
                yield use, difference


def _missing(package: Package, use: Use) -> str:
    return "is gone" if package.module(use.module) is not None else f"{use.module} is gone"


def _difference(parameters: ast.arguments, use: Use) -> str:
    """How parameters differ from those of a row; empty if they fit it."""
    positional = [argument.arg for argument in (*parameters.posonlyargs, *parameters.args)]
    if positional and positional[0] in ("self", "cls"):
        positional = positional[1:]
    keywords = [argument.arg for argument in parameters.kwonlyargs]
    every = [*positional, *keywords]
    if use.kind == "overrides":
        if parameters.kwarg is not None:
            every.append(parameters.kwarg.arg)
        if parameters.vararg is not None:
            every.append(parameters.vararg.arg)
        if tuple(every) != use.parameters:
            return f"has the parameters ({', '.join(every)}), ours ({', '.join(use.parameters)})"
        return ""
    defaults = positional[len(positional) - len(parameters.defaults) :]
    defaults += [
        name
        for name, default in zip(keywords, parameters.kw_defaults, strict=True)
        if default is not None
    ]
    lost = [name for name in use.parameters if name not in every and parameters.kwarg is None]
    new = [name for name in every if name not in defaults and name not in use.parameters]
    said = []
    if lost:
        said.append(f"has no parameter {', '.join(lost)}")
    if new:
        said.append(f"requires {', '.join(new)}")
    return "; ".join(said)
