"""Progress bars of loading and setup on stderr, one a rank and stage; of bytes also the rate and the time left."""

from __future__ import annotations

BYTE_STAGES = ("load", "update")  # whose units are bytes


class ProgressBars:
    """Context manager; draws nothing when quiet or when stderr is no terminal.

    console: a rich console; None: one on stderr.
    """

    def __init__(self, *, quiet: bool, console=None) -> None:
        self._bars, self._tasks = None, {}
        if quiet:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = console or Console(stderr=True)
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                _amount_column(),
                TimeElapsedColumn(),
            )
            self._bars = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> ProgressBars:
        if self._bars is not None:
            self._bars.start()
        return self

    def update(self, rank: int, stage: str, done: int, total: int) -> None:
        """done of total units of a rank's stage: bytes in those of BYTE_STAGES."""
        if self._bars is None:
            return
        if (rank, stage) not in self._tasks:
            of_bytes = stage in BYTE_STAGES
            self._tasks[rank, stage] = self._bars.add_task(f"rank {rank}: {stage}", total=total, of_bytes=of_bytes)
        self._bars.update(self._tasks[rank, stage], completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()


def amount(done: float, total: float | None, speed: float | None, seconds_left: float | None, of_bytes: bool) -> str:
    """What stands beside a bar. speed: bytes a second; None for what is not known yet."""
    if not of_bytes:
        return f"{done:.0f}/{total or 0:.0f}"
    text = f"{done / 1e9:.2f}/{(total or 0) / 1e9:.2f} GB"
    if speed is not None:
        text += f"  {speed / 1e9:.2f} GB/s"
    if seconds_left is not None:
        text += f"  {int(seconds_left) // 60}:{int(seconds_left) % 60:02d} left"
    return text


def _amount_column():
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Amount(ProgressColumn):
        def render(self, task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(amount(task.completed, task.total, speed, task.time_remaining, task.fields["of_bytes"]))

    return Amount()
