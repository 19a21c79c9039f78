"""The table at the end of a run."""

import re

from sparring.cli.result import result_lines

SUMMARY = {
    "sft_success": 0.5,
    "rl_success": 0.92,
    "rl_success_low": 0.9,
    "no_tool_success": 0.0,
    "eval_tasks": 520,
    "logprob_max_abs_diff": 0.0,
    "tokens_sampled": 1234567,
    "tokens_trained": 1000000,
    "wall_s": {"sft": 60.2, "rl": 200.4},
    "by_dataset": {
        "gcd": {"coverage": "well", "sft": 0.8, "rl": 0.98, "tasks": 260},
        "base_conversion": {"coverage": "thin", "sft": 0.2, "rl": 0.86, "tasks": 260},
    },
}


def test_the_table_has_a_row_per_dataset_and_a_total_and_facts_follow() -> None:
    assert result_lines(SUMMARY) == [
        "dataset          coverage  after SFT  after RL  tasks",
        "-----------------------------------------------------",
        "gcd                  well     80.0 %    98.0 %    260",
        "base_conversion      thin     20.0 %    86.0 %    260",
        "-----------------------------------------------------",
        "all together                  50.0 %    92.0 %    520",
        "",
        "lower end of the 95 % interval after RL                     90.0 %",
        "with the tool host switched off                             0.0 %",
        "engine against trainer, largest log-probability difference  0.0",
        "tokens sampled / trained                                    1,234,567 / 1,000,000",
        "wall clock                                                  261 s (sft 60 s, rl 200 s)",
    ]


def test_preferences_have_a_column_and_changes_and_held_out_rows_a_line() -> None:
    judged = {"preference": {"accuracy": 0.95, "low": 0.9, "high": 0.98, "count": 40}}
    change = {"before": "init", "after": "rl", "figure": "success", "tasks": 340}
    change |= {"difference": 0.4, "difference_low": 0.345, "difference_high": 0.451}
    lines = result_lines({**SUMMARY, "preference_success": 0.7, "held_out": judged, "change": change})
    assert "after SFT  after preferences  after RL" in lines[0]
    assert lines[5].split()[2:8] == ["50.0", "%", "70.0", "%", "92.0", "%"]
    change_line, held_out = (re.split(" {2,}", line) for line in lines[7:9])
    assert change_line == ["change, task by task", "+40.0 points (+34.5 to +45.1; rl against init, 340 tasks)"]
    assert held_out == ["held out, judged right after preference", "95.0 % of 40"]


def test_the_table_of_an_evaluation_without_training() -> None:
    tag = {"coverage": None, "init": 0.25, "sft": None, "rl": None, "tasks": 8}
    lines = result_lines({"init_success": 0.25, "eval_tasks": 8, "by_dataset": {"gcd": tag}})
    assert lines[0].split() == ["dataset", "before", "tasks"]
    assert lines[2].split() == ["gcd", "25.0", "%", "8"]


def test_a_world_without_datasets_has_one_row_under_one_rule() -> None:
    assert result_lines({"rl_success": 0.25, "eval_tasks": 8, "by_dataset": {}}) == [
        "dataset       after RL  tasks",
        "-----------------------------",
        "all together    25.0 %      8",
        "",
    ]


def test_the_table_leaves_out_missing_parts() -> None:
    lines = result_lines({"wall_s": {"sft": 3.0}, "sft_success": None, "by_dataset": {}})
    assert lines == ["wall clock  3 s (sft 3 s)"]
