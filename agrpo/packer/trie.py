"""The prefix tree of one row: a radix trie whose edges are slices of the samples' own token arrays.

A position is shared only where its token and the next token are equal, so that each position predicts one token
(PACK-2); a sample's last token has no next token and is shared by identical samples only (PACK-4, PACK-5). Every node
except the root is one segment: chains without branches are never split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


class Node:
    """One segment: positions [start, end) of the sample `tokens`, below `parent`."""

    __slots__ = ("children", "end", "packed_start", "parent", "segment", "start", "tokens")

    def __init__(self, tokens: np.ndarray, start: int, end: int, parent: Node | None):
        self.tokens, self.start, self.end, self.parent = tokens, start, end, parent
        self.children: dict[Any, Node] = {}  # in order of arrival
        self.segment = -1  # index of the segment in the layout
        self.packed_start = 0  # packed index of its first token


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample would join: its first `depth` positions exist already, the last of them inside or ending `node`."""

    node: Node
    depth: int


class Trie:
    """Shares every common prefix. `find` changes nothing; `insert` takes what `find` gave for the same trie state.

    [1 2 3 4 5] and [1 2 3 6 7] give the segments [1 2], [3 4 5], [3 6 7]: 3 is not shared, it predicts 4 or 6.
    """

    def __init__(self) -> None:
        self.root = Node(np.zeros(0, np.int32), 0, 0, None)

    def find(self, tokens: np.ndarray) -> Place:
        """The deepest place whose positions all equal those of `tokens` [L], next tokens included."""
        node, depth = self.root, 0
        while depth < len(tokens):
            child = node.children.get(self._key(tokens, depth))
            if child is None:
                break
            node, depth = child, depth + _num_shared(child, tokens)
            if depth < child.end:
                break
        return Place(node, depth)

    def insert(self, tokens: np.ndarray, place: Place) -> Node:
        """Add `tokens` [L] at `place`; returns the segment in which they end."""
        node, depth = place.node, place.depth
        if depth == len(tokens):
            return node
        if depth < node.end:
            node = self._split(node, depth)
        leaf = Node(tokens, depth, len(tokens), node)
        node.children[self._key(tokens, depth)] = leaf
        return leaf

    def segments(self) -> list[Node]:
        """All segments depth first, a parent before its children, siblings in order of arrival."""
        ordered, stack = [], [self.root]
        while stack:
            node = stack.pop()
            ordered.append(node)
            stack.extend(reversed(node.children.values()))
        return ordered[1:]

    def _key(self, tokens: np.ndarray, depth: int) -> Any:
        following = int(tokens[depth + 1]) if depth + 1 < len(tokens) else -1
        return int(tokens[depth]), following

    def _split(self, node: Node, depth: int) -> Node:
        # The upper half is the new node, so that leaves remembered by their samples stay leaves.
        upper = Node(node.tokens, node.start, depth, node.parent)
        node.parent.children[self._key(node.tokens, node.start)] = upper
        upper.children[self._key(node.tokens, depth)] = node
        node.start, node.parent = depth, upper
        return upper


class Chains(Trie):
    """Shares nothing: every sample is one segment below the root (PACK-8)."""

    def find(self, tokens: np.ndarray) -> Place:
        return Place(self.root, 0)

    def _key(self, tokens: np.ndarray, depth: int) -> Any:
        return len(self.root.children)


def _num_shared(node: Node, tokens: np.ndarray) -> int:
    """Positions of `node`, from its start, that `tokens` shares; the first of them is known to be shared."""
    # One token beyond the segment is compared too: it is the next token of the segment's last position.
    ours, theirs = tokens[node.start : node.end + 1], node.tokens[node.start : node.end + 1]
    shorter = min(len(ours), len(theirs))
    differs = ours[:shorter] != theirs[:shorter]
    first = int(differs.argmax()) if shorter else 0
    if differs[first]:
        return first - 1
    # Equal to the end of both: the whole segment. Otherwise one of them ends here and the other goes on.
    return node.end - node.start if len(ours) == len(theirs) else shorter - 1
