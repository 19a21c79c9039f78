"""Every rule of the house finds what breaks it, and lets the good pass."""

import pytest
from structure import (
    RULES,
    broad_excepts,
    documentation,
    full_packages,
    heavy_imports,
    import_cycles,
    layer_rules,
    light_inits,
    machine_paths,
    names,
    one_class_one_name,
    one_name_one_place,
    package_circles,
    protocol_methods,
    read,
    real_objects,
    sizes,
    small_packages,
    whole_tests,
)

LONG = "def f() -> None:\n    '''d'''\n" + "    x = 1\n" * 60
BITES = [
    (layer_rules, {"engine/a.py": "from sparring.train.trainer import T"}, "engine may not import train"),
    (layer_rules, {"batch/a.py": "def f():\n    import sparring.loop"}, "batch may not import loop"),
    (layer_rules, {"stages/rl.py": "from sparring.cluster.inline import C"}, "stages may not import cluster"),
    (layer_rules, {"recipe/load.py": "from sparring.stages.context import Context"}, "recipe may not import stages"),
    (layer_rules, {"cli/a.py": "from sparring.testing.toy import T"}, "cli may not import testing"),
    (layer_rules, {"attic/a.py": ""}, "attic has no layer"),
    (import_cycles, {"a.py": "import sparring.b", "b.py": "from sparring.a import f"}, "a: imports itself"),
    (import_cycles, {"a.py": "import sparring.b", "b.py": "def f():\n    import sparring.a"}, "a: imports itself"),
    (
        import_cycles,
        {"a.py": "import sparring.b", "b.py": "if TYPE_CHECKING:\n    import sparring.a"},
        "a: imports itself",
    ),
    (
        package_circles,
        {
            "a/b/c.py": "import sparring.a.d",
            "a/d.py": "def f():\n    import sparring.a.e.f",
            "a/e/f.py": "from sparring.a.b.g import h",
            "a/b/g.py": "",
        },
        "a.b.c: leads back to a/b over a.d",
    ),
    (heavy_imports, {"rollout/a.py": "import torch.nn"}, "imports torch.nn"),
    (heavy_imports, {"stages/a.py": "def f():\n    import torch"}, "imports torch"),
    (heavy_imports, {"observe/a.py": "import wandb"}, "imports wandb"),
    (heavy_imports, {"model/config.py": "import torch"}, "imports torch"),
    (heavy_imports, {"cluster/a.py": "from ray import remote"}, "imports ray.remote"),
    (light_inits, {"model/__init__.py": "'''d'''\nfrom x import y"}, "docstring and nothing else"),
    (light_inits, {"model/__init__.py": ""}, "docstring and nothing else"),
    (sizes, {"a.py": "x = 1\n" * 501}, "501 lines"),
    (sizes, {"a.py": LONG}, "f has 62 lines"),
    (sizes, {"a.py": "def f(a, b, c, d, e, *, g, h, i, j): ..."}, "f has 9 parameters"),
    (sizes, {"a.py": "@functools.cache\ndef f(a, b, c, d, e, *, g, h, i, j): ..."}, "f has 9 parameters"),
    (sizes, {"a.py": "@triton.jit\n" + LONG}, "f has 62 lines"),
    (heavy_imports, {"kernels/torch/a.py": "import triton"}, "imports triton"),
    (sizes, {"a.py": "#" * 121}, "121 characters wide"),
    (documentation, {"a.py": "x = 1"}, "a.py: no docstring"),
    (documentation, {"a.py": "class A: ..."}, "class A has no docstring"),
    (documentation, {"a.py": "def f(a) -> int:\n    '''d'''"}, "f lacks types (a)"),
    (
        documentation,
        {"a.py": "class A:\n    '''d'''\n    async def f(self):\n        '''d'''"},
        "f lacks types (return)",
    ),
    (documentation, {"a.py": "def f() -> int: ..."}, "f has no docstring"),
    (
        documentation,
        {"a.py": "class A(B):\n    '''Implements `c.C`.'''\n    def f(self) -> int: ..."},
        "A implements C, which is not there",
    ),
    (
        documentation,
        {
            "a.py": "class B(Protocol):\n    def f(self) -> int: ...\nclass A:\n    '''Implements `B`.'''\n    def f(self) -> int: ..."
        },
        "f has no docstring",
    ),
    (names, {"model/utils.py": ""}, "utils names nothing"),
    (names, {"helpers/a.py": ""}, "helpers names nothing"),
    (broad_excepts, {"a.py": "try: ...\nexcept (KeyError, Exception): ..."}, "catches everything"),
    (broad_excepts, {"a.py": "try: ...\nexcept: ..."}, "catches everything"),
    (broad_excepts, {"a.py": "try: ...\nexcept BaseException: ..."}, "catches everything"),
    (one_name_one_place, {"a.py": "class A:\n    def f(self): ...\n    def f(self): ..."}, "f is defined twice"),
    (one_name_one_place, {"a.py": "def f(): ...\nclass f: ..."}, "f is defined twice"),
    (machine_paths, {"a.py": "x = '/home/me/model'"}, "exists on one machine"),
    (real_objects, {"a.py": "from unittest.mock import Mock"}, "a mock"),
    (real_objects, {"a.py": "def test_a(monkeypatch): ..."}, "monkeypatch"),
    (real_objects, {"a.py": "@pytest.mark.skipif(True)\ndef test_a(): ..."}, "skipif"),
    (real_objects, {"a.py": "pytestmark = pytest.mark.xfail(strict=True)"}, "xfail"),
    (real_objects, {"a.py": "torch = pytest.importorskip('torch')"}, "importorskip"),
    (real_objects, {"a.py": "def test_a():\n    pytest.skip('no GPU')"}, "skip"),
    (real_objects, {"a.py": "from pytest import skip"}, "pytest.skip"),
    (real_objects, {"a.py": "from unittest.case import SkipTest"}, "SkipTest"),
    (
        whole_tests,
        {"a.py": "def test_a(path):\n    if path == 'exact-torch':\n        return\n    assert path"},
        "test_a returns",
    ),
    (
        whole_tests,
        {"a.py": "class TestA:\n    async def test_a(self):\n        with self:\n            return None"},
        "test_a returns",
    ),
    (small_packages, {f"engine/a{n}.py": "" for n in range(26)}, "engine: 26 modules"),
    (one_class_one_name, {"a.py": "class A: ...", "b.py": "class A: ..."}, "class A is in a.py:1 and b.py:1"),
    (protocol_methods, {"a.py": "class A(Protocol):\n    def f(self) -> int: ..."}, "A.f has no docstring"),
    (protocol_methods, {"a.py": "class A(Protocol[T]):\n    async def f(self) -> int: ..."}, "A.f has no docstring"),
    (full_packages, {"attic/__init__.py": "'''d'''", "a.py": ""}, "attic: an empty package"),
]


