"""The guarantees of docs/guarantees.md and the tests that keep them.

A guarantee and its tests go together: a test that is named here may only be deleted together with the
sentence in docs/guarantees.md, and a new sentence there needs a test here. A guard against mixed-up rewards
was once deleted with its test, and nobody noticed that the sentence had become untrue.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

KEPT_BY = {
    "No sample ever gets another sample's reward, even if a reward function forks, hangs, dies or writes to "
    "every open file.": (
        "test_score_file.test_every_row_of_a_file_gets_its_own_score",
        "test_reward_loop.test_forks_and_noise_of_the_function_give_no_other_sample_a_score",
        "test_reward_loop.test_an_async_function_that_forks_gives_no_other_sample_a_score",
        "test_reward_loop.test_sys_exit_in_a_task_costs_its_own_sample",
        "test_reward_loop.test_outcomes_become_statuses_in_order",
        "test_reward_loop.test_workers_and_grading_processes_are_killed_mid_batch",
    ),
    "A failure is a status, never a reward: a sample without a verdict has no vote in its group. It is "
    "excluded from the group's statistics and from the loss.": (
        "test_algorithm.test_a_failed_sample_has_no_vote_in_its_group",
        "test_compute_score.test_no_broken_server_raises",
        "test_reward_loop.test_outcomes_become_statuses_in_order",
        "test_policy.test_samples_without_verdict_and_groups_without_spread_change_nothing",
    ),
    "A run with too few verdicts or too many failed rollouts stops and reports the reason. It stops if more "
    "than the fraction `--max-no-verdict-rate` of a step's rollouts fail, or if more than this fraction of "
    "the samples that need a verdict have none. The second fraction is computed [for the step and for the "
    "latest steps together](glossary.md#statuses). Smaller losses are counted, but do not stop the run.": (
        "test_grpo_trainer.test_a_run_stops_for_many_failures_and_not_for_one",
        "test_grpo_trainer.test_a_run_without_verdicts_stops_with_a_word_on_why",
        "test_score_file.test_command_line_stops_when_the_judge_stays_down_and_resumes",
    ),
    "From one start of a run to the next, all samples are scored by the same version of the reward function. "
    "A run that resumes with another function, other `--reward-kwargs` or other judges says so.": (
        "test_run.test_a_run_that_resumes_with_another_reward_function_says_so",
        "test_run.test_a_run_that_resumes_with_another_judge_says_so",
        "test_reward_loop.test_a_run_scores_with_one_version_of_its_function",
        "test_reward_loop.test_a_file_that_a_call_imports_after_an_edit_scores_nothing",
        "test_grpo_trainer.test_a_reward_function_that_is_edited_while_a_run_starts_ends_the_start",
        "test_score_file.test_a_function_that_is_edited_while_a_judge_starts_scores_nothing",
        "test_score_file.test_resume_takes_the_same_data_and_settings_only_and_can_end",
        "test_score_file.test_resume_notices_another_judge_behind_the_address",
    ),
    "No sample is lost if a worker, a grading process or a node dies.": (
        "test_reward_loop.test_workers_and_grading_processes_are_killed_mid_batch",
        "test_reward_loop.test_a_grading_process_that_dies_between_two_samples_costs_none",
        "test_reward_loop.test_a_node_goes_away",
    ),
    "Functions written for verl's Reward Loop run unchanged on two conditions: a function that uses "
    "`reward_model_tokenizer` lists it as a parameter, and a model name in its requests is the served "
    "name.": (
        "test_reward_loop.test_functions_in_verls_style_run_unchanged",
        "test_reward_loop.test_the_tokenizer_is_the_judges_own_where_the_function_needs_one",
        "test_reward_loop.test_tokenizers_give_token_ids_as_functions_for_verl_expect",
    ),
    "A run can be stopped at any time and resumes from its newest checkpoint. On a CPU with "
    "`--rollout hf`, the result is the same as without the interruption.": (
        "test_grpo_trainer.test_killed_at_random_moments_and_resumed_is_exactly_the_uninterrupted_run",
        "test_grpo_trainer.test_a_run_leaves_what_it_promises_and_resumes_exactly",
        "test_lora.test_a_run_that_goes_on_is_the_uninterrupted_run_and_ends_as_one_model",
    ),
    "The sampler uses the trainer's weights, or with `--overlap` weights that are one step old. If the "
    "log-probabilities of sampler and trainer differ by more than `--max-logprob-diff` on average (twice "
    "that with `--overlap`), the run stops.": (
        "test_grpo_trainer.test_stale_weights_stop_the_run",
        "test_policy.test_a_sampler_with_other_weights_is_noticed_before_the_first_optimizer_step",
        "test_rollout.test_rollout_logprobs_are_the_trainers",
        "test_rollout.test_stale_weights_on_the_servers_are_noticed_and_a_restarted_server_has_the_newest",
    ),
    "A policy server that has not loaded the weights of a sync ends the run, even if the weights changed "
    "little. Each server returns checksums of its weights. Only weights whose checksums agreed when the "
    "servers had started are compared, in the data type of the servers: embedding, head and norms, and on "
    "GPUs also the matrices that vLLM does not merge. LoRA may change none of the compared weights: by "
    "default on a CPU, and with some `--lora-targets` on a GPU. The checksums then cannot reveal a lost "
    "sync. "
    "If a server rejects the request for checksums when the run starts, a warning says so, and none are "
    "compared.": (
        "test_rollout.test_stale_weights_on_the_servers_are_noticed_and_a_restarted_server_has_the_newest",
        "test_genrm_server.test_policy_servers_get_the_weights_at_every_sync_and_after_every_restart",
        "test_genrm_server.test_a_run_whose_servers_reject_checksums_at_its_start_goes_on_without_them",
        "test_weights.test_a_server_with_another_weight_is_noticed_however_its_workers_share_the_weights",
        "test_weights.test_checksums_add_up_and_do_not_fit_other_words",
    ),
    "A difference between sampler and trainer of more than three times the run's median is reported as a "
    "warning. At small learning rates, old weights change the log-probabilities less than rounding to bf16 "
    "does, so they cause no warning.": ("test_run_folder.test_a_sampler_that_suddenly_differs_is_reported",),
    "The loss does not depend on how a step is split into micro-batches or across ranks.": (
        "test_policy.test_update_does_not_depend_on_micro_batches",
        "test_policy_group.test_ranks_compute_what_one_process_does_and_save_for_any_number",
        "test_policy_group.test_ranks_compute_with_the_scales_of_one_process",
    ),
    "Checkpoints are written atomically, and a full disk never damages an earlier checkpoint.": (
        "test_grpo_trainer.test_a_full_disk_costs_no_earlier_checkpoint",
        "test_run_folder.test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones",
        "test_run_folder.test_old_checkpoints_are_deleted_and_half_written_ones_ignored",
    ),
    "Two runs never write to the same output directory.": (
        "test_run_folder.test_a_folder_is_held_by_one_run_and_a_second_start_deletes_nothing",
        "test_grpo_trainer.test_a_second_run_in_the_same_folder_is_refused_and_deletes_nothing",
    ),
    "Ctrl-C, SIGTERM and a closed terminal end a run without losing a completed step. Send SIGTERM only "
    "to the trainer's process, for example with `timeout --foreground`, because Ray exits if it also "
    "receives the signal.": (
        "test_grpo_trainer.test_ctrl_c_saves_and_leaves_cleanly",
        "test_grpo_trainer.test_ctrl_c_during_an_update_waits_for_its_end_and_a_second_one_does_not",
        "test_reward_loop.test_ctrl_c_does_not_wait_until_the_models_sleep",
        "test_run_folder.test_a_signal_waits_for_the_step_and_ends_the_run",
        "test_run_folder.test_a_closed_terminal_ends_the_run_after_the_step_and_nohup_keeps_it_going",
        "test_reward_loop.test_a_terminal_that_is_closed_while_ray_starts_ends_the_run_afterwards",
        "test_run.test_sigterm_during_the_start_ends_the_run_as_ctrl_c_does",
    ),
    "Sampled text is never re-tokenized, and tokens that the policy did not write are excluded from "
    "the update.": (
        "test_trajectory.test_what_was_sampled_stays_as_it_is_and_observations_are_no_part_of_it",
        "test_trajectory.test_a_reply_is_the_tail_of_the_whole_rendering",
        "test_trajectory.test_observed_tokens_have_no_part_in_the_update",
        "test_policy_group.test_ranks_compute_what_one_process_does_and_save_for_any_number",
    ),
    "A rollout function that fails, hangs or leaves tasks running loses only its own sample, unless it "
    "blocks the event loop. If it cancels tasks that it did not start, the run ends with an error.": (
        "test_trajectory.test_a_rollout_that_fails_has_a_status_and_touches_no_other",
        "test_trajectory.test_no_way_of_failing_escapes_its_sample",
        "test_trajectory.test_a_function_that_cancels_all_tasks_ends_the_run_and_is_named",
        "test_trajectory.test_what_a_failed_function_leaves_running_adds_nothing_and_stops_nobody",
        "test_trajectory.test_what_a_function_leaves_running_changes_nothing_that_is_scored",
        "test_trajectory.test_a_turn_that_a_function_leaves_running_changes_nothing_and_holds_up_nobody",
        "test_trajectory.test_calls_that_hang_in_threads_leave_threads_for_all_others",
        "test_trajectory.test_a_failed_rollout_leaves_its_group",
    ),
    "With `--rollout hf`, the same seed gives the same trajectories, however long tools take, unless a "
    "rollout reaches its time limit.": (
        "test_trajectory.test_a_run_depends_on_its_seed_alone_however_long_tools_take",
        "test_trajectory.test_each_round_draws_new_random_numbers",
        "test_trajectory.test_two_waves_at_the_same_time_are_those_that_they_are_alone",
        "test_trajectory.test_a_stopped_run_that_goes_on_is_the_same_run",
    ),
    "Text from a tool can neither end a message nor impersonate another role, unless the chat template marks "
    "messages with ordinary text, such as Llama-2's `[/INST]`.": (
        "test_trajectory.test_special_tokens_in_what_a_tool_says_stay_text",
        "test_trajectory.test_markup_in_a_reply_stays_text",
    ),
    "No request is lost while a server that can answer it is alive, with two exceptions. A request is sent "
    "to at most three servers (`--max-attempts`). If an engine hangs although its server's `/health` still "
    "responds, requests to it may run into their time limits until three in a row (`--unhealthy-after`) "
    "have done so while other servers answered.": (
        "test_router.test_one_bad_server_of_two_loses_nothing_and_leaves",
        "test_router.test_requests_stay_with_busy_servers_while_there_is_no_other",
        "test_router.test_an_engine_that_hangs_behind_a_good_health_leaves_until_it_is_restarted",
        "test_router.test_requests_in_flight_survive_the_death_of_their_server",
        "test_genrm_server.test_a_killed_server_loses_no_request_and_comes_back",
        "test_genrm_server.test_vllm_two_servers_one_killed_with_32_requests_in_flight",
    ),
    "Each response is delivered only to the request that it answers.": (
        "test_router.test_a_connection_with_bytes_that_nobody_asked_for_is_not_used_again",
        "test_router.test_method_path_query_headers_and_body_arrive_unchanged",
        "test_compute_score.test_what_is_sampled_or_differs_is_asked_each_time",
    ),
    "A restarted server does not join if a file of its model has another size or modification time than at "
    "the start. [Models on the Hub, and servers on other nodes](serving.md) are checked less.": (
        "test_genrm_server.test_a_server_that_would_load_other_files_does_not_join",
        "test_genrm_server.test_files_that_change_while_they_are_loaded_are_noticed",
    ),
    "A request that crashes servers is rejected instead of being sent to every server.": (
        "test_router.test_a_poisonous_request_is_asked_once_per_server_and_loses_no_harmless_one",
        "test_router.test_harmless_requests_beside_one_that_kills_engines_all_have_their_answer",
        "test_compute_score.test_equal_copies_of_a_prompt_of_which_servers_died_are_not_sent_again",
    ),
    "The router's API keys never appear in logs, in command lines or in the files of a run, unless you pass "
    "them as flags (`--api-key`, `--server-key`).": (
        "test_genrm_server.test_the_servers_have_a_key_that_nobody_sees",
        "test_router.test_the_key_can_come_from_the_environment",
    ),
    "Settings that are named like secrets are hidden in the files of a run, on its page and in W&B.": (
        "test_run_folder.test_secrets_are_hidden_wherever_they_are",
        "test_run_folder.test_the_files_about_a_start_contain_no_secrets",
        "test_run_folder.test_tensorboard_and_wandb_get_what_metrics_jsonl_gets",
        "test_view_run_page.test_secrets_are_not_on_the_page",
    ),
    "Child processes never outlive the process that started them, however it ends.": (
        "test_genrm_server.test_however_it_ends_nothing_is_left",
        "test_genrm_server.test_a_fork_of_the_program_keeps_no_server_alive",
        "test_reward_loop.test_nothing_is_left_running",
        "test_compute_score.test_the_child_processes_end_with_a_parent_that_is_killed",
    ),
    "Invalid settings and data are rejected before anything expensive starts, with a message that names the "
    "problem.": (
        "test_grpo_trainer.test_wrong_settings_are_refused_in_one_line",
        "test_run.test_positions_that_depend_on_the_longest_text_of_a_batch_are_rejected",
        "test_run.test_an_option_names_the_package_that_it_lacks",
        "test_reward_loop.test_wrong_settings_are_told_at_start",
        "test_reward_loop.test_a_router_that_rejects_the_key_ends_the_start_whatever_asks_it",
        "test_grpo_trainer.test_an_error_of_the_judges_address_comes_before_the_policy_loads",
    ),
    "No script contacts a hub unless you pass the name of a model or data set on that hub.": (
        "test_grpo_trainer.test_without_a_hub_name_nothing_asks_a_hub_also_where_the_library_is_loaded_already",
    ),
}


def test_every_guarantee_of_the_page_has_tests_and_every_tested_one_is_on_the_page():
    page = (ROOT / "docs/guarantees.md").read_text()
    bullets = re.findall(r"^- (.*?)(?=\n-|\n\n|\Z)", page, re.M | re.S)
    assert sorted(" ".join(bullet.split()) for bullet in bullets) == sorted(KEPT_BY)
    assert "docs/guarantees.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("sentence", KEPT_BY)
def test_the_tests_of_a_guarantee_exist(sentence):
    assert KEPT_BY[sentence], "no test keeps this guarantee"
    for name in KEPT_BY[sentence]:
        file, _, test = name.partition(".")
        text = (ROOT / f"tests/{file}.py").read_text()
        assert re.search(rf"^(async )?def {test}\(", text, re.M), f"{name} is gone; see this file's header"
