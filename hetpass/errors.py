"""The errors that hetpass raises for a user's mistake or an illegal request.

Every one is a `HetpassError`: a code that can be searched for, what is wrong, where it stands in
the user's own source, the numbers that clash, and the ways out.
"""

from __future__ import annotations

from collections.abc import Sequence


class HetpassError(Exception):
    """A refusal. `str(error)` is the whole message, laid out for a terminal.

    Args:
      code: a stable identifier, `HP-<AREA>-<WORD>`.
      what: one sentence, what is wrong.
      where: the equation, file and line, key or path it was found at; may be empty.
      details: lines with the values that clash (numbers with units, nearest legal values).
      ways_out: what the user can do, one action a line.
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str = "",
        details: Sequence[str] = (),
        ways_out: Sequence[str] = (),
    ) -> None:
        self.code = code
        self.what = what
        self.where = where
        self.details = tuple(details)
        self.ways_out = tuple(ways_out)
        super().__init__(self._message())

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes."""
        parts = (self.code, self.what, self.where, self.details, self.ways_out)
        return (_error_again, (type(self), *parts))

    def _message(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        if self.where:
            lines.append(f"  at {self.where}")
        lines += [f"  {line}" for line in self.details]
        if self.ways_out:
            lines.append("  ways out:")
            lines += [f"    - {line}" for line in self.ways_out]
        return "\n".join(lines)


def _error_again(
    sort: type[HetpassError],
    code: str,
    what: str,
    where: str,
    details: tuple[str, ...],
    ways_out: tuple[str, ...],
) -> HetpassError:
    return sort(code, what, where=where, details=details, ways_out=ways_out)


class ClusterError(HetpassError):
    """A cluster, device kind or link that cannot be: HP-CLUSTER-…"""


class PlanError(HetpassError):
    """A plan that is malformed, or made for another program or cluster: HP-PLAN-…"""


class TraceError(HetpassError):
    """A step that cannot be traced, or not at the probed batch sizes: HP-TRACE-…"""


class SplitError(HetpassError):
    """A step that cannot be run in microbatches with the same meaning: HP-SPLIT-…"""


class FactsError(HetpassError):
    """Facts about a program that cannot be: HP-FACTS-…"""


class ScheduleError(HetpassError):
    """A schedule that is unknown, or that cannot run: HP-SCHEDULE-…"""


class ExecutionError(HetpassError):
    """A call that does not fit the compiled step, or a run that failed: HP-RUN-…"""


class ToolError(HetpassError):
    """A command line that cannot be followed: HP-TOOL-…"""


class VerificationError(Exception):
    """A value that a pass made breaks its own rules: a fault of hetpass, not of the user's step.

    Not a HetpassError: there is nothing that a user could do but report it.
    """
