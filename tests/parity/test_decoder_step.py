"""A step as one call of the compiled kernels is, to the bit, the step operation by operation."""

from array import array

import pytest
import torch
from common.tiny_adapters import tiny_adapter
from suite import short_of

from sparring.errors import BadInput
from sparring.kernels import ops
from sparring.kernels.compiled.library import COMPILED
from sparring.model.load import load
from sparring.model.lora import Adapter
from sparring.model.peft import read
from sparring.model.steps.choose import step_of
from sparring.model.steps.compiled import DecoderStep
from sparring.model.steps.operations import OperationStep
from sparring.model.steps.rows import Slots, StepRows
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(*COMPILED)]
of_best = pytest.mark.kernel_paths(portable=False)

PAGE, PAGES_PER_TABLE, MAX_SLOTS = 16, 8, 70
MODELS = {
    "qwen3": {},
    "qwen3 heads of 32, each its own keys": {"head_dim": 32, "num_attention_heads": 5, "num_key_value_heads": 5},
    "qwen3 heads of 48": {"head_dim": 48},
    "qwen3 heads of 72, seven to one": {"head_dim": 72, "num_attention_heads": 7, "num_key_value_heads": 1},
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "tied": True},
    "qwen2": {"hidden_size": 100, "num_attention_heads": 10},
    "mistral": {"hidden_size": 64, "intermediate_size": 200},
    "mixtral": {},
    "qwen3_moe": {},
    "qwen3_moe many of odd width, shares of all, one layer without": {
        "num_experts": 40,
        "num_local_experts": 40,
        "num_experts_per_tok": 17,
        "moe_intermediate_size": 19,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
}
SHORT = (
    "qwen3 heads of 72, seven to one",
    "llama with biases",
    "qwen2",
    "qwen3_moe many of odd width, shares of all, one layer without",
)
"""Of the short suite, which computes on three threads and most in bfloat16: odd heads, biases and tied weights, odd
widths, experts."""
of_threads = pytest.mark.parametrize("threads", short_of([1, 2, 3], [3]))
of_dtypes = pytest.mark.parametrize("dtype", short_of(["float32", "bfloat16"], ["bfloat16"]))


@pytest.fixture(scope="module", params=short_of(MODELS, SHORT))
def path(request, tmp_path_factory):
    return tiny_model(
        request.param.split()[0], tmp_path_factory.mktemp("model") / "tiny", seed=5, **MODELS[request.param]
    )


