"""verl's training loop, `RayPPOTrainer.fit`, as it is: verl_fit_job.py SIZE STEPS FILE.

verl's driver runs on the first rank, and its workers, of the actor and of a reference policy, on
all: batches, log-probs, advantages, mini-batches, the loss, the optimizer and metrics are verl's.
In place of what needs Ray, a rollout engine or a Hugging Face checkpoint:

- calls go to the ranks by a broadcast (`Group`);
- answers are sampled from the policy itself, by the forward pass of verl's engine, and rewarded
  (`Policy.sample`), so that no weights are sent to a rollout engine;
- the model is grpo_job.py's, in float64.

The first rank writes rewards and weights to FILE.
"""

import sys
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.integration.cut_batches_job import VOCABULARY
from tests.integration.grpo_job import (
    ANSWERS,
    DUAL,
    LONGEST,
    PROMPTS,
    RATIO,
    Sampled,
    Trained,
    by_verl,
    new_prompts,
    sample,
)

TOKENS = 200  # of a micro-batch
ROLES = ("actor", "ref")


class Prompts(torch.utils.data.Dataset[dict[str, Any]]):
    """As verl's dataset gives them."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(5)
        self.rows = [row for _ in range(-(-count // PROMPTS)) for row in new_prompts(draw)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"dummy_tensor": torch.zeros(1), "raw_prompt": self.rows[at].tolist(), "index": at}


def padded_rows(rollouts: list[Sampled], rewards: Tensor) -> dict[str, Tensor]:
    """What verl's agent loop returns."""

    def padded(parts: list[Tensor], side: str = "right") -> Tensor:
        return pad_sequence(parts, batch_first=True, padding_side=side)

    prompts = padded([each.tokens[: each.prompt] for each in rollouts], "left")
    answers = padded([each.tokens[each.prompt :] for each in rollouts])
    written = padded([torch.ones(len(each.old), dtype=torch.long) for each in rollouts])
    seen = torch.cat(((prompts > 0).long(), written), 1)  # no prompt has the token of padding
    scores = torch.zeros(written.shape, dtype=torch.float64)
    scores[torch.arange(len(rewards)), written.sum(1) - 1] = rewards
    return {
        "prompts": prompts,
        "responses": answers,
        "response_mask": written,
        "input_ids": torch.cat((prompts, answers), 1),
        "attention_mask": seen,
        "position_ids": (seen.cumsum(1) - 1).clamp(min=0),
        "rm_scores": scores,
    }


def settings(size: int, steps: int, folder: Path) -> Any:
    """verl's configuration, by its own files; a Hugging Face folder for what verl reads there."""
    import verl
    from hydra import compose, initialize_config_dir
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="0", pad_token="0", eos_token="1"
    ).save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ).save_pretrained(folder)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    given = {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": LONGEST,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": folder,
        f"{actor}.megatron.context_parallel_size": size,
        f"{actor}.megatron.use_distributed_optimizer": False,
        f"{actor}.ppo_mini_batch_size": PROMPTS,
        f"{actor}.ppo_epochs": 2,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": TOKENS // size,
        f"{actor}.use_kl_loss": True,
        f"{actor}.clip_ratio": RATIO,
        f"{actor}.clip_ratio_c": DUAL,
        f"{actor}.optim.lr": 1e-2,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.clip_grad": 0.0,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": ANSWERS,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": TOKENS // size,
        "trainer.total_training_steps": steps,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.n_gpus_per_node": size,
        "trainer.device": "cpu",
    }
    with initialize_config_dir(str(Path(verl.__file__).with_name("trainer") / "config")):
        overrides = [f"{key}={value}" for key, value in given.items()]
        return compose("ppo_megatron_trainer", overrides)


