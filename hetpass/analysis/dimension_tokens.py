"""Dimensions as lists of tokens, major to minor, that are found to be the same.

A dimension of one value and one of another hold the same things in the same order: their tokens
become one. Where one side has [8] and the other [2, 4], the 8 is split.
"""

from __future__ import annotations

from collections.abc import Sequence


class DimensionTokens:
    """Tokens under unification. Tokens of size 1 count as nothing."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._same: dict[int, int] = {}  # a token -> the one that stands for it
        self._parts: dict[int, tuple[int, int]] = {}  # a token that was split, major and minor

    def token(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def leaves(self, tokens: Sequence[int]) -> list[int]:
        """The tokens as they are now, without those of size 1."""
        found: list[int] = []
        pending = list(reversed(tokens))
        while pending:
            token = pending.pop()
            while token in self._same:
                token = self._same[token]
            if token in self._parts:
                pending.extend(reversed(self._parts[token]))
            elif self.sizes[token] != 1:
                found.append(token)
        return found

    def unify(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """The two lists are one dimension; returns what does not divide, on either side."""
        a, b = self.leaves(left)[::-1], self.leaves(right)[::-1]
        while a and b:
            x, y = a.pop(), b.pop()
            if x == y:
                continue
            small, large = sorted((x, y), key=lambda t: self.sizes[t])
            if self.sizes[small] == self.sizes[large]:
                self._same[large] = small
            elif self.sizes[large] % self.sizes[small] == 0:
                rest = self.token(self.sizes[large] // self.sizes[small])
                first = self.token(self.sizes[small])
                self._parts[large], self._same[first] = (first, rest), small
                (a if large == x else b).append(rest)
            else:
                return [x, y, *a, *b]
            a, b = self.leaves(a[::-1])[::-1], self.leaves(b[::-1])[::-1]
        return [*a, *b]