class Play:
    """Sequences over pages of their own, and what both ways make of the same rows."""

    def __init__(self, model, threads=1):
        self.model, self.threads = model, threads
        self.kinds = [self._open(OperationStep), self._open(DecoderStep)]
        self.tables = [[slot * PAGES_PER_TABLE + i for i in range(PAGES_PER_TABLE)] for slot in range(MAX_SLOTS)]
        self.lengths = [0] * MAX_SLOTS

    def _open(self, kind):
        model = self.model
        pages = ops.KvPages(model.kv_heads, num_pages=MAX_SLOTS * PAGES_PER_TABLE, page_size=PAGE, dtype=model.dtype)
        slots = Slots.of(MAX_SLOTS, PAGES_PER_TABLE, VOCABULARY)
        for slot in range(MAX_SLOTS):
            slots.temperature[slot], slots.seeds[slot] = (1.0, 0.7, 0.0)[slot % 3], slot
            slots.top_k[slot], slots.top_p[slot] = (0, 0, 0, 5)[slot % 4], (1.0, 1.0, 0.9, 1.0)[slot % 4]
            if slot % 7 == 5:
                slots.limit(slot, bytes([255, 3, 0, 240, 1, 0, 0, 0, 0, 128]))
            slots.tops[slot] = (0, 0, 3, 20)[slot % 4]
            # at 40 tokens, which some have and some reach, two of them are possible again
            slots.bias(slot, 40, (1, 5)[: slot % 3], ((5, 1.5), (17, -30.25), (79, 2.0))[: slot % 4])
            slots.min_p[slot] = (0.0, 0.0, 0.0, 0.0, 0.2)[slot % 5]
        if kind is OperationStep:
            return OperationStep(model, pages, slots), pages, slots
        return DecoderStep(model, pages, slots, work_per_thread=1), pages, slots

    def rows(self, counts, *, independent=False, samples=None, steps=1, interrupt=0):
        """`counts`: new tokens by slot."""
        for slot, count in counts.items():
            self.lengths[slot] += count
        offsets = [0, *torch.tensor(list(counts.values())).cumsum(0).tolist()]
        return StepRows(
            slots=array("i", counts),
            cu_rows=array("i", offsets),
            lengths=array("i", [self.lengths[slot] for slot in counts]),
            tokens=array("q", [(7 * i + 11 * self.lengths[0]) % VOCABULARY for i in range(offsets[-1])]),
            samples=array("B", samples or [1] * len(counts)),
            entered=array("B", [not independent] * len(counts)),
            steps=steps,
            interrupt=array("i", [interrupt]),
        )

    @torch.inference_mode()
    def agree(self, rows):
        """What is sampled and every key and value that is written."""
        found = []
        torch.set_num_threads(self.threads)
        for step, pages, slots in self.kinds:
            slots.tables[:] = self.tables
            found.append((step(rows), *(tensor.clone() for tensor in pages.tensors)))
        torch.set_num_threads(1)
        (sampled, keys, values), (our_sampled, our_keys, our_values) = found
        assert our_sampled == sampled
        assert torch.equal(our_keys, keys) and torch.equal(our_values, values)
        return sampled

    @torch.inference_mode()
    def one_by_one(self, rows, steps):
        """What the operations sample in `steps` steps, each sequence going on with its own; all [steps][sequences]."""
        step, _, slots = self.kinds[0]
        slots.tables[:] = self.tables
        found, rows = ([], [], [], []), rows._replace(steps=1)
        for _ in range(steps):
            for values, new in zip(found, columns(step(rows)), strict=True):
                values.append([value for (value,) in new])
            lengths = array("i", [length + 1 for length in rows.lengths])
            rows = rows._replace(tokens=array("q", found[0][-1]), lengths=lengths)
        return found

    @torch.inference_mode()
    def at_once(self, rows):
        """The same in one call: [sequences][steps]."""
        step, _, slots = self.kinds[1]
        slots.tables[:] = self.tables
        torch.set_num_threads(self.threads)
        found = step(rows)
        torch.set_num_threads(1)
        return columns(found)


def columns(sampled):
    """Tokens, log-probabilities, kept ids and likeliest tokens, the last two as empty where there are none."""
    kept, tops = (
        values or [[none] * len(new) for new in sampled.tokens]
        for values, none in ((sampled.kept, b""), (sampled.tops, ()))
    )
    return sampled.tokens, sampled.logprobs, kept, tops


@of_best
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@of_threads
def test_prompts_generation_and_both_together(path, dtype, threads):
    play = Play(load(path, dtype=dtype), threads)
    play.agree(play.rows({0: 40, 3: 17, 9: 1, 4: 5}, samples=[0, 1, 1, 1]))
    play.agree(play.rows({3: 1, 0: 33, 9: 1, 12: 3}))
    for _ in range(3):
        tokens, logprobs, kept, tops = play.agree(play.rows({3: 1, 0: 1, 9: 1, 12: 1}, independent=True))
        assert len(tokens) == len(logprobs) == len(kept) == 4
        assert [bool(ids) for (ids,) in kept] == [True, False, True, True], "top-k, nothing, min-p, a limit"
        assert [len(new[0]) for new in tops] == [5, 0, 0, 0], "no more than what is kept"
    tokens, logprobs, *_ = play.agree(play.rows({5: 20}, samples=[0]))
    assert (tokens, logprobs) == ([], [])


@of_best
@of_threads
def test_a_prefix_that_is_written_and_read_in_one_step(path, threads):
    play = Play(load(path), threads)
    for slot in range(1, 6):
        play.tables[slot][:2] = play.tables[0][:2]
        play.lengths[slot] = 32
    play.agree(play.rows({0: 38, 1: 6, 2: 6, 3: 1, 4: 90, 5: 2}))


