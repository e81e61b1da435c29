"""The page of all environment variables, from the table that reads them: `python -m dwdp.tools.variables`.

`--write FILE` writes it, `--check FILE` exits with 1 where the file is another page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dwdp import env

HEAD = """# Environment variables

Made by `python -m dwdp.tools.variables --write docs/variables.md`; `make check` compares. A variable wins over the
field of the config that it is for, and the log says so. The alias means the same; both set to different values are
refused, as is a value that cannot be read. Another name that begins with `DWDP_` gives one warning.

"""


def page() -> str:
    """In Markdown, a row for each variable."""
    fields = {name: f"`dense_dwdp.{field}`" for field, name in env.DENSE_FIELDS.items()}
    fields |= {name: f"`dwdp.{field}`" for field, name in env.EXPERT_FIELDS.items()}
    rows = ["| variable, alias | what it says | it accepts | field of a config |", "|---|---|---|---|"]
    for switch in env.SWITCHES.values():
        names = f"`{switch.name}`" + (f" `{switch.alias}`" if switch.alias else "")
        meaning = switch.meaning
        if switch.name in env.WITHOUT_EFFECT:
            meaning += " (checked, without effect so far)"
        rows.append(f"| {names} | {meaning} | {switch.accepted} | {fields.get(switch.name, '')} |")
    return HEAD + "\n".join(rows) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dwdp.tools.variables", description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.check is not None:
        if options.check.read_text(encoding="utf-8") == page():
            return 0
        print(f"{options.check} is not what src/dwdp/env.py says: write it anew with --write", file=sys.stderr)
        return 1
    if options.write is not None:
        options.write.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
