"""The `renderers` library, imported without its client of an inference server.

The client, which the library's first import brings in and we never call, needs `openai`: a quarter of a second and tens
of megabytes in each process that renders. While the library is imported, an empty module stands in its place, unless
the real one is there; afterwards `import openai` finds the real one as ever.
"""

from __future__ import annotations

import sys
from types import ModuleType


class _NoClient(ModuleType):
    """Module of the name `openai`, in which there is nothing but the name that the library imports."""

    AsyncOpenAI = object


if "openai" in sys.modules:
    import renderers
else:
    sys.modules["openai"] = _NoClient("openai")
    try:
        import renderers
    finally:
        del sys.modules["openai"]

ToolCallParseStatus = renderers.ToolCallParseStatus
config_from_name = renderers.config_from_name
create_renderer = renderers.create_renderer