@pytest.mark.parametrize(("rule", "sources", "finding"), BITES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_rule_bites(rule, sources, finding) -> None:
    assert any(finding in found for found in rule(read(sources)))


WHOLE = """
def test_a():
    def one():
        return 1
    async def scenario(engine):
        if engine is None:
            return
        return await engine
    assert [lambda: 2, one, scenario]
def of_a_test():
    return
"""


def test_what_stands_in_a_test_may_return() -> None:
    assert not list(whole_tests(read({"a.py": WHOLE})))


CLEAN = {
    "types.py": "'''d'''\n",
    "protocols.py": "'''d'''\nfrom sparring.types import T\nif TYPE_CHECKING:\n    import torch\n",
    "errors.py": "'''d'''\ntry: ...\nexcept Exception: ...\n",
    "train/__init__.py": "'''d'''\n",
    "train/config.py": "'''d'''\n",
    "train/a.py": "'''d'''\nimport torch\nfrom sparring.types import T\ndef _f(x): ...\n",
    "rollout/a.py": "'''d'''\ndef f() -> None:\n    '''d'''\n    import wandb\n",
    "recipe/load.py": "'''d'''\nfrom sparring.train.config import C\nfrom sparring.errors import E\n",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_lets_the_good_pass(rule) -> None:
    assert not list(rule(read(CLEAN)))
