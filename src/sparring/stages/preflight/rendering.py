"""Check of the chat format: messages survive a round trip, and prompts and demonstrations fit the model's context."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sparring.envs.domains import factory_of
from sparring.errors import BadInput, refusal, refusal_in
from sparring.generation import GenerateRequest, Sampling
from sparring.model.hub import local_folder
from sparring.model.outline import Outline
from sparring.protocols import EnvFactory, Renderer
from sparring.recipe.run_config import RunConfig
from sparring.scratch import scratch
from sparring.stages.context import POLICY, RunFiles, given_checkpoint, renderer_of
from sparring.stages.data.demonstrations import Conversation, rendered, too_long
from sparring.stages.data.preferences import same_ids
from sparring.stages.init import fit_tokenizer
from sparring.stages.models.context_length import max_context
from sparring.types import Message, Task, ToolSpec

SOME = 200
"""Number of demonstrations and of training tasks that are checked; a stage checks the others when it reads them."""


def check_rendering(
    files: RunFiles,
    factory: EnvFactory,
    shape: Outline,
    tasks: Sequence[Task],
    examples: Sequence[Conversation],
    played: Sequence[Conversation],
) -> list[str]:
    """Check the chat format, and that prompts and demonstrations fit the context.

    A fresh model has no tokenizer yet, so a tokenizer is trained on `examples` alone. It needs about as few tokens for
    the examples as the run's own tokenizer at best, so what does not fit here will not fit later.

    Args:
        tasks: training tasks. Some prompts may be too long, but not all.
        examples: conversations to imitate; may be empty.
        played: conversations that were played with the environment, which may constrain replies.

    Raises:
        BadInput: a message changes on its round trip, or does not fit.
    """
    from sparring.render.round_trip import check_round_trip

    config = files.config
    demonstrated = [conversation.task for conversation in examples if conversation.task is not None]
    own = _tools_by_environment(factory, [*tasks, *demonstrated])
    tools = list({tool.name: tool for of_env in own.values() for tool in of_env}.values())
    with _renderer(files, shape, examples) as renderer:
        proven = check_round_trip(renderer, tools, config.render.control_tokens)
        facts = [f"render: {fact}" for fact in proven]
        facts += _check_thinking(config, renderer)
        facts += [f"render: {fact}" for fact in _check_agent_tools(played, tools, renderer)] + _check_sampling(
            config, shape, renderer
        )
        _check_constraints(played, renderer)
        prompted = demonstrated if demonstrated and given_checkpoint(config) is None else tasks
        prompted = list({task.id: task for task in prompted}.values())  # a short file repeats its tasks
        lengths = [
            len(renderer.render(task.messages, own[task.env]).tokens) if task.messages else 0 for task in prompted
        ]
        others = _prompt_lengths(played, renderer, shape)
        room = max_context(shape, config.engine, config.models[POLICY].dtype)
        if min(lengths) >= shape.max_positions:
            raise too_long(f"task {prompted[0].id}", shape.max_positions, f"a prompt of {lengths[0]}, tools included")
        if min(lengths) >= room:
            actual, expected = f"a prompt of {min(lengths)}, tools included", f"prompts of fewer than the {room} tokens"
            raise refusal("engine.kv.bytes", f"{expected} of the cache", actual, "raise it, or engine.kv.tokens")
        written = [(each, rendered(each, renderer, shape.max_positions).tokens) for each in examples[:SOME]]
        for (row, ids), (following, other_ids) in itertools.pairwise(written):
            if row.task is None and row.name == following.name and ids == other_ids:  # the sides of a pair
                raise same_ids(row.name)
    fitting = [length for length in lengths if length < room]
    most = max(length for length in (*fitting, *others) if length < room)
    facts.append(f"context: prompts of up to {most} tokens leave {room - most} for the rest")
    if len(fitting) < len(lengths):
        facts.append(
            f"context: {len(lengths) - len(fitting)} of {len(lengths)} prompts do not fit and cannot be trained"
        )
    return facts


def _tools_by_environment(factory: EnvFactory, tasks: Sequence[Task]) -> dict[str, Sequence[ToolSpec]]:
    return {env: factory_of(factory, task).make().tools for env, task in {t.env: t for t in tasks}.items()}


def _check_thinking(config: RunConfig, renderer: Renderer) -> list[str]:
    """Warn if prompts begin a thought although `thinking` is off: the chat format has no switch."""
    prompt = renderer.render([Message(role="user", content="Who?")], ()).tokens
    controls = {*renderer.control_ids.values(), *renderer.stop_ids}
    words = [token for token in prompt if token not in controls]
    if config.models[POLICY].thinking or renderer.parse(words, (), prompt=prompt).reasoning is None:
        return []
    return ["render: every reply begins inside a thought: models.policy.thinking = false has no effect in this format"]


def _check_agent_tools(played: Sequence[Conversation], own: Sequence[ToolSpec], renderer: Renderer) -> list[str]:
    from sparring.render.round_trip import check_tool_calls

    brought: list[ToolSpec] = []
    for conversation in played:
        brought += [tool for tool in conversation.tools if tool not in own and tool not in brought]
    return [f"{check_tool_calls(renderer, brought)} (of a task or an agent)"] if brought else []


def _prompt_lengths(played: Sequence[Conversation], renderer: Renderer, shape: Outline) -> list[int]:
    """Return the number of tokens of each played conversation's first request. Each is measured, because a task may
    add its own tools to the prompt.

    Raises:
        BadInput: the format refuses a request, or none fits into the model.
    """
    lengths: list[int] = []
    for conversation in played:
        messages = list(itertools.takewhile(lambda message: message.role != "assistant", conversation.messages))
        try:
            length = len(renderer.render(messages, conversation.tools).tokens) if messages else 0
        except BadInput as cause:
            raise refusal_in(conversation.name, cause) from cause
        lengths.append(length)
    if lengths and min(lengths) >= shape.max_positions:
        raise too_long(played[0].name, shape.max_positions, f"a prompt of {lengths[0]}, tools included")
    return lengths


def _check_sampling(config: RunConfig, shape: Outline, renderer: Renderer) -> list[str]:
    """Refuse sampling settings of `[rollout]` that the engine does not have, and constraints that do not compile."""
    from sparring.engine.check import problem_of

    sampling = config.rollout.sampling.build(stop=renderer.stop_ids)
    try:
        request = _bound(sampling, renderer)
    except BadInput as cause:
        raise refusal_in("rollout.sampling.constraint", cause) from cause
    problem = problem_of(request, shape.vocab_size)
    if problem:
        raise BadInput(f"[rollout]: expected {problem}", "[rollout]")
    if sampling.constraint is None:
        return []
    constrained = f"every reply is held to its {sampling.constraint.kind.replace('_', ' ')}"
    thought = "behind its thought, ", "; one that is cut inside its thought has no text"
    return [f"rollout: {constrained.join(thought if request.preface else ('', ''))}"]


def _bound(sampling: Sampling, renderer: Renderer) -> GenerateRequest:
    prompt = renderer.render([Message(role="user", content="?")], ()).tokens
    return renderer.bind(GenerateRequest(id="check", tokens=prompt, sampling=sampling))


def _check_constraints(played: Sequence[Conversation], renderer: Renderer) -> None:
    for conversation in played:
        for constraint in conversation.constraints:
            try:
                _bound(Sampling(constraint=constraint), renderer)
            except BadInput as cause:
                raise refusal_in(f"{conversation.name}: constraint", cause) from cause


@contextmanager
def _renderer(files: RunFiles, shape: Outline, examples: Sequence[Conversation]) -> Iterator[Renderer]:
    from sparring.render.train_tokenizer import MIN_VOCAB_SIZE

    config, start = files.config, given_checkpoint(files.config)
    if start is not None:
        yield renderer_of(config, start)
        return
    init = config.models[POLICY].init
    if init is not None and init.tokenizer is not None:
        yield renderer_of(config, local_folder(init.tokenizer))
        return
    if shape.vocab_size < MIN_VOCAB_SIZE:
        raise refusal("models.policy.init.vocab_size", f"at least {MIN_VOCAB_SIZE}", str(shape.vocab_size), "raise it")
    with scratch(files.folder) as folder:
        fit_tokenizer(examples[:SOME], shape.vocab_size, folder)
        yield renderer_of(config, folder)
