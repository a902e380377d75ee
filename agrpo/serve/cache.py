"""Keys and values of running requests, in pools of equal slots.

A pool of capacity c holds requests of up to c tokens in one tensor per layer; running requests occupy slots 0..n-1
without holes, so that one batched matrix product over a view reads them all. A request that outgrows its pool moves to
the next capacity; pools grow and shrink within one budget of tokens, which is what admission and preemption obey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from agrpo.serve.request import Request

_SMALLEST_CAPACITY = 256  # tokens; short answers then share one pool, and one attention call


class Pool:
    """Slots of one capacity: `keys` and `values` are [layers, slots, kv heads, capacity, head size]."""

    def __init__(self, capacity: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device):
        self.capacity, self.requests = capacity, []
        layers, heads, head_size = shape
        self.keys = torch.zeros((layers, 0, heads, capacity, head_size), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    def resize(self, num_slots: int) -> None:
        """Keep the occupied slots. New memory is zeroed: masked positions are multiplied by 0, and 0 * NaN is NaN."""
        used = len(self.requests)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((old.shape[0], num_slots, *old.shape[2:]))
            new[:, :used] = old[:, :used]
            setattr(self, name, new)

    def append(self, request: Request) -> None:
        request.pool, request.slot = self, len(self.requests)
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        """Free a slot; the last occupied one moves into it."""
        slot, last = request.slot, self.requests.pop()
        request.pool, request.slot = None, -1
        if last is not request:
            self.keys[:, slot].copy_(self.keys[:, len(self.requests)])
            self.values[:, slot].copy_(self.values[:, len(self.requests)])
            last.slot = slot
            self.requests[slot] = last

    def clean(self, request: Request) -> None:
        """Zero a slot that may hold NaN, before its next owner multiplies it by 0."""
        self.keys[:, request.slot] = 0
        self.values[:, request.slot] = 0


class Cache:
    """All pools, within `num_tokens` tokens of slots."""

    def __init__(
        self, num_tokens: int, max_length: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ):
        self.num_tokens = num_tokens
        capacities = []
        capacity = _SMALLEST_CAPACITY
        while capacity < max_length:
            capacities.append(capacity)
            capacity *= 2
        self.pools = [Pool(c, shape, dtype, device) for c in [*capacities, max_length]]

    @property
    def active(self) -> list[Pool]:
        return [p for p in self.pools if p.requests]

    @property
    def used_tokens(self) -> int:
        return sum(r.length for p in self.pools for r in p.requests)

    def place(self, request: Request, num_tokens: int) -> bool:
        """Give a request a slot for `num_tokens` tokens; false when the budget is spent."""
        pool = next(p for p in self.pools if p.capacity >= num_tokens)
        if len(pool.requests) == pool.num_slots and not self._grow(pool):
            return False
        pool.append(request)
        return True

    def move(self, request: Request) -> bool:
        """Move a request that filled its slot to the next capacity; false when the budget is spent."""
        old, slot = request.pool, request.slot
        if not self.place(request, old.capacity + 1):
            return False
        new = request.pool
        new.keys[:, request.slot, :, : old.capacity] = old.keys[:, slot]
        new.values[:, request.slot, :, : old.capacity] = old.values[:, slot]
        new_slot = request.slot
        request.pool, request.slot = old, slot
        old.remove(request)
        request.pool, request.slot = new, new_slot
        return True

    def release(self, request: Request) -> None:
        request.pool.remove(request)

    def _grow(self, pool: Pool) -> bool:
        """Add an eighth to a pool, or what the budget leaves; the free slots of other pools are given back first."""
        others = sum(p.num_slots * p.capacity for p in self.pools if p is not pool)
        # Small steps: one burst of requests in a long run must not take twice the memory from then on.
        wanted = pool.num_slots + max(8, pool.num_slots // 8)
        if others + wanted * pool.capacity > self.num_tokens:
            others = self._shrink(pool)
        affordable = (self.num_tokens - others) // pool.capacity
        if affordable <= pool.num_slots:
            return False
        pool.resize(min(wanted, affordable))
        return True

    def _shrink(self, keep: Pool) -> int:
        """Drop the free slots of every pool but one; the tokens they still hold."""
        held = 0
        for pool in self.pools:
            if pool is not keep:
                if pool.num_slots > len(pool.requests):
                    pool.resize(len(pool.requests))
                held += pool.num_slots * pool.capacity
        return held
