"""The rules of the house (design/architecture.md, section 2), checked on the source without importing it."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "sparring"

LAYERS = (
    "allocator annotations backoff disk generation open_files types log protocols reply rewards scratch workers errors "
    "observe user_cache user_files validation",
    "kernels",
    "tasks envs sandbox render record store algo batch model weights",
    "harness gateway rollout train engine",
    "loop cluster dashboard",
    "recipe",
    "stages",
    "launch",
    "cli testing",
    "__main__",
)
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}
ALWAYS_NEVER = {("stages", "cluster"), *((name, "testing") for name in LAYER if name != "testing")}
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "manager"}
HEAVY = {
    "torch": (
        "algo/loss/",
        "algo/rare/preference/",
        "algo/correction/",
        "batch/tensors.py",
        "kernels/",
        "model/",
        "weights/",
        "train/",
        "engine/",
        "testing/",
    ),
    "transformers": ("model/", "train/", "engine/", "testing/"),
    "vllm": ("engine/adapters/",),
    "ray": ("cluster/ray",),
    "triton": ("kernels/device/",),
    "tensorboard": (),
    "wandb": (),
    "datasets": (),
}
SPARING = (
    "skip",
    "skipif",
    "Skipped",
    "SkipTest",
    "skipIf",
    "skipUnless",
    "skipTest",
    "xfail",
    "expectedFailure",
    "importorskip",
)
"""Ways in which a test that does not run looks like one that passed."""
BROAD_EXCEPT = ("errors.py", "cli/main.py", "envs/guests/host.py")
GUESTS = "envs/guests/adapters/"
"""Files that run in interpreters of other people's worlds: the rules of the source do not hold there."""
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_WIDTH, MAX_MODULES = 500, 60, 8, 120, 25
VARIANTS = {"algo/rare/credit"}
"""Packages of rules: every file is one variant behind one protocol, and there may be any number of them."""
MACHINE_PATH = re.compile(r"""["'\s=](/(?:root|home|work|Users|tmp|mnt)/\w)""")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One source file: its path inside `src/sparring`, and what is in it."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read(sources: dict[str, str]) -> list[Module]:
    return [Module(path, text, ast.parse(text)) for path, text in sorted(sources.items())]


