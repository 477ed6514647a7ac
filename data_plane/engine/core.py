"""The engine's loop: receive, schedule, run, sample, finish, send.

A step that fails is not fatal: its sequences are run again one at a time, and only one that fails alone is ended. After
many failures in a row a token of nobody's is tried: where even that fails, the fault is the engine's, and it ends.
"""

from __future__ import annotations

import time

from data_plane import log
from data_plane.engine.ipc import EngineSocket
from data_plane.engine.kv_cache import BlockPool
from data_plane.engine.loader import Loaded, is_out_of_memory
from data_plane.engine.messages import (
    Abort,
    Add,
    Counters,
    FinishReason,
    FromEngine,
    Output,
    Progress,
    Rung,
    SamplingParams,
    Stop,
    ToEngine,
    Warm,
)
from data_plane.engine.request import Sequence
from data_plane.engine.runner import Sampled
from data_plane.engine.sampler import NOTHING
from data_plane.engine.scheduler import Scheduled, Scheduler
from data_plane.errors import StageLost

IDLE_TICK_S = 0.5
COMPILE_TICK_S = 0.002
_MOST_FAILURES = 20
_MOST_CHUNKS = 64
_DEAD_END = "what the reply is bound to cannot be written in this model's tokens"


class EngineCore:
    """State of the loop. `step` is one turn; `run` is the loop."""

    def __init__(self, loaded: Loaded) -> None:
        self._num_blocks, self._limits = loaded.num_blocks, loaded.limits
        self.pool = BlockPool(loaded.num_blocks)
        self.scheduler = Scheduler(self.pool, loaded.limits)
        self.going: Rung | None = None
        """Where it was told to go, once it has no work."""
        self.counters = Counters()
        self._runner = loaded.runner
        self._grammars = loaded.grammars
        self._eos = frozenset(loaded.spec.eos_token_ids)
        self._max_len = loaded.max_model_len
        self._failures_in_a_row = 0

    def release(self) -> None:
        """Give back what only a running engine needs; the weights stay in host memory."""
        self._runner.release()

    def restore(self) -> None:
        """Have again what `release` gave back, with nothing cached. Repeating is safe."""
        if self._runner.restore():
            self.pool = BlockPool(self._num_blocks)
            self.scheduler = Scheduler(self.pool, self._limits)

    def run(self, socket: EngineSocket) -> Rung | None:
        """Serve until told where to go next; None to stop, or once the other side is gone."""
        while True:
            idle = COMPILE_TICK_S if self._grammars.pending else IDLE_TICK_S
            messages = socket.receive(timeout_s=0.0 if self.scheduler.has_work else idle)
            if messages is None or not self.handle(messages):
                return None
            if self.going is not None and not self.scheduler.has_work:
                rung, self.going = self.going, None
                return rung
            if not messages and not self.scheduler.has_work:
                self._grammars.warm()
                self._runner.check()
            if not socket.send(self.turn()):
                return None

    def turn(self) -> list[FromEngine]:
        """Admit what has been compiled, then one step if there is work; always says how things are."""
        refused = self._admit_compiled()
        return [*refused, *(self.step() if self.scheduler.has_work else [self._progress(0.0, [])])]

    def _admit_compiled(self) -> list[FromEngine]:
        refused: list[FromEngine] = []
        for seq, reason in self._grammars.ready():
            if reason:
                refused.append(Output(seq.id, [], "refused", error=reason))
            else:
                self.scheduler.add(seq)
        return refused

    def handle(self, messages: list[ToEngine]) -> bool:
        """Take in what arrived. False to stop."""
        for message in messages:
            if isinstance(message, Add):
                seq = Sequence(message.id, list(message.prompt), len(message.prompt), message.params, message.salt)
                if message.params.grammar:
                    self._grammars.compile(seq)
                else:
                    self.scheduler.add(seq)
            elif isinstance(message, Abort):
                for id in message.ids:
                    if self._grammars.forget(id):
                        continue
                    live = self.scheduler.get(id)
                    if live is not None:
                        self.scheduler.finish(live)
            elif isinstance(message, Warm):
                self.going = message.rung
            elif isinstance(message, Stop):
                return False
        return True

    def step(self) -> list[FromEngine]:
        """One step; its outputs, then a Progress."""
        started = time.monotonic()
        plan = self.scheduler.schedule()
        if not plan:
            return [self._progress(0.0, plan)]
        moved = self._runner.bytes_moved(plan)
        try:
            sampled = self._runner.run(plan)
        except StageLost:
            raise
        except Exception as error:
            return [*self._failed(plan, error), self._progress(time.monotonic() - started, plan)]
        self._failures_in_a_row = 0
        self.counters.steps += 1
        outputs: list[FromEngine] = []
        for item in plan:
            if item.seq.scheduled_at == 0.0:
                item.seq.scheduled_at = started
            if item.seq.num_computed < item.seq.prompt_len and not item.seq.reported:
                self.counters.prompt_tokens += min(item.count, item.seq.prompt_len - item.seq.num_computed)
                if len(item.seq.chunks) < _MOST_CHUNKS:
                    item.seq.chunks.append((started, item.count))
            result = sampled.get(item.seq.id)
            if result is not None and result.token == NOTHING:
                outputs.append(self._no_token(item.seq))
                continue
            self.scheduler.computed(item)
            if result is not None:
                outputs.append(self._append(item.seq, result))
                self.counters.generated_tokens += not item.seq.params.embed
        return [*outputs, self._progress(time.monotonic() - started, plan, moved)]

    def _no_token(self, seq: Sequence) -> Output:
        """End a sequence for which no token was possible. What it has computed does not get into the prefix cache."""
        self.scheduler.finish(seq)
        if seq.matcher is not None:
            return Output(seq.id, [], "refused", error=_DEAD_END)
        log.event("no_numbers", level="error", computed=seq.num_computed)
        return Output(seq.id, [], "error", error="the model gave no numbers for this request")

    def _append(self, seq: Sequence, sampled: Sampled) -> Output:
        if seq.params.embed:
            self.scheduler.finish(seq)
            return Output(seq.id, [], "stop", None, seq.cached_tokens, seq.scheduled_at, vector=sampled.vector)
        token, logprob = sampled.token, sampled.logprob
        seq.tokens.append(token)
        finish = self._finish_reason(seq, token)
        first = not seq.reported
        preempted, seq.preempted, seq.reported = seq.preempted, 0, True
        if finish is not None:
            self.scheduler.finish(seq)
        return Output(
            seq.id,
            [token],
            finish,
            [logprob] if logprob is not None else None,
            seq.cached_tokens if first else 0,
            seq.scheduled_at if first else 0.0,
            _DEAD_END if finish == "refused" else "",
            prompt_logprobs=seq.scored if first and seq.params.prompt_logprobs >= 0 else None,
            chunks=seq.chunks if first else None,
            preempted=preempted,
        )

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        params = seq.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return "stop"
        if seq.matcher is not None:
            seq.matcher.consume_token(token)
            if seq.matcher.is_error():
                return "refused"
            if seq.matcher.is_stopped():
                return "stop"
        if seq.num_generated >= params.max_tokens or seq.num_tokens >= self._max_len:
            return "length"
        return None

    def _failed(self, plan: list[Scheduled], error: Exception) -> list[FromEngine]:
        """The step raised. Nothing of it was recorded, so its sequences can simply run again, apart."""
        self.counters.step_errors += 1
        self._failures_in_a_row += 1
        memory = is_out_of_memory(error)
        self.counters.out_of_memory += memory
        log.event("step_failed", level="error", kind=type(error).__name__, sequences=len(plan), out_of_memory=memory)
        if self._failures_in_a_row > _MOST_FAILURES:
            self._probe()
        if len(plan) > 1:
            self.scheduler.isolate([item.seq.id for item in plan])
            return []
        seq = plan[0].seq
        self.scheduler.finish(seq)
        return [Output(seq.id, [], "error", error="out of memory" if memory else "the engine failed on this request")]

    def _probe(self) -> None:
        """Run a token of nobody's; raises what the model raises even then."""
        seq = Sequence("", [0], 1, SamplingParams(max_tokens=1, temperature=0.0), b"")
        item = self.scheduler.alone(seq)
        try:
            self._runner.run([item])
        finally:
            self.scheduler.finish(seq)
        self._failures_in_a_row = 0

    def _progress(self, seconds: float, plan: list[Scheduled], moved: int = 0) -> Progress:
        counters = self.counters
        counters.preemptions = self.scheduler.preemptions
        counters.cached_tokens = self.scheduler.cached_tokens
        counters.prefix_queries = self.scheduler.prefix_queries
        return Progress(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting + self._grammars.pending,
            blocks_used=self.pool.num_used,
            blocks_cached=self.pool.num_cached,
            step_s=seconds,
            batch_tokens=sum(item.count for item in plan),
            bytes_moved=moved,
            counters=counters,
        )
