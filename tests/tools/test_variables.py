"""The page of variables is what the code reads, whole."""

from __future__ import annotations

import re
from pathlib import Path

from dwdp import env
from dwdp.tools.variables import main, page

FILE = Path(__file__).parents[2] / "docs" / "variables.md"


def test_the_page_in_docs_is_the_one_that_the_code_makes(tmp_path, capsys):
    """Fails when a variable is added to env.py alone."""
    assert main(["--check", str(FILE)]) == 0
    old = tmp_path / "variables.md"
    old.write_text(page().replace("DWDP_DENSE_STRICT", "DWDP_STRICT"))
    assert main(["--check", str(old)]) == 1 and str(old) in capsys.readouterr().err
    assert main(["--write", str(old)]) == 0 and main(["--check", str(old)]) == 0
    assert main([]) == 0 and capsys.readouterr().out == page()


def test_every_variable_has_one_row_with_what_it_means_and_accepts():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows] == list(env.SWITCHES)
    for row, switch in zip(rows, env.SWITCHES.values()):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4 and (switch.alias or "") in cells[0] and switch.meaning in cells[1] and cells[2]
        assert ("without effect" in cells[1]) == (switch.name in env.WITHOUT_EFFECT)
    assert sum("`dense_dwdp." in row for row in rows) == len(env.DENSE_FIELDS)
