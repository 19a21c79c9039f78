"""Pages: nobody's page is given out twice, and what is found by its digest is what was asked for."""

import hypothesis.strategies as st
from hypothesis import given, settings

from sparring.engine.kv import Idle, KvCache, PagePool

PAGE = 4


def cache(num_pages=8, share=True):
    return KvCache(num_pages, PAGE, share_prefixes=share)


def filled(kv, tokens, version=0):
    """Pages of `tokens` as a sequence that computed all of them would hold."""
    pages, digests = kv.take(kv.pages_for(len(tokens))), []
    kv.publish(pages, tokens, len(tokens), version, digests)
    return pages


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


def test_a_conversation_goes_on_from_all_its_tokens():
    kv = cache(share=False)
    tokens = list(range(10))
    pages = filled(kv, tokens)
    kv.park("a", Idle(tokens, pages, version=3))
    assert kv.resume("a", [*tokens, 77, 78], 3, []) == (pages, 10)
    assert kv.resume("a", [*tokens, 77, 78], 3, []) == ([], 0)


def test_the_last_token_is_always_left_to_compute():
    kv = cache(share=False)
    tokens = list(range(8))
    kv.park("a", Idle(tokens, filled(kv, tokens), version=0))
    _, known = kv.resume("a", tokens, 0, [])
    assert known == 4


def test_where_a_conversation_diverges_only_full_pages_are_reused():
    kv = cache(share=False)
    tokens = list(range(10))
    pages = filled(kv, tokens)
    kv.park("a", Idle(tokens, pages, version=0))
    assert kv.resume("a", [0, 1, 2, 3, 4, 5, 99, 98, 97], 0, []) == (pages[:1], 4)
    assert kv.pool.num_free == 7


def test_another_version_is_never_served():
    kv = cache()
    tokens = list(range(10))
    kv.park("a", Idle(tokens, filled(kv, tokens, version=1), version=1))
    assert kv.resume("a", [*tokens, 1], 2, []) == ([], 0)
    assert kv.pool.num_free == 8


def test_release_of_other_versions_leaves_this_one():
    kv = cache()
    for name, version in (("a", 1), ("b", 2)):
        kv.park(name, Idle([1, 2], kv.take(1), version))
    kv.release_other_versions(2)
    assert kv.pool.num_free == 7
    assert kv.resume("b", [1, 2, 3], 2, [])[1] == 2


def test_full_pages_are_found_by_what_they_hold_even_after_they_were_freed():
    kv = cache()
    tokens = list(range(9))
    pages = filled(kv, tokens)
    digests = []
    assert kv.resume(None, [*tokens, 50], 0, digests) == (pages[:2], 8)
    assert len(digests) == 2
    kv.drop(pages)
    kv.drop(pages[:2])
    assert kv.resume(None, tokens, 0, [])[0] == pages[:2]


def test_the_last_token_is_left_to_compute_though_its_page_is_full():
    kv = cache()
    pages = filled(kv, list(range(8)))
    digests = []
    assert kv.resume(None, list(range(8)), 0, digests) == (pages[:2], 7)
    assert len(digests) == 2
    assert kv.resume(None, list(range(7)), 0, []) == (pages[:1], 4)


def test_equal_pages_after_different_beginnings_are_different():
    kv = cache()
    filled(kv, [0, 0, 0, 0, 5, 5, 5, 5])
    assert kv.resume(None, [1, 1, 1, 1, 5, 5, 5, 5, 9], 0, []) == ([], 0)


def test_a_page_given_out_again_is_not_found_any_more():
    kv = cache(num_pages=2)
    tokens = list(range(8))
    kv.drop(filled(kv, tokens))
    kv.take(2)
    assert kv.resume(None, [*tokens, 1], 0, []) == ([], 0)


def test_idle_conversations_give_way_least_recently_used_first():
    kv = cache(num_pages=3, share=False)
    for name in "abc":
        kv.park(name, Idle([1, 2], kv.take(1), 0))
    assert kv.take(1, spare=3) is None
    assert len(kv.take(2)) == 2
    assert kv.resume("a", [1, 2, 3], 0, []) == kv.resume("b", [1, 2, 3], 0, []) == ([], 0)
    assert kv.resume("c", [1, 2, 3], 0, [])[1] == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["start", "park", "finish", "crowd"]), st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_pages_are_conserved_and_reused_ones_hold_the_right_tokens(actions):
    """Against a model of the memory: what each page holds, written when a sequence computes it."""
    kv, memory, live = cache(num_pages=12), {}, []
    for action, number, name in actions:
        if action == "start":
            tokens = [i // 3 for i in range(4 + 2 * number)] + [name]
            digests = []
            pages, known = kv.resume(str(name), tokens, 0, digests)
            fresh = kv.take(kv.pages_for(len(tokens)) - len(pages))
            if fresh is None:
                kv.drop(pages)
                continue
            pages = pages + fresh
            assert [memory[pages[i // PAGE], i % PAGE] for i in range(known)] == tokens[:known]
            memory.update({(pages[i // PAGE], i % PAGE): tokens[i] for i in range(known, len(tokens))})
            kv.publish(pages, tokens, len(tokens), 0, digests)
            live.append((tokens, pages))
        elif live:
            tokens, pages = live.pop(number % len(live))
            if action == "park":
                kv.park(str(name), Idle(tokens, pages, 0))
            else:
                kv.drop(pages)
        for tokens, pages in live:
            assert [memory[pages[i // PAGE], i % PAGE] for i in range(len(tokens))] == tokens
    for _, pages in live:
        kv.drop(pages)
    for name in range(4):
        kv.release(str(name))
    assert kv.pool.num_free == 12
    assert not any(kv.pool.references)


def test_a_page_that_is_shared_and_not_full_is_copied_for_whoever_goes_on_in_it():
    kv = cache(share=False)
    live = kv.take(2)
    for name in ("a", "b"):
        kv.share(name, [1, 2, 3, 4, 5], live, 0)
    (first, known), copies = kv.resume("a", [1, 2, 3, 4, 5, 6], 0, []), kv.take_copies()
    assert known == 5 and first[0] == live[0] and copies == [(live[1], first[1])] and first[1] not in live
    kv.drop(live)
    assert kv.resume("b", [1, 2, 3, 4, 5, 7], 0, []) == (live, 5)
    assert kv.take_copies() == []
    kv.drop(live)
    kv.drop(first)
    assert kv.pool.num_free == 8


def test_a_page_that_is_written_in_again_is_not_found_as_what_it_was():
    kv = cache()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    live = filled(kv, tokens)
    kv.share("a", tokens[:6], live, 0)
    kv.drop(live)
    assert kv.resume("a", [*tokens[:6], 9, 9, 9], 0, []) == (live, 6)
    assert kv.resume(None, [*tokens, 1], 0, []) == (live[:1], 4)


def test_without_room_for_a_copy_only_full_pages_are_shared():
    kv = cache(num_pages=2, share=False)
    live = kv.take(2)
    kv.share("a", [1, 2, 3, 4, 5], live, 0)
    assert kv.resume("a", [1, 2, 3, 4, 5, 6], 0, []) == (live[:1], 4)
    assert kv.take_copies() == [] and kv.pool.references == [2, 1]
