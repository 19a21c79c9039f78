import gc

from sparring.stages.runtime.garbage import fewer_collections


def test_the_garbage_collector_is_as_before_at_the_end() -> None:
    before = gc.get_threshold()
    with fewer_collections():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