@of_best
@of_threads
@pytest.mark.parametrize("count", short_of([1, 5, 70], [5, 70]))
def test_several_steps_in_one_call(path, threads, count):
    play = Play(load(path), threads)
    play.agree(play.rows({slot: 1 + slot % 23 for slot in range(count)}))
    rows = play.rows(dict.fromkeys(range(count), 1), independent=True, steps=11)
    expected = play.one_by_one(rows, 11)
    found = play.at_once(rows)
    assert [list(map(list, zip(*values, strict=True))) for values in expected] == list(found)
    # rows moved on: the next call can take them as they are
    assert list(rows.tokens) == expected[0][-1]
    assert rows.lengths == array("i", [play.lengths[slot] + 11 for slot in range(count)])
    pages, ours = (kind[1] for kind in play.kinds)
    assert all(map(torch.equal, pages.tensors, ours.tensors))


@of_best
def test_all_stop_when_one_of_them_ends(path):
    play = Play(load(path))
    counts = dict.fromkeys(range(7), 1)
    play.agree(play.rows({slot: 3 for slot in counts}))
    rows = play.rows(counts, independent=True, steps=9)
    tokens, *_ = play.one_by_one(rows, 9)
    ended = tokens[3][2]
    play.kinds[1][2].stops[2, 5] = ended
    found, *_ = play.at_once(rows)
    taken = next(t for t in range(9) if tokens[t][2] == ended) + 1
    assert found == [[tokens[t][i] for t in range(taken)] for i in counts]


@of_best
def test_an_interrupted_call_takes_one_step(path):
    play = Play(load(path))
    play.agree(play.rows({0: 3, 1: 4}))
    rows = play.rows({0: 1, 1: 1}, independent=True, steps=9, interrupt=1)
    one_by_one = play.one_by_one(rows, 1)
    assert play.at_once(rows) == tuple([[value] for value in values[0]] for values in one_by_one)


@of_best
def test_steps_without_pages_or_positions_are_refused(path):
    play = Play(load(path))
    rows = play.rows({0: 1}, independent=True, steps=PAGE * PAGES_PER_TABLE + 1)
    with pytest.raises(BadInput, match="sequence 0: expected a table"):
        play.at_once(rows)


@pytest.mark.full
@of_best
@of_threads
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_rows(path, dtype, threads):
    play = Play(load(path, dtype=dtype), threads)
    play.agree(play.rows({slot: 1 + slot % 23 for slot in range(MAX_SLOTS)}))
    for count in (1, 2, 3, 7, 15, 16, 31, 33, 47, 49, MAX_SLOTS):
        play.agree(play.rows(dict.fromkeys(range(count), 1), independent=True))


@of_dtypes
def test_every_compiled_path_of_the_run(path, dtype):
    """Not the best one alone, which the other tests have."""
    play = Play(load(path, dtype=dtype), 2)
    play.agree(play.rows({slot: 1 + slot % 23 for slot in range(MAX_SLOTS)}))
    for count in (1, 7, 33, MAX_SLOTS):
        play.agree(play.rows(dict.fromkeys(range(count), 1), independent=True))


