import gc

from sparring.stages.runtime.garbage import fewer_collections


def test_the_garbage_collector_is_as_before_at_the_end() -> None:
    tests = gc.get_threshold()
    try:
        for young in (700, 50_000):  # Python's, the program's
            gc.set_threshold(young)
            before = gc.get_threshold()
            with fewer_collections():
                assert gc.get_threshold()[0] >= max(young, 20_000)
                assert gc.get_freeze_count() > 0
            assert gc.get_threshold() == before
            assert gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*tests)
