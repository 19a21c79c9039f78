"""The verbs of the path: one Protocol per part. Parts meet only here and in `types`.

Every implementation passes the contract suite of its protocol in `tests/contract`.
"""

from sparring.protocols.boxes import (
    LiveCommand as LiveCommand,
    Boxes as Boxes,
    Command as Command,
    HandedOver as HandedOver,
    OnOutput as OnOutput,
    LiveProcess as LiveProcess,
    Placement as Placement,
    Sandbox as Sandbox,
    Shell as Shell,
    Snapshot as Snapshot,
    Terminal as Terminal,
)
from sparring.protocols.rollout import (
    AnyEnv as AnyEnv,
    EnvFactory as EnvFactory,
    Episode as Episode,
    Expert as Expert,
    Harness as Harness,
    OpenedEnv as OpenedEnv,
    Renderer as Renderer,
    ReplyReader as ReplyReader,
    RolesEnv as RolesEnv,
    Scorer as Scorer,
    Session as Session,
    SingleEnv as SingleEnv,
    TaskSource as TaskSource,
    ToolHost as ToolHost,
    World as World,
)
from sparring.protocols.training import (
    Annotator as Annotator,
    Credit as Credit,
    Divergence as Divergence,
    Loss as Loss,
    LossResult as LossResult,
    Needs as Needs,
    SurveyingLoss as SurveyingLoss,
    Trainer as Trainer,
    ValueModel as ValueModel,
)
from sparring.protocols.serving import (
    Cluster as Cluster,
    Engine as Engine,
    Store as Store,
    TrainPlan as TrainPlan,
)
