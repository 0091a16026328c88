"""One run of the trainer: its input, its processes, its checkpoints, and how it stops and resumes.

The function `train` in grpo_trainer.py uses this file, and shows the order of events in a run.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import ray
import torch
from torch.distributed.checkpoint import CheckpointException
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

import reward_loop
import reward_worker
from algorithm import CLIP_SETTINGS
from command_line import json_object, named
from causal_lm import (
    add_adapters,
    check_reading,
    load_tokenizer,
    prompt_ids_of,
    read_config,
    rotary_embeddings,
)
from genrm_server import count_gpus
from policy import Policy, RanksLost
from prepare_data import checked_row, errors_at, read_rows
from rollout import PolicyServers, check_sampling
from run_folder import (
    Log,
    HAS_SAVED,
    check_room,
    checkpoints_in,
    end_tokens,
    has_evaluation,
    lock_folder,
    note_start,
    read_lines,
    save_checkpoint,
    without_secrets,
)
from trajectory import Rollouts


class Run:
    """One run of the trainer, from its input to its checkpoints.

        with Run(config) as run:            # starts models and servers; saves the policy after a failure
            for step in run.remaining_steps():
                if run.evaluation_is_due():
                    ...                     # must log the evaluation's metrics
                    continue
                with run.protected_step():  # if a rank dies, the run continues from the newest checkpoint
                    ...
        run.result                          # the folder of the last checkpoint

    The constructor reads the input and raises ValueError if it is invalid.
    """

    def __init__(self, config):
        config.check()
        self.config = config
        transformers_logging.disable_progress_bar()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.result = None
        self.servers = None
        self.merged_dir = Path(config.out_dir, "merged")  # with LoRA: the final merged model
        self.cancelled = threading.Event()  # Setting this ends rollouts and any wait for rewards.
        self.num_restarts = 0
        self.num_updates = 0  # optimizer steps taken by the end of the latest step
        self.num_evaluations = 0  # since this process started
        self.started = datetime.now()  # when the run first started; a resumed run keeps this time
        self.lock = lock_folder(config, config.dry_run)  # No other run may use the directory now.
        try:
            state = self.find_checkpoint()
            self.first_step = self.step + 1  # of this process
            self.scored_by = state.get("scored_by")
            self.functions = state.get("functions")
            self.check_earlier_results()
            self.read_model()
            self.read_data()
            self.compare_prompts(state)
            self.read_rollout_function()
        except BaseException:
            self.lock.close()
            raise

    def find_checkpoint(self) -> dict:
        """Resume from the newest checkpoint if there is one, and start from the model otherwise.

        Returns the trainer's state.
        """
        self.resume_from = self.first_model = self.config.model
        state = {"step": 0, "prompts_drawn": 0}
        checkpoints = checkpoints_in(Path(self.config.out_dir, "checkpoints"))
        if checkpoints:
            newest = checkpoints[-1]
            self.resume_from = str(newest)
            rank = self.config.lora_rank
            if (newest / "adapter_config.json").exists() != bool(rank):
                raise ValueError(
                    f"--lora-rank {rank}: does not match the checkpoint {self.resume_from}; "
                    "pass the rank that the run started with"
                )
            try:
                state = json.loads((newest / "trainer_state.json").read_text())
            except ValueError as error:
                raise ValueError(
                    f"cannot load {self.resume_from} (trainer_state.json: {error}); delete the "
                    "checkpoint to resume from the previous one"
                ) from error
            self.compare_model(state)
            self.started = datetime.fromisoformat(state.get("started", self.started.isoformat()))
            print(f"resuming from {self.resume_from}")
        self.step = self.saved_step = state["step"]
        self.num_prompts_trained = state["prompts_drawn"]  # drawn by completed steps
        self.num_prompts_drawn = state["prompts_drawn"]  # drawn by completed and current steps
        self.prefetched = None  # The batch that is sampled during the update (--overlap).
        # For each split, the counts of run_folder.verdict_counts in the latest steps.
        self.recent_verdicts = defaultdict(list)
        for split, recent in state.get("verdicts", {}).items():
            # With --overlap, verdicts of the next step may have been counted before the checkpoint was saved.
            self.recent_verdicts[split] = [Counter(one) for one in recent if one["step"] <= self.step]
        return state

    def settings_before(self) -> dict:
        """Return the settings of the previous start, or an empty dict if config.json is missing."""
        file = Path(self.config.out_dir, "config.json")
        if not file.is_file():
            return {}
        try:
            return json.loads(file.read_bytes())
        except ValueError as error:
            raise ValueError(
                f"--out-dir {file.parent}: {file} is truncated ({error}); delete this file, and "
                "the run writes it again"
            ) from error

    def check_earlier_results(self):
        """Raise ValueError if a run without a checkpoint would delete the results of an earlier run."""
        config = self.config
        folder = Path(config.out_dir)
        lines, _ = read_lines(folder / "metrics.jsonl")
        if self.step or not lines:
            return
        if (folder / HAS_SAVED).exists():
            if config.resume == "never" or not config.total_steps:
                raise ValueError(
                    f"--out-dir {folder}: already contains a run, whose checkpoints are gone; pass another "
                    "directory, or train with --resume auto to replace its metrics and samples"
                )
        elif any(map(has_evaluation, lines)) and self.settings_before().get("total_steps") == 0:
            raise ValueError(f"--out-dir {folder}: already contains an evaluation; pass another directory")

    def compare_model(self, state: dict):
        """Print a warning if the run is resumed with another --model than the one it started with."""
        config = self.config
        # An older checkpoint does not name the model, but the previous start does.
        before = self.first_model = state.get("model") or self.settings_before().get("model", config.model)
        if not (config.kl_coef or config.lora_rank):
            return  # A checkpoint of full weights does not need --model.
        if before != config.model:
            use = "--kl-coef now compares with"
            if config.lora_rank:
                use = "the adapters are now added to"
            print(
                f"--model {config.model}: the run started with {before}, but {use} this model; pass "
                f"--model {before}, unless both models are the same"
            )

    def compare_scoring(self, now: dict):
        """Print a warning if another reward function or other reward models scored the steps so far."""
        before = self.scored_by
        self.scored_by = now
        if not self.step or not before:  # Older checkpoints do not say what scored their samples.
            return
        changed = reward_loop.changes_between(before, now)
        if changed:
            print(
                f"resuming with a different judge or reward function (not the same: {', '.join(changed)}); "
                f"rewards before and after step {self.step} cannot be compared"
            )
        for name in now["models"]:  # A server that does not respond now may have its earlier model.
            now["models"][name] = now["models"][name] or before["models"].get(name)

    def compare_functions(self):
        """Print a warning if another advantage, loss or rollout function trained the steps so far."""
        before, self.functions = self.functions, {}
        for field in ("advantage", "loss", "rollout_fn"):
            name = getattr(self.config, field) or ""
            files = []
            if ":" in name:
                path, name = reward_worker.file_and_name(field, name)
                found = reward_worker.fingerprints(str(path))
                files = sorted(found.values())  # Their folder may have been moved.
            self.functions[field] = [name, *files]
            kwargs = field.removesuffix("_fn") + "_kwargs"
            text = json.dumps(json_object(kwargs, getattr(self.config, kwargs)), sort_keys=True)
            # Arguments may contain keys, so files get only their digest.
            self.functions[kwargs] = reward_worker.sha256(text.encode())
        for name in CLIP_SETTINGS:
            self.functions[name] = getattr(self.config, name)
        changed = [name for name, now in self.functions.items() if before and before.get(name) != now]
        if self.step and changed:
            print(
                "resuming with a different advantage, loss or rollout function (not the same: "
                f"{', '.join(changed)}); the steps up to step {self.step} were trained without this change"
            )

    def compare_prompts(self, before: dict):
        """Print a warning if the run is resumed with other prompts, or in another order, than `before`."""
        config = self.config
        drawn = [config.seed, [row["prompt_ids"] for row in self.train_rows]]
        self.prompts_hash = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()
        if "prompts" in before:
            is_same = before["prompts"] == self.prompts_hash
        else:  # an older checkpoint
            files = self.settings_before().get("train_file", config.train_file)
            is_same = files == json.loads(json.dumps(config.train_file))
        if self.step and self.step < config.total_steps and not is_same:
            print(
                f"--train-file {' '.join(self.train_files)}: the prompts or their order (--seed) are not "
                f"those of the checkpoint; the run skips the first {self.num_prompts_drawn} of them. To "
                "train on all of them, pass the checkpoint as --model and another --out-dir"
            )

    def read_model(self):
        """Read the model's config.json and tokenizer. Raises ValueError if the run cannot use the model."""
        config = self.config
        self.base_model = self.resume_from
        if config.lora_rank:  # An adapter checkpoint does not contain the base model.
            self.base_model = config.model
        if Path(self.base_model, "adapter_config.json").is_file():
            raise ValueError(
                f"--model {self.base_model}: the folder contains LoRA adapters; merge them with python -m "
                f"tools.merge_lora {self.base_model} OUT, and pass --model OUT"
            )
        replace(config.policy_server_config(), model=self.base_model).check()
        trust = config.trust_remote_code
        self.model_config = read_config(self.base_model, trust, config.max_positions)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self.model_config), None)
        has_encoder = self.model_config.get_text_config() is not self.model_config
        # For some of these models, transformers loads only the language model, which has a config of its own.
        if config.rollout != "hf" and has_encoder and kind and kind.config_class is type(self.model_config):
            raise ValueError(
                f"--model {self.base_model}: vLLM cannot serve {kind.__name__} without an image processor, "
                "which the run does not copy; pass a text-only model, or --rollout hf on a CPU"
            )
        self.tokenizer = load_tokenizer(self.base_model, trust)
        self.decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"--model {self.base_model}: the tokenizer has no chat template; pass an "
                "instruct model, or add a chat template to the tokenizer"
            )

    def read_data(self):
        config = self.config
        self.train_files = config.train_file
        if isinstance(config.train_file, str):
            self.train_files = (config.train_file,)
        self.train_rows = []
        for file in self.train_files:
            self.train_rows += load_rows(file, self.tokenizer, config, self.started)
        if config.total_steps and config.lr_warmup_steps > config.total_steps:
            print(
                f"--lr-warmup-steps {config.lr_warmup_steps}: exceeds --total-steps {config.total_steps}, so "
                f"the learning rate never reaches --lr {config.lr:g}; lower --lr-warmup-steps"
            )
        if len(self.train_rows) < config.train_batch_size:
            print(
                f"--train-batch-size {config.train_batch_size}: exceeds the {len(self.train_rows)} rows of "
                "--train-file, so prompts repeat within a step; lower --train-batch-size"
            )
        self.val_rows = []  # (row, number of samples)
        for file in config.val_file:
            path, n = re.fullmatch(r"(.*?)(?::(-?\d+))?", file).groups()
            n = int(n or config.val_n)
            if not path or n < 1:
                raise ValueError(f"--val-file {file}: must be FILE or FILE:N, with N of at least 1")
            rows = load_rows(path, self.tokenizer, config, self.started)
            self.val_rows += [(row, n) for row in rows]
            prompts = {str(row["prompt"]) for row in rows}
            if n > 1 and len(rows) >= 2 * len(prompts):
                print(
                    f"--val-file {path}: prompts repeat ({len(rows)} rows, {len(prompts)} prompts), and "
                    f"each row gets {n} samples; pass {path}:1 to take one sample per row"
                )
        rows = self.train_rows + [row for row, _ in self.val_rows]
        self.max_sequence_length = max(len(row["prompt_ids"]) for row in rows) + config.max_response_length
        shape = self.model_config.get_text_config()
        self.num_embeddings = getattr(shape, "vocab_size", None) or math.inf
        highest = max(max(row["prompt_ids"]) for row in rows)
        if highest >= self.num_embeddings:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise ValueError(
                f"--model {self.base_model}: a prompt contains token {highest} ({token!r}), but the "
                f"embedding has only {self.num_embeddings} rows; resize the embedding, or use the "
                "model's own tokenizer"
            )
        limit = config.max_positions or getattr(shape, "max_position_embeddings", None) or math.inf
        # If a sequence exceeds the original length, models with these rope types encode all its positions
        # differently. Log-probabilities would then depend on the longest sample of the micro-batch.
        for rope in rotary_embeddings(shape):
            if rope["rope_type"] in ("dynamic", "longrope"):
                limit = min(limit, rope.get("original_max_position_embeddings") or limit)
        if self.max_sequence_length > limit:
            raise ValueError(
                f"--max-response-length {config.max_response_length}: with the longest prompt, a sequence "
                f"can have {self.max_sequence_length} tokens, but the model supports only {limit}; lower "
                "--max-response-length or --max-prompt-length"
            )

    def read_rollout_function(self):
        """Load the rollout function once for the whole run. Raises ValueError if that fails."""
        config = self.config
        self.rollout_runner = None
        if not config.rollout_fn:
            return
        function = reward_worker.load_in_this_process("rollout_fn", config.rollout_fn)
        settings = json_object("rollout_kwargs", config.rollout_kwargs)
        options = template_options(config, self.tokenizer, self.started)
        models = named("router_address", config.router_address)
        if not models and config.reward_mode == "standalone":  # Colocated judges may be asleep.
            # The addresses are not known before start_rewards, which calls offer_models.
            models = dict.fromkeys(named("genrm", config.genrm), "")
        try:
            self.rollout_runner = Rollouts(
                function,
                self.tokenizer,
                settings=settings,
                timeout=config.rollout_timeout,
                template_options=options,
                addresses=models,
                num_embeddings=self.num_embeddings,
            )
        except ValueError as error:
            page = "docs/rollouts.md"
            if "argument: 'reward_router_address" in str(error):
                page += (
                    ". Pass --router-address or --genrm. With --reward-mode colocate, the judges of --genrm "
                    "may sleep during rollouts, so the function gets no address"
                )
            raise ValueError(f"--rollout-fn {config.rollout_fn}: {error}; see {page}") from error
        self.check_added_texts(options)

    def check_added_texts(self, options: dict):
        """Raise ValueError if the tokenizer would lose text that observe() and reply() add."""
        prompt = self.train_rows[0]["prompt"]
        content = prompt[-1]["content"]
        texts = [content]
        for role in ("tool", "user"):
            added = [{"role": "assistant", "content": content}, {"role": role, "content": content}]
            with contextlib.suppress(Exception):  # If the template rejects the role, reply() will say so.
                texts.append(self.tokenizer.apply_chat_template(prompt + added, tokenize=False, **options))
        for text in texts:
            check_reading(self.tokenizer, text, self.rollout_runner.encode_after("\n", text))

    def check_weights(self):
        """Raise ValueError if the model's folder has no weights.

        The constructor does not call this, because tools/plan_run.py does not need weights.
        """
        folder = Path(self.base_model)
        if folder.is_dir() and not (any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))):
            raise ValueError(f"--model {folder}: the folder contains no weights; download the model again")

    def check_adapters(self):
        """Raise ValueError if the adapters do not fit the model that config.json describes."""
        if not self.config.lora_rank:
            return
        trust = self.config.trust_remote_code
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self.model_config, trust_remote_code=trust)
        except Exception:  # Code of a model may need the weights. The policy's start then checks this.
            return
        add_adapters(model, self.config, "")

    def check_rows(self):
        """Raise ValueError if the reward function cannot score a row.

        The constructor does not call this, because tools/plan_run.py scores nothing.
        """
        check_row = reward_loop.row_checker(self.config.make_job())
        for row in self.train_rows + [row for row, _ in self.val_rows]:
            with errors_at(row["where"]):
                check_row(row)

    # ---- from start to end

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.lock)
            self.check_weights()
            self.check_adapters()
            self.check_rows()
            if self.config.dry_run:
                print(json.dumps(without_secrets(asdict(self.config)), indent=2))
            else:
                self.start(stack)
            self.resources = stack.pop_all()  # These resources stay open until the run ends.
        return self

    def __exit__(self, kind, error, traceback):
        with self.resources:
            if error is not None:
                self.save_after_failure()
            elif not self.config.dry_run:
                self.finish()
                self.result = Path(self.resume_from)
        if isinstance(error, Exception):  # After Ctrl-C, the run ends at once.
            # The error that stopped the run says more than an error of the page.
            with contextlib.suppress(Exception, KeyboardInterrupt):
                self.write_page()

    def remaining_steps(self):
        """Yield the number of the next step, until the last step has been trained and evaluated.

        The number stays the same after an evaluation. If ranks die, all steps after the newest checkpoint are
        yielded again.
        """
        while not self.config.dry_run:
            if not self.log.history or self.log.history[-1]["step"] != self.step:
                self.log.metrics({"step": self.step})  # Step 0 has no line yet. A power cut may lose a line.
            if self.step >= self.config.total_steps and not self.evaluation_is_due():
                return
            yield self.step + 1

    def evaluation_is_due(self) -> bool:
        config, step = self.config, self.step
        is_done = has_evaluation(self.log.history[-1])
        if not config.total_steps:  # --total-steps 0 always evaluates, even a step evaluated before.
            is_done = self.num_evaluations > 0
        if is_done or not self.val_rows:
            return False
        if step >= config.total_steps:
            return True
        if step == 0:
            return config.val_before_train
        return config.val_every > 0 and step % config.val_every == 0

    @contextlib.contextmanager
    def protected_step(self):
        """Restart ranks that die during this step. When the step ends, print new findings."""
        self.step_started = time.perf_counter()
        with self.restarting_ranks():
            yield
            if self.step % 10 == 0:
                self.log.plot()
            check_progress(self.log)

    def count_step(self, step: int, num_prompts_drawn: int, metrics: dict):
        """Record that the policy has been trained on a step."""
        self.step = step
        self.unlogged_metrics = metrics
        self.num_prompts_trained = num_prompts_drawn
        self.num_updates = self.policy.num_updates

    def sync_weights(self) -> dict:
        """Wait until nothing is being generated, and send the new weights to the servers. Returns metrics."""
        if not self.servers:
            return {}
        started = time.perf_counter()
        while self.prefetched and not self.prefetched.rolled_out.wait(0.2):
            if self.interrupts.asked:  # The run is about to end and needs no sync.
                return {}
        ended = time.perf_counter()
        self.servers.sync()
        times = {"time/sync": time.perf_counter() - ended}
        if self.config.overlap:
            times["time/rollout_wait"] = ended - started
        return times

    def log_step(self, metrics: dict):
        seconds = time.perf_counter() - self.step_started
        metrics |= {"time/step": seconds, "perf/tokens_per_s": metrics["perf/tokens"] / seconds}
        self.log.metrics(metrics | {"actor/restarts": self.num_restarts})
        self.unlogged_metrics = None

    # ---- what a run starts

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start models, reward workers and servers; `stack` stops them in reverse order."""
        if reward_loop.connect_ray():
            stack.callback(ray.shutdown)
        self.interrupts = Interrupts()  # After Ray's start, because Ray also sets signal handlers.
        if ray.cluster_resources().get("GPU") and not count_gpus():
            print("no GPU of the Ray cluster is used, because this PyTorch is a build for CPUs")
        self.config = config = self.config.resolved(count_gpus())
        if config.rollout == "vllm":
            replace(config.policy_server_config(), model=self.base_model, device=config.device).check()
        self.reservation = None  # On a CPU, each process reserves its own resources.
        if config.device == "cuda":
            from cluster import placement

            self.reservation = placement.Reservation(placement.process_specs(config))
            stack.callback(self.reservation.close)
        job = config.make_job()
        self.scoring_files = job.files
        scored_by = config.scored_by(job)
        note_start(config, self.step, scored_by)
        self.compare_scoring(scored_by)
        self.compare_functions()
        self.log = Log(config, self.step)
        if import_tools():
            folder = shlex.quote(str(config.out_dir))
            print(f"to watch this run in a browser: python -m tools.view_run {folder} --serve")
        stack.callback(self.log.close)
        shares_gpus = bool(config.genrm) and config.reward_mode == "colocate" and config.device == "cuda"
        # A judge on the policy's GPUs starts first: it allocates its memory and then sleeps. Without --genrm,
        # errors of the reward function and of --router-address are found before the policy loads.
        rewards_first = shares_gpus or not config.genrm
        if rewards_first:
            self.start_rewards(stack, sleep_mode=shares_gpus)
        if shares_gpus:
            self.rewards.reward_models.sleep()
        self.start_policy(stack)
        if not rewards_first:
            self.start_rewards(stack, sleep_mode=False)
        if config.rollout == "vllm":
            self.start_servers(stack)
        stack.callback(self.cancelled.set)

    def start_rewards(self, stack, sleep_mode):
        self.rewards = reward_loop.start_rewards(self.config, stack, self.reservation, sleep_mode=sleep_mode)
        reward_worker.check_files(self.scoring_files)  # starts.jsonl describes these versions.
        if self.rollout_runner:
            if self.config.genrm:
                self.rollout_runner.offer_models(self.rewards.reward_models.router_addresses)
            self.rollout_runner.start()
            stack.callback(self.rollout_runner.close)

    @contextlib.contextmanager
    def loading(self):
        """Raise an error with a remedy if this context cannot load the policy or its optimizer."""
        try:
            yield
        except (ValueError, RanksLost):
            raise
        except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException.
            lines = reward_worker.error_line(first_cause(error))  # It writes each line break as \n.
            why = lines.rpartition(r"\n")[2]
            if (
                re.search("(?i)out of memory|can('t|not) allocate memory", why)
                or "CUDA error: out of" in lines
            ):
                raise RuntimeError(
                    f"not enough memory for the policy ({why}); stop other programs that use the memory, or "
                    "estimate what the run needs with python -m tools.plan_run"
                ) from error
            if re.search("(CUDA|NCCL)( driver| unknown)? error|NVIDIA driver|CUDA GPUs|cudaGet", lines):
                raise RuntimeError(
                    f"the GPU, its driver or NCCL failed ({lines}); run make check-gpu, and with several "
                    "ranks set NCCL_DEBUG=INFO to see NCCL's messages"
                ) from error
            if re.search("lacks resources|network interface", why):
                raise
            remedy = "check that its weights are not truncated, and fit config.json and --max-positions"
            if self.step:
                remedy = "if the run started with other settings of the model or LoRA, pass them; if one of "
                remedy += "its files is truncated, delete the checkpoint to resume from the previous one"
            raise ValueError(f"cannot load {self.resume_from} ({why}); {remedy}") from error

    def start_policy(self, stack):
        config = self.config
        with self.loading():
            if config.device == "cpu" and config.policy_ranks == 1:
                self.policy = Policy(config, self.resume_from, torch.device("cpu"))
            else:
                from cluster.policy_group import PolicyGroup

                self.policy = PolicyGroup(config, self.resume_from, self.reservation)
                stack.callback(self.policy.shutdown)
            if self.step:
                self.policy.load_optimizer(Path(self.resume_from))
        info = self.policy.model_info()
        whole = self.model_config.model_type
        trained = info["config"].model_type
        if trained != whole:
            print(
                f"--model {self.base_model}: only the language model ({trained}) of {whole} is trained; "
                "checkpoints omit other parts, such as a vision encoder"
            )
        if info["adapters"]:
            print(info["adapters"])
        elif config.total_steps:  # An evaluation writes no checkpoints.
            check_room(config, self.step, 12e-9 * info["parameters"])  # Adapters are too small to check.
        self.eos_ids = end_tokens(info["eos_token_id"], self.tokenizer)
        if not self.eos_ids:
            raise ValueError(
                f"--model {self.base_model}: neither the model nor its tokenizer defines an "
                "end token; add eos_token to the tokenizer"
            )
        if config.rollout == "hf":
            check_sampling(self.policy)
            self.policy.samples_itself = True

    def start_servers(self, stack):
        config = self.config.policy_server_config()
        # A run that resumes from a later step must not repeat the random numbers of the steps before.
        seed = random.Random(f"{self.config.seed}/{self.step}").getrandbits(31)
        config = replace(config, seed=seed, max_model_len=self.max_sequence_length)
        if isinstance(self.policy, Policy):
            self.servers = PolicyServers(self.policy, self.tokenizer, config)
        else:
            from cluster.servers import ClusterServers

            self.servers = ClusterServers(self.policy, self.tokenizer, config)
        stack.callback(self.servers.shutdown)

    # ---- what a run keeps

    def save_if_due(self):
        config = self.config
        if self.step == config.total_steps or config.save_every and self.step % config.save_every == 0:
            self.save()

    def save(self):
        state = {
            "step": self.step,
            "prompts_drawn": self.num_prompts_trained,
            "started": self.started.isoformat(),
            "prompts": self.prompts_hash,
            "model": self.first_model,
            "scored_by": self.scored_by,
            "functions": self.functions,
            "verdicts": self.recent_verdicts,
        }
        try:
            self.resume_from = str(save_checkpoint(self.policy, self.tokenizer, state, self.config))
        except RanksLost:
            raise
        except (Exception, CheckpointException) as error:  # A full disk raises various exceptions.
            raise RuntimeError(
                f"the checkpoint of step {self.step} could not be written ({first_cause(error)}); "
                f"--resume auto resumes after step {self.saved_step}"
            ) from error
        self.saved_step = self.step
        shutil.rmtree(self.merged_dir, ignore_errors=True)  # This model is from an older checkpoint.

    def write_page(self, lack: str = ""):
        """Write report.html. Returns the package tools as import_tools(lack) does."""
        tools = import_tools(lack)
        if tools:
            print(f"page: {tools.view_run.write_page([self.config.out_dir])}")
        return tools

    def finish(self):
        """Write report.html, and with LoRA the merged model, after the last step."""
        config = self.config
        tools = self.write_page(
            "report.html and the merged model were not written, because they need the folders tools/ and toy/"
        )
        if tools and config.lora_rank and self.step:
            tools.merge_lora.merge(
                Path(self.resume_from),
                self.merged_dir,
                config.model,
                config.max_positions,
                config.trust_remote_code,
            )

    # ---- what may go wrong

    def save_after_failure(self):
        """Save a checkpoint if the newest one is older, so that nothing learned is lost."""
        # In the middle of an update, the weights belong to no step and must not be saved.
        if self.step > self.saved_step and self.policy.num_updates == self.num_updates:
            # The error that stopped the run says more than the loss of a rank.
            with contextlib.suppress(RanksLost, KeyboardInterrupt), self.interrupts.held("saving"):
                self.interrupts.say(f"saving step {self.step}")
                self.save()
                if self.unlogged_metrics:  # The weight sync or the log failed.
                    with contextlib.suppress(OSError):
                        self.log.keep(self.unlogged_metrics)
        self.interrupts.say(f"the run stopped; --resume auto resumes after step {self.saved_step}")

    @contextlib.contextmanager
    def restarting_ranks(self):
        """Restart ranks that die inside this context, from the newest checkpoint."""
        try:
            yield
        except RanksLost as error:
            self.recover(error)

    def recover(self, error: RanksLost):
        """Start new ranks from the newest checkpoint. Judges, workers and servers keep running."""
        if self.interrupts.asked:  # The run is about to end.
            raise KeyboardInterrupt from error
        self.cancelled.set()  # The prefetched step will be drawn again.
        if self.prefetched:
            self.prefetched.collected.exception()  # This waits until the thread has ended.
        self.cancelled.clear()
        self.num_restarts += 1
        if self.num_restarts > self.config.max_restarts:
            raise RanksLost(
                f"{error}; --max-restarts {self.config.max_restarts} allows no further restart; see the "
                "worker logs in the folder of Ray's session"
            ) from error
        self.find_checkpoint()
        print(
            f"{error}; restarting the ranks after step {self.saved_step} (attempt {self.num_restarts} of "
            f"--max-restarts {self.config.max_restarts})"
        )
        try:
            with self.loading():
                self.policy.restart(self.resume_from)
                if self.step:
                    self.policy.load_optimizer(Path(self.resume_from))
            if self.servers:
                self.servers.sync()
        except RanksLost as again:
            self.recover(again)
            return
        self.num_updates = self.policy.num_updates
        self.log.rewind(self.saved_step)


def first_cause(error: BaseException) -> BaseException:
    """Return `error`, or the first error of a CheckpointException, whose text begins with a traceback.

    Raises KeyboardInterrupt if this is the first error.
    """
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    if isinstance(error, KeyboardInterrupt):  # torch catches it as well.
        raise error
    return error


def template_options(config, tokenizer, now: datetime | None) -> dict:
    """Return the arguments of the chat template. A template that shows the date or the time shows `now`.

    Raises ValueError for arguments that the trainer sets.
    """
    options = json_object("chat_template_kwargs", config.chat_template_kwargs)
    names = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    for name in options.keys() & (names - {"tools", "documents"}):  # Templates read these two.
        raise ValueError(
            f"--chat-template-kwargs: {name!r} is an argument of apply_chat_template, which the trainer "
            "sets; pass only variables of the chat template"
        )
    if now and "strftime_now" in str(tokenizer.chat_template):
        options = {"strftime_now": now.strftime} | options
    return options


def load_rows(path: str, tokenizer, config, now: datetime | None = None) -> list[dict]:
    """Read the rows of a file and add `prompt_ids` and `where`. A ValueError names the file and the row."""
    options = template_options(config, tokenizer, now)
    rows = read_rows(Path(path), ["data_source", "prompt", "reward_model"])
    kept = []
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        with errors_at(where):
            row = checked_row({"extra_info": {}} | row, is_table=Path(path).suffix.lower() == ".parquet")
            ids = prompt_ids_of(row, tokenizer, options)
        if len(ids) <= config.max_prompt_length:
            kept.append(row | {"prompt_ids": ids, "where": where})
    if len(kept) < len(rows):
        print(
            f"{path}: dropped {len(rows) - len(kept)} of {len(rows)} rows because their prompts exceed "
            f"--max-prompt-length {config.max_prompt_length}"
        )
    if not kept:
        raise ValueError(f"{path}: no rows are left; raise --max-prompt-length")
    for row in kept:
        if row.get("tools"):
            if row["prompt_ids"] == prompt_ids_of(row | {"tools": None}, tokenizer, options):
                print(f"{path}: the chat template ignores the column tools, so the policy does not see them")
            break
    for row in kept:
        roles = [message["role"] for message in row["prompt"]]
        if len(roles) > 1 and roles[-1] == "assistant" != roles[-2]:
            with contextlib.suppress(ValueError):  # Without this message, the prompt may be invalid.
                check_continued(row, tokenizer, options)
            break
    return kept


def check_continued(row: dict, tokenizer, options: dict) -> None:
    """Print a line if the chat template changes the assistant's message that the policy continues."""
    *before, last = row["prompt"]
    opened = tokenizer.decode(prompt_ids_of(row | {"prompt": before}, tokenizer, options))
    expected = opened + last["content"]
    prompt = tokenizer.decode(row["prompt_ids"])
    if prompt not in (expected, f"{opened} {last['content']}"):
        print(
            f"{row['where']}: the chat template changes the text that the policy continues: the prompt ends "
            f"with {prompt[-60:]!r}, not {expected[-60:]!r}"
        )


