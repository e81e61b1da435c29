"""Budgets, how large a ring page must be for a plan to fit them, and a pool that owns pages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dwdp.errors import MemoryBudgetError

logger = logging.getLogger(__name__)

# No table is larger than this, so a plan with such pages has the fewest mappings possible.
LARGEST_PAGE = 1 << 50


@dataclass
class Budget:
    """`used` of `limit` things called `word`; `cure` says what to do when they do not suffice."""

    word: str
    limit: int
    cure: str
    used: int = 0

    @property
    def left(self) -> int:
        return self.limit - self.used

    def check(self, more: int, what: str) -> None:
        """Raise MemoryBudgetError unless `more` further ones, for `what`, are within the limit."""
        if self.used + more > self.limit:
            raise MemoryBudgetError(
                f"{what} would make {self.used + more} {self.word}, the budget is {self.limit}; {self.cure}"
            )


def fit_page_bytes(
    page_bytes: int,
    num_mappings_for: Callable[[int], int],
    mapping_budget: int,
    *,
    num_descriptors_for: Callable[[int], int] | None = None,
    descriptor_budget: int = 0,
) -> int:
    """The smallest page, `page_bytes` doubled as often as needed, whose plan is within both budgets.

    page_bytes: size in bytes to start from
    num_mappings_for, num_descriptors_for: page size -> number that the whole plan needs
    Raises MemoryBudgetError when no page size is large enough.
    """
    limits = [("mappings", num_mappings_for, mapping_budget)]
    if num_descriptors_for is not None:
        limits.append(("descriptors", num_descriptors_for, descriptor_budget))
    for word, needed_for, budget in limits:
        fewest = needed_for(max(LARGEST_PAGE, page_bytes))
        if fewest > budget:
            raise MemoryBudgetError(
                f"the plan needs {fewest} {word} with pages of any size, {budget} are left in the budget; "
                "use fewer, larger handles or raise the limit (mapping_budget, vm.max_map_count, ulimit -Hn)"
            )
    first = page_bytes
    while any(needed_for(page_bytes) > budget for _, needed_for, budget in limits):
        page_bytes *= 2
    if page_bytes != first:
        logger.info(
            "pages doubled from %d to %d bytes: %s",
            first,
            page_bytes,
            ", ".join(
                f"{needed_for(page_bytes)} {word} where {needed_for(first)} pass the budget of {budget}"
                for word, needed_for, budget in limits
                if needed_for(first) > budget
            ),
        )
    return page_bytes


class PagePool:
    """Owns the ring pages made from one domain: handles of `domain.page_bytes` each, not exported."""

    def __init__(self, domain) -> None:
        self._domain = domain
        self._pages: list = []

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of this pool."""
        return sum(page.nbytes for page in self._pages)

    def allocate(self, num_pages: int, what: str) -> list:
        """`num_pages` new pages. Fails as `domain.create`; what this call made is then released, once."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages for {what}")
        made = []
        try:
            for _ in range(num_pages):
                made.append(self._domain.create(self._domain.page_bytes, what, exportable=False))
        except BaseException:
            for page in made:
                self._domain.release(page)
            raise
        self._pages.extend(made)
        return list(made)

    def close(self) -> None:
        """Release every page; idempotent."""
        pages, self._pages = self._pages, []
        for page in pages:
            self._domain.release(page)

    def __enter__(self) -> PagePool:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
