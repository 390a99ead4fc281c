"""The rules of the house that a machine can check."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "rl_trainers"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own group and from those above it.
LAYERS = [
    {"types"},
    {"distributions", "advantages", "losses", "models", "optimizers"},
    {"rollout", "windows", "supervised", "replay", "ring", "envs", "checkpoint", "metrics"},
    {"trajectory"},
    {"datasets"},
    {"task"},
    {"acting", "sharding", "iteration", "trainer", "together"},
    {"off_policy", "policy_trainer", "value_trainer", "actor_critic", "joint", "sac"},
    {"drivers"},
    {"trax_compat", "cli"},
]
RANKS = {module: rank for rank, modules in enumerate(LAYERS) for module in modules}
MAX_BODY_LINES = 60
MAX_ARGUMENTS = 8
MAX_PACKAGE_LINES = 17500
GLOBAL_RANDOMNESS = re.compile(
    r"np\.random\.(?!default_rng|Generator|SeedSequence|RandomState|PCG64)\w+\("
)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _module(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_id(path):
    return str(path.relative_to(PACKAGE))


def _wrong_arrows(module, source):
    """Modules of the package that ``module`` may not import, but does."""
    parts = [name.split(".") for name in _imports(ast.parse(source))]
    inner = {part[1] for part in parts if part[0] == "rl_trainers" and len(part) > 1}
    return {name for name in inner if RANKS.get(name, -1) > RANKS[module]}


def _body_lines(function):
    documented = ast.get_docstring(function) is not None and len(function.body) > 1
    return function.end_lineno - function.body[documented].lineno + 1


def _long_functions(source):
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTION)]
    return {f.name: _body_lines(f) for f in functions if _body_lines(f) > MAX_BODY_LINES}


def _is_constructor(function):
    """Whether it makes an object that gin can configure, which may take as much as it needs."""
    decorators = "".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return function.name == "__init__" or "configurable" in decorators


def _arguments(function):
    names = [a.arg for a in [*function.args.posonlyargs, *function.args.args]]
    own = names[:1] in (["self"], ["cls"])
    return len(names) - own + len(function.args.kwonlyargs)


@pytest.mark.parametrize("path", SOURCES, ids=_module_id)
def test_imports_point_up_the_layers(path):
    module = _module(path)
    if module == "__init__":
        return
    assert module in RANKS, f"say in LAYERS where {module} belongs"
    assert _wrong_arrows(module, path.read_text()) == set()


@pytest.mark.parametrize("path", SOURCES, ids=_module_id)
def test_functions_are_short_and_take_few_arguments(path):
    source = path.read_text()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTION)]

    assert _long_functions(source) == {}
    many = {f.name for f in functions if _arguments(f) > MAX_ARGUMENTS and not _is_constructor(f)}
    assert many == set()


@pytest.mark.parametrize("path", SOURCES, ids=_module_id)
def test_definitions_are_nested_one_deep_at_most(path):
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, FUNCTION)]
    deep = {
        outer.name
        for outer in functions
        for inner in ast.walk(outer)
        if inner is not outer and isinstance(inner, FUNCTION)
        for innermost in ast.walk(inner)
        if innermost is not inner and isinstance(innermost, FUNCTION)
    }
    assert deep == set()


@pytest.mark.parametrize("path", SOURCES, ids=_module_id)
def test_no_pickle_and_no_global_numpy_randomness(path):
    source = path.read_text()

    roots = {name.split(".")[0] for name in _imports(ast.parse(source))}
    assert roots.isdisjoint({"pickle", "cloudpickle", "dill", "joblib"})
    # allow_pickle is what would make np.load and np.save use it.
    assert "allow_pickle=True" not in source
    assert GLOBAL_RANDOMNESS.findall(source) == []


def test_the_package_stays_small():
    assert sum(len(path.read_text().splitlines()) for path in SOURCES) <= MAX_PACKAGE_LINES


def test_importing_the_slow_parts_is_left_to_their_use():
    code = (
        "import sys; import rl_trainers.checkpoint, rl_trainers.metrics; "
        "print([m for m in ('orbax', 'tensorboardX', 'matplotlib', 'rliable', 'tensorflow')"
        " if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)

    assert printed.stdout.strip() == "[]", printed.stderr


def test_the_rules_catch_what_they_are_for():
    source = "from rl_trainers.task import RLTask\nfrom rl_trainers import types, cli\n"
    assert _wrong_arrows("losses", source) == {"task", "cli"}
    assert _wrong_arrows("drivers", source) == {"cli"}
    body = "\n".join(["    x = 1"] * 61)
    assert GLOBAL_RANDOMNESS.findall("np.random.seed(0); np.random.default_rng(0)") != []
    assert GLOBAL_RANDOMNESS.findall("np.random.default_rng(0)") == []
    assert _long_functions(f'def f():\n    """Doc."""\n{body}\n') == {"f": 61}
