"""Reports of ranks: who differs from whom, and how it is said."""

import pytest

from dwdp.group.ranks import RankInfo, compare_reports, join_problems, name_ranks


def test_equal_reports_are_no_problem_and_key_order_does_not_matter():
    assert compare_reports([{"a": 1, "b": [2]}, {"b": [2], "a": 1}]) == []


def test_a_rank_is_held_against_the_majority():
    problems = compare_reports([{"a": 1}, {"a": 1}, {"a": 2, "b": 3}, {"a": 1}])
    assert problems == ["rank 2 has a 2, most ranks have 1", "rank 2 has b 3, most ranks have (missing)"]


def test_without_a_strict_majority_every_rank_is_listed_with_its_values():
    assert compare_reports([{"a": 1, "c": 0}, {"a": 2, "c": 0}]) == ["rank 0 has a 1", "rank 1 has a 2"]


def test_a_rank_without_a_report_is_named_and_is_no_part_of_a_majority():
    assert compare_reports([{"a": 1}, None]) == ["rank 1 sent no report"]
    assert compare_reports([{"a": 1}, {"a": 1}, {"a": 2}, None]) == [
        "rank 3 sent no report",
        "rank 0 has a 1",
        "rank 1 has a 1",
        "rank 2 has a 2",
    ]


def test_ignored_keys_may_differ():
    assert compare_reports([{"a": 1, "pid": 1}, {"a": 1, "pid": 2}], ignore={"pid"}) == []


def test_eight_problems_are_shown_and_the_others_counted():
    text = join_problems([f"p{i}" for i in range(11)])
    assert "p7" in text and "p8" not in text and text.endswith("and 3 more")
    assert join_problems(["x", "y"]) == "x; y"


def test_ranks_are_named_in_order_and_bad_numbers_refused():
    assert name_ranks({3, 1}) == "ranks 1, 3" and name_ranks([2]) == "rank 2"
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} .* {size}"):
            RankInfo.here(rank, size)
