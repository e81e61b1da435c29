"""Every field of a config and every switch changes something that can be seen, when it alone is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import create_model

from dwdp import env
from dwdp.config.schema import DwdpConfig, ServeConfig
from dwdp.errors import ConfigError
from tests.config import observables, observed
from tests.config.observables import TABLE
from tests.config.observed import STANDALONE, UNSET, Asked
from tests.config.observing import Observable


@pytest.fixture(scope="module", autouse=True)
def runs():
    yield
    observed.forget()


@pytest.mark.parametrize("one", TABLE, ids=lambda one: f"{one.name}={one.changed!r}"[:60])
def test_changing_it_alone_changes_its_observable_as_it_should(one: Observable):
    base, changed = one.observe(one.base), one.observe(one.changed)
    assert one.expect(base, changed), (one.what, base, changed)


SWITCHES = {one.name: one for one in TABLE if one.is_switch and env.SWITCHES[one.name].alias}


@pytest.mark.parametrize("name", SWITCHES)
def test_the_alias_alone_shows_the_same_and_a_difference_is_an_error_naming_both(name, monkeypatch):
    one, alias = SWITCHES[name], env.SWITCHES[name].alias
    base = one.observe(one.base) if one.base is UNSET else one.observe(one.base, alias)
    assert one.expect(base, one.observe(one.changed, alias))
    other = one.base if one.base is not UNSET else {"1": "0", "4": "5", "30": "31", "gather": "batched"}[one.changed]
    assert env.value(name, {name: other}) != env.value(name, {name: one.changed})
    for first, second in ((name, alias), (alias, name)):
        both = {first: one.changed, second: other}
        if one.asks:
            text = Asked(STANDALONE, both).refusal
        else:
            with pytest.raises(ConfigError) as caught:
                env.check_environment(both)
            text = str(caught.value)
        assert name in text and alias in text and "differ" in text


def test_an_observable_that_does_not_change_is_noticed():
    """The table's own negative control: a field that does nothing has no observable."""
    one = next(one for one in TABLE if one.name == "dwdp.num_prefetch_slots")
    base = one.observe(one.base)
    assert not one.expect(base, base)


@pytest.mark.parametrize("one", TABLE, ids=lambda one: f"{one.name}={one.changed!r}"[:60])
def test_no_expectation_holds_of_one_observation_alone(one: Observable):
    """So that a field which has stopped doing anything fails, whichever of the two it then looks like."""
    for value in (one.base, one.changed):
        seen = one.observe(value)
        try:
            held = one.expect(seen, seen)
        except (TypeError, AttributeError):  # None has no words in it
            held = False
        assert not held, (one.name, seen)


def test_every_field_and_every_switch_has_an_entry():
    assert observables.problems() == []


def test_a_new_field_a_new_switch_and_a_removed_one_are_listed_and_the_command_fails(monkeypatch, capsys):
    assert observables.main(["--check"]) == 0
    section = create_model("DwdpConfig", __base__=DwdpConfig, new_field=(int, 0))
    larger = create_model("ServeConfig", __base__=ServeConfig, extra=(bool, False), dwdp=(section | None, None))
    switches = env.SWITCHES | {"DWDP_NEW": env.Switch("DWDP_NEW", None, "something new", str, "anything")}
    del switches["DWDP_RANK"]
    monkeypatch.setattr(env, "SWITCHES", switches)  # another dict: the order of the real one is told to users
    assert observables.main(["--check"], larger) == 1
    named = {line.split(":")[0] for line in capsys.readouterr().err.splitlines()}
    assert named == {"extra", "dwdp.new_field", "DWDP_NEW", "DWDP_RANK"}


def test_make_check_runs_the_check():
    recipe = (Path(__file__).parents[2] / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    assert "-m tests.config.observables --check" in recipe
