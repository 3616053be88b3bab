"""Structure of the project: permitted imports among modules, the cost of an import, and files that must agree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch.utils._device import _device_constructors

import ssd_generation

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ssd_generation"
LAB = ROOT / "tests" / "lab"
SOURCES = [*PACKAGE.rglob("*.py"), *LAB.rglob("*.py")]

# --- Import directions ----------------------------------------------------------------------------
# A room (a module or a sub-package of ssd_generation) may import the rooms named here and whatever those may
# import in turn. A new room is added where it belongs.
MAY_IMPORT: dict[str, set[str]] = {
    "support": set(),
    "config": {"support"},
    "models": {"support"},
    "cache": {"support"},
    "native": {"support"},
    "forward": {"config", "cache", "native"},
    "drafting": {"config", "forward"},
    "decoding": {"drafting"},
    "tuning": {"decoding"},
    "generation": {"tuning"},
    "harness": {"generation", "models"},
    "chat": {"harness"},
    "search": {"harness"},
    "evaluation": {"harness"},
    "benchmark": {"harness"},
    "serving": {"harness"},
}
# The entry points may import every room. A module-level import in the command line would be paid for
# by every sub-command, so it belongs inside a function (except for DOORS, which cost nothing).
ROOT_MODULES = {"__init__", "__main__"}
# Input from outside and output to a screen pass through these, in any room.
DOORS = {"support"}
COMMAND_LINE = "cli"


def _allowed(room: str) -> set[str]:
    reachable: set[str] = set()
    waiting = [room]
    while waiting:
        for below in MAY_IMPORT[waiting.pop()] - reachable:
            reachable.add(below)
            waiting.append(below)
    return reachable


def _room(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def _at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: no function bodies, nor `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from _at_import_time(other)
            continue
        yield node
        yield from _at_import_time(node)


def _imported_rooms(nodes: Iterator[ast.AST], path: Path, package: Path) -> Iterator[tuple[str, int]]:
    """Yield (room, line) for each import from the package; the room is `__init__` for the package itself."""
    rooms = {_room(p, package) for p in package.rglob("*.py")}
    here = list(path.relative_to(package.parent).parts[:-1])
    for node in nodes:
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == package.name:
                yield target[1] if len(target) > 1 and target[1] in rooms else "__init__", node.lineno


def _wrong_arrows(package: Path) -> list[str]:
    wrong = []
    for path in sorted(package.rglob("*.py")):
        room = _room(path, package)
        place = path.relative_to(package.parent).as_posix()
        if room in ROOT_MODULES:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if room == COMMAND_LINE:
            wrong += [
                f"{place}:{line}: imports {target} at module level; import it inside the sub-command"
                for target, line in _imported_rooms(_at_import_time(tree), path, package)
                if target not in (COMMAND_LINE, *DOORS)
            ]
        elif room not in MAY_IMPORT:
            wrong.append(f"{place}: {room!r} has no entry in MAY_IMPORT")
        else:
            wrong += [
                f"{place}:{line}: {room} must not import {target}"
                for target, line in _imported_rooms(ast.walk(tree), path, package)
                if target != room and target not in _allowed(room)
            ]
    return wrong


def test_imports_go_upward_only() -> None:
    assert _wrong_arrows(PACKAGE) == []


def test_import_table_has_no_cycles() -> None:
    assert [room for room in MAY_IMPORT if room in _allowed(room)] == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("config/schema", "from ..forward.structure.skip_mode import draft_mode", "config must not import forward"),
        (
            "config/schema",
            "def f():\n    from ssd_generation.models import load_model",
            "config must not import models",
        ),
        ("forward/sublayers", "import ssd_generation.generation", "forward must not import generation"),
        ("forward/sublayers", "from ssd_generation import SkipConfig", "forward must not import __init__"),
        ("forward/sublayers", "from .. import decoding", "forward must not import decoding"),
        ("forward/sublayers", "from ..config import SkipConfig", None),
        ("forward/sublayers", "from . import skip_mode", None),
        ("drafting/lookup", "from ..support.bounds import Integer", None),
        ("drafting/lookup", "from ..decoding import loop", "drafting must not import decoding"),
        ("search/study", "from ..benchmark.run_benchmark import run", "search must not import benchmark"),
        ("search/study", "from .space import Space\nfrom ..generation import enable", None),
        ("cli/search", "from ..search import study", "imports search at module level"),
        ("cli/search", "if True:\n    from .. import load_model", "imports __init__ at module level"),
        ("cli/search", "from . import output\ndef run():\n    from ..search import study", None),
        ("cli/search", "if TYPE_CHECKING:\n    from ..config import SkipConfig", None),
        ("novelty", "", "'novelty' has no entry"),
    ],
)
def test_wrong_arrows_are_found(tmp_path: Path, module: str, source: str, complaint: str | None) -> None:
    package = tmp_path / "ssd_generation"
    package.mkdir()
    (package / "generation.py").touch()
    for room in {*MAY_IMPORT, "cli"} - {"generation"}:
        (package / room).mkdir()
        (package / room / "__init__.py").touch()
    (package / f"{module}.py").write_text(source)
    wrong = _wrong_arrows(package)
    if complaint is None:
        assert wrong == []
    else:
        assert len(wrong) == 1 and complaint in wrong[0]


# --- Effects of `import ssd_generation` -----------------------------------------------------------
# Dependencies and extras that are imported where they are used.
ON_USE_ONLY = [
    "accelerate",
    "bitsandbytes",
    "datasets",
    "evaluate",
    "gguf",
    "matplotlib",
    "nbclient",
    "nltk",
    "optuna",
    "pandas",
    "peft",
    "rich",
    "rouge_score",
    "typer",
]


def _run(source: str) -> str:
    done = subprocess.run(
        # Away from the root: python -c would find the checkout there, not the installed package.
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    # transformers itself imports some of these where they are installed. So each import is attributed to the
    # nearest caller among transformers, its companions and this package.
    blamed = _run(f"""
        import sys

        class Witness:
            def find_spec(self, name, path=None, target=None):
                if name in {ON_USE_ONLY!r}:
                    frame = sys._getframe()
                    while frame is not None:
                        caller = frame.f_globals.get("__name__", "").partition(".")[0]
                        if caller in ("ssd_generation", "transformers", "huggingface_hub", "torch"):
                            if caller == "ssd_generation":
                                print(name, "is imported by", frame.f_globals["__name__"])
                            break
                        frame = frame.f_back

        sys.meta_path.insert(0, Witness())
        import ssd_generation
        for public in getattr(ssd_generation, "__all__", []):
            getattr(ssd_generation, public)
        """)
    assert blamed == ""


def test_import_needs_none_of_the_optional_packages() -> None:
    loaded = _run(f"""
        import sys
        for name in {ON_USE_ONLY!r}:
            sys.modules[name] = None  # as if it were not installed
        import ssd_generation
        for public in getattr(ssd_generation, "__all__", []):
            getattr(ssd_generation, public)
        print([name for name in {ON_USE_ONLY!r} if sys.modules[name] is not None])
        """)
    assert loaded == "[]"


def test_import_changes_nothing_in_transformers_and_torch() -> None:
    changed = _run("""
        import sys, types, warnings
        import torch
        import transformers.pipelines
        from transformers import AutoModelForCausalLM, GenerationMixin, LlamaForCausalLM, PreTrainedModel, pipeline
        from transformers.generation import candidate_generator, utils
        from transformers.utils import logging

        def contents():
            kept = {}
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] in ("torch", "transformers") and isinstance(module, types.ModuleType):
                    for attribute, value in list(vars(module).items()):
                        if not attribute.startswith("__"):
                            kept[name, attribute] = value
                        if isinstance(value, type) and value.__module__ == name:
                            for member, inner in list(vars(value).items()):
                                kept[name, attribute, member] = inner
            return kept

        def settings():
            return logging.get_verbosity(), torch.get_num_threads(), torch.is_grad_enabled(), list(warnings.filters)

        before, set_before = contents(), settings()
        assert ("transformers.generation.utils", "GenerationMixin", "generate") in before
        import ssd_generation
        after = contents()
        # What is not there yet may be loaded; what is there stays the same object.
        print([key for key, value in before.items() if key not in after or after[key] is not value])
        print(settings() == set_before)
        """)
    assert changed == "[]\nTrue"


def test_everything_works_without_the_extra_that_makes_kernels() -> None:
    said = _run("""
        import sys
        sys.modules["llvmlite"] = None
        import torch
        import transformers
        from ssd_generation import DraftingConfig, SelfSpeculativeConfig, enable_self_speculative
        from ssd_generation.native.codegen.compiler import why_not

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        model = enable_self_speculative(transformers.LlamaForCausalLM(config).eval())
        ids = torch.arange(3, 12)[None]
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        drafting = DraftingConfig(policy="fixed", max_draft_length=3)
        requests = SelfSpeculativeConfig(lookup=True, drafting=drafting), SelfSpeculativeConfig(
            precision="int8", drafting=drafting
        )
        plain = model.generate(ids, **options)
        print([torch.equal(plain, model.generate(ids, **options, self_speculative=request)) for request in requests])
        print(why_not())
        """)
    assert said.splitlines()[-2:] == ["[True, True]", "llvmlite is not installed (extra `fast`)"]


# --- Devices --------------------------------------------------------------------------------------
# Functions of torch that make a tensor on the default device, which the user may set.
FACTORIES = frozenset({function.__name__ for function in _device_constructors()} | {"Generator", "complex", "normal"})


def _on_the_default_device(source: str) -> list[int]:
    """Return the lines of calls that leave a tensor's device to `torch.set_default_device`."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg == "device" for keyword in node.keywords)
        and not (node.func.attr == "Generator" and node.args)
    )


