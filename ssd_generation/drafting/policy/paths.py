"""Paths of a round: the drafted tokens of each row, as far as a policy was asked about them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Path", "Paths"]


class Path:
    """Drafted tokens of a row.

    Attributes:
        survival: probability that all of them are accepted.
        bins: confidence bin of each.
    """

    __slots__ = ("bins", "survival")

    def __init__(self, survival: float = 1.0) -> None:
        self.survival = survival
        self.bins: list[int] = []


class Paths:
    """Paths of a round's rows, which the calls to a policy do not name.

    Rows are distinguished by their order: at each depth, the policy is asked again about those that continued at the
    depth before; and they are reported in the order in which they began.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self._paths: list[Path] = []
        self._reported = self._depth = 0
        self._waiting: list[Path] = []  # continued at the depth before, and not asked about at this one yet; last first
        self._continued: list[Path] = []  # at this depth

    def at(self, depth: int, survival: Sequence[float]) -> Path:
        """Return the path of the row in question, without its token at this depth.

        Args:
            depth: depth of the token in question, ≥ 1.
            survival: survival by depth, for a row whose path is not known.
        """
        if depth != self._depth:
            self._depth = depth
            self._waiting, self._continued = self._continued, []
            self._waiting.reverse()
        if depth == 1:
            self._paths.append(Path())
            return self._paths[-1]
        return self._waiting.pop() if self._waiting else Path(survival[depth - 1])

    def continues(self, path: Path) -> None:
        """Note that the row of this path continues."""
        self._continued.append(path)

    def survival(self, depth: int, survival: Sequence[float], acceptance: Sequence[float]) -> float:
        """Return the probability that a row's `depth` drafted tokens are all accepted.

        Args:
            depth: number of drafted tokens of the row.
            survival: survival by depth, used where more than one row drafts or nothing is drafted.
            acceptance: acceptance by depth, for the last drafted tokens, which the policy was not asked about.
        """
        if not depth or len(self._paths) != 1:
            return survival[depth]
        path = self._paths[0]
        product = path.survival
        for i in range(len(path.bins), depth):
            product *= acceptance[i]
        return product

    def report(self, drafted: int) -> Sequence[int]:
        """Return the confidence bins of the next row to be reported, given how many tokens it drafted.

        Empty where the policy was not asked about that row, or the next path does not fit that number.
        """
        if self._reported >= len(self._paths):
            return ()
        bins = self._paths[self._reported].bins
        if len(bins) not in (drafted, drafted - 1):  # the policy need not have been asked about the last token
            return ()
        self._reported += 1
        return bins