class Import(NamedTuple):
    """One imported name: dotted, its line, and `when`: as the module is imported, in a function, or for annotations."""

    name: str
    line: int
    when: str


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """Return everything that a module imports, in functions and under TYPE_CHECKING too."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[Import]:
    waiting: list[tuple[ast.AST, str]] = [(module.tree, "import")]
    while waiting:
        node, when = waiting.pop()
        if isinstance(node, Function):
            when = "function"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            when = "annotation"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: relative import; write it in full"
            yield from (Import(f"{node.module}.{alias.name}", node.lineno, when) for alias in node.names)
        waiting.extend((child, when) for child in ast.iter_child_nodes(node))


def functions(module: Module) -> Iterator[tuple[Function, bool]]:
    """Every function, with whether outsiders may call it: public name, in the module or in public classes. A protocol's
    methods are said by its docstring."""
    waiting: list[tuple[ast.AST, bool]] = [(module.tree, True)]
    while waiting:
        node, public = waiting.pop()
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (Function, ast.ClassDef))
            open_here = public and not isinstance(node, Function) and not (named and child.name.startswith("_"))
            open_here &= not (isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases))
            if isinstance(child, Function):
                yield child, open_here
            waiting.append((child, open_here if named else public))


def layer_rules(modules: list[Module]) -> Iterator[str]:
    """A package imports itself and strictly lower layers."""
    for module in modules:
        if module.package not in LAYER and module.path != "__init__.py":
            yield f"{module.path}: {module.package} has no layer"
            continue
        for name, line, _ in imports(module):
            if not name.startswith("sparring."):
                continue
            target = name.split(".")[1]
            if target == module.package or target not in LAYER or module.path == "__init__.py":
                continue
            same_ground = LAYER[target] == LAYER[module.package] == 0
            lower = LAYER[target] < LAYER[module.package] or same_ground
            never = (module.package, target) in ALWAYS_NEVER
            if not lower or never:
                yield f"{module.path}:{line}: {module.package} may not import {target}"


def import_cycles(modules: list[Module]) -> Iterator[str]:
    """No module reaches itself through imports, those in functions and under TYPE_CHECKING included."""
    edges = _imported(modules)
    for start in sorted(edges):
        reached, waiting = set(), list(edges[start])
        while waiting:
            at = waiting.pop()
            if at not in reached:
                reached.add(at)
                waiting.extend(edges[at])
        if start in reached:
            yield f"{start}: imports itself through {sorted(reached)}"


def _imported(modules: list[Module]) -> dict[str, set[str]]:
    names = {module.name for module in modules}
    return {m.name: {n for name, *_ in imports(m) for n in _ours(name, names)} - {m.name} for m in modules}


def _ours(name: str, names: set[str]) -> set[str]:
    inner = name.removeprefix("sparring.")
    return {inner} & names or {inner.rpartition(".")[0]} & names


def package_circles(modules: list[Module]) -> Iterator[str]:
    """An import that leaves a package, sub-packages included, never leads back into it over modules outside."""
    edges = _imported(modules)
    homes = {parent for module in modules for parent in Path(module.path).parent.parents[:-1]}
    homes |= {Path(module.path).parent for module in modules} - {Path()}
    for home in sorted(homes):
        inside = {module.name for module in modules if module.path.startswith(f"{home}/")}
        returns, size = inside, 0
        while size < len(returns):
            size, returns = len(returns), returns | {name for name, others in edges.items() if others & returns}
        for name in sorted(inside):
            yield from (
                f"{name}: leads back to {home} over {other}" for other in sorted(edges[name] & returns - inside)
            )


def heavy_imports(modules: list[Module]) -> Iterator[str]:
    """Torch and its like are imported in their rooms alone, in functions too, and by no `__init__` or `config`.

    A library without a room is imported where it is used, in functions alone.
    """
    for module in modules:
        light = module.path.endswith(("__init__.py", "config.py"))
        for name, line, when in imports(module):
            rooms = HEAVY.get(name.split(".")[0])
            if rooms is None or when == "annotation" or (when == "function" and not rooms):
                continue
            if not module.path.startswith(rooms or "-") or light and when == "import":
                yield f"{module.path}:{line}: imports {name}"


def light_inits(modules: list[Module]) -> Iterator[str]:
    """An `__init__` is a docstring; the project's own may also say what `sparring` offers, and those of the nouns and
    the verbs which of their modules has which."""
    for module in modules:
        if module.path.endswith("__init__.py"):
            extra = [node for node in module.tree.body if not isinstance(node, ast.Expr)]
            if module.path in ("types/__init__.py", "protocols/__init__.py"):
                own = f"sparring.{module.name}."
                extra = [n for n in extra if not (isinstance(n, ast.ImportFrom) and (n.module or "").startswith(own))]
            if not ast.get_docstring(module.tree) or (extra and module.path != "__init__.py"):
                yield f"{module.path}: must be a docstring and nothing else"


def sizes(modules: list[Module]) -> Iterator[str]:
    """Files, lines, functions and signatures a reader can hold in the head."""
    for module in modules:
        lines = module.text.splitlines()
        if len(lines) > MAX_FILE:
            yield f"{module.path}: {len(lines)} lines, more than {MAX_FILE}"
        yield from (
            f"{module.path}:{n}: {len(s)} characters wide" for n, s in enumerate(lines, 1) if len(s) > MAX_WIDTH
        )
        for function, _ in functions(module):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{module.path}:{function.lineno}: {function.name} has {length} lines, more than {MAX_FUNCTION}"
            if (count := len(_parameters(function))) > MAX_PARAMETERS and not _is_device_program(function):
                yield f"{module.path}:{function.lineno}: {function.name} has {count} parameters, more than {MAX_PARAMETERS}"


def _is_device_program(function: Function) -> bool:
    """Whether Triton compiles it: what it takes are pointers and sizes of one launch, which only its wrapper in Python
    passes."""
    programs = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(ast.unparse(program) == "triton.jit" for program in programs)


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    both = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [a for a in both if a is not None and a.arg not in ("self", "cls")]


IMPLEMENTS = re.compile(r"Implements\s+`(?:\w+\.)*(\w+)`")


def documented_methods(modules: list[Module]) -> dict[str, set[str]]:
    """Return for every class, by name, the methods that its docstrings describe."""
    classes = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    return {
        node.name: {method.name for method in node.body if isinstance(method, Function) and ast.get_docstring(method)}
        for node in classes
    }


def inherited_docstrings(modules: list[Module]) -> Iterator[tuple[Function, str]]:
    """Yield every method that a base class describes, or a protocol that its class or a base says it implements; refuse
    a protocol that does not exist."""
    described = documented_methods(modules)
    classes = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    implemented = {node.name: IMPLEMENTS.findall(ast.get_docstring(node) or "") for node in classes}
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            protocols = IMPLEMENTS.findall(ast.get_docstring(node) or "")
            bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
            above = {*protocols, *bases, *(name for base in bases for name in implemented.get(base, ()))}
            names = set().union(*(described.get(name, set()) for name in above))
            yield from ((method, "") for method in node.body if isinstance(method, Function) and method.name in names)
            for name in protocols:
                if name not in described:
                    yield node, f"{module.path}:{node.lineno}: {node.name} implements {name}, which is not there"


def documentation(modules: list[Module]) -> Iterator[str]:
    """Modules, public classes and public functions say what they are; public functions are typed. A method that a base
    class or the implemented protocol describes need not say it again."""
    inherited = list(inherited_docstrings(modules))
    yield from filter(None, (refusal for _, refusal in inherited))
    described_above = {id(method) for method, _ in inherited}
    for module in modules:
        if not ast.get_docstring(module.tree):
            yield f"{module.path}: no docstring"
        for node in ast.iter_child_nodes(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                yield f"{module.path}:{node.lineno}: class {node.name} has no docstring"
        for function, public in functions(module):
            if not public:
                continue
            where = f"{module.path}:{function.lineno}: {function.name}"
            untyped = [a.arg for a in _parameters(function) if a.annotation is None]
            if untyped or (function.returns is None and function.name != "__init__"):
                yield f"{where} lacks types ({', '.join(untyped) or 'return'})"
            if not ast.get_docstring(function) and id(function) not in described_above:
                yield f"{where} has no docstring"


def names(modules: list[Module]) -> Iterator[str]:
    """No noun, no home."""
    for module in modules:
        yield from (
            f"{module.path}: {part} names nothing" for part in module.name.split(".") if part in FORBIDDEN_NAMES
        )


def broad_excepts(modules: list[Module]) -> Iterator[str]:
    """Only the boundary and the command line catch everything."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and module.path not in BROAD_EXCEPT:
                kinds = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"Exception"}
                reraised = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                if "Exception" in kinds or ("BaseException" in kinds and not reraised):
                    yield f"{module.path}:{node.lineno}: catches everything"


