"""Blocks of parameters: how they are cut, and the norm over them."""

import pytest
import torch

from sparring.train.blocks import BLOCK, block_squares, norm_of, stretches


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_stretches_of_whole_blocks_and_nearly_equal(count):
    sizes = {"embedding": 21 * BLOCK + 5, "norm": 64, "matrix": 8 * BLOCK, "scalar": 1}
    shards = stretches(sizes, count)
    for name, size in sizes.items():
        parts = [shard[name] for shard in shards if name in shard]
        assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])] and parts[-1][1] == size
        assert all(end % BLOCK == 0 for _, end in parts[:-1])
    held = [sum(end - begin for begin, end in shard.values()) for shard in shards]
    assert max(held) - min(held) <= 2 * BLOCK


def test_a_model_of_few_blocks_leaves_ranks_without_a_share():
    assert [len(shard) for shard in stretches({"a": 3}, 3)] == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_does_not_depend_on_the_cut(dtype):
    values = torch.randn(5 * BLOCK + 17, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = block_squares(values)
    for cut in (BLOCK, 3 * BLOCK):
        assert block_squares(values[:cut]) + block_squares(values[cut:]) == whole
    assert len(whole) == 6 and norm_of(whole) == norm_of(reversed(whole))
    assert norm_of(whole) == pytest.approx(values.double().norm().item(), rel=1e-12)


def test_tensors_computed_together_have_the_bits_of_each_block_added_in_halves():
    def added(row: list[float]) -> float:
        row = [value * value for value in row] + [0.0] * (BLOCK - len(row))
        while (half := len(row) // 2) > 0:
            row = [a + b for a, b in zip(row[:half], row[half:], strict=True)]
        return row[0]

    random = torch.Generator().manual_seed(2)
    sizes = [512, 64, 1, 3, 4095, 4096, 4097, 0, 600 * BLOCK, 128]
    for given in ([torch.randn(size, generator=random) for size in sizes], [torch.randn(8, 64), torch.randn(200, 8)]):
        together = block_squares(*given)
        assert together == [square for values in given for square in block_squares(values)]
        blocks = [block.tolist() for values in given[:8] for block in values.reshape(-1).split(BLOCK) if len(block)]
        assert together[: len(blocks)] == list(map(added, blocks))


def test_a_norm_that_float32_cannot_hold_is_still_finite_and_others_are_not():
    assert norm_of(block_squares(torch.full((4,), 1e30))) == pytest.approx(2e30)
    for spoilt in (float("inf"), float("nan")):
        assert not norm_of(block_squares(torch.tensor([1.0, spoilt]))) < float("inf")
