"""One run of the trainer: what it reads, starts and holds, and how it goes on after a stop.

Used by grpo_trainer.py, whose `train` is what happens with it.
"""

import contextlib
import functools
import json
import math
import re
import shutil
import threading
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import ray
import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import CheckpointException
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

import genrm_server
import reward_loop
from algorithm import overlong_penalty
from policy import Policy, RanksLost
from prepare_data import read_rows
from rollout import check_sampling
from run_folder import Interrupts, Log, check_folder, check_room, checkpoints_in, has_evaluation
from run_folder import read_lines, save_checkpoint, write_config


class Run:
    """One run. The constructor refuses bad input; `start` starts models, judges and servers."""

    def __init__(self, config):
        if config.baseline:
            file = f"{reward_loop.HERE}/compute_score.py"
            if config.reward_fn:
                file = re.sub(r":\w*$", "", config.reward_fn)
            config = replace(config, reward_fn=f"{file}:compute_score_baseline")
        config.check()
        self.config = config
        transformers_logging.disable_progress_bar()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.servers = None
        self.leaving = threading.Event()  # set: what is rolled out or judged now is given up
        self.num_restarts = 0
        self.updates = 0  # of the policy by the end of the newest step
        self.find_checkpoint()
        self.remote = dict(trust_remote_code=config.trust_remote_code)
        # Of a whole model, made of the newest checkpoint's adapters: that checkpoint's trainer_state.json.
        self.merged = Path(config.out_dir, "merged/trainer_state.json")
        self.base = config.model if config.lora_rank else self.source  # checkpoints of adapters have no model
        self.tokenizer = AutoTokenizer.from_pretrained(self.base, **self.remote)
        self.decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        if not self.tokenizer.chat_template:
            raise ValueError(f"model: {self.base} has no chat template; take an instruct model or add one")
        self.read_data()
        self.lock = check_folder(config)  # no other run writes there until it is closed
        self.longest = self.check_sizes()

    def find_checkpoint(self) -> None:
        """Where the run goes on, `source`: its newest checkpoint, or the model."""
        self.source = self.config.model
        state = {"step": 0, "prompts_drawn": 0}
        checkpoints = checkpoints_in(Path(self.config.out_dir, "checkpoints"))
        if checkpoints:
            newest = checkpoints[-1]
            self.source = str(newest)
            state = json.loads((newest / "trainer_state.json").read_text())
            self.check_adapters(newest / "adapter_config.json")
        self.step = self.saved = state["step"]
        self.prompts_drawn = self.drawn = state["prompts_drawn"]  # by the steps done; by those ahead as well
        self.ahead = None  # the step that is rolled out during the update (--overlap)

    def check_adapters(self, path: Path) -> None:
        """ValueError where the run's checkpoints have other adapters than this configuration."""
        saved = {"r": 0, "lora_alpha": 0}
        if path.is_file():
            saved = json.loads(path.read_text())
        rank = self.config.lora_rank
        alpha = self.config.lora_alpha or 2 * rank
        for field, has, wanted in (
            ("lora_rank", saved["r"], rank),
            ("lora_alpha", saved["lora_alpha"], alpha),
        ):
            if has != wanted:
                raise ValueError(f"{field}: {wanted}, but the run in out_dir has {has}; take that")

    def read_data(self) -> None:
        config = self.config
        train_files = config.train_file
        if isinstance(train_files, str):
            train_files = (train_files,)
        self.train_rows = []
        for file in train_files:
            self.train_rows += load_rows(file, self.tokenizer, config)
        self.val_rows = []  # (row, samples of it)
        for file in config.val_file:
            path, n = re.fullmatch(r"(.*?)(?::([1-9]\d*))?", file).groups()
            for row in load_rows(path, self.tokenizer, config):
                self.val_rows.append((row, int(n or config.val_n)))

    def check_sizes(self) -> int:
        """Tokens of the longest prompt and response. ValueError where model or disk are too small."""
        config = self.config
        rows = self.train_rows + [row for row, _ in self.val_rows]
        longest = max(len(row["prompt_ids"]) for row in rows) + config.max_response_length
        shape = AutoConfig.from_pretrained(self.base, **self.remote).get_text_config()
        limit = config.max_positions or getattr(shape, "max_position_embeddings", None) or math.inf
        # Beyond these lengths such models compute all positions differently: a sample's log-probabilities
        # would depend on the others in its micro-batch.
        rope = getattr(shape, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, rope.get("original_max_position_embeddings") or limit)
        if longest > limit:
            raise ValueError(
                f"max_response_length: {config.max_response_length} and the longest prompt are {longest} "
                f"tokens, the model takes {limit}; lower it, or max_prompt_length"
            )
        weights = count_weights(self.base)
        if self.source != self.base:
            count_weights(self.source)  # adapters: are they whole?
        if config.total_steps:  # an evaluation writes no checkpoint
            # adapters: the merged model at the end
            gb_per_weight = 1.5e-9 if config.lora_rank else 12e-9
            check_room(config, gb_per_weight * weights)
        return longest

    def is_done(self) -> bool:
        """Whether a resumed run has nothing left: no step, no adapters to merge, no evaluation."""
        if self.step < self.config.total_steps:
            return False
        if self.config.lora_rank and self.step and not self.merged.is_file():
            return False
        lines, _ = read_lines(Path(self.config.out_dir, "metrics.jsonl"))
        evaluated = any(line["step"] == self.step and has_evaluation(line) for line in lines)
        return evaluated or not self.val_rows

    # ---- what a run starts

    def start(self, stack: contextlib.ExitStack) -> None:
        """Models, reward workers and servers; `stack` ends them in the opposite order."""
        if reward_loop.connect_ray():
            stack.callback(ray.shutdown)
        self.config = config = self.config.settled(ray.cluster_resources().get("GPU", 0))
        self.places = None  # on CPU all have places of their own
        if config.device == "cuda":
            from cluster import placement

            self.places = placement.Places(placement.parts_of(config))
            stack.callback(self.places.close)
        write_config(config, resumed=self.step > 0)
        self.log = Log(config, self.step)
        stack.callback(self.log.close)
        shares_gpus = config.reward_mode == "colocate" and config.genrm and config.device == "cuda"
        if shares_gpus:  # first the judge, which takes its share of the memory and sleeps
            self.start_rewards(stack, sleep_mode=True)
            self.rewards.reward_models.sleep()
        self.start_policy(stack)
        if not shares_gpus:
            self.start_rewards(stack, sleep_mode=False)
        if config.rollout == "vllm":
            self.start_servers(stack)
        stack.callback(self.leaving.set)
        self.interrupts = Interrupts()  # only now: Ray has put handlers of its own in place
        stack.callback(self.interrupts.restore)

    def start_rewards(self, stack: contextlib.ExitStack, sleep_mode: bool) -> None:
        config = self.config
        penalty = None
        if config.overlong_buffer:
            penalty = functools.partial(
                overlong_penalty,
                max_length=config.max_response_length,
                buffer=config.overlong_buffer,
                factor=config.overlong_factor,
            )
        self.rewards = reward_loop.start_rewards(
            config, stack, self.places, sleep_mode=sleep_mode, overlong=penalty
        )

    def start_policy(self, stack: contextlib.ExitStack) -> None:
        config = self.config
        if config.device == "cpu" and config.policy_ranks == 1:
            self.policy = Policy(config, self.source, torch.device("cpu"))
        else:
            from cluster.policy_group import PolicyGroup

            self.policy = PolicyGroup(config, self.source, self.places)
            stack.callback(self.policy.shutdown)
        if self.step:
            self.load_optimizer()
        about = self.policy.about()
        if about["adapters"]:
            print(about["adapters"], flush=True)
        eos_ids = about["eos_token_id"]
        if not isinstance(eos_ids, list):
            eos_ids = [eos_ids]
        self.eos_ids = {*eos_ids, self.tokenizer.eos_token_id} - {None}
        if not self.eos_ids:
            raise ValueError(f"model: neither {self.base} nor its tokenizer has an end token; add eos_token")
        if config.rollout == "hf":
            check_sampling(self.policy)
            self.policy.samples_itself = True

    def load_optimizer(self) -> None:
        try:
            self.policy.load_optimizer(Path(self.source))
        except RanksLost:
            raise
        except (Exception, CheckpointException) as error:  # a cut file raises many kinds, one no Exception
            why = str(error).strip().splitlines()[-1]
            raise ValueError(
                f"{self.source}/optimizer cannot be read ({why}); delete {self.source} to go on from the "
                "checkpoint before it"
            ) from error

    def start_servers(self, stack: contextlib.ExitStack) -> None:
        from cluster.servers import ClusterServers, PolicyServers

        config = self.config
        servers = genrm_server.Config(
            model="",
            num_servers=config.rollout_servers,
            tensor_parallel_size=config.rollout_tensor_parallel,
            gpu_share=config.rollout_gpu_share,
            cpus=config.rollout_cpus,
            max_model_len=self.longest,
            seed=config.seed % 2**31,
            policy="least_loaded",
            queue_timeout=900,
            log_dir=Path(config.out_dir, "rollout_logs"),
            vllm_args=reward_loop.split_arguments("rollout_vllm_args", config.rollout_vllm_args),
        )
        kind = PolicyServers if isinstance(self.policy, Policy) else ClusterServers
        self.servers = kind(self.policy, self.tokenizer, servers)
        stack.callback(self.servers.shutdown)

    # ---- what a run keeps

    def finished(self, step: int, prompts_drawn: int) -> None:
        """The update of this step has happened."""
        self.step = step
        self.prompts_drawn = prompts_drawn
        self.updates = self.policy.num_updates

    def save(self) -> None:
        state = {"step": self.step, "prompts_drawn": self.prompts_drawn}
        self.merged.unlink(missing_ok=True)  # from here on it is of an earlier checkpoint
        try:
            self.source = str(save_checkpoint(self.policy, self.tokenizer, state, self.config))
        except RuntimeError as error:
            if isinstance(error.__cause__, RanksLost):
                raise error.__cause__
            raise
        self.saved = self.step

    def finish(self) -> None:
        """What is written after the last step: adapters as an ordinary model, and the page."""
        config = self.config
        if config.lora_rank and self.step:
            import lora

            self.merged.unlink(missing_ok=True)
            folder = self.merged.parent
            lora.merge(Path(self.source), folder, config.model, config.max_positions, **self.remote)
            shutil.copy(Path(self.source, self.merged.name), self.merged)
        try:
            from tools.view_run import write_page
        except ImportError as error:
            print(f"page: not written, it needs the folders tools and toy ({error})")
        else:
            print(f"page: {write_page([config.out_dir])}")

    # ---- what may go wrong

    @contextlib.contextmanager
    def saved_on_failure(self):
        """Inside, whatever goes wrong, nothing that was learnt is lost."""
        try:
            yield
        except BaseException:
            # In the middle of an update the weights are no step's.
            if self.step > self.saved and self.policy.num_updates == self.updates:
                with contextlib.suppress(RanksLost):  # the error on its way says more
                    self.save()
            print(f"stopped; --resume auto goes on after step {self.saved}", flush=True)
            raise

    @contextlib.contextmanager
    def restarting_ranks(self):
        """Inside, a rank that dies costs the steps since the newest checkpoint, and nothing else."""
        try:
            yield
        except RanksLost as error:
            self.recover(error)

    def recover(self, error: RanksLost) -> None:
        """New ranks from the newest checkpoint. Judges, workers and the policy's servers stay."""
        self.leaving.set()  # what is ahead is drawn again
        if self.ahead:
            wait([self.ahead.rolled_out, self.ahead.batch])
        self.leaving.clear()
        self.num_restarts += 1
        if self.num_restarts > self.config.max_restarts:
            raise error
        self.find_checkpoint()
        count = f"{self.num_restarts} of max_restarts {self.config.max_restarts}"
        print(f"{error}; the ranks are started anew after step {self.saved} ({count})", flush=True)
        try:
            self.policy.restart(self.source)
            if self.saved:
                self.load_optimizer()
            if self.servers:
                self.servers.sync()
        except RanksLost as again:
            self.recover(again)
            return
        self.updates = self.policy.num_updates
        self.log.rewind(self.saved)


