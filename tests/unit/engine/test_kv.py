"""Pages: nobody's page is given out twice, and what is found by its digest is what was asked for."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from sparring.engine.cache.kv import KvCache, PageCopy
from sparring.engine.cache.pages import PagePool

PAGE = 4


def cache(num_pages=8, share=True):
    return KvCache(num_pages, PAGE, share_prefixes=share)


def filled(kv, tokens, version=0):
    """Pages of `tokens` as a sequence that computed all of them would hold."""
    pages, digests = kv.take(kv.pages_for(len(tokens))), []
    kv.publish(pages, tokens, len(tokens), version, digests)
    return pages


def park(kv, name, tokens, pages, version=0):
    """What is left when a sequence that held these pages has ended."""
    kv.park(name, tokens, pages, version)
    kv.drop(pages)


def resume(kv, name, tokens, version, digests):
    """The pages of a request that hold something already, and of how many tokens; the others are given back."""
    allocation = kv.allocate(name, tokens, kv.pages_for(len(tokens)), version, digests, 0)
    found = kv.pages_for(allocation.num_cached)
    kv.drop(allocation.pages[found:])
    return allocation.pages[:found], allocation.num_cached


def test_taken_pages_are_distinct_and_run_out():
    kv = cache()
    pages = kv.take(8)
    assert sorted(pages) == list(range(8))
    assert kv.take(1) is None
    kv.drop(pages[:3])
    assert kv.take(4) is None
    assert len(kv.take(3)) == 3


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(1)
    page = pool.take()
    pool.hold(page)
    pool.drop(page)
    assert pool.num_free == 0
    pool.drop(page)
    assert pool.num_free == 1


TEN = list(range(10))
OWN, EQUAL = [0, 0, 0, 0, 5, 5, 5, 5], [1, 1, 1, 1, 5, 5, 5, 5]


@pytest.mark.parametrize(
    ("share", "kept", "name", "asked", "version", "known"),
    [
        pytest.param(False, TEN, "a", [*TEN, 77, 78], 0, 10, id="all tokens of a conversation"),
        pytest.param(False, TEN[:8], "a", TEN[:8], 0, 4, id="the last token is left to compute"),
        pytest.param(False, TEN, "a", [*TEN[:7], 98, 97], 0, 4, id="of what diverges only full pages"),
        pytest.param(True, TEN, "a", [*TEN, 1], 1, 0, id="other weights"),
        pytest.param(True, TEN[:8], None, TEN[:8], 0, 7, id="the last token of a full page is left to compute"),
        pytest.param(True, TEN[:8], None, TEN[:7], 0, 4, id="full pages of another's beginning"),
        pytest.param(True, OWN, None, [*EQUAL, 9], 0, 0, id="equal pages after different beginnings"),
    ],
)
def test_a_request_goes_on_from_what_is_kept(share, kept, name, asked, version, known):
    kv = cache(share=share)
    pages = filled(kv, kept)
    kv.park("a", kept, pages, 0)
    if name:
        kv.drop(pages)
    found = kv.pages_for(known)
    assert resume(kv, name, asked, version, []) == (pages[:found], known)
    assert kv.pool.num_free == 8 - (found if name else len(pages)), "what is not gone on from is given back"
    assert resume(kv, name or "b", asked, 1, []) == ([], 0)


def test_release_of_a_version_leaves_the_others():
    kv = cache()
    for name, version in (("a", 1), ("b", 2)):
        park(kv, name, [1, 2], kv.take(1), version)
    assert kv.release_weights(1) == ["a"]
    assert kv.pool.num_free == 7
    assert resume(kv, "b", [1, 2, 3], 2, [])[1] == 2


def test_full_pages_are_found_by_their_contents_even_after_they_were_freed():
    kv = cache()
    tokens = list(range(9))
    pages = filled(kv, tokens)
    digests = []
    assert resume(kv, None, [*tokens, 50], 0, digests) == (pages[:2], 8)
    assert len(digests) == 2
    kv.drop(pages)
    kv.drop(pages[:2])
    assert resume(kv, None, tokens, 0, [])[0] == pages[:2]


def test_a_page_given_out_again_is_not_found_any_more():
    kv = cache(num_pages=3)
    tokens = list(range(8))
    kv.drop(filled(kv, tokens))
    kv.drop(kv.take(3))
    assert resume(kv, None, [*tokens, 1], 0, []) == ([], 0)


def test_renewed_pages_hold_nothing_and_the_same_ones_are_written_again():
    kv = cache()
    tokens = list(range(8))
    pages, held = filled(kv, tokens), kv.take(1)
    kv.drop(pages)
    kv.pool.renew()
    assert resume(kv, None, [*tokens, 99], 0, []) == ([], 0)
    kv.pool.renew()
    assert held == [2] and kv.take(7) == [0, 1, 3, 4, 5, 6, 7]


def test_idle_conversations_give_way_least_recently_used_first():
    kv = cache(num_pages=3, share=False)
    for name in "abc":
        park(kv, name, [1, 2], kv.take(1), 0)
    assert kv.take(1, spare=3) is None
    taken = kv.take(2)
    assert len(taken) == 2
    kv.drop(taken)
    assert resume(kv, "a", [1, 2, 3], 0, []) == resume(kv, "b", [1, 2, 3], 0, []) == ([], 0)
    assert resume(kv, "c", [1, 2, 3], 0, [])[1] == 2


actions = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "keep", "fork", "finish", "trim"]), st.integers(0, 5), st.integers(0, 3)
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(actions, st.sampled_from([0, 5, 40]), st.sampled_from([None, 3]), st.booleans())
def test_pages_are_conserved_and_reused_ones_hold_the_right_tokens(actions, host_pages, idle_pages, share):
    """Against a model of the memory: what each page holds, written when a sequence computes it, copied when that is
    asked for."""
    kv = KvCache(12, PAGE, share_prefixes=share, host_pages=host_pages, idle_pages=idle_pages)
    memory, host, live = {}, {}, []
    ways = {"within": (memory, memory), "out": (memory, host), "back": (host, memory)}
    for action, number, name in actions:
        if action == "start":
            tokens = [i // 3 for i in range(4 + 2 * number)] + [name]
            digests = []
            allocation = kv.allocate(str(name), tokens, kv.pages_for(len(tokens)), 0, digests, 1)
            for way, source, target in kv.take_copies():
                before, after = ways[way]
                after.update({(target, i): before.get((source, i)) for i in range(PAGE)})
            if allocation is None:
                continue
            pages, known = allocation[:2]
            assert known >= allocation.num_parked + allocation.num_restored
            assert [memory[pages[i // PAGE], i % PAGE] for i in range(known)] == tokens[:known]
            memory.update({(pages[i // PAGE], i % PAGE): tokens[i] for i in range(known, len(tokens))})
            kv.publish(pages, tokens, len(tokens), 0, digests)
            live.append((tokens, pages))
        elif action == "trim":
            kv.trim()
            assert idle_pages is None or kv.pool.num_idle <= idle_pages
        elif action == "fork" and live:
            tokens, pages = live[number % len(live)]
            kv.park(str(name), tokens[: len(tokens) - number], pages[: kv.pages_for(len(tokens) - number)], 0)
        elif live:
            tokens, pages = live.pop(number % len(live))
            if action == "keep":
                kv.park(str(name), tokens, pages, 0)
            kv.drop(pages)
        for tokens, pages in live:
            assert [memory[pages[i // PAGE], i % PAGE] for i in range(len(tokens))] == tokens
        assert kv.num_available == 12 - len({page for _, pages in live for page in pages})
    for _, pages in live:
        kv.drop(pages)
    for name in range(4):
        kv.release(str(name))
    for pool in (kv.pool, kv.host):
        assert pool.num_free == pool.num_pages and pool.num_idle == 0
        assert not any(pool.references)


def test_a_shared_partial_page_is_copied_for_its_writer():
    kv = cache(share=False)
    live = kv.take(2)
    for name in ("a", "b"):
        kv.park(name, [1, 2, 3, 4, 5], live, 0)
    (first, known), copies = resume(kv, "a", [1, 2, 3, 4, 5, 6], 0, []), kv.take_copies()
    assert (
        known == 5
        and first[0] == live[0]
        and copies == [PageCopy("within", live[1], first[1])]
        and first[1] not in live
    )
    kv.drop(live)
    assert resume(kv, "b", [1, 2, 3, 4, 5, 7], 0, []) == (live, 5)
    assert kv.take_copies() == []
    kv.drop(live)
    kv.drop(first)
    assert kv.pool.num_free == 8


def test_a_rewritten_page_is_not_found_by_its_old_contents():
    kv = cache()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    live = filled(kv, tokens)
    kv.park("a", tokens[:6], live, 0)
    kv.drop(live)
    assert resume(kv, "a", [*tokens[:6], 9, 9, 9], 0, []) == (live, 6)
    assert resume(kv, None, [*tokens, 1], 0, []) == (live[:1], 4)


def test_without_room_for_a_copy_a_request_waits_and_its_full_pages_stay_kept():
    kv = cache(num_pages=2, share=False)
    live = kv.take(2)
    kv.park("a", [1, 2, 3, 4, 5], live, 0)
    assert kv.allocate("a", [1, 2, 3, 4, 5, 6], 2, 0, [], 0) is None
    assert kv.take_copies() == [] and kv.pool.references == [2, 1]
    kv.drop(live)
    assert resume(kv, "a", [1, 2, 3, 4, 5, 6], 0, []) == (live[:1], 4)


def away(num_pages=4, host_pages=8, share=False):
    return KvCache(num_pages, PAGE, share_prefixes=share, host_pages=host_pages)


def hosted(kv):
    """Pages in host memory that are held."""
    return kv.host.num_pages - kv.host.num_free


def test_an_evicted_conversation_moves_to_host_memory_and_back():
    kv, tokens = away(), list(range(10))
    first = kv.take(3)
    park(kv, "a", tokens, first)
    other = kv.take(4)
    out = kv.take_copies()
    assert [copy[:2] for copy in out] == [("out", page) for page in first]
    kv.drop(other)
    allocation = kv.allocate("a", [*tokens, 7, 7, 7], 4, 0, [], 0)
    assert (allocation.num_cached, allocation.num_parked, allocation.num_restored, len(set(allocation.pages))) == (
        10,
        0,
        10,
        4,
    )
    assert kv.take_copies() == [
        PageCopy("back", copy.target, page) for copy, page in zip(out, allocation.pages, strict=False)
    ]
    park(kv, "a", [*tokens, 7, 7, 7], allocation.pages)
    assert hosted(kv) == 0


def test_full_host_memory_evicts_the_oldest_conversation():
    kv = away(num_pages=2, host_pages=4)
    for name in "abc":
        park(kv, name, [1, 2, 3, 4, 5], kv.take(2))
    kv.drop(kv.take(2))
    assert kv.counts.evictions == 1 and hosted(kv) == 4
    assert resume(kv, "a", [1, 2, 3, 4, 5, 6], 0, []) == ([], 0)
    assert kv.allocate("b", [1, 2, 3, 4, 5, 6], 2, 0, [], 0).num_restored == 5


def test_a_conversation_larger_than_host_memory_evicts_none_there():
    kv = away(num_pages=4, host_pages=2)
    park(kv, "small", [1, 2, 3, 4, 5], kv.take(2))
    kv.drop(kv.take(4))
    park(kv, "large", list(range(16)), kv.take(4))
    kv.drop(kv.take(4))
    assert kv.counts.evictions == 1
    assert kv.allocate("small", [1, 2, 3, 4, 5, 6], 2, 0, [], 0).num_restored == 5


def test_pages_in_host_memory_are_not_copied_there_again():
    kv, tokens = away(num_pages=4, share=True), list(range(10))
    pages = filled(kv, tokens)
    park(kv, "a", tokens, pages)
    for count in (3, 1):  # all of them, and then the one that is not full
        kv.drop(kv.take(4))
        assert [copy.way for copy in kv.take_copies()] == ["out"] * count
        digests = []
        allocation = kv.allocate("a", [*tokens, 7], 3, 0, digests, 0)
        assert allocation.num_restored == 10 and len(digests) == 2
        assert [copy.way for copy in kv.take_copies()] == ["back"] * 3
        park(kv, "a", tokens, allocation.pages)


def test_restored_pages_are_found_by_other_requests():
    kv, tokens = away(num_pages=4, share=True), list(range(10))
    park(kv, "a", tokens, filled(kv, tokens))
    kv.drop(kv.take(4))
    allocation = kv.allocate("a", [*tokens, 7], 3, 0, [], 0)
    assert kv.allocate(None, [*tokens[:8], 9], 3, 0, [], 0).pages[:2] == allocation.pages[:2]


def test_pages_still_in_the_cache_are_not_copied_back():
    kv, tokens = away(num_pages=8, share=True), list(range(16))
    park(kv, "a", tokens, filled(kv, tokens))
    live = kv.allocate(None, tokens[:9], 3, 0, [], 0).pages
    kv.drop(kv.take(5))
    kv.take_copies()
    allocation = kv.allocate("a", [*tokens, 7], 5, 0, [], 0)
    assert allocation.pages[:2] == live[:2]
    assert (allocation.num_cached, allocation.num_parked, allocation.num_restored) == (16, 0, 8)
    assert [copy.way for copy in kv.take_copies()] == ["back"] * 2


def test_a_request_that_is_not_admitted_keeps_its_parked_pages():
    kv, tokens = away(num_pages=4), list(range(10))
    park(kv, "a", tokens, kv.take(3))
    for where in ("kept", "restored"):
        live = kv.take(1)
        assert kv.allocate("a", [*tokens, 7, 8, 9], 4, 0, [], 0) is None
        kv.drop(live)
        if where == "kept":
            kv.drop(kv.take(4))
    assert kv.allocate("a", [*tokens, 7, 8, 9], 4, 0, [], 0).num_restored == 10


def test_other_versions_and_released_conversations_leave_host_memory():
    kv = away(num_pages=2)
    for name, version in (("a", 1), ("b", 2), ("c", 2)):
        park(kv, name, [1, 2, 3, 4, 5], kv.take(2), version)
    kv.drop(kv.take(2))
    assert hosted(kv) == 6
    assert kv.release_weights(1) == ["a"]
    kv.release("b")
    assert hosted(kv) == 2
    assert kv.allocate("c", [1, 2, 3, 4, 5, 6], 2, 3, [], 0).num_cached == 0


def test_a_failed_step_drops_all_idle_pages():
    kv, tokens = away(num_pages=4, share=True), list(range(8))
    park(kv, "a", tokens, filled(kv, tokens))
    kv.drop(kv.take(4))
    park(kv, "b", [1, 2], kv.take(1))
    kv.invalidate()
    assert (kv.pool.num_free, hosted(kv), kv.host.num_pages) == (4, 0, 8)
    park(kv, "a", tokens, filled(kv, tokens))
    kv.take_copies()
    kv.drop(kv.take(4))
    assert [copy.way for copy in kv.take_copies()] == ["out", "out"]


def test_idle_conversations_hold_no_more_than_they_may():
    kv = KvCache(16, PAGE, share_prefixes=False, idle_pages=5)
    live = kv.take(4)
    kv.park("live", [1] * 16, live, 0)
    for name in "abc":
        park(kv, name, [1] * 8, kv.take(2))
    assert (kv.pool.num_idle, kv.pool.num_free) == (6, 6)
    kv.trim()
    assert (kv.pool.num_idle, kv.counts.evictions) == (4, 1)
    assert kv.allocate("live", [1] * 17, 5, 0, [], 0).num_cached == 16


def windowed(share=False, **settings):
    """A position reads itself and five before it."""
    return KvCache(8, PAGE, share_prefixes=share, window=6, **settings)


def test_unread_pages_are_returned_early_and_once():
    kv, tokens = windowed(), list(range(18))
    pages = kv.take(5)
    assert [kv.num_unread(count) for count in (0, 8, 9, 12, 13, 18)] == [0, 0, 1, 1, 2, 3]
    kv.drop_unread(pages, 0, 1)
    kv.drop_unread(pages, 1, 3)
    assert kv.pool.num_free == 6
    park(kv, "a", tokens, pages)
    assert (kv.pool.num_free, kv.pool.num_idle) == (6, 2)
    allocation = kv.allocate("a", [*tokens, 7, 7, 7], 6, 0, [], 0)
    assert (allocation.num_cached, allocation.pages[:5], kv.pool.num_free) == (18, pages, 5)
    kv.drop(allocation.pages)
    assert kv.pool.num_free == 8 and not any(kv.pool.references)


def test_a_diverging_conversation_without_its_window_is_recomputed():
    for cut, known in ((18, 18), (17, 16), (16, 16), (15, 0)):
        kv, tokens = KvCache(8, PAGE, share_prefixes=False, window=8), list(range(18))
        pages = kv.take(5)
        park(kv, "a", tokens, pages)
        assert kv.allocate("a", [*tokens[:cut], 99, 99], kv.pages_for(cut + 2), 0, [], 0).num_cached == known


def test_pages_returned_early_are_neither_copied_nor_found():
    """Nor does it need room, there or here."""
    kv, tokens = windowed(share=True, host_pages=3), list(range(18))
    park(kv, "other", [1, 2], kv.take(1))
    pages = filled(kv, tokens)
    kv.drop_unread(pages, 0, 3)
    park(kv, "a", tokens, pages)
    others = kv.take(8)
    assert [copy.way for copy in kv.take_copies()] == ["out"] * 3 and kv.counts.evictions == 0
    kv.drop(others[:2])
    allocation = kv.allocate("a", [*tokens, 7], 5, 0, [], 0)
    assert (allocation.num_restored, [copy.way for copy in kv.take_copies()], kv.pool.num_free) == (18, ["back"] * 2, 0)
    kv.release("other")
    kv.drop(others[2:])
    assert kv.allocate(None, [*tokens[:12], 9], 4, 0, [], 0).num_cached == 0
    kv.release("a")
    assert hosted(kv) == 0


def test_a_page_that_another_is_still_filling_is_not_taken_for_full_in_host_memory():
    kv, tokens, digests = windowed(share=True, host_pages=8), list(range(20)), []
    pages = kv.take(5)
    kv.publish(pages, tokens, 18, 0, digests)
    kv.park("fork", tokens[:18], pages, 0)
    kv.publish(pages, tokens, 20, 0, digests)  # planned, not computed yet
    kv.drop_unread(pages, 0, 4)
    kv.take(7)
    assert [copy.way for copy in kv.take_copies()] == ["out"] * 2
    assert kv.host.find(digests[3]) is not None and kv.host.find(digests[4]) is None


def test_a_request_that_is_not_admitted_keeps_no_pages_still_being_filled():
    kv, tokens = cache(num_pages=4), list(range(12))
    own = filled(kv, tokens[:4])
    park(kv, "a", tokens[:4], own)
    others = kv.allocate(None, [*tokens[:8], 1], 3, 0, [], 0).pages
    kv.publish(others, tokens[:8], 8, 0, [])  # planned, not computed yet
    assert kv.allocate("a", tokens, 4, 0, [], 0) is None
    assert [kv.pool.references[page] for page in others] == [2, 1, 1]
