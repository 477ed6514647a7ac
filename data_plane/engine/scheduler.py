"""Which tokens run in the next step: one budget, one rule — `num_computed` chases `num_tokens`.

Prefill, a chunk of it, decode and recomputation after preemption are the same thing with different distances.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from data_plane.engine.kv_cache import BlockPool
from data_plane.engine.request import Sequence

_LOOK_AHEAD = 32
# a token whose logits are wanted costs a row of the vocabulary's size and a look at all of it
MOST_SCORED = 64


@dataclass(frozen=True)
class SchedulerLimits:
    """max_batched_tokens bounds a step's tokens; prefill_chunk bounds one sequence's share while others decode."""

    block_size: int
    max_num_seqs: int
    max_batched_tokens: int
    prefill_chunk: int
    prefix_cache: bool = True


@dataclass(frozen=True)
class Scheduled:
    """`count` tokens of `seq`, from seq.num_computed on, run in this step."""

    seq: Sequence
    count: int

    @property
    def samples(self) -> bool:
        return self.seq.num_computed + self.count == self.seq.num_tokens


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse and preemption by recompute.

    Running sequences go first, in order of arrival; when blocks run out, the latest gives way. Waiting ones follow in
    order, except that one whose prefix another is just computing waits for it instead of computing it again.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.running: list[Sequence] = []
        self._queue: deque[Sequence] = deque()
        self._live: dict[str, Sequence] = {}
        self._filling: dict[bytes, str] = {}
        self._alone: deque[str] = deque()
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.preemptions = 0
        self.cached_tokens = 0
        self.prefix_queries = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self.running)

    def get(self, id: str) -> Sequence | None:
        return self._live.get(id)

    def add(self, seq: Sequence) -> None:
        self._live[seq.id] = seq
        self._queue.append(seq)

    def finish(self, seq: Sequence) -> None:
        """Forget a sequence, wherever it is, and free what it holds."""
        if self._live.pop(seq.id, None) is None:
            return
        if seq.row >= 0:
            self.running.remove(seq)
            self._release(seq)
        elif len(self._queue) > 2 * self.num_waiting + 64:
            # ended sequences leave the queue when they reach its head; a long queue of them is swept
            self._queue = deque(waiting for waiting in self._queue if waiting.id in self._live)

    def isolate(self, ids: list[str]) -> None:
        """After a step failed: run these one at a time, so that the one at fault fails alone."""
        self._alone.extend(ids)

    def alone(self, seq: Sequence) -> Scheduled:
        """A step of a new sequence, as short as a block, by itself; others give way where there is no room."""
        self._live[seq.id] = seq
        while not (self._rows and self._admit(seq, [])):
            self._preempt(self.running[-1])
        return Scheduled(seq, seq.num_tokens)

    def schedule(self) -> list[Scheduled]:
        """The next step's work; empty only when nothing can run."""
        while self._alone:
            seq = self._live.get(self._alone.popleft())
            if seq is not None and seq.row >= 0:
                count = self._share(seq, self.limits.prefill_chunk)
                if self._grow(seq, count):
                    return [Scheduled(seq, count)]
        budget = self.limits.max_batched_tokens
        plan: list[Scheduled] = []
        budget = self._schedule_running(plan, budget)
        self._schedule_waiting(plan, budget)
        return plan

    def _schedule_running(self, plan: list[Scheduled], budget: int) -> int:
        place = 0
        # preempting shortens the list from its end, so it is walked by place
        while place < len(self.running) and budget > 0:
            seq = self.running[place]
            count = self._share(seq, budget)
            while not self._grow(seq, count):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is seq:
                    return budget
            plan.append(Scheduled(seq, count))
            budget -= count
            place += 1
        return budget

    def _share(self, seq: Sequence, budget: int) -> int:
        """How many of its tokens a sequence runs in this step."""
        most = min(budget, MOST_SCORED) if seq.unscored else budget
        return min(seq.num_tokens - seq.num_computed, most, self._chunk())

    def _chunk(self) -> int:
        return self.limits.prefill_chunk if len(self.running) > 1 else self.limits.max_batched_tokens

    def _schedule_waiting(self, plan: list[Scheduled], budget: int) -> None:
        passed: list[Sequence] = []
        while self._queue and budget > 0 and self._rows and len(passed) < _LOOK_AHEAD:
            seq = self._queue.popleft()
            if self._live.get(seq.id) is not seq:
                continue
            hits = self._prefix(seq)
            if hits is None:
                passed.append(seq)
                continue
            if not self._admit(seq, hits):
                passed.append(seq)
                break
            count = self._share(seq, budget)
            plan.append(Scheduled(seq, count))
            budget -= count
        self._queue.extendleft(reversed(passed))

    def _prefix(self, seq: Sequence) -> list[bytes] | None:
        """The cached prefix, or None to wait for a running sequence that computes more of it right now."""
        # what is not computed has no logits
        if not self.limits.prefix_cache or seq.unscored:
            return []
        # the last token always runs: its logits are wanted
        hashes = seq.hash_blocks((seq.num_tokens - 1) // self.limits.block_size, self.limits.block_size)
        count = self.pool.cached_prefix(hashes)
        if count < len(hashes) and hashes[count] in self._filling:
            return None
        return hashes[:count]

    def _admit(self, seq: Sequence, hits: list[bytes]) -> bool:
        """Give a waiting sequence its blocks for all it has to compute, or change nothing."""
        size = self.limits.block_size
        fresh = -(-seq.num_tokens // size) - len(hits)
        # one spare block a running sequence, so that admitting does not force a preemption at once
        spare = len(self.running)
        if fresh + self.pool.num_cached_free(hits) + spare > self.pool.num_free:
            return False
        seq.blocks = self.pool.take(hits)
        seq.blocks += self.pool.allocate(fresh) or []
        seq.num_computed = len(hits) * size
        seq.published = len(hits)
        seq.row = self._rows.pop()
        self.running.append(seq)
        if not seq.reported:
            seq.cached_tokens = seq.num_computed
            self.cached_tokens += min(seq.num_computed, seq.prompt_len)
            self.prefix_queries += seq.prompt_len
        for hash in seq.hashes[len(hits) :]:
            self._filling.setdefault(hash, seq.id)
        return True

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens of a running sequence."""
        missing = -(-(seq.num_computed + count) // self.limits.block_size) - len(seq.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        seq.blocks += blocks
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        self._queue.appendleft(seq)
        self.preemptions += 1
        seq.preempted += 1

    def _release(self, seq: Sequence) -> None:
        for hash in seq.hashes[seq.published :]:
            if self._filling.get(hash) == seq.id:
                del self._filling[hash]
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.num_computed = seq.published = 0
        self._rows.append(seq.row)
        seq.row = -1

    def computed(self, item: Scheduled) -> None:
        """Record that a scheduled part ran: its full blocks become findable."""
        seq, size = item.seq, self.limits.block_size
        seq.num_computed += item.count
        if not self.limits.prefix_cache:
            return
        full = seq.num_computed // size
        if full > seq.published:
            hashes = seq.hash_blocks(full, size)
            for place in range(seq.published, full):
                self.pool.publish(seq.blocks[place], hashes[place])
                if self._filling.get(hashes[place]) == seq.id:
                    del self._filling[hashes[place]]
            seq.published = full
