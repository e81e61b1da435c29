"""Progress bars of loading and setup on stderr, one a rank and stage."""

from __future__ import annotations


class ProgressBars:
    """Context manager; draws nothing when quiet or when stderr is no terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._bars, self._tasks = None, {}
        if quiet:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bars = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> ProgressBars:
        if self._bars is not None:
            self._bars.start()
        return self

    def update(self, rank: int, stage: str, done: int, total: int) -> None:
        """done of total units of a rank's stage."""
        if self._bars is None:
            return
        if (rank, stage) not in self._tasks:
            self._tasks[rank, stage] = self._bars.add_task(f"rank {rank}: {stage}", total=total)
        self._bars.update(self._tasks[rank, stage], completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()
