"""SECURITY.md names for each promise the tests that would fail if it did not hold; here, that they
exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TRUSTED = [
    "sdk/test_tokens_hostile.py::test_code_of_a_checkpoint_is_not_run",
    "sdk/test_tokens_hostile.py::test_whatever_loads_a_checkpoint_says_whether_its_code_may_run",
    "sdk/test_tokens_hostile.py::test_a_hostile_template_is_stopped",
]
"""What is said of a checkpoint, above the table."""
PROMISES = {
    "run code": [
        "tools/trace/test_import_foreign.py::test_a_row_of_something_else_is_told_or_skipped",
        "sdk/judges/test_attack.py::test_no_text_earns_a_reward_of_a_judge_that_compares",
        "tools/dataset/test_dataset_fence_cli.py::test_every_command_that_runs_programs_is_refused_without_a_fence",
    ],
    "move the terminal's cursor": [
        "tools/test_trace_cli.py::test_show_an_episode_without_taking_its_text_for_anything_else",
        "tools/tui/test_safe_markdown.py::test_what_a_model_wrote_stays",
    ],
    "run scripts in an exported page": [
        "tools/trace/test_exchange_formats.py::test_a_page_shows_everything_and_runs_and_fetches_nothing",
    ],
    "read your files": [
        "tools/dataset/test_dataset_fence.py::test_files_of_the_user_are_out_of_reach",
        "tools/dataset/test_dataset_fence.py::test_links_lead_nowhere",
        "tools/dataset/test_dataset_fence.py::test_a_directory_of_the_user_cannot_be_deleted",
    ],
    "reach the network": ["tools/dataset/test_dataset_fence.py::test_the_network_is_out_of_reach"],
    "use up the machine": [
        "tools/dataset/test_dataset_fence.py::test_a_fork_bomb_ends_and_a_sound_program_beside_it_does_not_notice",
        "tools/dataset/test_dataset_fence.py::test_files_without_end_are_stopped_wherever_they_are_written",
        "tools/dataset/test_dataset_sandbox.py::test_processes_that_eat_memory_together_are_stopped",
        "tools/dataset/test_dataset_sandbox.py::test_code_that_loops_or_sleeps_is_stopped",
    ],
    "read their tests or say that they pass": [
        "sdk/judges/test_code_attacks.py::test_no_cheat_earns_a_reward",
        "sdk/judges/test_attack.py::test_no_program_earns_a_reward_of_the_code_judge",
        "tools/dataset/test_dataset_sandbox.py::test_nothing_but_stdio_reaches_a_program_however_many_files_are_open",
    ],
    "read other files": [
        "sdk/trace/test_trace_query.py::test_anything_else_is_a_query_error",
        "sdk/trace/test_trace_query.py::test_a_variable_of_this_process_cannot_be_read",
        "sdk/trace/test_trace_query.py::test_a_long_query_is_interrupted",
    ],
    "write": [
        "sdk/trace/test_trace_query.py::test_anything_else_is_a_query_error",
    ],
    "read prompts, replies and keys": [
        "sdk/test_secret_keys.py::test_a_run_keeps_secrets_out_of_its_files_and_the_files_to_their_owner",
        "sdk/test_origins.py::test_loopback_is_what_was_bound",
        "sdk/test_gateway.py::test_who_asks_is_in_the_path_then_the_key_then_the_header",
    ],
    "use a served model": [
        "sdk/test_origins.py::test_without_a_key_nothing_is_served_to_other_machines",
        "sdk/test_run_serve.py::test_with_a_key_only_who_sends_it_is_answered",
        "sdk/test_run_serve.py::test_a_foreign_page_is_not_answered",
    ],
    "read a trace": [
        "tools/tui/test_viewer_web.py::test_only_who_has_the_token_gets_in_and_ctrl_c_ends_all",
        "sdk/trace/test_trace_live.py::test_the_route_refuses_strangers_and_nonsense",
    ],
    "learn your keys": [
        "sdk/test_secret_keys.py::test_nothing_under_a_secret_key_is_left_at_any_depth",
        "sdk/test_addresses.py::test_a_run_connects_with_what_it_never_writes",
        "sdk/test_addresses.py::test_an_export_replaces_them_in_the_middle_of_a_text",
        "sdk/trace/test_trace_writer.py::test_secrets_are_in_no_byte_of_the_file",
        "tools/test_trace_exchange_cli.py::test_export_to_a_file_says_what_it_wrote_and_redacted",
        "tools/trace/test_redact.py::test_no_planted_value_survives",
    ],
}
"""What each party must not do, as the second column of SECURITY.md's table has it, and the tests of
what holds it."""


def test_every_promise_of_the_threat_model_has_tests() -> None:
    """The second column of the table consists of the promises above, in their order."""
    rows = re.findall(
        r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE
    )
    assert ", ".join(rows[1:]) == ", ".join(PROMISES), (
        "give each promise of SECURITY.md a line in PROMISES"
    )


@pytest.mark.parametrize(
    "name", sorted({test for tests in (TRUSTED, *PROMISES.values()) for test in tests})
)
def test_the_named_test_exists(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    functions = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert function in functions
