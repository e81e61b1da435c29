"""Entries that name modules: a list narrowed to a layer's experts says of these what the whole list says."""

import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dwdp.errors import CheckpointError
from dwdp.model.formats import MATRICES, expert_module
from dwdp.model.name_rules import NameRules

PARENT = expert_module(1)
WHOLE = "language_model.model.layers.1.block_sparse_moe.experts.12.w2"
PARTS = [
    "language_model",
    "model",
    "layers",
    "1",
    "2",
    "12",
    "block_sparse_moe",
    "experts",
    "w1",
    "w2",
    "self_attn",
    "rts",
]
names = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(".".join)
cut = st.tuples(st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE))).map(lambda at: WHOLE[min(at) : max(at)])
literals = st.one_of(names, cut)
escaped = literals.map(lambda text: text.replace(".", r"\."))
entries = st.one_of(
    literals,
    literals.map("{}*".format),
    literals.map("*{}*".format),
    literals.map("*{}".format),
    literals.map("*{}?[0-9]*".format),
    escaped.map("re:{}".format),
    escaped.map("re:.*{}.*".format),
    escaped.map("re:^.*{}$".format),
    escaped.map("re:^{}.*w[12]".format),
    escaped.map("re:.*{}?".format),
    escaped.map("re:.*?{}".format),
    escaped.map(r"re:.*({}|\.w1)$".format),
    escaped.map(r"re:nothing|.*{}".format),
    escaped.map(r"re:.*mlp(\.x)?|.*{}".format),
    escaped.map(r"re:.*\.(mlp|{})".format),
).filter(lambda entry: not entry.endswith((r"\?", r"\\")))


@settings(max_examples=250, deadline=None)
@given(st.lists(entries, min_size=1, max_size=4))
@example(["re:.*self_attn.*", "re:.*experts.*"])
@example(["experts.12.w2"])
@example(["re:.*w2"])
def test_a_narrowed_list_says_the_same_of_the_experts_below(listed):
    """Dropping one entry more in `_may_lie_in` or `_may_begin` made this fail."""
    rules = NameRules("test", [(entry, number) for number, entry in enumerate(listed)])
    narrowed = rules.experts_below(PARENT)
    for expert in (0, 1, 12, 112):
        for matrix in MATRICES:
            module = f"{PARENT}.{expert}.{matrix}"
            assert narrowed.first(module) == rules.first(module)


def test_what_a_release_ignores_is_nothing_among_its_experts():
    listed = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up)_proj.*", "*vision_tower*", "model.layers.0.mlp"]
    listed += ["re:.*shared_experts.*", "model.layers.2.block_sparse_moe.experts"]
    assert NameRules("test", [(entry, entry) for entry in listed]).experts_below(PARENT)._rules == []


@pytest.mark.parametrize("entry", ["re:(", "re:a{99999999999999}", "re:" + "(" * 5000])
def test_an_expression_that_cannot_be_read_is_refused(entry):
    with pytest.raises(CheckpointError, match="config.json has the bad regular expression") as refused:
        NameRules("config.json", [(entry, 1)])
    assert len(str(refused.value)) < 400


def test_an_expression_warns_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert NameRules("config.json", [("re:[[a]", 1)]).first("a") == 1