def count_weights(folder: str) -> int:
    """The numbers in a folder's safetensors files; 0 for a hub name. ValueError where a file is cut."""
    total = 0
    for path in Path(folder).glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    total += math.prod(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(
                f"model: {path} cannot be read ({error}); copy it anew, or delete its folder if it is a "
                "checkpoint, to go on from the one before"
            ) from error
    return total


def load_rows(path: str, tokenizer, config) -> list[dict]:
    """The rows of a file, each with `prompt_ids`. ValueError naming the file, the row and what is wrong."""
    try:
        options = dict(json.loads(config.chat_template_kwargs).items())
    except (ValueError, AttributeError):
        what = f"chat_template_kwargs: {config.chat_template_kwargs!r}"
        raise ValueError(f"{what} is not JSON, or no JSON object") from None
    options |= dict(add_generation_prompt=True, tokenize=True, return_dict=False)
    rows = read_rows(Path(path), ["data_source", "prompt", "reward_model", "extra_info"])
    kept = []
    for number, row in enumerate(rows):
        try:
            ids = tokenizer.apply_chat_template(row["prompt"], **options)
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            why = f"the chat template refuses prompt {str(row['prompt'])[:200]} ({error})"
            raise ValueError(f"{path} row {number}: {why}; it must be a list of {{role, content}}") from error
        if len(ids) <= config.max_prompt_length:
            kept.append(row | {"prompt_ids": ids})
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} rows"
        print(f"{path}: dropped {dropped} with prompts over {config.max_prompt_length} tokens")
    if not kept:
        raise ValueError(f"{path}: no row is left; raise --max-prompt-length or look at the file")
    return kept