def one_name_one_place(modules: list[Module]) -> Iterator[str]:
    """A module or class says each of its names once: of two, the reader finds the one that is dead."""
    for module in modules:
        for scope in ast.walk(module.tree):
            if not isinstance(scope, ast.Module | ast.ClassDef):
                continue
            said: set[str] = set()
            for node in scope.body:
                again = isinstance(node, Function) and any(_is_further(decorator) for decorator in node.decorator_list)
                if isinstance(node, Function | ast.ClassDef) and not again:
                    if node.name in said:
                        yield f"{module.path}:{node.lineno}: {node.name} is defined twice"
                    said.add(node.name)


def _is_further(decorator: ast.expr) -> bool:
    """Whether what it decorates belongs to a definition of the same name: a setter, an overload, a case of a
    dispatch."""
    name = (
        decorator.attr
        if isinstance(decorator, ast.Attribute)
        else decorator.id
        if isinstance(decorator, ast.Name)
        else ""
    )
    return name in ("setter", "overload", "register")


def machine_paths(modules: list[Module]) -> Iterator[str]:
    """Nobody's machine is written into the source."""
    for module in modules:
        for number, line in enumerate(module.text.splitlines(), 1):
            if found := MACHINE_PATH.search(line):
                yield f"{module.path}:{number}: {found[1]}... exists on one machine"


