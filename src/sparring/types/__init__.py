"""The nouns of the path: one frozen dataclass per life stage of a token. Standard library only.

    task -> rollout -> trajectory -> group -> sample -> batch -> loss -> weights -> engine -> (next) rollout

Conventions. Tokens are ids as sampled, never re-encoded text. `None` means "does not exist", which differs from zero.
Durations are seconds (`_s`), times are seconds since the epoch. A weight version is the number of updates that made it
(0 = the initial weights of the run).
"""

from sparring.types.boxes import (
    BoxSpec as BoxSpec,
    CommandEnd as CommandEnd,
    EntryKind as EntryKind,
    ExecResult as ExecResult,
    MOST_BYTES as MOST_BYTES,
    TreeEntry as TreeEntry,
)
from sparring.types.conversation import (
    Limits as Limits,
    Message as Message,
    Observation as Observation,
    ReplyPiece as ReplyPiece,
    Role as Role,
    Task as Task,
    ToolCall as ToolCall,
    ToolSpec as ToolSpec,
)
from sparring.types.record import (
    DEFAULT_ROLES as DEFAULT_ROLES,
    Evidence as Evidence,
    Failure as Failure,
    Fork as Fork,
    ForkReason as ForkReason,
    Group as Group,
    Label as Label,
    Outcome as Outcome,
    OutcomeKind as OutcomeKind,
    POLICY as POLICY,
    Purpose as Purpose,
    Rollout as Rollout,
    Score as Score,
    Segment as Segment,
    Source as Source,
    StopReason as StopReason,
    Timing as Timing,
    Trajectory as Trajectory,
    UNTRAINED as UNTRAINED,
    Usage as Usage,
    alike as alike,
    main_replies as main_replies,
)
from sparring.types.training import (
    Batch as Batch,
    CheckpointRef as CheckpointRef,
    PAIR_SHARE as PAIR_SHARE,
    Sample as Sample,
    StepResult as StepResult,
    TokenAccount as TokenAccount,
    WeightRef as WeightRef,
)
