"""Files for what a check found: refused before a run that takes long, not behind it."""

from __future__ import annotations

import argparse
from pathlib import Path


def output_file(text: str) -> Path:
    """The type of an argument: a file in a folder that there is."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    return path
