"""Settings and fixtures that all tests share: one thread, no hub, real data, and one small trained run."""

import gc
import os
import random
import secrets
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hub-")  # start with an empty cache of the hub
os.environ["XDG_CACHE_HOME"] = os.environ["HF_HOME"]  # likewise for stored answers and machine code
os.environ["OMP_NUM_THREADS"] = "1"  # the models are too small for more threads; also applies to subprocesses

import pytest
import torch
from hypothesis import settings

from support import SHARED, devices
from support.browser import chromium
from support.ranks import Ranks

settings.register_profile("onward", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("onward")
for name in "CI", "BUILD_NUMBER":  # if set, pytest shows full differences, which takes hours for long lists
    os.environ.pop(name, None)
os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no test simulates a power failure
gc.disable()  # until all tests are collected: imports make millions of objects but little garbage
# background jobs of a shell, and their children, ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)

THINNED = {  # grids of slow cases: `make test` runs every nth case, `make test-all` runs all
    "test_compiled_and_plain_steps_agree_after_and_amid_an_edit": 5,
    "test_compiled_steps_equal_plain_ones_and_rows_do_not_meet": 7,
    "test_engine_with_adapters_gives_the_same_tokens_compiled_or_not": 3,
    "test_kernel_stays_between_guard_pages": 11,
    "test_failure_is_one_sentence_of_a_rank_and_a_line_of_the_other": 2,
    "test_a_rank_that_is_stopped_is_named_and_all_others_end": 3,
    "test_odd_stream": 3,
    "test_two_processes_print_the_figures_of_one": 3,
    "test_collectives_of_two_processes_are_those_of_the_plan": 3,
    "test_loss_of_a_window_is_the_sum_over_its_documents": 11,
    "test_a_run_without_a_break_has_the_ids_of_the_library": 3,
    "test_every_family_trains_and_is_read_by_transformers_afterwards": 13,
    "test_the_fast_paths_of_a_family_equal_the_written_out_one": 3,
    "test_small_model_is_never_in_memory_twice": 2,
    "test_an_initialization_has_the_values_training_and_files_of_peft": 3,
    "test_a_text_is_completed_branched_and_looked_into": 3,
    "test_a_broken_link_opens_the_page": 3,
    "test_part_of_the_queries_has_the_attention_of_the_whole": 3,
    "test_evaluating_a_run_gives_the_figures_of_its_last_evaluation": 3,
    "test_process_has_its_share_of_the_state_and_that_of_two_blocks": 2,
    "test_process_loads_its_share_of_stored_models": 2,
    "test_processes_of_a_mesh_roll_back_together": 2,
    "test_the_same_mesh_resumes_bit_for_bit": 2,
    "test_a_preset_has_the_parameters_that_transformers_counts": 13,
    "test_no_key_of_transformers_is_ignored": 7,
    "test_head_that_differs_from_the_tied_embedding_is_kept_as_in_transformers": 13,
    "test_a_quantized_model_of_each_family_is_loaded_to_the_same_bits": 13,
    "test_nothing_is_found_in": 11,
    "test_one_mutant_of_each_kind_is_found": 7,
    "test_saved_state_is_loaded_and_continued_bit_for_bit": 11,
    "test_every_cache_gives_the_logits_of_the_plain_run": 11,
    "test_an_adapter_has_the_logits_of_peft_whichever_of_the_two_wrote_it": 5,
    "test_request_that_cannot_go_on_fails_alone": 11,
    "test_two_processes_train_as_one": 7,
    "test_backend_equals_the_reference_without_a_cache": 4,
    "test_request_has_the_same_tokens_in_every_batch_cache_and_chunking": 7,
    "test_each_parameter_of_every_release_has_a_rule": 7,
    "test_tables_of_rotary_positions_mean_what_they_do_to_transformers": 7,
    "test_a_folder_of_transformers_and_one_of_ours_give_the_same_logits_in_both": 7,
    "test_pages_fit_the_window_and_axe_finds_nothing": 12,
    "test_no_body_gets_status_500": 3,
    "test_every_way_to_run_a_family_gives_the_logits_of_the_plain_run": 3,
    "test_every_way_to_run_gives_the_logits_of_the_plain_run": 5,
    "test_a_run_reports_the_figures_that_its_method_names": 3,
    "test_scores_are_those_of_each_pair_alone": 5,
    "test_saved_prompt_continues_as_if_just_prefilled": 5,
    "test_prompt_has_the_same_hypotheses_alone_and_in_a_batch": 7,
    "test_hypotheses_and_scores_equal_transformers": 3,
    "test_all_replies_have_the_reasoning_content_and_calls_of_the_answer": 3,
    "test_one_call_is_read_if_the_request_takes_one": 5,
    "test_required_calls_are_in_the_form_of_the_model_and_of_their_own_schema": 3,
    "test_engine_with_a_cache_gives_the_same_tokens_compiled_or_not": 5,
    "test_a_model_comes_back_bit_for_bit": 7,
    "test_fields_that_change_nothing_change_nothing": 5,
    "test_tied_matrix_may_have_the_name_of_the_head": 7,
    "test_damaged_save_is_moved_aside_and_the_one_before_is_loaded": 3,
    "test_unusual_decoder_that_is_right_raises_no_alarm": 7,
    "test_logits_of_every_decoder_are_those_without_the_kernels": 7,
    "test_the_loss_falls": 3,
    "test_a_family_expresses_a_decoder_or_refuses_it": 5,
    "test_engine_tokens_equal_the_plain_run_without_a_cache": 4,
    "test_the_loss_and_all_gradients_are_those_written_out": 7,
    "test_each_answer_is_trained_once_after_the_text_that_the_model_is_given": 5,
    "test_measuring_changes_no_bit_of_training_and_removes_its_hooks": 7,
    "test_recomputed_gradients_are_equal_to_the_bit_with_dropout": 7,
    "test_kernel_does_not_depend_on_the_default_dtype": 11,
    "test_each_call_in_each_place_gives_the_text_of_jinja": 3,
    "test_token_changes_later_logits_within_reach_only": 5,
    "test_trace_of_everything_changes_no_bit_and_has_the_listed_shapes": 5,
    "test_edits_with_a_cache_are_those_of_the_whole_text": 4,
    "test_parts_of_a_logit_add_up_to_it": 5,
    "test_logits_of_each_dtype_are_near_those_of_fp64": 5,
    "test_llama_cpp_computes_the_same_distributions": 5,
    "test_rotary_positions_are_read_in_the_words_of_transformers_4": 5,
    "test_answers_conform_to_schemas_of_pydantic": 5,
    "test_adapters_of_every_part_change_nothing_at_first_and_equal_the_merged_model": 5,
    "test_random_programs_notice_mutant": 2,
    "test_rows_of_a_search_have_the_hidden_states_of_a_call_without_a_cache": 3,
    "test_what_leaves_only_the_likeliest_token_is_greedy": 3,
    "test_products_on_arm_compute_in_neon_registers": 3,
    "test_plan_of_two_layers_of_a_release_is_what_a_rank_does": 2,
    "test_plan_of_a_context_axis_is_what_a_rank_does": 2,
    "test_plan_of_stages_is_what_their_ranks_do": 2,
    "test_graphs_of_all_lengths_give_the_logits_of_plain_steps": 2,
    "test_axe_finds_no_serious_fault": 2,
    "test_distribution_proof_notices_mutant": 3,
    "test_compiled_steps_with_a_quantized_cache_equal_plain_ones": 3,
    "test_engine_gives_the_same_tokens_compiled_or_not": 3,
    "test_planned_memory_is_enough_and_little_more": 2,
    "test_adapters_begin_and_learn_as_in_one_process": 2,
    "test_dpo_on_an_adapter_starts_from_its_logits_and_resumes": 3,
    "test_weights_without_gradients_need_no_shards": 3,
    "test_backend_equals_the_reference_with_a_cache": 3,
    "test_reading_quantizes_as_the_loaded_model_is_quantized": 3,
    "test_run_that_rolled_back_resumes_exactly": 2,
    "test_run_goes_back_one_save_further_where_the_newest_is_spoilt": 2,
    "test_models_learn_sums_modulo_ten_from_rewards": 3,
    "test_a_run_of_reinforcement_resumes_exactly_and_logs_its_figures": 3,
    "test_a_base_of_each_kind_is_trained_on_and_resumed": 2,
    "test_options_of_the_engine_change_no_answer": 3,
    "test_every_field_of_the_model_can_be_set": 3,
    "test_fine_tuning_on_a_mesh_is_that_of_one_process": 2,
    "test_what_llama_cpp_cannot_compute_is_refused_by_name": 3,
    "test_help_of_a_method_shows_its_fields_and_its_formula": 3,
    "test_missing_keys_mean_the_defaults_of_transformers": 5,
    "test_a_key_that_is_absent_means_the_default_of_transformers": 5,
    "test_every_release_is_a_preset_with_the_tokenizer_s_vocabulary": 5,
    "test_gradients_do_not_depend_on_the_size_of_batches": 3,
    "test_langchain_takes_three_steps": 3,
    "test_sliding_context_continues_from_its_later_half": 3,
    "test_samples_over_windows_and_scarce_blocks_keep_their_tokens": 3,
    "test_prompt_continues_from_the_end_of_an_earlier_one": 3,
    "test_rows_with_different_adapters_are_answered_as_each_alone": 3,
    "test_constraints_hold_in_batches_and_speculation": 2,
    "test_without_windows_gpt3_is_a_gpt2_where_heads_fill_the_width": 3,
    "test_ctrl_c_stops_training": 2,
    "test_process_that_does_not_answer_is_named": 2,
    "test_the_command_shows_the_accuracy_of_a_head_and_how_to_use_it": 3,
    "test_visits_in_training_are_counted_once": 3,
    "test_keys_without_an_effect_are_no_error": 3,
    "test_a_router_that_is_skewed_at_first_is_evened_out": 2,
    "test_kernels_equal_the_operations_that_they_replace": 2,
    "test_compile_without_a_home_to_write_to_gives_the_same_answer": 2,
    "test_precisions_are_compared_only_where_compilation_is_short": 2,
    "test_each_initialization_begins_as_the_base_and_resumes_exactly": 3,
    "test_ranks_with_different_data_or_versions_are_named": 2,
    "test_each_mistake_is_recognized_as_itself": 3,
    "test_nan_of_an_earlier_answer_reaches_no_later_one": 5,
    "test_code_that_does_harm_scores_0_and_leaves_nothing": 3,
    "test_tokens_are_those_of_plain_decoding": 3,
    "test_rewards_score_as_documented": 3,
    "test_masks_follow_packing_windows_chunks_and_layers": 2,
    "test_mistakes_are_one_sentence_and_no_run_is_begun": 5,
    "test_a_declared_field_changes_the_reply_or_is_refused": 3,
    "test_kernel_with_several_threads_stays_between_guard_pages": 4,
    "test_saves_move_between_meshes": 2,
    "test_a_file_that_cannot_be_checked_is_one_sentence": 2,
    "test_a_wrong_reward_is_one_sentence": 3,
    "test_every_kernel_is_valid_code_for_other_processors": 3,
    "test_a_wrong_task_file_is_one_sentence_and_loses_no_other": 2,
    "test_layer_is_the_formula_and_changes_no_token": 3,
    "test_a_field_of_another_route_is_refused_unless_it_is_empty": 3,
    "test_a_large_body_is_refused_before_it_is_read_whole": 3,
    "test_a_constraint_without_end_holds_up_nobody_and_is_refused_as_too_large": 3,
    "test_own_block_generates_the_tokens_of_its_plain_forward": 3,
    "test_changing_a_document_changes_no_logit_of_another": 5,
    "test_steps_of_a_family_are_compiled": 3,
    "test_section_without_other_libraries_gives_a_table_of_onward": 3,
    "test_text_decoder_has_the_logits_and_the_tensors_of_the_whole_model": 2,
    "test_each_activation_put_back_gives_the_same_logits_and_the_traced_gradient": 2,
    "test_proposals_are_those_of_the_formula": 3,
    "test_products_equal_the_formula_and_do_not_depend_on_other_rows": 2,
    "test_all_logits_are_never_in_memory_at_once": 3,
    "test_axe_finds_nothing": 2,
    "test_an_answer_passes_with_the_header_alone": 3,
    "test_compiled_prompts_equal_plain_ones": 3,
    "test_drafts_are_those_of_the_formula_and_change_no_token": 3,
}
TINY = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "context_length": 32}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests compute, such as cuda (default: cpu)")


