"""Paths of a round: the drafted tokens of each row as far as a policy was asked about them."""

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
    """The paths of a round's rows, which a policy's questions and reports do not name.

    Rows are told apart by their order: at each depth, those that continued at the depth before are asked about again;
    and they are reported in the order in which they began.
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
        """Return the path of the row that is asked about, without its token at this depth.

        Args:
            depth: of the token that is asked about, ≥ 1.
            survival: by depth, for a row whose path is not known.
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
            depth: drafted tokens of the row.
            survival: by depth, where more than one row drafts or nothing is drafted.
            acceptance: by depth, for tokens that were drafted last and not asked about.
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

        Empty where that row was not asked about, or is not the one whose turn it is.
        """
        if self._reported >= len(self._paths):
            return ()
        bins = self._paths[self._reported].bins
        if len(bins) not in (drafted, drafted - 1):  # the last token need not have been asked about
            return ()
        self._reported += 1
        return bins
