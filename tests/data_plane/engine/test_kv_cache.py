from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from data_plane.engine.kv_cache import BlockPool


def test_blank_blocks_are_used_before_cached_ones_and_cached_ones_oldest_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    pool.publish(first[0], b"first")
    pool.publish(second[0], b"second")
    pool.release(first)
    pool.release(second)
    blanks = pool.allocate(2)
    assert blanks is not None
    assert not {*blanks} & {*first, *second}
    assert pool.cached_prefix([b"first", b"second"]) == 2
    assert pool.allocate(1) == first
    assert pool.cached_prefix([b"first"]) == 0
    assert pool.cached_prefix([b"second"]) == 1


def test_the_end_of_a_chain_is_reused_before_its_beginning() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(3)
    assert chain is not None
    hashes = [b"0", b"1", b"2"]
    for block, hash in zip(chain, hashes, strict=True):
        pool.publish(block, hash)
    pool.release(chain)
    for left in (2, 1, 0):
        assert pool.allocate(1) is not None
        assert pool.cached_prefix(hashes) == left


def test_too_much_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) is not None
    assert pool.allocate(1) is None


def test_a_cached_block_in_use_is_not_free_to_take_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    assert pool.num_cached_free([b"a"]) == 0
    assert pool.take([b"a"]) == [blocks[0]]
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release([blocks[0]])
    assert pool.num_cached_free([b"a"]) == 1
    pool.check()


def test_the_first_block_with_a_content_stays_the_one_found() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"same")
    pool.publish(blocks[1], b"same")
    assert pool.take([b"same"]) == [blocks[0]]
    pool.check()


def test_the_check_sees_books_that_do_not_balance() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.check()


class Books(RuleBasedStateMachine):
    """The pool against a model of it: who holds which block, and what content each content block was given."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.owners = [0] * 6
        self.content: dict[int, bytes] = {}

    @rule(target=held, count=st.integers(1, 7))
    def allocate(self, count: int) -> object:
        free = sum(owners == 0 for owners in self.owners)
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
            return multiple()
        assert blocks is not None
        assert len(blocks) == count
        for block in blocks:
            assert self.owners[block] == 0, "a block in use was given away"
            self.owners[block] = 1
            self.content.pop(block, None)
        return blocks

    @rule(blocks=held, hash=st.sampled_from([b"a", b"b", b"c"]))
    def publish(self, blocks: list[int], hash: bytes) -> None:
        self.pool.publish(blocks[0], hash)
        if hash not in self.content.values() and blocks[0] not in self.content:
            self.content[blocks[0]] = hash

    @rule(target=held, hashes=st.permutations([b"a", b"b", b"c"]))
    def take(self, hashes: list[bytes]) -> object:
        count = self.pool.cached_prefix(hashes)
        where = {hash: block for block, hash in self.content.items()}
        assert count == next((place for place, hash in enumerate(hashes) if hash not in where), 3)
        if count == 0:
            return multiple()
        assert self.pool.num_cached_free(hashes[:count]) == sum(self.owners[where[h]] == 0 for h in hashes[:count])
        blocks = self.pool.take(hashes[:count])
        assert blocks == [where[hash] for hash in hashes[:count]]
        for block in blocks:
            self.owners[block] += 1
        return blocks

    @rule(blocks=consumes(held))
    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self.owners[block] -= 1

    @invariant()
    def balances(self) -> None:
        self.pool.check()
        assert self.pool.num_used == sum(owners > 0 for owners in self.owners)
        assert self.pool.num_used + self.pool.num_free == 6
        assert self.pool.num_cached == len(self.content)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
