"""The scheduler: which sequences run, and what of their texts is read in a step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from quickbeam.drafters.base import DrafterState
from quickbeam.engine.prefix_cache import Chunk, PrefixCache
from quickbeam.engine.proposing import SequenceProposal, fail
from quickbeam.engine.sequence import SequenceState
from quickbeam.models.base import Chain, Draft, Model, Part, end_of_chunk, images_between
from quickbeam.models.cache.kv import OutOfPages, Page

TREE = 64  # how many rows a sequence may need besides its tokens
# Where so many sequences may be active, the last slot is kept for tenants that have none active. It
# takes sequences of at most `SHORT` tokens, so that it is free again soon.
MANY_SLOTS = 8
SHORT = 1024
MAX_TENANTS = 4096  # how many tenants are remembered


class ScheduledPart(NamedTuple):
    """A sequence with its part of the next pass.

    `proposal` is its draft tree; None for a text that is read.
    """

    sequence: SequenceState
    part: Part
    proposal: SequenceProposal | None = None


_arrival = attrgetter("arrival")


class FairQueue:
    """Waiting sequences. The tenant that was served the fewest tokens is next, its first one first.

    This is start-time fair queueing (Goyal et al. 1996). A tenant that begins to wait counts as
    served as many tokens as the waiting tenant that was served fewest, or as many as when it last
    waited if these are more. Once nobody waits, all begin anew.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[SequenceState]] = {}  # by tenant, in order of arrival
        self._served: dict[Hashable, int] = {}  # tokens by tenant
        # the fewest tokens of a tenant that waited when a sequence was last taken
        self._least = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[SequenceState]:
        return iter([sequence for queue in self._queues.values() for sequence in queue])

    def add(self, sequence: SequenceState) -> None:
        """Add a sequence. It comes before those that arrived later, whichever was added first."""
        tenant = sequence.request.tenant
        if tenant not in self._queues:
            self._queues[tenant] = []
            self._served[tenant] = max(self._least, self._served.get(tenant, 0))
        insort(self._queues[tenant], sequence, key=_arrival)

    def heads(self) -> list[SequenceState]:
        """Return the first sequence of each tenant, in the order in which they are next."""
        tenants = sorted(self._queues, key=self._served.__getitem__)
        return [self._queues[tenant][0] for tenant in tenants]

    def take(self, sequence: SequenceState) -> None:
        """Remove a sequence that begins, at the cost of its tenant."""
        self._least = min(self._served[tenant] for tenant in self._queues)
        self._served[sequence.request.tenant] += sequence.cost
        self.remove(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence. Does nothing if it is not waiting."""
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant, [])
        if sequence in queue:
            queue.remove(sequence)
            if not queue:
                del self._queues[tenant]
                self._forget()

    def _forget(self) -> None:
        """Forget tenants that don't wait, if it makes no difference or if they are too many."""
        self._least = self._least if self._queues else 0
        remember = bool(self._queues) and len(self._served) <= MAX_TENANTS
        self._served = {
            tenant: tokens
            for tenant, tokens in self._served.items()
            if tenant in self._queues or (remember and tokens > self._least)
        }


class Scheduler:
    """`waiting` sequences, and `active` ones in order of arrival.

    At most `max_running` are active: their texts are read, or they run. A sequence is admitted when
    there is memory for its text, in the order of `FairQueue`. Where there are `MANY_SLOTS`, the
    last slot is left free for a short sequence of a tenant that has none active. If memory runs
    short later, the active sequence that came last is preempted: its text stays, its keys and
    values are computed again.
    """

    def __init__(self, model: Model, prefixes: PrefixCache, max_running: int) -> None:
        self.model = model
        self.prefixes = prefixes
        self.max_running = max_running
        self.pool = model.pool
        self.waiting = FairQueue()
        self.active: list[SequenceState] = []

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence that is over, and free what it holds."""
        sequence.release()
        if sequence in self.active:
            self.active.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def admit(self) -> None:
        """Make waiting sequences active, in order, as far as slots and memory allow."""
        while (sequence := self._next()) is not None:
            if self.active and not self._fits(sequence):
                return
            if self._prefix_in_prefill(sequence):
                return
            self.waiting.take(sequence)
            insort(self.active, sequence, key=_arrival)
            try:
                sequence.begin(self.pool.new())
                sequence.statistics.exact = self.model.exact
                self._reuse(sequence)
            except Exception as error:
                sequence.end("error", error)

    def _next(self) -> SequenceState | None:
        free = self.max_running - len(self.active)
        if free <= 0 or not self.waiting:
            return None
        heads = self.waiting.heads()
        if free > 1 or self.max_running < MANY_SLOTS or heads[0].request.tenant is None:
            return heads[0]
        served = {sequence.request.tenant for sequence in self.active}
        for sequence in heads:
            if sequence.cost <= SHORT and sequence.request.tenant not in served:
                return sequence
        return None

    def _fits(self, sequence: SequenceState) -> bool:
        """Whether a sequence's text and a tree fit without preempting an active sequence.

        What the active sequences are still going to read counts as taken.
        """
        if self.pool.limit is None:
            return True
        chunks = list[Chunk]()
        if not sequence.scoring:
            chunks = self.prefixes.find(sequence.prefix_key, sequence.drafter)
        cached_tokens = len(chunks) * self.prefixes.size
        needed = -(-(len(sequence.ids) - cached_tokens + TREE) // self.pool.page)
        needed += self.pool.most_state_pages
        reserved = len(self.active)
        for active in self.active:
            if active.cache is not None:
                reserved += active.cache.missing(len(active.ids) + 1)
        missing = needed + reserved - (self.pool.free or 0)
        # shared chunks that it is going to hold can't be dropped for it
        return missing <= 0 or missing <= self.prefixes.evictable_pages(chunks)

    def _prefix_in_prefill(self, sequence: SequenceState) -> bool:
        """Whether an active sequence is reading the same beginning right now.

        Waiting for it then saves reading that text twice.
        """
        if sequence.scoring:
            return False
        size = self.prefixes.size
        key = sequence.prefix_key
        for other in self.active:
            if other.started or not other.unread:
                continue
            # compares the chunks that the other has read and the one that it reads next
            behind = other.read // size * size
            shareable = min(len(key) - 1, len(other.request.prompt)) // size * size
            if shareable > behind and key[: behind + size] == other.prefix_key[: behind + size]:
                return True
        return False

    def _reuse(self, sequence: SequenceState) -> None:
        """Begin a sequence with the chunks that the prefix cache holds.

        They hold no log-probabilities, so a prompt whose tokens' are wanted is read anew.
        """
        if sequence.scoring:
            return
        prefixes = self.prefixes
        drafter = sequence.drafter
        state = sequence.draft_state
        end = len(sequence.ids) - sequence.started
        chunks = prefixes.find(sequence.prefix_key[:end], drafter)
        if not chunks:
            return
        assert sequence.cache is not None
        # looked up first, since making room for the drafter's rows may drop these chunks
        kv = [chunk.kv for chunk in chunks]
        snapshot = chunks[-1].snapshot
        if state is not None and drafter is prefixes.drafter:
            self._reuse_draft(state, chunks)
        sequence.cache.attach(kv, prefixes.size, snapshot)
        sequence.chunks = list(chunks)
        if not sequence.statistics.preemptions:  # after one, the chunks may hold its answer
            sequence.statistics.cached_tokens = len(chunks) * prefixes.size

    def _reuse_draft(self, state: DrafterState, chunks: Sequence[Chunk]) -> None:
        """Begin a drafter's state with the rows of the first chunks, if the drafter has read any.

        Of the other chunks it gets the hidden states, as far as they are kept.
        """
        rows = list[list[Page]]()
        for chunk in chunks:
            if chunk.draft is None:
                break
            rows.append(chunk.draft)
        hidden = [chunk.hidden for chunk in chunks[len(rows) :]]
        if rows:
            hidden.insert(0, chunks[len(rows) - 1].last_hidden)
        known_hidden = [states for states in hidden if states is not None]
        if rows or known_hidden:
            state.attach(rows, self.prefixes.size, known_hidden)

    def preempt(self, sequence: SequenceState) -> None:
        """Free all of an active sequence but its text, and let it wait again."""
        sequence.release()
        sequence.statistics.preemptions += 1
        self.active.remove(sequence)
        self.waiting.add(sequence)

    def fit_memory(self, scheduled: list[ScheduledPart]) -> list[ScheduledPart]:
        """Return the parts that can run.

        If the pool runs short, trees shrink to roots, and then the latest sequences are preempted.
        """
        if self._has_memory(scheduled):
            return scheduled
        scheduled = [_root_alone(part) for part in scheduled]
        while not self._has_memory(scheduled):
            last = self.active[-1]
            if len(self.active) == 1:
                pages = f"all {self.pool.limit} pages of keys and values are taken"
                fail(last, OutOfPages(f"{pages}: raise --kv-memory"))
                return []
            self.prefixes.remember(last, last.read)
            self.preempt(last)
            scheduled = [part for part in scheduled if part.sequence is not last]
        return scheduled

    def _has_memory(self, scheduled: Sequence[ScheduledPart]) -> bool:
        """Whether the parts fit, once what nobody holds is given up for them."""
        pool = self.pool
        if pool.limit is None:
            return True
        missing = 0
        for sequence, part, _ in scheduled:
            missing += part.cache.missing(sequence.read + part.rows + 1)
        while missing > (pool.free or 0) and pool.evict():
            pass
        # `free` is negative where the limit was lowered meanwhile
        return missing <= max(0, pool.free or 0)

    def to_read(self) -> list[ScheduledPart]:
        """Return the sequences whose text is read in this step, each with the part that is read.

        Where sequences run, or tenants may ask at any time, the passes over texts are short.
        """
        reading = [sequence for sequence in self.active if sequence.unread]
        if not reading:
            return []
        tenants = {sequence.request.tenant for sequence in reading}
        capacity = self.model.chunk
        if len(reading) < len(self.active) or len(tenants) > 1:
            capacity = self.model.mixed_chunk
        elif tenants != {None}:
            capacity = min(capacity, 2 * self.model.mixed_chunk)
        parts = list[ScheduledPart]()
        counts = shares([sequence.unread for sequence in reading], capacity)
        for sequence, count in zip(reading, counts, strict=True):
            if not count or sequence.cache is None:
                continue
            end = end_of_chunk(sequence.request.images, sequence.read, sequence.read + count)
            count = end - sequence.read
            ends_prompt = not sequence.started and end == len(sequence.request.prompt)
            wanted = count if sequence.scoring else int(ends_prompt)
            images = images_between(sequence.request.images, sequence.read, end)
            text = Chain(sequence.cache, sequence.ids[sequence.read : end], wanted, images)
            parts.append(ScheduledPart(sequence, text))
        return parts


def _root_alone(scheduled: ScheduledPart) -> ScheduledPart:
    """Return a part whose tree is its root; a text as it is."""
    part = scheduled.part
    if not isinstance(part, Draft):
        return scheduled
    return scheduled._replace(part=part._replace(tree=part.tree.first(1)))


def shares(unread: Sequence[int], capacity: int) -> list[int]:
    """Return how many tokens of each text are read in a step that reads `capacity` tokens at most.

    Half of them are of the text that came first, so that every text is read in time. The other half
    goes to those that have least to read: a short text does not wait for the end of a long one.
    """
    if not unread:
        return []
    counts = [0] * len(unread)
    counts[0] = min(unread[0], capacity - capacity // 2)
    left = capacity - counts[0]
    shortest_first = sorted(range(1, len(unread)), key=unread.__getitem__)
    for i in [*shortest_first, 0]:
        more = min(unread[i] - counts[i], left)
        counts[i] += more
        left -= more
    return counts