def full_packages(modules: list[Module]) -> Iterator[str]:
    """A package that holds nothing yet does not exist yet."""
    homes = {module.path.rpartition("/")[0] for module in modules if not module.path.endswith("__init__.py")}
    for module in modules:
        home = module.path.removesuffix("/__init__.py")
        if module.path.endswith("/__init__.py") and not any(f"{h}/".startswith(f"{home}/") for h in homes):
            yield f"{home}: an empty package"


def small_packages(modules: list[Module]) -> Iterator[str]:
    """A package has as many modules as a reader can keep apart."""
    homes = Counter(module.path.rpartition("/")[0] for module in modules if not module.path.endswith("__init__.py"))
    for home, count in homes.items():
        if count > MAX_MODULES and home not in VARIANTS:
            yield f"{home}: {count} modules, more than {MAX_MODULES}"


def one_class_one_name(modules: list[Module]) -> Iterator[str]:
    """A public class name means one thing in the whole project."""
    homes: dict[str, list[str]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(f"{module.path}:{node.lineno}")
    yield from (f"class {name} is in {' and '.join(places)}" for name, places in homes.items() if len(places) > 1)


def protocol_methods(modules: list[Module]) -> Iterator[str]:
    """Every method of a protocol says what it promises."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                for method in node.body:
                    if isinstance(method, Function) and not ast.get_docstring(method):
                        yield f"{module.path}:{method.lineno}: {node.name}.{method.name} has no docstring"


def real_objects(modules: list[Module]) -> Iterator[str]:
    """Tests use real objects and always run: no mocks, no patches, no skips."""
    for module in modules:
        for name, line, _ in imports(module):
            if name.split(".")[:2] in (["unittest", "mock"], ["mock"]):
                yield f"{module.path}:{line}: a mock"
            if name.split(".")[0] in ("pytest", "unittest") and name.split(".")[-1] in SPARING:
                yield f"{module.path}:{line}: {name}"
        for node in ast.walk(module.tree):
            said = node.arg if isinstance(node, ast.arg) else node.attr if isinstance(node, ast.Attribute) else ""
            if said in ("monkeypatch", "MonkeyPatch", *SPARING):
                yield f"{module.path}:{node.lineno}: {said}"


def whole_tests(modules: list[Module]) -> Iterator[str]:
    """A test never returns: what it would leave out by that is a case of its own, or none."""
    for module in modules:
        for function in ast.walk(module.tree):
            if isinstance(function, Function) and function.name.startswith("test_"):
                yield from (
                    f"{module.path}:{n.lineno}: {function.name} returns"
                    for n in _own(function)
                    if isinstance(n, ast.Return)
                )


def _own(function: Function) -> Iterator[ast.AST]:
    """What stands in it, without the functions and classes inside."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


RULES = (
    layer_rules, import_cycles, package_circles, heavy_imports, light_inits, sizes, documentation, names, broad_excepts,
    one_name_one_place, machine_paths, full_packages, small_packages, one_class_one_name, protocol_methods,
)  # fmt: skip

TEST_RULES = (real_objects, whole_tests)


def sources(folder: Path) -> dict[str, str]:
    """Return every Python file below a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}


def one_file_one_name(tests: Path) -> Iterator[str]:
    """Yield the names that two test files share: pytest imports files by name, and finds only the first of two."""
    files = Counter(path.name for path in tests.rglob("test_*.py"))
    yield from (f"tests: {count} files are called {name}" for name, count in files.items() if count > 1)


def findings() -> Iterator[str]:
    """Yield what breaks a rule in the source and in the tests."""
    files = {path: text for path, text in sources(SOURCE).items() if not path.startswith(GUESTS)}
    house, tests = read(files), read(sources(ROOT / "tests"))
    assert len(house) > 60, f"expected the source in {SOURCE}, got {len(house)} files"
    for rule in RULES:
        yield from rule(house)
    for rule in TEST_RULES:
        yield from (f"tests/{finding}" for finding in rule(tests))
    yield from one_file_one_name(ROOT / "tests")
