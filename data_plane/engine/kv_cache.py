"""Who owns which block of the paged KV cache, and which full blocks can be found again by their prefix."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Reference-counted blocks with a prefix index.

    A block is free when nobody refers to it. Free blocks whose content is indexed stay findable and are reused last,
    oldest first; blank ones are reused first, latest first, so that memory never used stays untouched.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of unknown content, or None and no change if there are not as many."""
        if count > self.num_free:
            return None
        return [self._take_any() for _ in range(count)]

    def _take_any(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        hash = self._hash_of[block]
        if hash is not None:
            del self._block_of[hash]
            self._hash_of[block] = None

    def cached_prefix(self, hashes: list[bytes]) -> int:
        """How many leading blocks of the chain are in the cache."""
        count = 0
        for hash in hashes:
            if hash not in self._block_of:
                break
            count += 1
        return count

    def num_cached_free(self, hashes: list[bytes]) -> int:
        """How many of these cached blocks nobody refers to: taking them uses up free blocks."""
        return sum(self._references[self._block_of[hash]] == 0 for hash in hashes)

    def take(self, hashes: list[bytes]) -> list[int]:
        """Refer to the cached blocks of these hashes, all of which must be cached."""
        blocks = [self._block_of[hash] for hash in hashes]
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        return blocks

    def publish(self, block: int, hash: bytes) -> None:
        """Make a full block findable; if another block holds the same content, that one stays the one found."""
        if hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[hash] = block
            self._hash_of[block] = hash

    def release(self, blocks: list[int]) -> None:
        """Drop one reference each. Later blocks of a chain become reusable before earlier ones."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def check(self) -> None:
        """Raise AssertionError if the books don't balance."""
        free = [*self._blank, *self._cached]
        if len(set(free)) != len(free):
            raise AssertionError("a block is free twice")
        if any(self._references[block] for block in free):
            raise AssertionError("a free block is referred to")
        if sum(count > 0 for count in self._references) + len(free) != self.num_blocks:
            raise AssertionError("blocks were lost")
        if any(self._hash_of[block] != hash for hash, block in self._block_of.items()):
            raise AssertionError("the prefix index is off")