def serve_verl(size: int) -> None:
    """The plugin, by the lines of docs/frameworks.md; the model that verl's bridge would make."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    from megatron_cp_plugin import megatron as cp_megatron

    init_device_mesh = MegatronEngine._init_device_mesh

    def with_plugin(self: Any) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        init_device_mesh(self)
        cp_megatron.install("zigzag", layout="thd")
        model_parallel_cuda_manual_seed(7)

    def configured(self: Any) -> None:
        self.is_value_model = self.share_embeddings_and_output_weights = False
        self.param_dtype = torch.float32
        self.bridge, self.provider, self.peft_cls, self.tf_config = object(), None, None, None

    def built(self: Any) -> Any:
        module = Trained.of(size).model
        self.tf_config = module.config
        return [module]

    MegatronEngine._init_device_mesh = with_plugin
    MegatronEngine._build_tf_config = configured
    MegatronEngine._build_megatron_module = built


def policy() -> type:
    """verl's worker, which samples too."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    class Policy(ActorRolloutRefWorker):
        draw = torch.Generator().manual_seed(3)

        def sample(self, prompts: list[list[int]]) -> dict[str, Tensor]:
            """Answers to prompts, one to each, with their rewards."""
            engine = self.actor.engine
            with engine.eval_mode():
                look = partial(by_verl, engine.module[0])
                rollouts, rewards = sample(look, list(map(torch.tensor, prompts)), self.draw)
            return padded_rows(rollouts, rewards)

        def weights(self) -> dict[str, Tensor]:
            named = self.actor.engine.module[0].module.named_parameters()
            return {name: each.detach() for name, each in named}

    return Policy


class Group:
    """The workers of all ranks in the place of verl's RayWorkerGroup; the first rank calls them."""

    def __init__(self, role: str, config: Any = None) -> None:
        """A worker of each rank. Args: config: verl's; other ranks hear the first one's."""
        heard = [config]
        dist.broadcast_object_list(heard)
        self._role, self._worker = role, policy()(config=heard[0], role=role)
        self._dispatch_info = {role: [0]}  # one data-parallel rank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("async"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            dist.broadcast_object_list([(self._role, name, args)])
            return getattr(self._worker, name)(*args)

        return call

    @classmethod
    def follow(cls) -> None:
        """Another rank's part, until the first one's `stop`."""
        workers = {role: cls(role)._worker for role in ROLES}
        heard: list[Any] = [None]
        while dist.broadcast_object_list(heard) or heard[0] != "stop":
            role, name, args = heard[0]
            getattr(workers[role], name)(*args)


def fit(size: int, steps: int, file: str) -> None:
    """The driver and its workers."""
    serve_verl(size)
    if dist.get_rank():
        Group.follow()
        return
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role

    rewards: list[float] = []

    class Rollouts:
        """In the place of verl's agent loop and its servers."""

        def __init__(self, group: Group) -> None:
            self._group = group

        def generate_sequences(self, batch: Any) -> Any:
            found = self._group.sample(list(batch.non_tensor_batch["raw_prompt"]))
            rewards.append(float(found["rm_scores"].sum(1).mean()))
            images = np.array([{} for _ in found["prompts"]], dtype=object)
            return DataProto.from_dict(
                found, {"multi_modal_inputs": images}, meta_info={"timing": {}}
            )

        def update_weights(self, step: int) -> None:
            """The policy itself is sampled."""

        def sleep_replicas(self) -> None:
            """There are none."""

    class Trainer(RayPPOTrainer):  # type: ignore[misc]
        def init_workers(self) -> None:
            groups = [Group(role, self.config.actor_rollout_ref) for role in ROLES]
            self.actor_rollout_wg, self.ref_policy_wg = groups
            for group in groups:
                group.init_model()
            self.async_rollout_manager = self.checkpoint_manager = Rollouts(self.actor_rollout_wg)

    trainer = Trainer(
        settings(size, steps, Path(mkdtemp())),
        None,
        dict.fromkeys((Role.ActorRollout, Role.RefPolicy)),
        ResourcePoolManager({"all": [size]}, {Role.ActorRollout: "all"}),
        train_dataset=Prompts(PROMPTS * steps),
        val_dataset=Prompts(PROMPTS),
        train_sampler=torch.utils.data.SequentialSampler(range(PROMPTS * steps)),
    )
    trainer.init_workers()
    trainer.fit()
    torch.save({"rewards": rewards, "weights": trainer.actor_rollout_wg.weights()}, file)
    dist.broadcast_object_list(["stop"])


def main() -> None:
    from megatron_cp_plugin.integration import cpu

    cpu.activate()  # Megatron's schedules ask for GPUs
    dist.init_process_group("gloo")
    fit(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])


if __name__ == "__main__":
    from megatron_cp_plugin.integration.launch import whole_program

    with whole_program():
        main()