def import_tools(lack: str = ""):
    """Return the package tools with the modules that a run uses, or None if they cannot be imported.

    In that case, `lack` is printed with the reason. It says what the run does without them.
    """
    try:
        import tools.diagnose
        import tools.merge_lora
        import tools.view_run
    except (ImportError, FileNotFoundError) as error:  # tools/findings.toml may be missing.
        if lack:
            print(f"{lack} ({error})")
        return None
    return tools


def check_progress(log: Log) -> None:
    """Print the findings that first appear at the newest step.

    Raises RuntimeError if no group had a learning signal in the last --max-idle-steps steps.
    """
    step = log.history[-1]["step"]
    tools = import_tools()
    if tools:
        for finding in tools.diagnose.diagnose(log.history, log.recent, last=2):
            if finding.steps[-1] == step and step - 1 not in finding.steps:
                print(finding)
    limit = log.config.max_idle_steps
    last = log.history[-limit:]
    has_signal = any(line.get("reward/groups_with_spread", 1) for line in last)  # Step 0 lacks the metric.
    if limit and len(last) == limit and not has_signal:
        raise RuntimeError(
            f"no group had a learning signal in {limit} consecutive steps "
            "(--max-idle-steps); check the rewards in samples.jsonl"
        )


class Interrupts:
    """Handles Ctrl-C, SIGTERM and a closed terminal: immediately, or at the end of a `held` block."""

    def __init__(self):
        self.hold = ""  # what a held block does
        self.asked = False
        self.was_dropped = False
        sys.unraisablehook = self.raise_again
        signal.signal(signal.SIGINT, self.handle)
        signal.signal(signal.SIGTERM, self.handle)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP.
            signal.signal(signal.SIGHUP, self.handle)
        os.register_at_fork(after_in_child=self.restore_defaults)

    def restore_defaults(self):
        """Give a process that a tool forks Python's own handlers, so that the tool can end it."""
        handlers = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGHUP: signal.SIG_DFL,
        }
        for number, handler in handlers.items():
            if signal.getsignal(number) == self.handle:
                signal.signal(number, handler)

    def handle(self, number, _):
        if number == signal.SIGHUP:  # The terminal is gone, and writing to it would fail.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # The shell and the system may both send the signal.
            self.drop_output()
        if self.asked or not self.hold:
            self.was_dropped = False
            raise KeyboardInterrupt
        self.asked = True
        self.say(f"{self.hold}; press Ctrl-C again to quit immediately")

    def say(self, text: str):
        """Print a line, or write it to stderr if nobody reads stdout any more."""
        line = f"{text}\n".encode()
        try:
            os.write(1, line)
        except OSError:  # Ctrl-C has also ended the program that reads the output, such as `tee`.
            try:
                os.write(2, line)
                os.dup2(2, 1)
            except OSError:
                self.drop_output()

    def drop_output(self):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)

    def raise_again(self, unraisable):
        """Interrupt again soon after Python has dropped a KeyboardInterrupt, as it does in a __del__."""
        if unraisable.exc_type is KeyboardInterrupt:
            self.was_dropped = True
            threading.Timer(0.1, self.interrupt_if_dropped).start()
        else:
            sys.__unraisablehook__(unraisable)

    def interrupt_if_dropped(self):
        if self.was_dropped:
            os.kill(os.getpid(), signal.SIGINT)

    @contextlib.contextmanager
    def held(self, what: str = "finishing this step, then saving"):
        """Delay the first Ctrl-C until the end of the block."""
        self.asked = False
        self.hold = what
        try:
            yield
        finally:
            self.hold = ""
        if self.asked or self.was_dropped:
            self.was_dropped = False
            raise KeyboardInterrupt