def adapt(play, tmp_path, path):
    """Three adapters of other ranks and for other layers, dealt out so that runs of one and mixtures occur."""
    adapters, experts = play.model.adapters, bool(play.model.decoder.mixtures)
    targets = ["all-linear", ("q_proj", "down_proj"), ("v_proj", "k_proj", "up_proj", "o_proj")]
    if experts:
        targets[1:] = [("q_proj",), ("v_proj", "k_proj", "o_proj")]
    stacks = ((), ("experts.gate_up_proj", "experts.down_proj"), ("experts.down_proj",))
    for number, target in enumerate(targets):
        which = {"target_modules": target, "target_parameters": stacks[number] if experts else ()}
        state = read(tiny_adapter(path, tmp_path / str(number), seed=number, rank=(1, 40, 5)[number], **which))
        adapters.put(number, adapters.fit(Adapter(state, play.model.dtype, play.model.device)))
    for _, _, slots in play.kinds:
        slots.adapters[:] = [slot % 4 - 1 if slot % 20 < 10 else (slot // 5) % 4 - 1 for slot in range(MAX_SLOTS)]


@of_best
@of_threads
@of_dtypes
def test_adapters_of_a_row_each(path, tmp_path, dtype, threads):
    """Prompts, few rows, many, and several steps at once; all rows under one, then all under none."""
    play = Play(load(path, dtype=dtype), threads)
    plain = play.agree(play.rows({slot: 1 + slot % 5 for slot in range(9)}))
    play.lengths = [0] * MAX_SLOTS
    adapt(play, tmp_path, path)
    assert play.agree(play.rows({slot: 1 + slot % 5 for slot in range(9)})) != plain
    play.agree(play.rows({0: 40, 3: 17, 9: 1, 14: 5, 17: 21}, samples=[0, 1, 1, 1, 0]))
    play.agree(play.rows({slot: 1 for slot in range(10, MAX_SLOTS)}))
    for count in (1, 2, 3, 7, 33, MAX_SLOTS):
        play.agree(play.rows(dict.fromkeys(range(count), 1), independent=True))
    rows = play.rows(dict.fromkeys(range(40), 1), independent=True, steps=7)
    expected = play.one_by_one(rows, 7)
    assert [list(map(list, zip(*values, strict=True))) for values in expected] == list(play.at_once(rows))
    for number in (1, -1):
        for _, _, slots in play.kinds:
            slots.adapters[:] = number
        play.agree(play.rows({0: 9, 1: 1, 2: 1}))
    play.model.adapters.put(1, play.model.adapters.take(2))  # an adapter that changes its number, and one that goes
    for _, _, slots in play.kinds:
        slots.adapters[:] = 1
    play.agree(play.rows({0: 1, 3: 1}))


@of_best
def test_a_context_of_several_partial_sums(path):
    play = Play(load(path))
    play.agree(play.rows({0: 125, 1: 127}))
    play.tables[0][7], play.tables[1][7] = 200, 201
    for _ in range(3):
        play.agree(play.rows({0: 1}))


@of_best
def test_changed_and_replaced_weights_are_followed(path):
    model = load(path)
    play = Play(model)
    before = play.agree(play.rows({0: 9, 1: 3}))
    model.load_state({name: tensor * 1.25 for name, tensor in model.state().items()})
    play.lengths = [0] * MAX_SLOTS
    assert play.agree(play.rows({0: 9, 1: 3})) != before
    norm = model.decoder.norm
    norm.weight = torch.nn.Parameter(norm.weight * -1.0)
    play.agree(play.rows({0: 1, 1: 1}))
    norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(BadInput, match="a norm weight"):
        play.kinds[1][0](play.rows({0: 1}))


@of_best
def test_bad_tables_and_tokens_are_refused_before_anything_is_written(path):
    play = Play(load(path))
    step, pages, slots = play.kinds[1]
    good = play.rows({0: 20, 1: 3})
    slots.tables[:] = play.tables
    before = pages.tensors[0].clone()
    slots.tables[1, 0] = MAX_SLOTS * PAGES_PER_TABLE
    with pytest.raises(BadInput, match="sequence 1: expected a table over 560 pages of 16"):
        step(good)
    slots.tables[1, 0] = -1
    with pytest.raises(BadInput, match="sequence 1"):
        step(good)
    slots.tables[:] = play.tables
    with pytest.raises(BadInput, match="sequence 0"):
        step(good._replace(lengths=array("i", [19, 3])))
    with pytest.raises(BadInput, match="sequence 1"):
        step(good._replace(lengths=array("i", [20, PAGE * PAGES_PER_TABLE + 1])))
    for token in (VOCABULARY, -1):
        with pytest.raises(BadInput, match="row 21: expected a token below 80"):
            step(good._replace(tokens=array("q", [*good.tokens[:21], token, good.tokens[22]])))
    assert torch.equal(pages.tensors[0], before)
    assert len(step(good)[0]) == 2


@of_best
def test_models_choose_their_step(path, tmp_path):
    def kind(model):
        return type(
            step_of(model, ops.KvPages(model.kv_heads, num_pages=4, dtype=model.dtype), Slots.of(2, 2, VOCABULARY))
        )

    assert kind(load(path)) is DecoderStep
    assert kind(load(path, numerics="fast")) is DecoderStep
    assert kind(load(tiny_model("olmo2", tmp_path))) is OperationStep