def test_every_tensor_that_is_made_names_its_device() -> None:
    found = {path: _on_the_default_device(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert [f"{path.relative_to(ROOT)}:{line}" for path, lines in found.items() for line in lines] == []


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("torch.zeros(3)", True),
        ("torch.zeros(3, device=x.device)", False),
        ("f(torch.randint(0, 9, (1, 2), generator=torch.Generator('cpu')))", True),
        ("torch.Generator().manual_seed(0)", True),
        ("torch.Generator(device).manual_seed(0)", False),
        ("x.new_zeros(3)", False),
        ("torch.empty_like(x)", False),
    ],
)
def test_tensors_without_a_device_are_found(source: str, is_found: bool) -> None:
    assert bool(_on_the_default_device(source)) is is_found


# --- Files that must agree ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def test_version_is_kept_in_one_place(project: dict[str, Any]) -> None:
    assert "version" in project["dynamic"]  # hatchling reads __version__
    assert version("ssd_generation") == ssd_generation.__version__, (
        "installed before the version changed: install again"
    )


# Extras that the tests need, and that are therefore tested at their lower bounds too.
TRIED_EXTRAS = ("cli", "demo", "fast", "accelerate", "peft")


def test_minimum_versions_are_the_lower_bounds(project: dict[str, Any]) -> None:
    requirements = list(project["dependencies"])
    for extra in TRIED_EXTRAS:
        requirements += project["optional-dependencies"][extra]
    lower_bounds: dict[str, str] = {}
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name == "ssd-generation":  # an extra composed of other extras
            continue
        (bound,) = [s.version for s in requirement.specifier if s.operator == ">="]
        lower_bounds[name] = bound

    pinned: dict[str, str] = {}
    for line in (ROOT / ".ci" / "minimum-versions.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            package, _, number = line.partition("==")
            pinned[canonicalize_name(package)] = number

    def released(number: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.sub(r"(\.0)+$", "", number).split("."))

    assert {n: released(v) for n, v in pinned.items()} == {n: released(v) for n, v in lower_bounds.items()}


def test_every_dependency_has_a_lower_bound(project: dict[str, Any]) -> None:
    requirements = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    unbounded = [
        str(r)
        for r in map(Requirement, requirements)
        if r.name != project["name"] and not any(s.operator in (">=", "==") for s in r.specifier)
    ]
    assert unbounded == []


# Imported but not declared: dependencies of a declared package whose objects that package takes or returns.
PART_OF_ANOTHER = {
    **dict.fromkeys(("huggingface_hub", "numpy", "packaging", "safetensors", "tokenizers", "tqdm"), "transformers"),
    "outlines_core": "outlines",
    "openvino": "openvino-genai",
    "datasets": "evaluate",
    "pyarrow": "evaluate",
    "sqlalchemy": "optuna",
}


def test_everything_that_is_imported_is_declared(project: dict[str, Any]) -> None:
    requirements = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    declared = {canonicalize_name(Requirement(requirement).name) for requirement in requirements}
    undeclared = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {PACKAGE.name}:
                own = (path.parent / f"{name}.py").exists()  # module next to a program that is run as a script
                if not own and canonicalize_name(PART_OF_ANOTHER.get(name, name)) not in declared:
                    undeclared.add(name)
    assert undeclared == set()


def test_readme_has_the_test_command_that_ci_runs() -> None:
    readme = ROOT / "README.md"
    block = re.search(
        r"^<!-- test-command -->\n```bash\n([^\n]+)\n```$", readme.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert block is not None, "README.md needs <!-- test-command --> directly above a bash block of one line"
    assert "pytest" in block[1]


# --- No trace of the development machine ----------------------------------------------------------
# A user's folder, or the local package index. `someone` is the user in made-up examples.
MACHINE_SPECIFIC = re.compile(r"/(?:root|work)/|/(?:home|Users)/(?!someone\b)|(?i:index[-_]url)")


def _tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def test_no_tracked_file_names_a_path_or_index_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _tracked_files()
        if path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if MACHINE_SPECIFIC.search(line)
    ]
    assert found == []


# --- No import cycles among modules ---------------------------------------------------------------
def _imports_among_modules(package: Path) -> dict[str, set[str]]:
    """Return, per module, the package's modules that it imports: at the top, inside functions, and for types alone."""
    modules = {".".join(p.relative_to(package).with_suffix("").parts): p for p in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        here, targets = name.split(".")[:-1], set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or "").startswith(package.name)):
                continue
            base = here[: len(here) - node.level + 1] if node.level else []
            parts = (node.module or "").split(".") if node.module else []
            base = [*base, *parts] if node.level else parts[1:]
            for alias in node.names:
                found = (c for c in (".".join([*base, alias.name]), ".".join(base)) if c in modules)
                targets.update([next(found, name)])
        graph[name] = targets - {name}
    return graph


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules in import cycles and those that import them; empty if there is no cycle."""
    left = dict(graph)
    while ends := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in ends:
            del left[name]
    return sorted(left)


def test_no_modules_import_one_another() -> None:
    graph = _imports_among_modules(PACKAGE)
    assert len(graph) > 90 and "forward.runners" in graph["forward.forward"]
    assert _circle(graph) == []
    of_lab = _imports_among_modules(LAB)
    assert "tables" in of_lab["targets.trial"]
    assert _circle(of_lab) == []
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


# --- Names of files -------------------------------------------------------------------------------
def _shared_file_names(package: Path) -> dict[str, list[str]]:
    """Return, per file name that several files share, their paths; `__init__.py` is exempt."""
    places = defaultdict(list)
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.name != "__init__.py" and "__pycache__" not in path.parts:
            places[path.name].append(path.relative_to(package).as_posix())
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_two_files_share_a_name(tmp_path: Path) -> None:
    # A traceback, an editor's tab and a search by name then identify the module.
    assert _shared_file_names(PACKAGE) == {}
    for place in ("search/__init__.py", "search/runner.py", "evaluation/__init__.py", "evaluation/runner.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    assert _shared_file_names(tmp_path) == {"runner.py": ["evaluation/runner.py", "search/runner.py"]}