class Failures:
    """Prints the name and the error of each failing test immediately, since a run that is cut off has no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = (crash.message if crash else str(report.longrepr)).strip().split("\n")[0]
            self.terminal.write_line(f"\nFAILED {report.nodeid} at {report.when}: {error}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    stack = ExitStack()
    stack.enter_context(devices.using(config.getoption("device")))
    config.add_cleanup(stack.close)
    config.add_cleanup(lambda: shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True))


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if terminal := plugins.get_plugin("terminalreporter"):  # worker processes of pytest-xdist have none
        plugins.register(Failures(terminal))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    # Compressed bytes contain the time, so test names with them would differ between worker processes.
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests marked `long`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # the slowest first, so that no process waits for them at the end
    items.sort(key=lambda item: item.path.name != "test_docs.py")
    seen = Counter[str]()
    for item in items:
        name = item.name.partition("[")[0]
        if name in THINNED and not item.get_closest_marker("long"):
            if seen[name] % THINNED[name]:
                item.add_marker(pytest.mark.long)
            seen[name] += 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    secrets.randbits = random.Random(item.nodeid).getrandbits  # type: ignore[assignment]  # seeds requests without a seed


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # keeps the collector from traversing libraries and tests repeatedly
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return devices.device()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """A process group of two processes, which wait for tasks."""
    with closing(Ranks(2)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """A process group of four processes, which wait for tasks."""
    with closing(Ranks(4)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data next to the repository; tests that use it are skipped if it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the data in {SHARED}")
    return SHARED


@pytest.fixture(scope="module")  # module scope: playwright's event loop blocks others until it ends
def browser() -> Iterator[Any]:
    """Chromium; tests that use it are skipped if it is missing."""
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def story() -> str:
    """About 8,000 characters of simple English, always the same."""
    choose = random.Random(0).choice
    who, does, where = ["The cat", "A dog", "The old king"], ["sat", "slept", "sang"], ["mat", "hill", "café"]
    return "".join(f"{choose(who)} {choose(does)} on the {choose(where)}.\n" for _ in range(270))


@pytest.fixture(scope="session")
def story_file(story: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    path.write_text(story, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_run(story_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a small model with BPE; tests must not change it."""
    import onward

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    onward.train(
        str(story_file), folder, tokenizer="bpe:300", steps=60, batch_size=8, precision="fp32", device="cpu", model=TINY
    )
    return folder


@pytest.fixture(scope="module")
def lm(tiny_run: Path) -> Any:
    import onward

    return onward.load(tiny_run)
